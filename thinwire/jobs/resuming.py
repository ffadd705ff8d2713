"""What can be said of a run that is to go on before its workers are started."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.jobs import outcome
from thinwire.jobs.job import CHECKPOINTS, RECORDS, Job, read_job
from thinwire.jobs.progress import Tail
from thinwire.jobs.words import duration

MAY_CHANGE = ("epochs", "steps", "seconds", "target", "tensorboard")


def resumed(folder: Path, given: Mapping[str, Any]) -> Job:
    """The job of a run, with what was given anew. The task may be named again; nothing else that it was begun with."""
    job = read_job(folder)
    if given.get("task", job.task) != job.task:
        raise ValueError(
            f"{folder} trains {job.task}, not {given['task']}: leave {given['task']} out to go on with it."
        )
    for key in given:
        if key not in (*MAY_CHANGE, "task"):
            raise ValueError(
                f"--{key.replace('_', '-')} cannot be given with --resume: a run goes on as it was begun. Only its "
                "limits may be others."
            )
    return replace(job, **given)


def nothing_to_do(job: Job, folder: Path) -> str:
    """Why there is nothing left to do for a run that goes on, in a sentence; nothing if there is."""
    step = newest_step(folder, job.hosts)
    began, ended = _last_start(folder)
    limits = _limits(job, began.get("batches_per_epoch"))
    planned = min(limits.values(), default=math.inf)
    is_done = ended.get("how") == "done"  # a run that was ended in its last step has not been tested yet
    if step > planned or (step == planned and is_done):
        options = " and ".join(f"--{name}" for name, limit in limits.items() if limit <= step)
        so_far = f"at step {step} of {planned:.0f}" if step == planned else f"at step {step}, beyond {planned:.0f}"
        return f"{folder} is already {so_far}: to go on, give it more {options}."
    if is_done and ended.get("saved") == step and _is_out_of_time(job, began, ended):
        spent, limit = duration(ended["seconds"]), duration(job.seconds or 0.0)
        return f"{folder} has already trained {spent} of {limit}: to go on, give it more --seconds."
    return ""


def _last_start(folder: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """How the run was last begun, and how it ended then, from its records; where they break off, from its outcome."""
    began: Mapping[str, Any] = {}
    ended: Mapping[str, Any] = {}
    for record in Tail(folder / RECORDS).new():
        if record.get("kind") == "began":
            began, ended = record, {}
        elif record.get("kind") == "ended":
            ended = record
    return began, ended or outcome.read(folder)


def newest_step(folder: Path, hosts: int) -> int:
    """Of the checkpoints that all workers have saved, the newest; 0 if there is none."""
    saved = [0]
    for place in (folder / CHECKPOINTS).glob("step-*"):
        if place.name[5:].isdigit() and all((place / f"rank-{rank:05d}.json").exists() for rank in range(hosts)):
            saved.append(int(place.name[5:]))
    return max(saved)


def _limits(job: Job, batches_per_epoch: int | None) -> dict[str, int]:
    """In steps, by the option that sets it."""
    limits = {} if job.steps is None else {"steps": job.steps}
    if job.last_epoch is not None and batches_per_epoch:
        limits["epochs"] = job.last_epoch * batches_per_epoch
    return limits


def _is_out_of_time(job: Job, began: Mapping[str, Any], ended: Mapping[str, Any]) -> bool:
    """A training ends a little before its time is up, so a limit that it was ended by counts as reached."""
    if job.seconds is None or ended.get("seconds") is None:
        return False
    by_time = began.get("steps") is None or (ended.get("steps") or 0) < began["steps"]
    return bool(ended["seconds"] >= job.seconds or (by_time and job.seconds <= (began.get("seconds") or 0.0)))
