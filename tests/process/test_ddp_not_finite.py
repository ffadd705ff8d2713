"""Loss scaling, and gradients that are not finite: a step that must not count leaves no trace."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.process.launch import run_ranks
from tests.process.models import flat_parameters, loss_of, make
from tests.process.plans import SPARSE, plan

pytestmark = pytest.mark.process


def _train_scaled(rank: int, name: str, scaled: bool) -> torch.Tensor:
    model = DDP(make("mlp"))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3, enabled=scaled)
    comm = thinwire.attach(model, **plan(name), scaler=scaler if scaled else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(10):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    if scaled:
        assert scaler.get_scale() == 2.0**13
    comm.close()
    return flat_parameters(model)


def _scaled_and_not(rank: int, name: str) -> None:
    assert torch.equal(_train_scaled(rank, name, True), _train_scaled(rank, name, False))


@pytest.mark.parametrize("name", SPARSE)
def test_a_changing_loss_scale_changes_no_bit(name: str) -> None:
    run_ranks(_scaled_and_not, 2, name=name)


def _spoilt(rank: int, name: str, value: float) -> tuple[torch.Tensor, int]:
    model = DDP(make("mlp"))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    comm = thinwire.attach(model, **plan(name), scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(8):
        optimizer.zero_grad()
        loss = scaler.scale(loss_of(model, rank, step))
        if step == 5 and rank == 1:
            loss = loss + value * next(model.parameters()).sum()
        before = comm.state_dict()["error"]
        loss.backward()
        if step == 5:
            assert all(not torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
            after = comm.state_dict()["error"]
            assert all(torch.equal(before[n], after[n]) for n in before)
            assert comm.last is not None and comm.last.skipped
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0
    comm.close()
    return flat_parameters(model), comm.skipped


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", SPARSE)
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all_and_leaves_no_trace(
    name: str, value: float
) -> None:
    (first, skipped), (second, _) = run_ranks(_spoilt, 2, name=name, value=value)
    assert torch.equal(first, second)
    assert torch.isfinite(first).all()
    assert skipped == 1


def _spoilt_dense(rank: int, collective: str) -> int:
    model = DDP(make("mlp"))
    comm = thinwire.attach(model, exchange="dense", collective=collective)
    for step in range(3):
        model.zero_grad()
        loss = loss_of(model, rank, step)
        if step == 1 and rank == 1:
            loss = loss * float("nan")
        loss.backward()
        finite = all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
        assert finite == (step != 1)
    comm.close()
    return comm.skipped


@pytest.mark.parametrize("collective", ["torch", "ring"])
def test_a_dense_step_that_is_not_finite_is_counted(collective: str) -> None:
    assert run_ranks(_spoilt_dense, 2, collective=collective) == [1, 1]


def _spoilt_in_turn(rank: int) -> tuple[int, int]:
    model = DDP(make("mlp"), bucket_cap_mb=0.001)
    comm = thinwire.attach(model, exchange="dense", collective="torch")
    parameters = list(model.parameters())
    for step, spoilt in enumerate(parameters):
        for skipped in (False, True):
            model.zero_grad()
            loss = loss_of(model, rank, step)
            if skipped and rank == step % 2:
                loss = loss + float("nan") * spoilt.reshape(-1)[-1]
            loss.backward()
            assert comm.last is not None and comm.last.skipped == skipped
            finite = [bool(torch.isfinite(p.grad).all()) for p in parameters if p.grad is not None]
            assert any(finite) and all(finite) != skipped  # other buckets are as they should be
    comm.close()
    return comm.skipped, len(parameters)


def test_a_single_entry_of_a_single_bucket_on_one_rank_makes_all_ranks_skip_a_dense_step() -> None:
    for skipped, parameters in run_ranks(_spoilt_in_turn, 2):
        assert skipped == parameters == 6
