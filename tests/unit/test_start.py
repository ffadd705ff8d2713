"""From a job to a folder of its own, and a place for its workers."""

from __future__ import annotations

import io
import signal
from pathlib import Path
from typing import NoReturn

import pytest
from rich.console import Console

from thinwire.jobs import start
from thinwire.jobs.compare import compare, jobs_of, speed_up_in_words
from thinwire.jobs.job import Job, Mistake
from thinwire.jobs.team import Interrupts


def a_place_that_never_comes(*_: object) -> NoReturn:
    signal.raise_signal(signal.SIGTERM)
    pytest.fail("it waits for ever")


def test_a_request_to_end_is_heard_while_the_place_is_made_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.jobs.start.ground_for", a_place_that_never_comes)
    job, console = Job(out=str(tmp_path)), Console(file=io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        start.train(job, None, [], console)
    assert list(tmp_path.iterdir()) == []
    with Interrupts() as interrupts:
        made = compare(job, jobs_of(job, ["ddp", "adaptive"], 1), tmp_path, [], console, interrupts)
    assert (made.outcome.how, made.outcome.code) == ("interrupted", 128 + signal.SIGTERM)
    assert [run.method for run in made.runs] == ["ddp"]
    assert speed_up_in_words(made).endswith("the same command begins anew, in a new folder.")


@pytest.mark.parametrize("name", [None, "run"])
@pytest.mark.parametrize("out", ["nowhere", "file", "file/runs"])
def test_where_no_folder_can_be_it_is_said_and_no_name_is_tried(tmp_path: Path, out: str, name: str | None) -> None:
    (tmp_path / "nowhere").symlink_to("/nowhere/disk")
    (tmp_path / "file").touch()
    with pytest.raises(Mistake, match="cannot be the folder of runs") as told:
        start.new_folder(Job(out=str(tmp_path / out), name=name))
    assert told.value.key == "out"


def test_a_folder_is_made_with_those_that_it_is_in(tmp_path: Path) -> None:
    job = Job(out=str(tmp_path / "all" / "runs"), method="ddp")
    assert [start.new_folder(job).name for _ in range(2)] == ["digits-ddp-1", "digits-ddp-2"]
