"""A dense step over torch's own all_reduce holds nothing up that goes on under plain DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import thinwire
from tests.process.launch import run_ranks

pytestmark = pytest.mark.process


def _attach(model: DDP) -> thinwire.Synchronizer:
    return thinwire.attach(model, exchange="dense", collective="torch")


class Then(torch.autograd.Function):
    """Does nothing forward; calls a function when backward() comes by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Any) -> torch.Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.function()
        return *grads, None


def _goes_on_upstream(rank: int) -> int:
    """Rank 1 has its gradient only when rank 0 has come beyond the model, to what the model's input was made of."""
    store = dist.distributed_c10d._get_default_store()
    model, before = DDP(nn.Linear(64, 10)), nn.Linear(64, 64)
    comm = _attach(model)
    for step in range(3):
        been = f"rank 0 is beyond the model, step {step}"
        x = before(torch.ones(2, 64))
        if rank == 0:
            model(Then.apply(x, lambda been=been: store.set(been, "yes"))).sum().backward()
        else:
            Then.apply(model(x), lambda been=been: store.wait([been])).sum().backward()
    comm.close()
    return comm.step


def test_backward_goes_on_beyond_the_model_before_all_buckets_have_arrived() -> None:
    assert run_ranks(_goes_on_upstream, 2) == [3, 3]


def _in_another_order(rank: int) -> list[torch.Tensor | None]:
    models = [DDP(nn.Linear(64, 64), process_group=dist.new_group([0, 1])) for _ in range(2)]
    comms = [_attach(model) for model in models]
    for step in range(5):
        is_turned = rank == 1 and step >= 3
        outputs = [model(torch.full((2, 64), 1.0 + rank)).sum() for model in (models[::-1] if is_turned else models)]
        (outputs[0] + outputs[1]).backward()
    assert [comm.step for comm in comms] == [5, 5]
    for comm in comms:
        comm.close()
    return [p.grad for model in models for p in model.parameters()]


def test_ranks_may_call_two_models_in_another_order() -> None:
    first, second = run_ranks(_in_another_order, 2)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))


def _fails_beyond_the_model(rank: int) -> int:
    model, before = DDP(nn.Linear(64, 10)), nn.Linear(64, 64)
    comm = _attach(model)

    def fail() -> None:
        raise ArithmeticError("beyond the model")

    for step in range(3):
        x = before(torch.ones(2, 64))
        if step == 1:
            with pytest.raises(ArithmeticError):
                model(Then.apply(x, fail)).sum().backward()
            break
        model(x).sum().backward()
    comm.close()
    return comm.step


def test_a_backward_that_fails_beyond_the_model_is_no_step() -> None:
    assert run_ranks(_fails_beyond_the_model, 2) == [1, 1]


def _within_another_backward(rank: int, static_graph: bool) -> list[torch.Tensor]:
    found = []
    for attached in (False, True):
        torch.manual_seed(0)
        model = DDP(nn.Linear(64, 10), static_graph=static_graph)
        comm = _attach(model) if attached else None
        for _ in range(3):
            model.zero_grad()
            x = torch.full((2, 64), float(rank + 1), requires_grad=True)
            checkpoint(model, x, use_reentrant=True).sum().backward()
        found.append(model.module.weight.grad)
        if comm is not None:
            comm.close()
    return found


@pytest.mark.parametrize("static_graph", [False, True])
def test_a_checkpointed_model_is_averaged_as_plain_ddp_does(static_graph: bool) -> None:
    for plain, ours in run_ranks(_within_another_backward, 2, static_graph=static_graph):
        assert torch.equal(plain, ours)
