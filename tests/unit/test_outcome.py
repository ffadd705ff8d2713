"""How a run ended is written where it can be found, also where nothing else can be written any more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.disks import fill, small_disk
from thinwire.jobs import outcome
from thinwire.jobs.outcome import FILE, Outcome


def test_of_a_run_that_has_not_ended_nothing_is_known(tmp_path: Path) -> None:
    assert outcome.read(tmp_path)["how"] == "" and outcome.read(tmp_path)["steps"] is None
    outcome.note(tmp_path, how="done", steps=10)
    assert outcome.read(tmp_path)["how"] == "done"
    outcome.begin(tmp_path)  # it goes on
    assert outcome.read(tmp_path)["how"] == "" and outcome.read(tmp_path)["steps"] is None


def test_whoever_started_the_workers_adds_to_what_rank_0_knew(tmp_path: Path) -> None:
    outcome.begin(tmp_path)
    outcome.note(tmp_path, how="failed", message="rank 0 lost rank 1.", steps=300, saved=200)
    outcome.note_recorded(tmp_path, 104)
    outcome.conclude(tmp_path, Outcome(how="failed", code=1, message="worker 1 was ended by SIGKILL."))
    known = json.loads((tmp_path / FILE).read_text())
    assert (known["how"], known["message"]) == ("failed", "worker 1 was ended by SIGKILL.")
    assert (known["format"], known["steps"], known["saved"], known["recorded"]) == (1, 300, 200, 104)


def test_of_an_interrupt_rank_0_knows_more(tmp_path: Path) -> None:
    outcome.note(tmp_path, how="interrupted", message="interrupted after step 7.", steps=7)
    outcome.note_recorded(tmp_path, 7)
    outcome.conclude(tmp_path, Outcome(how="interrupted", code=130, message="interrupted by SIGINT."))
    known = outcome.read(tmp_path)
    assert known["message"] == "interrupted after step 7." and known["recorded"] is None
    outcome.begin(tmp_path)  # and this time it had no chance to say anything
    outcome.conclude(tmp_path, Outcome(how="interrupted", code=130, message="interrupted by SIGINT."))
    assert outcome.read(tmp_path)["message"] == "interrupted by SIGINT."


def test_what_rank_0_wrote_down_counts_though_nobody_heard_it(tmp_path: Path) -> None:
    outcome.note(tmp_path, how="done", message="the records end here: No space left on device.", steps=7)
    told = outcome.conclude(tmp_path, Outcome(how="done"))
    assert told == Outcome(how="done", code=1, message="the records end here: No space left on device.")
    assert outcome.read(tmp_path)["message"] == told.message
    heard = Outcome(how="done", code=1, message="worker 0: the records end here: No space left on device.")
    assert outcome.conclude(tmp_path, heard) == heard and outcome.read(tmp_path)["message"] == heard.message
    outcome.begin(tmp_path)
    outcome.note(tmp_path, how="done")
    assert outcome.conclude(tmp_path, Outcome(how="done")) == Outcome(how="done")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 2, "how": "done"}'])
def test_a_file_that_says_nothing_is_as_good_as_none(content: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(content)
    assert outcome.read(tmp_path)["how"] == ""
    outcome.note(tmp_path, how="done")
    assert outcome.read(tmp_path)["how"] == "done"


def test_a_disk_that_is_full_by_then_holds_the_end_too(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        outcome.begin(disk)
        fill(disk)
        message, log = "m" * 5000, ("l" * 5000,) * 6
        outcome.conclude(disk, Outcome(how="failed", code=1, message=message, log=log))
        known = outcome.read(disk)
        assert known["how"] == "failed" and known["message"].startswith("mmm") and len(known["log"]) == 6


def test_where_there_is_no_room_at_all_nothing_is_left_half_done(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        fill(disk)
        with pytest.raises(OSError):
            outcome.begin(disk)
        assert not (disk / FILE).exists()
