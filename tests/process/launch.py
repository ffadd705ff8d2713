"""Run a function on N ranks that are real processes with a gloo process group on loopback.

    def program(rank, number):
        ...
        return number + rank

    assert run_ranks(program, 3, number=1) == [1, 2, 3]

The function must be at the top level of its module. `run_ranks` raises the first rank's error with its traceback;
`outcomes` never raises and tells how each rank ended, for tests in which ranks are meant to die.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# A rank finds its function by module name, also when the tests were started by a plain `pytest`.
_ROOT = str(Path(__file__).parents[2])
if _ROOT not in sys.path:
    sys.path.append(_ROOT)

_context = multiprocessing.get_context("forkserver")
# Imported once by the server, so that a rank starts in milliseconds. pytest is the main module that each rank repeats.
_context.set_forkserver_preload(["pytest", "tests.process.preload"])


@dataclass
class Outcome:
    """How a rank ended.

    Attributes:
        value: what its function returned.
        error: the name of the exception's class that its function raised, "" if none.
        message: that exception's text.
        traceback: that exception's traceback, as text.
        exitcode: 0, 1 after an exception, -9 after SIGKILL.
        stderr: what it wrote there.
        order: ranks that reported earlier have a lower number; None if it never did.
    """

    rank: int
    value: Any = None
    error: str = ""
    message: str = ""
    traceback: str = ""
    exitcode: int | None = None
    stderr: str = ""
    order: int | None = None


class RankFailed(AssertionError):
    """A rank raised, died, or did not finish."""


def run_ranks(function: Callable[..., Any], world_size: int, *, limit: float = 60.0, **arguments: Any) -> list[Any]:
    """What `function(rank, **arguments)` returned on each rank; raise `RankFailed` about the first that failed."""
    ended = outcomes(function, world_size, limit=limit, **arguments)
    failed = [outcome for outcome in ended if outcome.error or outcome.exitcode != 0]
    if failed:
        first = min(failed, key=lambda outcome: (outcome.order is None, outcome.order or 0))
        raise RankFailed(
            f"rank {first.rank} of {world_size} ended with exit code {first.exitcode}. {first.message}\n"
            f"{first.traceback}{first.stderr}"
        )
    return [outcome.value for outcome in ended]


def outcomes(function: Callable[..., Any], world_size: int, *, limit: float = 60.0, **arguments: Any) -> list[Outcome]:
    """Run `function(rank, **arguments)` on each rank and tell how each ended. After `limit` seconds all are killed."""
    deadline = time.monotonic() + limit
    with tempfile.TemporaryDirectory() as folder, LoopbackStore() as store:
        ranks = [_Rank(rank, world_size, store.port, Path(folder), function, arguments) for rank in range(world_size)]
        try:
            _gather(ranks, deadline)
        finally:
            for rank in ranks:
                rank.end(deadline)
        return [rank.outcome for rank in ranks]


class LoopbackStore:
    """The group's store lives here and not in rank 0, so that rank 0 may die too. It listens on loopback only."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self._store = dist.TCPStore(
            "127.0.0.1", self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def __enter__(self) -> LoopbackStore:
        return self

    def __exit__(self, *_: object) -> None:
        del self._store


class _Rank:
    """The parent's side of one rank."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        port: int,
        folder: Path,
        function: Callable[..., Any],
        arguments: dict[str, Any],
    ) -> None:
        self.outcome = Outcome(rank)
        self._stderr = folder / f"stderr-{rank}"
        self.reports, theirs = _context.Pipe(duplex=False)
        self.process: ForkServerProcess = _context.Process(
            target=_rank_main, args=(theirs, rank, world_size, port, self._stderr, function, arguments), daemon=True
        )
        self.process.start()
        theirs.close()

    def hear(self, order: int) -> None:
        try:
            self.outcome.__dict__.update(pickle.loads(self.reports.recv_bytes()), order=order)
        except EOFError:
            pass  # killed before it could report

    def end(self, deadline: float) -> None:
        self.process.join(max(0.0, deadline - time.monotonic()))
        if self.process.is_alive():
            self.outcome.message += f" (rank {self.outcome.rank} was still running at the time limit)"
            self.process.kill()
            self.process.join()
        self.outcome.exitcode = self.process.exitcode
        self.outcome.stderr = self._stderr.read_text() if self._stderr.exists() else ""
        self.reports.close()


def _gather(ranks: Iterable[_Rank], deadline: float) -> None:
    waiting = {rank.reports: rank for rank in ranks}
    order = 0
    while waiting and time.monotonic() < deadline:
        for reports in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
            assert isinstance(reports, Connection)
            waiting.pop(reports).hear(order)
            order += 1


def _rank_main(
    reports: Connection,
    rank: int,
    world_size: int,
    port: int,
    stderr: Path,
    function: Callable[..., Any],
    arguments: dict[str, Any],
) -> None:
    with stderr.open("wb") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
        report = {"value": function(rank, **arguments)}
    except BaseException as error:
        report = {"error": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
    try:
        # As bytes: a tensor sent through multiprocessing would stay in this process's shared memory, and this one ends.
        reports.send_bytes(pickle.dumps(report))
    except Exception:  # a value that cannot be pickled
        report = {"error": "ValueError", "traceback": traceback.format_exc()}
        reports.send_bytes(pickle.dumps(report))
    if "error" in report:
        # Without the process group's farewell: its other ranks may be gone, and it would wait for them.
        raise SystemExit(1)
    dist.destroy_process_group()
