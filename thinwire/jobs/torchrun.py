"""What whoever starts workers does for them, where torchrun has started them: they do it, and most of it rank 0.

What only that needs is imported where it is needed: all workers import this.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from thinwire.jobs import outcome, resuming, telling
from thinwire.jobs.job import JOB, Job, read_job, write_job

LOOK_SECONDS = 0.2  # between two looks at what there is to tell
MAY_DIFFER = ("folder_of_data", "text", "port", "tensorboard")  # from machine to machine


def require_one_job(job: Job, goes_on: bool) -> None:
    """Refuse a job that is not rank 0's, on all workers: each machine has its own command, and may have its own run."""
    own = job.to_json() | {"resume": goes_on}
    words = _other(own, json.loads(_from(0, json.dumps(own))))
    _refuse(f"rank {dist.get_rank()} has another job than rank 0: {words}." if words else "")


def _other(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The first setting that is not as they have it; nothing if all are."""
    keys = (key for key in own if key not in MAY_DIFFER and own[key] != theirs[key])
    return next((f"its {key} is {own[key]!r}, and there it is {theirs[key]!r}" for key in keys), "")


# --- where the run is


def shared_folder(job: Job, store: Store | None) -> Path:
    """Rank 0's new folder, or that of this very run if torchrun has started it again, which its store tells.

    Where workers have disks of their own, it is a folder of the same name on each, which none of them had before.
    """
    key, restarts = f"thinwire/folder-of/{_hash_of(job)}", _restarts()
    begun = _from(0, _begun_before(store, key, restarts) if dist.get_rank() == 0 else "")
    folder = Path(begun) if begun else _new_folder(job)
    _refuse(_not_of(job, folder) if begun else "")
    _write_down(job, folder)
    if dist.get_rank() == 0 and store is not None:
        store.set(key, f"{restarts} {folder}")
    return folder


def _hash_of(job: Job) -> str:
    """So that what is noted of one job is not found by another: a script may train several."""
    return hashlib.sha256(json.dumps(job.to_json()).encode()).hexdigest()


def _restarts() -> int:
    """Of all workers together: torchrun tells each machine only how often it failed there."""
    number = torch.tensor(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    dist.all_reduce(number)
    return int(number)


def _begun_before(store: Store | None, key: str, restarts: int) -> str:
    """Where a start before this one has begun the run, as torchrun's store has it; nothing if none has.

    A script that torchrun runs may train the same job twice: then torchrun has not started anything again.
    """
    if store is None or not store.check([key]):
        return ""
    before, _, folder = store.get(key).decode().partition(" ")
    if int(before) == restarts:
        return ""
    telling.note(f"torchrun has started it again: it goes on in {folder}.")
    return folder


def _not_of(job: Job, folder: Path) -> str:
    """Why the folder that a start before this one has begun is not that on this machine; nothing if it can be."""
    if not (folder / JOB).exists():
        return ""
    words = _other(read_job(folder).to_json(), job.to_json())
    return f"{folder} has another job on the machine of rank {dist.get_rank()}: {words}." if words else ""


def _new_folder(job: Job) -> Path:
    """Rank 0 makes it, where no machine has one: a name that is taken is refused, and a number is passed over."""
    from thinwire.jobs.start import folder_of, new_folder

    if job.name is None:
        return _numbered(job)
    _refuse(_taken(folder_of(job)))
    if dist.get_rank() == 0:
        new_folder(job)
    return folder_of(job)


def _taken(folder: Path) -> str:
    from thinwire.jobs.start import exists_already

    if not os.path.lexists(folder):
        return ""
    rank = dist.get_rank()
    elsewhere = f"{folder} exists already on the machine of rank {rank}: choose another --name."
    return elsewhere if rank else exists_already(folder)


def _numbered(job: Job) -> Path:
    from thinwire.jobs.start import folder_of, make_out

    number, made = 0, ""
    while not made:  # unless somebody else has made it since all looked
        number = _free_on_all(job, number + 1)
        with suppress(FileExistsError):
            if dist.get_rank() == 0:
                make_out(Path(job.out))
                folder_of(job, number).mkdir()
                made = "made"
        made = _from(0, made)
    return folder_of(job, number)


def _free_on_all(job: Job, number: int) -> int:
    """The first from this one on that no machine has. Each says the first that it could have, and they try the last."""
    from thinwire.jobs.start import folder_of

    while True:
        own = next(n for n in itertools.count(number) if not os.path.lexists(folder_of(job, n)))
        last = torch.tensor(own)
        dist.all_reduce(last, dist.ReduceOp.MAX)
        if int(last) == number:
            return number
        number = int(last)


def _write_down(job: Job, folder: Path) -> None:
    """On rank 0's disk and on those of machines that have their own, or nobody could go on with it there."""
    folder.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        write_job(folder, job, sys.argv)
    written = _from(0, (folder / JOB).read_text() if dist.get_rank() == 0 else "")
    is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"
    if is_first_here and not _has(folder / JOB, written):
        write_job(folder, job, sys.argv)


def _has(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


def begin(job: Job, folder: Path, goes_on: bool) -> None:
    """What was known of how the run ended is past; of one that goes on, this start is written down too."""
    words = resuming.nothing_to_do(job, folder) if dist.get_rank() == 0 else ""
    if words:
        telling.note(words)
    if goes_on and not _from(0, words):
        _write_down(job, folder)
    if dist.get_rank() == 0:
        outcome.begin(folder)


# --- what all know


def _from(rank: int, words: str) -> str:
    """What this rank says, on all."""
    said = torch.tensor(list(words.encode()), dtype=torch.uint8)
    length = torch.tensor(said.numel())
    dist.broadcast(length, rank)
    said = said if dist.get_rank() == rank else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(said, rank)
    return bytes(said.tolist()).decode()


def _refuse(words: str) -> None:
    """Refuse on all workers what one of them has to, in its words: of several the first has them."""
    first = torch.tensor(dist.get_rank() if words else dist.get_world_size())
    dist.all_reduce(first, dist.ReduceOp.MIN)
    if first < dist.get_world_size():
        raise ValueError(_from(int(first), words))


# --- what is told


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
