"""The paper's way to find gains: try every candidate ratio, and leave no trace."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.process.decisions import decision_for
from tests.process.launch import run_ranks
from thinwire import records
from thinwire.control.adaptive import Adaptive
from thinwire.control.decision import Decision, Standing
from thinwire.control.gain import CANDIDATES
from thinwire.control.prices import Prices
from thinwire.control.replay import replay
from thinwire.control.view import View
from thinwire.exchange import complete

pytestmark = pytest.mark.process

STEPS = 40


@dataclass(frozen=True, kw_only=True)
class Steady(Adaptive):
    """One plan for good, so that nothing but exploring could make two runs differ."""

    explore: str = "restore"
    exchange: str = "star-topk"

    def decide(self, view: View, standing: Standing, step: int, prices: Prices) -> Decision | None:
        return decision_for(complete(self.exchange, 1.0 if self.exchange == "dense" else 0.05), standing, step, "habit")


class Follower(nn.Module):
    """Takes a running mean off, and assigns it anew at every step instead of changing it in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


def net() -> nn.Module:
    """With buffers that change, and with random numbers of its own."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(40, 300), nn.BatchNorm1d(300), nn.ReLU(), Follower(300), nn.Dropout(0.3), nn.Linear(300, 10)
    )


def _train(rank: int, exchange: str, optimizer: str, exploring: bool) -> dict[str, Any]:
    model = DDP(net())
    controller = Steady(exchange=exchange)
    comm = thinwire.attach(model, controller)
    kinds = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        "adam": lambda: torch.optim.Adam(model.parameters(), lr=0.01),
    }
    chosen = kinds[optimizer]()
    schedule = torch.optim.lr_scheduler.ExponentialLR(chosen, 0.97)
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        chosen.zero_grad()
        x, y = batch
        noise = random.random() + float(np.random.rand())
        loss = nn.functional.cross_entropy(model(x * (1 + 0.1 * noise)), y)
        loss.backward()
        chosen.step()
        schedule.step()
        return float(loss)

    explorer = thinwire.Explorer(comm, model, chosen, step, also=[schedule])
    data, found, losses = torch.Generator().manual_seed(100 + rank), {}, []
    for i in range(STEPS):
        batch = (torch.randn(16, 40, generator=data), torch.randint(10, (16,), generator=data))
        losses.append(explorer.step(batch) if exploring else step(batch))
        if exploring and i == STEPS // 2:
            found = explorer.explore()  # and at whatever steps it did so by itself
    result = {
        "parameters": torch.cat([t.detach().double().reshape(-1) for t in model.state_dict().values()]),
        "losses": losses,
        "rate": schedule.get_last_lr(),
        "error": torch.cat([e.reshape(-1) for e in comm.memory.state_dict().values()]),
        "next": [random.random(), float(np.random.rand()), float(torch.rand(()))],
        "step": comm.step,
        "found": found,
    }
    comm.close()
    return result


@pytest.mark.parametrize(
    ("exchange", "optimizer"),
    [("star-topk", "sgd"), ("topk-allgather", "adam"), ("dense", "sgd"), ("dense", "adam")],
)
def test_a_run_that_explored_goes_on_with_the_bits_of_one_that_never_did(exchange: str, optimizer: str) -> None:
    explored = run_ranks(_train, 2, exchange=exchange, optimizer=optimizer, exploring=True)
    plain = run_ranks(_train, 2, exchange=exchange, optimizer=optimizer, exploring=False)
    assert explored[0]["found"] == explored[1]["found"]
    for ours, theirs in zip(explored, plain, strict=True):
        gains = [ours["found"][ratio] for ratio in CANDIDATES]
        assert gains == sorted(gains, reverse=True) and 0 < gains[-1] < gains[0] <= 1
        for name in ("parameters", "error"):
            assert torch.equal(ours[name], theirs[name]), name
        for name in ("losses", "rate", "next", "step"):
            assert ours[name] == theirs[name], name


def _by_the_paper(rank: int, path: str) -> tuple[list[str], bool]:
    model = DDP(net())
    comm = thinwire.attach(model, thinwire.Adaptive(objective="knee", explore="restore"), records=path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    explorer, plans = thinwire.Explorer(comm, model, optimizer, step), []
    for i in range(30):
        generator = torch.Generator().manual_seed(i)
        explorer.step((torch.randn(16, 40, generator=generator), torch.randint(10, (16,), generator=generator)))
        plans.append(str(comm.plan))
    wanting = comm.wants_exploring
    comm.close()
    return plans, wanting


def test_the_papers_rule_explores_by_itself_alike_on_all_ranks_and_can_be_decided_again(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    first, second = run_ranks(_by_the_paper, 2, path=str(path))
    assert first == second
    written = list(records.read(path))
    explored = [record for record in written if record["kind"] == "explored"]
    assert explored and [ratio for ratio, _ in explored[0]["gains"]] == list(CANDIDATES)
    assert sum(record["kind"] == "step" for record in written) == 30, "steps that were undone are no steps"
    made = [record["plan"] for record in written if record["kind"] == "decision"]
    assert [records.plain(decision.to_json())["plan"] for decision in replay(written)] == made


def _with_nothing_to_try(rank: int) -> int:
    model = DDP(net())
    comm = thinwire.attach(model, thinwire.Adaptive(ratios=(1.0, 1.0), explore="restore"))
    runs = 0

    def step(batch: torch.Tensor) -> None:
        nonlocal runs
        runs += 1
        model(batch).sum().backward()

    explorer, tried = thinwire.Explorer(comm, model, torch.optim.SGD(model.parameters(), lr=0.0), step), 0
    find = explorer.explore

    def explore() -> dict[float, float]:
        nonlocal tried
        tried += 1
        return find()

    explorer.explore = explore  # type: ignore[method-assign]
    for i in range(40):
        explorer.step(torch.randn(16, 40, generator=torch.Generator().manual_seed(i)))
    comm.close()
    assert runs == 40
    return tried


def test_where_there_is_nothing_to_try_out_that_is_found_once_and_not_at_every_step() -> None:
    tried = run_ranks(_with_nothing_to_try, 2)
    assert tried[0] == tried[1] and 1 <= tried[0] <= 5  # again when the gain is another


def _wrong(rank: int) -> list[str]:
    model = DDP(net())
    comm = thinwire.attach(model, "star-topk")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    words = []
    with pytest.raises(ValueError) as raised:
        thinwire.Explorer(comm, model, optimizer, lambda batch: None)
    words.append(str(raised.value))
    comm.close()
    model = DDP(net())
    comm = thinwire.attach(model, thinwire.Adaptive(explore="restore"))
    with pytest.raises(TypeError) as wrong:
        thinwire.Explorer(comm, model, optimizer, lambda batch: None, also=[object()])
    words.append(str(wrong.value))
    with pytest.raises(RuntimeError) as early:
        thinwire.Explorer(comm, model, optimizer, lambda batch: None).explore()
    words.append(str(early.value))
    comm.close()
    return words


def test_what_cannot_be_explored_is_refused_with_a_reason() -> None:
    fixed, stateless, early = run_ranks(_wrong, 1)[0]
    assert 'Adaptive(explore="restore")' in fixed
    assert "object has no state_dict" in stateless
    assert "no batch yet" in early
    with pytest.raises(ValueError, match="unknown explore 'often'. Known are: histogram, restore"):
        thinwire.Adaptive(explore="often")
