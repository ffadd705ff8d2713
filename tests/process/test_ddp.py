"""The drop-in under DistributedDataParallel, with real processes on loopback."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.process.launch import outcomes, run_ranks
from tests.process.models import batch, flat_gradients, flat_parameters, loss_of, make
from thinwire.exchange import NAMES, collectives_of

pytestmark = pytest.mark.process
SPARSE = [name for name in NAMES if name != "dense"]


# --- each exchange against a reference that is one process and a few lines of torch


def _top(x: torch.Tensor, k: int) -> torch.Tensor:
    """Where the k largest are, ties to the lowest index."""
    order = torch.sort(x.abs(), descending=True, stable=True).indices
    return torch.zeros_like(x, dtype=torch.bool).index_fill(0, order[:k], True)


def reference_step(name: str, x: torch.Tensor, sizes: list[int], ratio: float, step: int) -> torch.Tensor:
    """Which entries of each rank's x (rank, entry) are sent."""
    k = max(1, int(ratio * x.shape[1]))
    if name == "dense":
        return torch.ones_like(x, dtype=torch.bool)
    if name == "layerwise-topk":
        return torch.stack(
            [torch.cat([_top(part, max(1, int(ratio * len(part)))) for part in row.split(sizes)]) for row in x]
        )
    masks = torch.stack([_top(row, k) for row in x])
    if name == "star-topk":
        return masks[step % len(x)].expand_as(masks)
    if name == "var-topk":
        return masks[(x * masks).square().sum(1).argmax()].expand_as(masks)
    return masks


def reference_run(name: str, world_size: int, steps: int, ratio: float) -> torch.Tensor:
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sizes = [p.numel() for p in model.parameters()]
    error = torch.zeros(world_size, sum(sizes))
    for step in range(steps):
        grads = []
        for rank in range(world_size):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            grads.append(flat_gradients(model))
        x = torch.stack(grads) + error
        sent = x * reference_step(name, x, sizes, ratio, step)
        error = x - sent
        for p, part in zip(model.parameters(), sent.mean(0).split(sizes), strict=True):
            p.grad = part.view_as(p).clone()
        optimizer.step()
    return flat_parameters(model)


def train(rank: int, steps: int, model: str = "mlp", ddp: dict[str, Any] | None = None, **plan: Any) -> torch.Tensor:
    net = DDP(make(model), **(ddp or {}))
    comm = thinwire.attach(net, **plan)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, rank, step).backward()
        optimizer.step()
    comm.close()
    return flat_parameters(net)


@pytest.mark.parametrize("link", ["tcp", "process"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_each_exchange_trains_as_its_one_process_reference(name: str, world_size: int, link: str) -> None:
    collective = collectives_of(name)[0]
    results = run_ranks(
        train, world_size, steps=12, exchange=name, collective=collective, ratio=_ratio(name), link=link
    )
    for parameters in results:
        assert torch.equal(parameters, results[0])
    expected = reference_run(name, world_size, 12, _ratio(name) or 1.0)
    # Sums of 2 or 3 float32 in another order, through 12 steps of momentum.
    torch.testing.assert_close(results[0], expected, rtol=1e-4, atol=1e-6)


def _ratio(name: str) -> float | None:
    return None if name == "dense" else 0.05


def _every_collective(rank: int) -> dict[str, torch.Tensor]:
    return {
        f"{name} {collective}": train(rank, 4, exchange=name, collective=collective, ratio=_ratio(name))
        for name in NAMES
        for collective in collectives_of(name)
    }


def test_every_collective_gives_the_same_training_and_the_same_bits_on_four_ranks() -> None:
    results = run_ranks(_every_collective, 4, limit=100)
    for plan, parameters in results[0].items():
        for other in results[1:]:
            assert torch.equal(other[plan], parameters), plan
        name = plan.split()[0]
        first = results[0][f"{name} {collectives_of(name)[0]}"]
        torch.testing.assert_close(parameters, first, rtol=1e-4, atol=1e-6)


# --- no compression is DDP


def _with_and_without_us(rank: int, name: str, accumulate: bool, ddp: dict[str, Any]) -> None:
    plain, ours = DDP(make(name), **ddp), DDP(make(name), **ddp)
    comm = thinwire.attach(ours, exchange="dense", collective="torch")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (plain, ours)]
    for step in range(100):
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            with model.no_sync() if accumulate else contextlib.nullcontext():
                loss_of(model, rank, 2 * step).backward()
            if accumulate:
                loss_of(model, rank, 2 * step + 1).backward()
            optimizer.step()
        assert torch.equal(flat_parameters(plain), flat_parameters(ours)), step
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), ours.buffers(), strict=True))
    assert comm.step == 100
    assert comm.last is not None and comm.last.gain == 1.0
    comm.close()


@pytest.mark.parametrize("accumulate", [False, True], ids=["every-step", "no_sync"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_no_compression_is_bit_equal_to_plain_ddp(name: str, accumulate: bool) -> None:
    run_ranks(_with_and_without_us, 2, name=name, accumulate=accumulate, ddp={})


def test_no_compression_is_bit_equal_to_plain_ddp_on_three_ranks_with_many_buckets() -> None:
    run_ranks(_with_and_without_us, 3, name="transformer", accumulate=False, ddp={"bucket_cap_mb": 0.002})


# --- many buckets


def _many_buckets(rank: int, link: str) -> dict[str, torch.Tensor]:
    results = {}
    for name in NAMES:
        net = DDP(make("many-layers"), bucket_cap_mb=1e-4)
        comm = thinwire.attach(net, exchange=name, ratio=_ratio(name), link=link)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for step in range(200):
            optimizer.zero_grad()
            loss_of(net, rank, step % 7).backward()
            optimizer.step()
        sizes = net._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        assert len(sizes.split(",")) >= 50, sizes
        assert comm.step == 200
        comm.close()
        results[name] = flat_parameters(net)
    return results


@pytest.mark.timeout(240)
@pytest.mark.parametrize("link", ["tcp", "process"])
def test_fifty_buckets_and_two_hundred_steps_of_each_exchange_do_not_hang(link: str) -> None:
    first, second = run_ranks(_many_buckets, 2, limit=200, link=link)
    for name in NAMES:
        assert torch.equal(first[name], second[name]), name
        assert torch.isfinite(first[name]).all()


# --- resuming


def _train_with_checkpoints(rank: int, folder: str, kill_at: int | None, exchange: str) -> dict[str, Any]:
    net = DDP(make("mlp"))
    comm = thinwire.attach(net, exchange=exchange, ratio=_ratio(exchange))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    checkpoint = thinwire.Checkpoint(Path(folder), rank, dist.get_world_size())
    start = 0
    if (step := comm.common_step(checkpoint.steps())) is not None:
        state, start = checkpoint.load(step)
        net.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        comm.load_state_dict(state["comm"])
    for step in range(start, 12):
        optimizer.zero_grad()
        loss_of(net, rank, step).backward()
        optimizer.step()
        if (step + 1) % 3 == 0 and not (step == 8 and rank == 1 and kill_at is not None):  # killed before it saved
            state = {"model": net.module.state_dict(), "optimizer": optimizer.state_dict(), "comm": comm.state_dict()}
            checkpoint.save(state, step + 1)
        if step == kill_at:
            dist.barrier()  # both have saved what they save before this step
            os.kill(os.getpid(), signal.SIGKILL)
    final = {"parameters": flat_parameters(net), "start": start, **comm.state_dict()["error"]}
    comm.close()
    return final


@pytest.mark.parametrize("exchange", NAMES)
def test_a_run_that_was_killed_resumes_bit_equal(exchange: str, tmp_path: Path) -> None:
    whole = run_ranks(_train_with_checkpoints, 2, folder=str(tmp_path / "whole"), kill_at=None, exchange=exchange)
    folder = str(tmp_path / "killed")
    killed = outcomes(_train_with_checkpoints, 2, folder=folder, kill_at=9, exchange=exchange)
    assert [outcome.exitcode for outcome in killed] == [-signal.SIGKILL] * 2
    resumed = run_ranks(_train_with_checkpoints, 2, folder=folder, kill_at=None, exchange=exchange)
    for before, after in zip(whole, resumed, strict=True):
        assert after.pop("start") == 6 and before.pop("start") == 0
        for name, tensor in before.items():
            assert torch.equal(tensor, after[name]), name


def _batch_is_seeded(rank: int) -> float:
    return float(batch(rank, 3)[0].sum())


def test_ranks_have_data_of_their_own() -> None:
    values = run_ranks(_batch_is_seeded, 2)
    assert values[0] != values[1]
