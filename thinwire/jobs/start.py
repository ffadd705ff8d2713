"""Starts the workers of a job and stays with them until the last has ended: in the lab, or on loopback.

Workers have sessions of their own, so a Ctrl-C comes to us alone: we ask them to end, they save a checkpoint after
their present step, and whoever is not done with that in time is killed. They die with us, however we die.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from rich.console import Console

from thinwire.jobs.job import RECORDS, TRUTH, Job, write_job
from thinwire.jobs.live import View, say, title_of, view_of
from thinwire.lab import run
from thinwire.lab.errors import LabUnavailable
from thinwire.lab.lab import Lab

WORKER = "thinwire.jobs.worker"
LOOK_EVERY = 0.05
INTERRUPT_GRACE, FAILURE_GRACE = 1.4, 3.0  # seconds from asking to end to SIGKILL
LAST_LINES = 6
LOOPBACK, LOOPBACK_DEVICE = "127.0.0.1", "lo" if sys.platform == "linux" else "lo0"
PORTS = range(20000, 32000)  # below those that outgoing connections are given
PR_SET_PDEATHSIG = 1
SENTENCE = re.compile(r"thinwire: (?:worker \d+: )?(.+)")  # what a worker has to say to a person

_libc = ctypes.CDLL(None)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        how: done, interrupted or failed.
        code: the exit code that says so: 0, 1, or 128 + n for signal n.
        message: what went wrong, in a sentence; nothing when all is well.
        log: the last lines of the worker that failed first, if it could not say what was wrong.
        at_once: nobody wants to wait for anything any more.
    """

    how: str
    code: int = 0
    message: str = ""
    log: tuple[str, ...] = ()
    at_once: bool = False


# --- where a run lives


def new_folder(job: Job, stem: str = "") -> Path:
    """Make a folder that did not exist: the job's name, else the stem and the first number that is free."""
    if job.name is None:
        return _numbered(Path(job.out), stem or f"{job.task}-{job.method}")
    folder = Path(job.out) / job.name
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ValueError(
            f"{folder} exists already: go on with it by --resume {folder}, or choose another --name."
        ) from None
    return folder


def _numbered(out: Path, stem: str) -> Path:
    safe = re.sub(r"[^A-Za-z0-9.]+", "-", stem).strip("-.")
    for number in itertools.count(1):
        with suppress(FileExistsError):
            folder = out / f"{safe}-{number}"
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("numbers do not end.")


def refuse_early(job: Job) -> None:
    """Find what cannot work before anything is made or started, so that a mistake leaves nothing behind."""
    if job.names_a_network:
        job.schedule()
    if job.tensorboard:
        _require_tensorboard()
    for path in (job.text, job.folder_of_data):
        if path is not None and not Path(path).exists():
            raise ValueError(f"{path} does not exist: {job.task} reads its data from there.")
    if job.link == "shaped" and not job.names_a_network:
        raise ValueError("a shaped link needs a network to be like: name one, or a latency and a rate.")


def joining(job: Job, env: Mapping[str, str] = os.environ) -> Job:
    """The job as one of torchrun's workers has it: there are as many as torchrun says, on the network that there is."""
    if job.names_a_network and job.link != "shaped":
        raise ValueError(
            "torchrun's workers are on the network that there is: leave out --network, --latency and --rate, or add "
            "--link shaped."
        )
    if job.tensorboard and env.get("RANK") == "0":  # who writes it
        _require_tensorboard()
    return replace(job, hosts=int(env["WORLD_SIZE"]))


def _require_tensorboard() -> None:
    from thinwire.report import tensorboard  # here: it takes NumPy along, which is slow to come

    tensorboard.require()


# --- where workers run


class Ground(ABC):
    """A place for workers: starts them, and knows what they need to find each other."""

    def __init__(self, job: Job) -> None:
        self.job = job

    @abstractmethod
    def start(self, rank: int, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a command as this rank; what it prints can be read from its `stdout`."""

    def trouble(self) -> str:
        """Why nobody can go on here; nothing while all is well."""
        return ""


class OnLoopback(Ground):
    """Processes of this machine that talk over its loopback."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._port = job.port if job.port is not None else _free_port()
        if not _is_free(self._port):
            raise ValueError(f"port {self._port} is in use: choose another --port, or none for one that is free.")

    def start(self, rank: int, command: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env=self._environment(rank, os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_dies_with(os.getpid()),
        )

    def _environment(self, rank: int, env: Mapping[str, str]) -> dict[str, str]:
        """As `thinwire.lab.run.environment` has it in the lab; here all ranks are on one machine."""
        return {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            **env,
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self._port),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.job.hosts),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.job.hosts),
            "GROUP_RANK": "0",
            "GLOO_SOCKET_IFNAME": LOOPBACK_DEVICE,
            "TP_SOCKET_IFNAME": LOOPBACK_DEVICE,
        }


class InLab(Ground):
    """Hosts of a lab, behind its network."""

    def __init__(self, job: Job, lab: Lab) -> None:
        super().__init__(job)
        self._lab = lab

    def start(self, rank: int, command: Sequence[str]) -> subprocess.Popen[bytes]:
        port = {} if self.job.port is None else {"MASTER_PORT": str(self.job.port)}
        env = run.environment(self._lab, rank, {**os.environ, **port})
        return self._lab.start(rank, command, env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def trouble(self) -> str:
        code = self._lab.relay.poll()
        return "" if code is None else f"the lab's relay {run.how_it_ended(code)}"


@contextmanager
def ground_for(job: Job, folder: Path, say: Callable[[str], None]) -> Iterator[Ground]:
    """The place that the job asks for. Where it leaves the choice: the lab if it names a network, else loopback.

    Where there can be no lab, links are shaped instead, which is said aloud.
    """
    if job.link in ("loopback", "shaped") or (job.link == "auto" and not job.names_a_network):
        yield OnLoopback(replace(job, link="loopback" if job.link == "auto" else job.link))
        return
    _keep_earlier(folder / TRUTH)
    lab = Lab(job.hosts, job.schedule(), seed=job.seed, truth=folder / TRUTH)
    try:
        lab.__enter__()
    except LabUnavailable as error:
        if job.link == "lab":
            raise
        say(f"No lab here: {str(error).splitlines()[0]}")
        say("thinwire's own links are shaped instead; plain DDP and its hooks are not slowed down.")
        yield OnLoopback(replace(job, link="shaped"))
        return
    with lab:
        for note in lab.schedule.notes:
            say(f"the network {lab.schedule.name}: {note}")
        yield InLab(replace(job, link="lab"), lab)


def why_no_lab() -> str:
    """Why this machine makes no lab; nothing if it does."""
    try:
        with Lab(1):
            return ""
    except LabUnavailable as error:
        return str(error).splitlines()[0]


def _keep_earlier(path: Path) -> None:
    """A lab begins its truth anew, so that of a run that goes on is put aside, as its records are."""
    if path.exists():
        free = next(n for n in itertools.count(1) if not path.with_name(f"{path.stem}.{n}{path.suffix}").exists())
        path.rename(path.with_name(f"{path.stem}.{free}{path.suffix}"))


def _is_free(port: int) -> bool:
    try:
        socket.create_server((LOOPBACK, port)).close()
    except OSError:
        return False
    return True


def _free_port() -> int:
    """One that is free now. No outgoing connection can take it before the workers do."""
    for port in random.sample(PORTS, 100):
        if _is_free(port):
            return port
    raise OSError("no port is free on this machine.")


def _dies_with(parent: int) -> Callable[[], None] | None:
    """Runs in the new process before its program: let the kernel end it when we have gone."""
    if sys.platform != "linux":
        return None

    def prepare() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


# --- one run


class Interrupts:
    """Notes Ctrl-C and SIGTERM instead of ending by them, while this is open."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, lambda number, _: self.seen.append(number))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


def train(job: Job, folder: Path | None, command: Sequence[str], console: Console) -> tuple[Outcome, Path]:
    """Train in a new folder, or go on in one that there is. Gives how it ended, and the folder."""
    refuse_early(job)
    place = new_folder(job) if folder is None else folder
    invite(job, place, console)
    try:
        with occupied(place), Interrupts() as interrupts:
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
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{folder} is being trained by another process: wait for it, or end it.") from None
    except OSError:
        pass  # a file system without locks
    else:
        yield
        return
    finally:
        os.close(descriptor)
    yield


def invite(job: Job, folder: Path, console: Console) -> None:
    """Say how to see it in TensorBoard: whoever wants to wants it while it runs."""
    if job.tensorboard:
        say(console, f"to watch it: tensorboard --logdir {folder}")


def conduct(
    job: Job, folder: Path, command: Sequence[str], console: Console, title: str, interrupts: Interrupts
) -> Outcome:
    """Train: make the place, write down the job, start its workers, show how they do."""
    with ground_for(job, folder, partial(say, console)) as ground:
        write_job(folder, ground.job, command)
        with closing(view_of(ground.job, folder, console, title)) as view:
            return run_workers(ground, folder, view, interrupts)


def run_workers(ground: Ground, folder: Path, view: View, interrupts: Interrupts) -> Outcome:
    """Start all workers of the job in this folder, and give how it went when the last has ended."""
    team = _Team(ground, folder, view, interrupts)
    try:
        team.start()
        return team.attend()
    finally:
        team.kill()


class _Worker:
    """A worker's process and what it prints: kept in a file, and its last lines here, for the disk may be full."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], log: Path) -> None:
        assert process.stdout is not None
        self.rank, self.process = rank, process
        self.sentences: list[str] = []
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._rest = b""
        self._source = process.stdout
        os.set_blocking(self._source.fileno(), False)
        self._log: BinaryIO | None = log.open("ab", buffering=0)

    def listen(self) -> None:
        """Take in what it has printed since."""
        while piece := self._source.read(1 << 16):
            self._keep(piece)
            *lines, self._rest = (self._rest + piece).split(b"\n")
            for line in lines:
                self._take(line.decode(errors="replace").rstrip())

    def _keep(self, piece: bytes) -> None:
        if self._log is not None:
            try:
                self._log.write(piece)
            except OSError:  # it is cut off here
                self._log.close()
                self._log = None

    def _take(self, line: str) -> None:
        if line:
            self._lines.append(line)
        if match := SENTENCE.fullmatch(line):
            self.sentences.append(match[1])

    def finish(self) -> None:
        """After its end."""
        self.listen()
        self._take(self._rest.decode(errors="replace").rstrip())
        self._source.close()
        if self._log is not None:
            self._log.close()

    def how_it_failed(self) -> Outcome:
        """In its own words if it found some."""
        if self.sentences:
            return Outcome(how="failed", code=1, message=f"worker {self.rank}: {self.sentences[-1]}")
        how = f"worker {self.rank} {run.how_it_ended(self.process.returncode)}."
        return Outcome(how="failed", code=1, message=how, log=tuple(self._lines))


class _Team:
    """The workers of one run."""

    def __init__(self, ground: Ground, folder: Path, view: View, interrupts: Interrupts) -> None:
        self._ground, self._folder, self._view, self._interrupts = ground, folder, view, interrupts
        self._running: list[_Worker] = []
        self._outcome = Outcome(how="done")
        self._deadline: float | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", WORKER, str(self._folder)]
        for rank in range(self._ground.job.hosts):
            process = self._ground.start(rank, command)
            self._running.append(_Worker(rank, process, self._folder / f"worker-{rank}.log"))

    def attend(self) -> Outcome:
        """Until the last has ended."""
        while self._running:
            self._note_interrupts()
            self._note_trouble()
            self._note_ends()
            self._keep_deadline()
            self._view.look()
            time.sleep(LOOK_EVERY)
        return self._outcome

    def kill(self) -> None:
        """End what still runs, at once; nothing does unless starting or watching failed."""
        self._signal_all(signal.SIGKILL)
        while self._running:
            worker = self._running.pop()
            worker.process.wait()
            worker.finish()

    # --- what can happen

    def _note_interrupts(self) -> None:
        seen = self._interrupts.seen
        if len(seen) > 1 and not self._outcome.at_once:
            self._outcome = replace(self._interrupted(seen[0]), at_once=True)
            self._signal_all(signal.SIGKILL)
        elif seen and self._outcome.how == "done":
            self._outcome = self._interrupted(seen[0])
            self._view.say("ending the workers; they save a checkpoint. Once more ends them at once.")
            self._end_all(INTERRUPT_GRACE)

    def _interrupted(self, number: int) -> Outcome:
        return Outcome(how="interrupted", code=128 + number, message=f"interrupted by {signal.Signals(number).name}.")

    def _note_trouble(self) -> None:
        if self._outcome.how == "done" and (trouble := self._ground.trouble()):
            self._fail(Outcome(how="failed", code=1, message=trouble))

    def _note_ends(self) -> None:
        for worker in self._running:
            worker.listen()
        ended = [worker for worker in self._running if worker.process.poll() is not None]
        self._running = [worker for worker in self._running if worker not in ended]
        for worker in ended:
            worker.finish()
        # One that was killed takes the others with it, so of several it is the cause.
        failed = sorted((w for w in ended if w.process.returncode), key=lambda w: (w.process.returncode > 0, w.rank))
        if failed and self._outcome.how == "done":
            self._fail(failed[0].how_it_failed())
        for worker in ended:
            if worker.sentences and self._outcome == Outcome(how="done"):  # it came to its end, and yet not all is well
                self._outcome = Outcome(how="done", code=1, message=f"worker {worker.rank}: {worker.sentences[-1]}")

    def _fail(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._end_all(FAILURE_GRACE)

    def _keep_deadline(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._signal_all(signal.SIGKILL)
            self._deadline = None

    def _end_all(self, grace: float) -> None:
        self._signal_all(signal.SIGTERM)
        self._deadline = time.monotonic() + grace

    def _signal_all(self, number: signal.Signals) -> None:
        """To the whole group of each worker: one that started others is not asked alone."""
        for worker in self._running:
            with suppress(ProcessLookupError):
                os.killpg(worker.process.pid, number)
