"""Workers train together, write down what they do, end together, and go on bit for bit."""

from __future__ import annotations

import json
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

from tests.process.launch import _context, run_ranks
from tests.timing import timing
from tests.unit.test_data import write_fashion
from thinwire import records
from thinwire.jobs import outcome
from thinwire.jobs.job import Job, read_job, write_job
from thinwire.jobs.leaving import INTERRUPTED, Leaving
from thinwire.jobs.training import Training
from thinwire.jobs.worker import join, main
from thinwire.train.checkpoint import Checkpoint

pytestmark = pytest.mark.process

METHODS = (
    "adaptive",
    "ddp",
    "ddp-fp16",
    "ddp-powersgd",
    "topk-allgather@0.05",
    "star-topk@0.05:tree",
    "dcd@int8:ring",
)
STEPS = 12  # PowerSGD begins at the tenth


# --- in processes that are there already


def _train(rank: int, folder: str, **settings: Any) -> dict[str, Any]:
    """One worker from beginning to end, in a process group that exists."""
    training = Training(Job(hosts=2, **settings), Path(folder), Leaving())
    ending = training.run()
    parameters = [p.detach().clone() for p in training._task.module.parameters()]
    training.close()
    return {"ending": ending, "parameters": torch.cat([p.reshape(-1) for p in parameters])}


def _train_by_all(rank: int, folder: str, methods: tuple[str, ...], **settings: Any) -> list[dict[str, Any]]:
    return [_train(rank, f"{folder}/{number}", method=method, **settings) for number, method in enumerate(methods)]


def _written(folder: Path | str) -> list[dict[str, Any]]:
    return list(records.read(Path(folder) / "records.jsonl"))


def _of(kind: str, written: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in written if record["kind"] == kind]


@pytest.mark.parametrize("task", ["digits", "fashion-mnist", "chars"])
def test_every_task_is_trained_by_every_method(task: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"task": task, "steps": STEPS, "batch": 4, "checkpoint_every": 0}
    if task == "fashion-mnist":
        settings["folder_of_data"] = str(write_fashion(tmp_path / "images"))
    if task == "chars":
        (tmp_path / "text").write_text("to be or not to be, that is the question. " * 200)
        settings["text"] = str(tmp_path / "text")
    ranks = run_ranks(_train_by_all, 2, folder=str(tmp_path), methods=METHODS, **settings)
    for number, method in enumerate(METHODS):
        first, second = ranks[0][number], ranks[1][number]
        assert first["ending"].how == second["ending"].how == "done", method
        if not method.startswith("dcd"):
            assert torch.equal(first["parameters"], second["parameters"]), method
        written = _written(tmp_path / str(number))
        assert [step["step"] for step in _of("step", written)] == list(range(STEPS)), method
        _check_records(task, method, written)


def _check_records(task: str, method: str, written: list[dict[str, Any]]) -> None:
    assert written[0]["kind"] == "run" and written[-1]["kind"] == "ended"
    (began,) = _of("began", written)
    assert began["hosts"] == 2 and began["steps"] == STEPS and began["wall"] > 0 and began["monotonic"] > 0
    assert began["parameters"] == sum(numel for _, numel in began["layers"]) > 0
    first, *_, last = _of("evaluated", written)
    assert (first["step"], last["step"]) == (0, STEPS)
    assert 0 < last["trained_seconds"] and first["trained_seconds"] < 0.01
    assert 0 < last["sent_bytes"] and 0 < last["dense_bytes"]
    if task == "chars":
        assert last["accuracy"] is None and 1 < last["perplexity"] < 1000
    else:
        assert 0 <= last["accuracy"] <= 1 and last["perplexity"] is None
    assert _of("loss", written)[0]["loss"] > 0
    assert bool(_of("consensus", written)) == method.startswith("dcd")
    ended = written[-1]
    assert (ended["how"], ended["message"], ended["steps"]) == ("done", "", STEPS)
    assert ended["accuracy"] == last["accuracy"] and ended["saved"] == STEPS and ended["seconds"] > 0
    plans = {step["plan"]["exchange"] for step in _of("step", written)}
    assert plans == {method.partition("@")[0]} or method == "adaptive"
    for step in _of("step", written):
        assert step["sent_bytes"] > 0 and step["dense_bytes"] > 0 and step["skipped"] is False


def test_what_a_hook_saves_is_counted(tmp_path: Path) -> None:
    methods = ("ddp", "ddp-fp16", "ddp-powersgd")
    run_ranks(_train_by_all, 2, folder=str(tmp_path), methods=methods, steps=STEPS)
    sent = [[step["sent_bytes"] for step in _of("step", _written(tmp_path / str(n)))] for n in range(3)]
    dense = 50_826 * 4  # twice half of the gradient
    assert sent[0] == [dense] * STEPS
    assert sent[1] == [dense // 2] * STEPS
    assert sent[2][0] == dense and sent[2][-1] < dense / 10


def _twice(rank: int, folder: str, method: str, **settings: Any) -> list[torch.Tensor]:
    """All at once, and in two goes."""
    settings |= {"method": method, "checkpoint_every": 0}
    whole = _train(rank, f"{folder}/whole", steps=20, **settings)
    _train(rank, f"{folder}/parts", steps=13, **settings)
    parts = _train(rank, f"{folder}/parts", steps=20, **settings)
    return [whole["parameters"], parts["parameters"]]


@pytest.mark.parametrize(
    "method", ["ddp", "ddp-fp16", "topk-allgather@0.05", "var-topk@0.05", "dcd@int8", "choco@sign"]
)
def test_a_training_in_two_goes_ends_with_the_same_bits(method: str, tmp_path: Path) -> None:
    for whole, parts in run_ranks(_twice, 2, folder=str(tmp_path), method=method, partition="dirichlet:0.3"):
        assert torch.equal(whole, parts)
    written = _written(tmp_path / "parts")
    assert [record["step"] for record in _of("began", written)] == [0, 13]
    assert [step["step"] for step in _of("step", written)] == list(range(20))
    assert [ended["how"] for ended in _of("ended", written)] == ["done", "done"]
    first, second = _of("began", written)
    assert first["trained_seconds"] == 0 < second["trained_seconds"]


def _buffers(rank: int, folder: str) -> list[list[torch.Tensor]]:
    training = Training(Job(hosts=2, method="ddp", model="resnet20", batch=4, steps=2), Path(folder), Leaving())
    training.run()

    def buffers() -> list[torch.Tensor]:
        return [buffer.clone() for buffer in training._task.module.buffers() if buffer.is_floating_point()]

    before = buffers()
    with training._exchanging.looking(training._task.module, None):
        tested = buffers()
    after = buffers()
    training.close()
    return [before, tested, after]


def test_batch_norms_are_each_workers_own_and_tested_by_their_mean(tmp_path: Path) -> None:
    first, second = run_ranks(_buffers, 2, folder=str(tmp_path))
    for a, b, mean, theirs, after in zip(first[0], second[0], first[1], second[1], first[2], strict=True):
        assert torch.equal(mean, theirs) and torch.allclose(mean, (a + b) / 2) and torch.equal(a, after)
    assert not all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))


OWN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def make():
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 2))
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    dataset = TensorDataset(x, (x.sum(1) > 0).long())
    loader = DataLoader(dataset, batch_size=8, shuffle=True)
    return model, nn.CrossEntropyLoss(), loader, loader
"""


def _own_twice(rank: int, folder: str) -> list[torch.Tensor]:
    os.chdir(folder)
    return _twice(rank, folder, "star-topk@0.1", task="own_task:make")


def test_the_users_own_goes_on_with_the_same_bits_though_it_shuffles_and_drops_out(tmp_path: Path) -> None:
    (tmp_path / "own_task.py").write_text(OWN)
    first, second = run_ranks(_own_twice, 2, folder=str(tmp_path))
    assert torch.equal(first[0], first[1]) and torch.equal(first[0], second[1])
    assert _of("evaluated", _written(tmp_path / "whole"))[-1]["accuracy"] > 0.3


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path: Path) -> None:
    for one in run_ranks(_train, 2, folder=str(tmp_path), lr=1e6, steps=500, method="ddp", checkpoint_every=1):
        assert one["ending"].how == "failed" and "the loss is not finite on" in one["ending"].message
    ended = _written(tmp_path)[-1]
    assert ended["how"] == "failed" and "smaller --lr" in ended["message"]
    for step in Checkpoint(tmp_path / "checkpoints", 0, 2).steps():
        state, _ = Checkpoint(tmp_path / "checkpoints", 0, 2).load(step)
        assert step < ended["steps"] and state["position"] is not None


def _train_with_little_room(rank: int, **settings: Any) -> dict[str, Any]:
    """No file may grow beyond 200 kB, and a checkpoint has 400."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    return _train(rank, **settings)


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_training(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"folder": str(tmp_path), "checkpoint_every": 10, "method": "ddp"}
    run_ranks(_train, 2, steps=5, **settings)
    for one in run_ranks(_train_with_little_room, 2, steps=20, **settings):
        assert one["ending"].how == "done"
    ended = _written(tmp_path)[-1]
    assert ended["message"].startswith(
        "the checkpoint of step 20 could not be saved (File too large); the one of step 5"
    )
    assert ended["steps"] == 20 and ended["saved"] == 5
    assert [Checkpoint(tmp_path / "checkpoints", rank, 2).steps() for rank in (0, 1)] == [[5], [5]]


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


def test_time_ends_a_training_on_all_workers_at_once(tmp_path: Path) -> None:
    run_ranks(_train, 2, folder=str(tmp_path), seconds=1.0, method="ddp", evaluate_every=0.3)
    written = _written(tmp_path)
    assert 0.5 < written[-1]["seconds"] < 3.0
    assert len(_of("evaluated", written)) >= 3
    assert [step["step"] for step in _of("step", written)] == list(range(written[-1]["steps"]))


def test_over_shaped_links_adaptive_finds_the_network_that_was_asked_for(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"link": "shaped", "latency": "20ms", "rate": "10mbit", "steps": 15}
    run_ranks(_train, 2, folder=str(tmp_path), **settings)
    written = _written(tmp_path)
    last = _of("step", written)[-1]
    assert last["alpha"] == pytest.approx(0.02, rel=0.1) and last["beta"] == pytest.approx(8e-7, rel=0.1)
    assert last["plan"]["exchange"] != "dense" and last["step_seconds"] > 0.02
    truth = [json.loads(line) for line in (tmp_path / "truth.jsonl").read_text().splitlines()]
    assert truth[-1]["now"]["latency"] == 0.02 and truth[-1]["now"]["rate"] == 1.25e6 and truth[-1]["wall"] > 0


# --- in processes that they begin and end themselves


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
        while not (path.exists() and condition(_written(self.folder))):
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
    killed.until(lambda written: len(_of("saved", written)) >= 2)
    killed.kill()
    assert not _of("ended", _written(killed.folder))
    assert killed.start().codes() == [0, 0]
    began = _of("began", _written(killed.folder))
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
    workers.until(lambda written: len(_of("loss", written)) >= 3)
    _end_within(2.0, workers, signal.SIGTERM if method == "ddp" else signal.SIGINT, asked)
    ended = _written(workers.folder)[-1]
    assert ended["how"] == "interrupted" and ended["steps"] == ended["saved"] > 0
    known = outcome.read(workers.folder)
    assert {key: known[key] for key in ("how", "message", "steps", "saved", "accuracy", "evaluated")} == {
        key: ended[key] for key in ("how", "message", "steps", "saved", "accuracy", "evaluated")
    }
    assert workers.steps_saved() == [[ended["saved"]], [ended["saved"]]]


@timing
def test_a_worker_whose_peer_is_stuck_leaves_alone(tmp_path: Path) -> None:
    workers = Workers(_new(tmp_path), method="ddp", seconds=60.0, checkpoint_every=20).start()
    workers.until(lambda written: _of("saved", written))
    workers.send(1, signal.SIGSTOP)
    workers.send(0, signal.SIGINT)
    start = time.monotonic()
    assert workers.code(0) == INTERRUPTED
    took = time.monotonic() - start
    workers.kill()
    assert took < 2.0
    ended = _written(workers.folder)[-1]
    assert ended["how"] == "interrupted" and "the last checkpoint is of step" in ended["message"]
    assert ended["saved"] in workers.steps_saved()[0]


@pytest.mark.parametrize("method", ["ddp", "topk-allgather@0.05"])
def test_a_worker_that_loses_a_peer_says_so_and_fails(method: str, tmp_path: Path) -> None:
    workers = Workers(tmp_path / "run", method=method, seconds=60.0, checkpoint_every=20).start()
    workers.until(lambda written: _of("saved", written))
    workers.send(1, signal.SIGKILL)
    assert workers.codes() == [1, -signal.SIGKILL]
    ended = _written(workers.folder)[-1]
    assert ended["how"] == "failed" and "lost" in ended["message"]
    assert "thinwire: worker 0: " in workers.said(0) and "Traceback" not in workers.said(0)


def _join(folder: Path) -> None:
    join(Job(steps=5, out=str(folder / "made")), None)


def test_under_torchrun_rank_0_makes_the_folder(tmp_path: Path) -> None:
    workers = Workers(tmp_path / "run").start(_join)
    assert workers.codes() == [0, 0], workers.said(0)
    (folder,) = (workers.folder / "made").iterdir()
    assert _written(folder)[-1]["how"] == "done"
    job = read_job(folder)
    assert (job.hosts, job.steps) == (2, 5)


def test_a_run_does_not_go_on_with_another_number_of_workers(tmp_path: Path) -> None:
    workers = Workers(tmp_path / "run")
    write_job(workers.folder, Job(hosts=3), [])
    assert workers.start().codes() == [1, 1]
    assert "is a run of 3 workers, and here are 2." in workers.said(0)


def _fails(folder: Path, port: int) -> str:
    command = [sys.executable, "-m", "thinwire.jobs.worker", str(folder)]
    ended = subprocess.run(
        command, env={**os.environ, **_environment(0, 1, port)}, capture_output=True, text=True, timeout=60
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
