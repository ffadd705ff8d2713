"""Where workers run: the hosts of a lab, or this machine's loopback."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from thinwire.jobs.job import TRUTH, Job, Mistake
from thinwire.lab import run
from thinwire.lab.errors import LabError, LabUnavailable
from thinwire.lab.lab import Lab

LOOPBACK, LOOPBACK_DEVICE = "127.0.0.1", "lo" if sys.platform == "linux" else "lo0"
PORTS = range(20000, 32000)  # below those that outgoing connections are given
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None)


class Ground(ABC):
    """A place for workers: starts them, and knows what they need to find each other."""

    def __init__(self, job: Job) -> None:
        self.job = job

    @abstractmethod
    def start(self, rank: int, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a command as this rank; what it prints can be read from its `stdout`."""

    def begin(self) -> None:  # noqa: B027 (most places do not change)
        """The workers begin to train: from now on the network changes as it is meant to."""

    def trouble(self) -> str:
        """Why nobody can go on here; nothing while all is well."""
        return ""

    def notes(self) -> list[str]:
        """What else is not well since this was last asked."""
        return []


class OnLoopback(Ground):
    """Processes of this machine that talk over its loopback."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._port = job.port if job.port is not None else _free_port()
        require_port(self._port)

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

    def begin(self) -> None:
        with suppress(LabError):  # its end is told as trouble
            self._lab.begin()

    def trouble(self) -> str:
        code = self._lab.relay.poll()
        return "" if code is None else f"the lab's relay {run.how_it_ended(code)}"

    def notes(self) -> list[str]:
        return self._lab.notes()


def on_loopback(job: Job) -> bool:
    """Whether the job asks for nothing but loopback."""
    return job.link in ("loopback", "shaped") or (job.link == "auto" and not job.names_a_network)


@contextmanager
def ground_for(job: Job, folder: Path, say: Callable[[str], None]) -> Iterator[Ground]:
    """The place that the job asks for. Where it leaves the choice: the lab if it names a network, else loopback.

    Where there can be no lab, links are shaped instead, which is said aloud.
    """
    if on_loopback(job):
        yield OnLoopback(replace(job, link="loopback" if job.link == "auto" else job.link))
        return
    _keep_earlier(folder / TRUTH)
    with ExitStack() as ending:
        try:
            lab = ending.enter_context(Lab(job.hosts, job.schedule(), seed=job.seed, truth=folder / TRUTH, waits=True))
        except LabUnavailable as error:
            if job.link == "lab":
                raise
            say(f"No lab here: {str(error).splitlines()[0]}")
            say("thinwire's own links are shaped instead; plain DDP and its hooks are not slowed down.")
            yield OnLoopback(replace(job, link="shaped"))
            return
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


def require_port(port: int) -> None:
    """That workers can meet there."""
    if wrong := _wrong_with(port):
        raise Mistake("port", f"port {port} {wrong}: choose another --port, or none for one that is free.")


def _wrong_with(port: int) -> str:
    """Why it cannot be had; nothing if it can."""
    try:
        socket.create_server((LOOPBACK, port)).close()
    except OSError as error:
        return "is in use" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
    return ""


def _free_port() -> int:
    """One that is free now. No outgoing connection can take it before the workers do."""
    for port in random.sample(PORTS, 100):
        if not _wrong_with(port):
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
