"""Everything that DDP users do besides the plain loop must go on working, and lose nothing."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.process.launch import run_ranks
from tests.process.models import batch, flat_parameters, loss_of, make
from tests.process.plans import SPARSE, plan
from thinwire.exchange import NAMES

pytestmark = pytest.mark.process


# --- buckets of every layout


def _by_hand(rank: int, name: str, steps: int, accumulate: int) -> torch.Tensor:
    model = make("mlp")
    sync = thinwire.Synchronizer(model, **plan(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            loss_of(model, rank, accumulate * step + part).backward()
        sync.average_gradients()
        optimizer.step()
    sync.close()
    return flat_parameters(model)


def _by_ddp(rank: int, name: str, steps: int, accumulate: int, ddp: dict[str, Any]) -> torch.Tensor:
    model = DDP(make("mlp"), **ddp)
    comm = thinwire.attach(model, **plan(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            last = part == accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss_of(model, rank, accumulate * step + part).backward()
        optimizer.step()
    comm.close()
    return flat_parameters(model)


def _layouts(rank: int, name: str) -> None:
    layouts: list[dict[str, Any]] = [
        {},
        {"bucket_cap_mb": 0.001},
        {"static_graph": True, "bucket_cap_mb": 0.001},
        {"find_unused_parameters": True, "bucket_cap_mb": 0.001},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
    ]
    expected = _by_hand(rank, name, steps=8, accumulate=1)
    for ddp in layouts:
        assert torch.equal(_by_ddp(rank, name, 8, 1, ddp), expected), ddp
    accumulated = _by_hand(rank, name, steps=4, accumulate=2)
    for ddp in layouts[:2] + layouts[3:]:  # torch itself cannot do static_graph with no_sync
        assert torch.equal(_by_ddp(rank, name, 4, 2, ddp), accumulated), ddp


@pytest.mark.parametrize("name", SPARSE)
def test_errors_follow_their_parameters_through_every_layout_of_buckets(name: str) -> None:
    run_ranks(_layouts, 2, name=name)


# --- nothing is lost


class Forked(nn.Module):
    """Uses one of two branches, or neither; has a frozen layer and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(64, 16) for _ in range(2))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.shared = nn.Linear(16, 16)
        self.same = self.shared
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor, branch: int | None) -> torch.Tensor:
        h = x[:, :16] if branch is None else self.branches[branch](x)
        return self.head(self.same(torch.relu(self.shared(self.frozen(h)))))


def _add_up(total: torch.Tensor, grad: torch.Tensor) -> None:
    total += grad


def _nothing_is_lost(rank: int, name: str) -> None:
    torch.manual_seed(3)
    model = DDP(Forked(), find_unused_parameters=True)
    comm = thinwire.attach(model, **plan(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trainable = {n: p for n, p in model.module.named_parameters() if p.requires_grad}
    given = {n: torch.zeros_like(p) for n, p in trainable.items()}
    for n, p in trainable.items():
        p.register_hook(functools.partial(_add_up, given[n]))
    before = {n: p.detach().clone() for n, p in trainable.items()}
    for step in range(12):
        optimizer.zero_grad()
        x, y = batch(rank, step)
        branch = (None, 0, rank)[step % 3]  # unused everywhere, used everywhere, used by one rank each
        F.cross_entropy(model(x, branch), y).backward()
        optimizer.step()
    errors = comm.state_dict()["error"]
    assert errors.keys() == given.keys()
    for n, p in trainable.items():
        applied = (before[n] - p.detach()) / 1e-2
        total = given[n] - errors[n]
        torch.distributed.all_reduce(total)
        # Twelve float32 updates of parameters near 0.1, divided by the rate of 0.01.
        torch.testing.assert_close(applied, total / 2, rtol=1e-3, atol=2e-5, msg=lambda text, n=n: f"{n}: {text}")
    comm.close()


@pytest.mark.parametrize("name", NAMES)
def test_with_unused_frozen_and_shared_parameters_nothing_is_lost(name: str) -> None:
    run_ranks(_nothing_is_lost, 2, name=name)


# --- uneven inputs


def _uneven(rank: int, name: str) -> torch.Tensor:
    model = DDP(make("mlp"), bucket_cap_mb=0.001)
    comm = thinwire.attach(model, **plan(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Join([model]):
        for step in range((6, 4, 1)[rank]):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
    comm.close()
    return flat_parameters(model)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_with_fewer_batches_may_join_early(name: str) -> None:
    results = run_ranks(_uneven, 3, name=name)
    assert all(torch.equal(parameters, results[0]) for parameters in results)
    assert torch.isfinite(results[0]).all()


# --- other types


def _half_precision(rank: int, name: str) -> torch.Tensor:
    model = DDP(make("mlp").bfloat16())
    comm = thinwire.attach(model, **plan(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        x, y = batch(rank, step)
        F.cross_entropy(model(x.bfloat16()).float(), y).backward()
        optimizer.step()
    assert all(error.dtype == torch.float32 for error in comm.state_dict()["error"].values())
    comm.close()
    return flat_parameters(model)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_gradients_have_single_precision_errors(name: str) -> None:
    first, second = run_ranks(_half_precision, 2, name=name)
    assert torch.equal(first, second) and torch.isfinite(first.float()).all()


# --- from one plan to another


def _from_sparse_to_dense(rank: int) -> None:
    model = DDP(make("mlp"))
    sparse = thinwire.attach(model, exchange="topk-allgather", ratio=0.05)
    for step in range(3):
        model.zero_grad()
        loss_of(model, rank, step).backward()
    state = sparse.state_dict()
    sparse.close()
    model = DDP(model.module)
    dense = thinwire.attach(model, exchange="dense", collective="torch")
    dense.load_state_dict(state)
    plain = make("mlp")
    for step in (3, 4):
        model.zero_grad()
        loss_of(model, rank, step).backward()
        plain.zero_grad()
        loss_of(plain, rank, step).backward()
        for (name, p), q in zip(model.module.named_parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            expected = q.grad + state["error"][name] * (step == 3)
            torch.distributed.all_reduce(expected)
            torch.testing.assert_close(p.grad, expected / 2)
        assert not any(error.any() for error in dense.state_dict()["error"].values())
    dense.close()


def test_what_a_sparse_run_left_is_sent_by_the_dense_run_that_takes_over() -> None:
    run_ranks(_from_sparse_to_dense, 2)
