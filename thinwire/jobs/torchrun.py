"""What whoever starts workers does for them, where torchrun has started them: they do it, and most of it rank 0.

What only that needs is imported where it is needed: all workers import this.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.jobs import outcome, resuming, telling
from thinwire.jobs.job import JOB, Job, read_job, write_job

LOOK_SECONDS = 0.2  # between two looks at what there is to tell


def shared_folder(job: Job) -> Path:
    """Rank 0's new folder, or that of this very job if torchrun has started it again.

    Where workers have disks of their own, it is a folder of the same name on each.
    """
    from thinwire.jobs.start import new_folder

    restarts = torch.tensor(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))  # of this machine's workers
    dist.all_reduce(restarts, dist.ReduceOp.MAX)
    name = ""
    if dist.get_rank() == 0:
        begun = _begun_before(job) if restarts else None
        folder = new_folder(job) if begun is None else begun
        write_job(folder, job, sys.argv)
        name = str(folder)
    folder = Path(_from_rank_0(name))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _begun_before(job: Job) -> Path | None:
    """Where a start before this one has begun the job. Only its --name tells."""
    if job.name is None:
        return None
    folder = Path(job.out) / job.name
    with suppress(ValueError):  # it is no run
        if read_job(folder) == job:
            telling.note(f"torchrun has started it again: it goes on in {folder}.")
            return folder
    return None


def begin(job: Job, folder: Path, goes_on: bool) -> None:
    """What was known of how the run ended is past; of one that goes on, this start is written down too.

    Call on all workers: on a machine whose disk is not rank 0's somebody has to write down the job there, or nobody
    could go on with it.
    """
    written = ""
    if dist.get_rank() == 0:
        words = resuming.nothing_to_do(job, folder)
        if words:
            telling.note(words)
        elif goes_on:
            write_job(folder, job, sys.argv)
        outcome.begin(folder)
        written = "" if words else (folder / JOB).read_text()
    written = _from_rank_0(written)
    is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"
    if written and is_first_here and not _has(folder / JOB, written):
        write_job(folder, job, sys.argv)


def _has(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


def _from_rank_0(words: str) -> str:
    """What rank 0 says, on all."""
    said = torch.tensor(list(words.encode()), dtype=torch.uint8)
    length = torch.tensor(said.numel())
    dist.broadcast(length, 0)
    said = said if dist.get_rank() == 0 else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(said, 0)
    return bytes(said.tolist()).decode()


@contextmanager
def told(job: Job, folder: Path, goes_on: bool) -> Iterator[None]:
    """Where no launcher of ours watches: a line on stderr every few seconds, and one for every change of plan."""
    from rich.console import Console

    from thinwire.jobs.live import Plain
    from thinwire.jobs.progress import Progress
    from thinwire.jobs.words import title_of

    console, over = Console(stderr=True), threading.Event()
    view = Plain(Progress(replace(job, tensorboard=False)), folder, console, title_of(job))
    if goes_on:
        view.pass_over()

    def watch() -> None:
        while not over.wait(LOOK_SECONDS):
            view.look()

    watcher = threading.Thread(target=watch, name="thinwire-told", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        view.close()
        outcome.note_recorded(folder, view.progress.step)


def report(folder: Path, with_scalars: bool) -> None:
    """That it cannot be made makes no training a failure."""
    from thinwire.report import page, tensorboard

    try:
        print(f"report: {page.write(folder)}", flush=True)
        if with_scalars:
            print(f"to see it: tensorboard --logdir {tensorboard.write(folder)[0]}", flush=True)
    except Exception as error:
        print(f"thinwire: the report could not be made: {error}", file=sys.stderr, flush=True)
