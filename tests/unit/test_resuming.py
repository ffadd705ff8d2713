"""What is said of a run that is to go on, before anybody is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from thinwire.jobs.job import Job, write_job
from thinwire.jobs.resuming import newest_step, nothing_to_do, resumed

HOSTS, PER_EPOCH = 2, 10


def a_run(folder: Path, *, step: int, how: str = "done", trained: float = 5.0, **settings: Any) -> Job:
    """That has saved this step and ended there."""
    job = Job(hosts=HOSTS, **settings)
    by_epochs = [] if job.last_epoch is None else [job.last_epoch * PER_EPOCH]
    planned = min([*by_epochs, *([] if job.steps is None else [job.steps])], default=None)
    began = {"kind": "began", "batches_per_epoch": PER_EPOCH, "steps": planned, "seconds": job.seconds}
    ended = {"kind": "ended", "how": how, "steps": step, "saved": step, "seconds": trained}
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (began, ended)))
    for rank in range(HOSTS):
        save(folder, step, rank)
    write_job(folder, job, [])
    return job


def save(folder: Path, step: int, rank: int) -> None:
    place = folder / "checkpoints" / f"step-{step:09d}"
    place.mkdir(parents=True, exist_ok=True)
    (place / f"rank-{rank:05d}.json").touch()


def left(folder: Path, **given: Any) -> str:
    return nothing_to_do(resumed(folder, given), folder)


@pytest.mark.parametrize(
    ("settings", "given", "says"),
    [
        ({"steps": 20}, {}, "already at step 20 of 20: to go on, give it more --steps."),
        ({"epochs": 2}, {}, "already at step 20 of 20: to go on, give it more --epochs."),
        ({"epochs": 2, "steps": 20}, {}, "already at step 20 of 20: to go on, give it more --steps and --epochs."),
        ({"epochs": 2, "steps": 20}, {"steps": 30}, "already at step 20 of 20: to go on, give it more --epochs."),
        ({"steps": 20}, {"steps": 10}, "already at step 20, beyond 10: to go on, give it more --steps."),
        ({"seconds": 5.1}, {}, "has already trained 5 s of 5.1 s: to go on, give it more --seconds."),
        ({"seconds": 60.0}, {"seconds": 4.0}, "has already trained 5 s of 4 s: to go on, give it more --seconds."),
    ],
)
def test_a_run_at_its_limit_has_nothing_to_do(
    settings: dict[str, Any], given: dict[str, Any], says: str, tmp_path: Path
) -> None:
    a_run(tmp_path, step=20, **settings)
    assert left(tmp_path, **given).endswith(says)


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ({"steps": 20}, {"steps": 21}),
        ({"epochs": 2}, {"epochs": 3}),
        ({"seconds": 5.1}, {"seconds": 10.0}),
        ({"steps": 20, "seconds": 60.0}, {"steps": 30}),  # it was not time that ended it
        ({"steps": 20, "how": "interrupted"}, {}),  # it was not tested at its end
    ],
)
def test_a_run_that_is_given_more_goes_on(settings: dict[str, Any], given: dict[str, Any], tmp_path: Path) -> None:
    a_run(tmp_path, step=20, **settings)
    assert left(tmp_path, **given) == ""


def test_a_run_whose_last_checkpoint_is_not_its_last_step_goes_on(tmp_path: Path) -> None:
    a_run(tmp_path, step=20, steps=20)
    save(tmp_path, 10, 0)
    save(tmp_path, 10, 1)
    (tmp_path / "checkpoints" / "step-000000020" / "rank-00001.json").unlink()
    assert newest_step(tmp_path, HOSTS) == 10 and left(tmp_path) == ""


def test_a_run_that_was_killed_at_its_last_step_goes_on(tmp_path: Path) -> None:
    a_run(tmp_path, step=20, steps=20)
    with (tmp_path / "records.jsonl").open("a") as records:
        records.write(json.dumps({"kind": "began", "batches_per_epoch": PER_EPOCH, "steps": 30}) + "\n")
    for rank in range(HOSTS):
        save(tmp_path, 30, rank)
    assert left(tmp_path, steps=30) == ""


def test_a_run_without_a_checkpoint_begins(tmp_path: Path) -> None:
    write_job(tmp_path, Job(hosts=HOSTS), [])
    assert left(tmp_path) == ""


def test_another_task_is_refused_in_the_users_words_and_the_same_one_is_not(tmp_path: Path) -> None:
    write_job(tmp_path, Job(task="chars"), [])
    assert resumed(tmp_path, {"task": "chars", "steps": 5}).steps == 5
    with pytest.raises(ValueError) as told:
        resumed(tmp_path, {"task": "digits"})
    assert str(told.value) == f"{tmp_path} trains chars, not digits: leave digits out to go on with it."


def test_what_a_run_was_begun_with_stays(tmp_path: Path) -> None:
    write_job(tmp_path, Job(), [])
    with pytest.raises(ValueError, match="--checkpoint-every cannot be given with --resume: a run goes on as it was"):
        resumed(tmp_path, {"checkpoint_every": 5})
