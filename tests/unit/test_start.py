"""From a job to a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.jobs import start
from thinwire.jobs.job import Job, Mistake


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
