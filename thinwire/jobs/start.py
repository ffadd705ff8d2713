"""From a job to a run: a folder of its own, a place for its workers, and a view of how they do."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from thinwire.jobs import digits, fashion, outcome
from thinwire.jobs.ground import ground_for, on_loopback, require_port
from thinwire.jobs.job import RECORDS, Job, Mistake, blaming, write_job
from thinwire.jobs.live import say, view_of
from thinwire.jobs.method import Method
from thinwire.jobs.outcome import Outcome
from thinwire.jobs.own import maker_of
from thinwire.jobs.resuming import newest_step, nothing_to_do
from thinwire.jobs.team import Interrupts, run_workers
from thinwire.jobs.words import title_of

# --- where a run lives


def new_folder(job: Job, stem: str = "") -> Path:
    """Make a folder that did not exist: the job's name, else the stem and the first number that is free.

    Args:
        stem: of a comparison's folder; a run's is made of its task and method.
    """
    make_out(Path(job.out))
    if job.name is None:
        return _first_that_can_be_made(job, stem)
    folder = folder_of(job)
    try:
        folder.mkdir()
    except FileExistsError:
        raise ValueError(exists_already(folder, can_go_on=not stem)) from None
    return folder


def exists_already(folder: Path, can_go_on: bool = True) -> str:
    """Of a run, which can go on where it is; a comparison cannot."""
    go_on = f"go on with it by --resume {folder}, or " if can_go_on else ""
    return f"{folder} exists already: {go_on}choose another --name."


def folder_of(job: Job, number: int = 1, stem: str = "") -> Path:
    """Where a run of the job would be: of one without a name, the one with this number."""
    safe = re.sub(r"[^A-Za-z0-9.]+", "-", stem or f"{job.task}-{job.method}").strip("-.")
    return Path(job.out) / (f"{safe}-{number}" if job.name is None else job.name)


def _first_that_can_be_made(job: Job, stem: str) -> Path:
    for number in itertools.count(1):
        with suppress(FileExistsError):
            folder = folder_of(job, number, stem)
            folder.mkdir()
            return folder
    raise AssertionError("numbers do not end.")


def make_out(out: Path) -> None:
    """Apart from what is in it: that there is something else in its place must not pass for a name that is taken."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise Mistake("out", f"{out} cannot be the folder of runs: it, or what it is in, is no folder.") from None


def refuse_early(job: Job) -> None:
    """Find what cannot work before anything is made or started, so that a mistake leaves nothing behind."""
    if job.names_a_network:
        job.schedule()
    if job.tensorboard:
        _require_tensorboard()
    for key in ("text", "folder_of_data"):
        if (path := getattr(job, key)) is not None and not Path(path).exists():
            raise Mistake(key, f"{path} does not exist: {job.task} reads its data from there.")
    if job.task == "digits":
        digits.find()
    if job.task == "fashion-mnist":
        with blaming("folder_of_data"):
            fashion.find(job.folder_of_data)
    if job.link == "shaped" and not job.names_a_network:
        raise Mistake("link", "a shaped link needs a network to be like: name one, or a latency and a rate.")
    _require_own(job)
    _require_topology(job)
    if job.port is not None and on_loopback(job):
        require_port(job.port)


def joining(job: Job, env: Mapping[str, str] = os.environ) -> Job:
    """The job as one of torchrun's workers has it: there are as many as torchrun says, on the network that there is."""
    if job.names_a_network and job.link != "shaped":
        raise ValueError(
            "torchrun's workers are on the network that there is: leave out --network, --latency and --rate, or add "
            "--link shaped."
        )
    if job.tensorboard and env.get("RANK") == "0":  # who writes it
        _require_tensorboard()
    _require_own(job)
    job = replace(job, hosts=int(env["WORLD_SIZE"]))
    _require_topology(job)
    return job


def _require_own(job: Job) -> None:
    """That the user's own module has what the task names."""
    if job.own:
        with blaming("task"):
            maker_of(job.task)


def _require_topology(job: Job) -> None:
    """That so many hosts can be connected as the method says."""
    method = Method.parse(job.method)
    if method.topology is not None:
        from thinwire.gossip import topology  # here: it takes NumPy along, which is slow to come

        with blaming("method"):
            topology.build(method.topology, job.hosts, seed=job.seed)


def _require_tensorboard() -> None:
    from thinwire.report import tensorboard  # here: it takes NumPy along, which is slow to come

    tensorboard.require()


# --- one run


def train(job: Job, folder: Path | None, command: Sequence[str], console: Console) -> tuple[Outcome, Path]:
    """Train in a new folder, or go on in one that there is. Gives how it ended, and the folder."""
    refuse_early(job)
    place = new_folder(job) if folder is None else folder
    try:
        with occupied(place), Interrupts() as interrupts:
            if folder is not None and (words := nothing_to_do(job, folder)):
                say(console, words)
                return Outcome(how="done", message=words), folder
            if folder is not None and not newest_step(folder, job.hosts):
                say(console, f"{folder} has no checkpoint that all workers have saved: it begins again at step 0.")
            invite(job, place, console)
            return conduct(job, place, command, console, title_of(job), interrupts), place
    except BaseException:
        if folder is None and not (place / RECORDS).exists():
            shutil.rmtree(place, ignore_errors=True)  # nothing was begun, so nothing stays
        raise


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Have a run's folder to oneself, until we end, however that is: two trainings would write over each other."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{folder} is being trained by another process: wait for it, or end it.") from None
    except OSError:
        pass  # a file system without locks


def invite(job: Job, folder: Path, console: Console) -> None:
    """Say how to see it in TensorBoard: whoever wants to wants it while it runs."""
    if job.tensorboard:
        say(console, f"to watch it: tensorboard --logdir {folder}")


def conduct(
    job: Job, folder: Path, command: Sequence[str], console: Console, title: str, interrupts: Interrupts
) -> Outcome:
    """Train: make the place, write down the job, start its workers, show how they do, write down how it ended."""
    goes_on = (folder / RECORDS).exists()
    with ExitStack() as ending:
        with interrupts.ending():
            ground = ending.enter_context(ground_for(job, folder, partial(say, console)))
        write_job(folder, ground.job, command)
        outcome.begin(folder)
        with closing(view_of(ground.job, folder, console, title, goes_on)) as view:
            ended = run_workers(ground, folder, view, interrupts)
        outcome.note_recorded(folder, view.progress.step)
        return outcome.conclude(folder, ended)
