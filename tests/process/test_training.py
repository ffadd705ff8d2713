"""Workers train together, write down what they do, and go on bit for bit."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.process.launch import run_ranks
from tests.process.runs import lines_of, of_kind
from tests.unit.test_data import write_fashion
from thinwire.jobs.job import Job
from thinwire.jobs.leaving import Leaving
from thinwire.jobs.training import Training
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


def _train(rank: int, folder: str, **settings: Any) -> dict[str, Any]:
    """One worker from beginning to end, in a process group that exists."""
    training = Training(Job(hosts=2, **settings), Path(folder), Leaving())
    ending = training.run()
    parameters = [p.detach().clone() for p in training._task.module.parameters()]
    training.close()
    return {"ending": ending, "parameters": torch.cat([p.reshape(-1) for p in parameters])}


def _train_by_all(rank: int, folder: str, methods: tuple[str, ...], **settings: Any) -> list[dict[str, Any]]:
    return [_train(rank, f"{folder}/{number}", method=method, **settings) for number, method in enumerate(methods)]


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
        written = lines_of(tmp_path / str(number))
        assert [step["step"] for step in of_kind("step", written)] == list(range(STEPS)), method
        _check_records(task, method, written)


def _check_records(task: str, method: str, written: list[dict[str, Any]]) -> None:
    assert written[0]["kind"] == "run" and written[-1]["kind"] == "ended"
    (began,) = of_kind("began", written)
    assert began["hosts"] == 2 and began["steps"] == STEPS and began["wall"] > 0 and began["monotonic"] > 0
    assert began["parameters"] == sum(numel for _, numel in began["layers"]) > 0
    first, *_, last = of_kind("evaluated", written)
    assert (first["step"], last["step"]) == (0, STEPS)
    assert 0 < last["trained_seconds"] and first["trained_seconds"] < 0.01
    assert 0 < last["sent_bytes"] and 0 < last["dense_bytes"]
    if task == "chars":
        assert last["accuracy"] is None and 1 < last["perplexity"] < 1000
    else:
        assert 0 <= last["accuracy"] <= 1 and last["perplexity"] is None
    assert of_kind("loss", written)[0]["loss"] > 0
    assert bool(of_kind("consensus", written)) == method.startswith("dcd")
    ended = written[-1]
    assert (ended["how"], ended["message"], ended["steps"]) == ("done", "", STEPS)
    assert ended["accuracy"] == last["accuracy"] and ended["saved"] == STEPS and ended["seconds"] > 0
    plans = {step["plan"]["exchange"] for step in of_kind("step", written)}
    assert plans == {method.partition("@")[0]} or method == "adaptive"
    for step in of_kind("step", written):
        assert step["sent_bytes"] > 0 and step["dense_bytes"] > 0 and step["skipped"] is False


def test_what_a_hook_saves_is_counted(tmp_path: Path) -> None:
    methods = ("ddp", "ddp-fp16", "ddp-powersgd")
    run_ranks(_train_by_all, 2, folder=str(tmp_path), methods=methods, steps=STEPS)
    sent = [[step["sent_bytes"] for step in of_kind("step", lines_of(tmp_path / str(n)))] for n in range(3)]
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
    written = lines_of(tmp_path / "parts")
    assert [record["step"] for record in of_kind("began", written)] == [0, 13]
    assert [step["step"] for step in of_kind("step", written)] == list(range(20))
    assert [ended["how"] for ended in of_kind("ended", written)] == ["done", "done"]
    first, second = of_kind("began", written)
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
    assert of_kind("evaluated", lines_of(tmp_path / "whole"))[-1]["accuracy"] > 0.3


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path: Path) -> None:
    for one in run_ranks(_train, 2, folder=str(tmp_path), lr=1e6, steps=500, method="ddp", checkpoint_every=1):
        assert one["ending"].how == "failed" and "the loss is not finite on" in one["ending"].message
    ended = lines_of(tmp_path)[-1]
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
    ended = lines_of(tmp_path)[-1]
    assert ended["message"].startswith(
        "the checkpoint of step 20 could not be saved (File too large); the one of step 5"
    )
    assert ended["steps"] == 20 and ended["saved"] == 5
    assert [Checkpoint(tmp_path / "checkpoints", rank, 2).steps() for rank in (0, 1)] == [[5], [5]]


def test_time_ends_a_training_on_all_workers_at_once(tmp_path: Path) -> None:
    run_ranks(_train, 2, folder=str(tmp_path), seconds=1.0, method="ddp", evaluate_every=0.3)
    written = lines_of(tmp_path)
    assert 0.5 < written[-1]["seconds"] < 3.0
    assert len(of_kind("evaluated", written)) >= 3
    assert [step["step"] for step in of_kind("step", written)] == list(range(written[-1]["steps"]))


def test_over_shaped_links_adaptive_finds_the_network_that_was_asked_for(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"link": "shaped", "latency": "20ms", "rate": "10mbit", "steps": 15}
    run_ranks(_train, 2, folder=str(tmp_path), **settings)
    written = lines_of(tmp_path)
    last = of_kind("step", written)[-1]
    assert last["alpha"] == pytest.approx(0.02, rel=0.1) and last["beta"] == pytest.approx(8e-7, rel=0.1)
    assert last["plan"]["exchange"] != "dense" and last["step_seconds"] > 0.02
    truth = [json.loads(line) for line in (tmp_path / "truth.jsonl").read_text().splitlines()]
    assert truth[-1]["now"]["latency"] == 0.02 and truth[-1]["now"]["rate"] == 1.25e6 and truth[-1]["wall"] > 0
