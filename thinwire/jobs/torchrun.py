"""What whoever starts workers does for them, where torchrun has started them: rank 0 does it.

What only that needs is imported where it is needed: all workers import this.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.jobs import outcome, resuming, telling
from thinwire.jobs.job import Job, write_job

LOOK_SECONDS = 0.2  # between two looks at what there is to tell


def shared_folder(job: Job) -> Path:
    """Rank 0's new folder. Where workers have disks of their own, it is a folder of the same name on each."""
    from thinwire.jobs.start import new_folder

    name = torch.zeros(4096, dtype=torch.uint8)
    if dist.get_rank() == 0:
        folder = new_folder(job)
        write_job(folder, job, sys.argv)
        words = str(folder).encode()
        name[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
    dist.broadcast(name, 0)
    folder = Path(bytes(name.tolist()).rstrip(b"\0").decode())
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def begin(job: Job, folder: Path, goes_on: bool) -> None:
    """What was known of how the run ended is past; of one that goes on, this start is written down too."""
    if words := resuming.nothing_to_do(job, folder):
        telling.note(words)
    elif goes_on:
        write_job(folder, job, sys.argv)
    outcome.begin(folder)


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
