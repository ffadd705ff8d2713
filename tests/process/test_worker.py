"""Workers as processes: they end together or alone, say why, and go on where they were."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.process.launch import _context
from tests.process.runs import lines_of, of_kind
from tests.timing import timing
from thinwire.jobs import outcome
from thinwire.jobs.job import Job, read_job, write_job
from thinwire.jobs.leaving import INTERRUPTED
from thinwire.jobs.worker import join, main
from thinwire.train.checkpoint import Checkpoint

pytestmark = pytest.mark.process


class Workers:
    """The workers of one run, forked from a server that has imported everything."""

    def __init__(self, folder: Path, ranks: int = 2, **settings: Any) -> None:
        self.folder, self.ranks = folder, ranks
        self.processes: list[ForkServerProcess] = []
        folder.mkdir(exist_ok=True)
        write_job(folder, Job(hosts=ranks, **settings), ["a test"])

    def start(self, program: Callable[[Path], None] | None = None) -> Workers:
        port = _free_port()
        self.processes = [
            _context.Process(
                target=_be_worker,
                args=(self.folder, _environment(rank, self.ranks, port), self._log(rank), program or _work),
                daemon=True,
            )
            for rank in range(self.ranks)
        ]
        for process in self.processes:
            process.start()
        return self

    def send(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def code(self, rank: int, limit: float = 60.0) -> int | None:
        self.processes[rank].join(limit)
        return self.processes[rank].exitcode

    def codes(self) -> list[int | None]:
        found = [self.code(rank) for rank in range(self.ranks)]
        self.kill()
        return found

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def until(self, condition: Callable[[list[dict[str, Any]]], object], limit: float = 60.0) -> None:
        """Look at the records until they fulfil a condition."""
        deadline = time.monotonic() + limit
        path = self.folder / "records.jsonl"
        while not (path.exists() and condition(lines_of(self.folder))):
            assert time.monotonic() < deadline and self.processes[0].is_alive(), self.said(0)
            time.sleep(0.01)

    def said(self, rank: int) -> str:
        return self._log(rank).read_text()

    def states(self, step: int) -> list[dict[str, Any]]:
        return [Checkpoint(self.folder / "checkpoints", rank, self.ranks).load(step)[0] for rank in range(self.ranks)]

    def steps_saved(self) -> list[list[int]]:
        return [Checkpoint(self.folder / "checkpoints", rank, self.ranks).steps() for rank in range(self.ranks)]

    def _log(self, rank: int) -> Path:
        return self.folder / f"said-{rank}"


def _be_worker(folder: Path, env: dict[str, str], log: Path, program: Callable[[Path], None]) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    os.environ.update(env)
    program(folder)


def _work(folder: Path) -> None:
    main([str(folder)])


def _new(folder: Path) -> Path:
    """For a test that may be measured again."""
    return folder / f"run-{time.monotonic_ns()}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    torchruns = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    there = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    return {**there, **{key: str(value) for key, value in torchruns.items()}}


def test_a_run_that_is_killed_and_started_again_ends_with_the_same_bits(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"method": "star-topk@0.05", "steps": 200, "checkpoint_every": 10}
    whole = Workers(tmp_path / "whole", **settings).start()
    assert whole.codes() == [0, 0]
    killed = Workers(tmp_path / "killed", **settings).start()
    killed.until(lambda written: len(of_kind("saved", written)) >= 2)
    killed.kill()
    assert not of_kind("ended", lines_of(killed.folder))
    assert killed.start().codes() == [0, 0]
    began = of_kind("began", lines_of(killed.folder))
    assert len(began) == 2 and 20 <= began[1]["step"] < 200
    for ours, theirs in zip(whole.states(200), killed.states(200), strict=True):
        for name, parameter in ours["model"].items():
            assert torch.equal(parameter, theirs["model"][name])
        for name, error in ours["comm"]["error"].items():
            assert torch.equal(error, theirs["comm"]["error"][name])
        assert ours["position"] == theirs["position"]


def _end_within(seconds: float, workers: Workers, number: signal.Signals, asked: list[int]) -> None:
    for rank in asked:
        workers.send(rank, number)
    start = time.monotonic()
    assert [workers.code(rank) for rank in range(workers.ranks)] == [INTERRUPTED] * workers.ranks
    assert time.monotonic() - start < seconds


@pytest.mark.parametrize(("method", "asked"), [("adaptive", [0, 1]), ("ddp", [1]), ("choco@sign", [0])])
@timing
def test_asked_to_end_all_save_the_same_step(method: str, asked: list[int], tmp_path: Path) -> None:
    workers = Workers(_new(tmp_path), method=method, seconds=60.0, checkpoint_every=0).start()
    workers.until(lambda written: len(of_kind("loss", written)) >= 3)
    _end_within(2.0, workers, signal.SIGTERM if method == "ddp" else signal.SIGINT, asked)
    ended = lines_of(workers.folder)[-1]
    assert ended["how"] == "interrupted" and ended["steps"] == ended["saved"] > 0
    known = outcome.read(workers.folder)
    assert {key: known[key] for key in ("how", "message", "steps", "saved", "accuracy", "evaluated")} == {
        key: ended[key] for key in ("how", "message", "steps", "saved", "accuracy", "evaluated")
    }
    assert workers.steps_saved() == [[ended["saved"]], [ended["saved"]]]


@timing
def test_a_worker_whose_peer_is_stuck_leaves_alone(tmp_path: Path) -> None:
    workers = Workers(_new(tmp_path), method="ddp", seconds=60.0, checkpoint_every=20).start()
    workers.until(lambda written: of_kind("saved", written))
    workers.send(1, signal.SIGSTOP)
    workers.send(0, signal.SIGINT)
    start = time.monotonic()
    assert workers.code(0) == INTERRUPTED
    took = time.monotonic() - start
    workers.kill()
    assert took < 2.0
    ended = lines_of(workers.folder)[-1]
    assert ended["how"] == "interrupted" and "the last checkpoint is of step" in ended["message"]
    assert ended["saved"] in workers.steps_saved()[0]


@pytest.mark.parametrize("method", ["ddp", "topk-allgather@0.05"])
def test_a_worker_that_loses_a_peer_says_so_and_fails(method: str, tmp_path: Path) -> None:
    workers = Workers(tmp_path / "run", method=method, seconds=60.0, checkpoint_every=20).start()
    workers.until(lambda written: of_kind("saved", written))
    workers.send(1, signal.SIGKILL)
    assert workers.codes() == [1, -signal.SIGKILL]
    ended = lines_of(workers.folder)[-1]
    assert ended["how"] == "failed" and "lost" in ended["message"]
    assert "thinwire: worker 0: " in workers.said(0) and "Traceback" not in workers.said(0)


def _join(folder: Path) -> None:
    join(Job(steps=5, out=str(folder / "made")), None)


def test_under_torchrun_rank_0_makes_the_folder(tmp_path: Path) -> None:
    workers = Workers(tmp_path / "run").start(_join)
    assert workers.codes() == [0, 0], workers.said(0)
    (folder,) = (workers.folder / "made").iterdir()
    assert lines_of(folder)[-1]["how"] == "done"
    job = read_job(folder)
    assert (job.hosts, job.steps) == (2, 5)


def test_a_run_does_not_go_on_with_another_number_of_workers(tmp_path: Path) -> None:
    workers = Workers(tmp_path / "run")
    write_job(workers.folder, Job(hosts=3), [])
    assert workers.start().codes() == [1, 1]
    assert "is a run of 3 workers, and here are 2." in workers.said(0)


def _fails(folder: Path, port: int, ranks: int = 1) -> str:
    command = [sys.executable, "-m", "thinwire.jobs.worker", str(folder)]
    ended = subprocess.run(
        command, env={**os.environ, **_environment(0, ranks, port)}, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    return ended.stderr


def test_what_is_wrong_before_it_begins_is_one_sentence(tmp_path: Path) -> None:
    port = _free_port()
    assert _fails(tmp_path, port) == f"thinwire: worker 0: {tmp_path} is no run: it has no job.json.\n"
    write_job(tmp_path, Job(hosts=1, task="chars", text="missing.txt"), [])
    assert _fails(tmp_path, port) == "thinwire: worker 0: missing.txt cannot be read: No such file or directory.\n"
    with socket.create_server(("127.0.0.1", port)):
        assert f"thinwire: worker 0: port {port} is in use: choose another --port" in _fails(tmp_path, port)


def test_a_worker_whose_peers_never_come_says_how_many_did(tmp_path: Path) -> None:
    write_job(tmp_path, Job(hosts=2, timeout=1), [])
    assert _fails(tmp_path, _free_port(), ranks=2) == "thinwire: worker 0: only 1 of 2 workers came within 1 s.\n"


def _work_with_little_room(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    _work(folder)


def test_the_first_checkpoint_that_cannot_be_written_is_told_at_once_and_the_last_at_the_end(tmp_path: Path) -> None:
    workers = Workers(tmp_path / "run", method="ddp", steps=30, checkpoint_every=10).start(_work_with_little_room)
    assert workers.codes() == [0, 0]
    words = "the checkpoint of step {} could not be saved (File too large); there is none yet."
    for rank in range(2):
        told = [line for line in workers.said(rank).splitlines() if "could not be saved" in line]
        assert told == [f"thinwire: note: {words.format(10)}", f"thinwire: worker {rank}: {words.format(30)}"]
    known = outcome.read(workers.folder)
    assert (known["how"], known["message"], known["saved"]) == ("done", words.format(30), None)
