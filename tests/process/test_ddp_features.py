"""Everything that DDP users do besides the plain loop must go on working, and lose nothing."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.process.launch import outcomes, run_ranks
from tests.process.models import batch, flat_parameters, loss_of, make
from tests.timing import timing
from thinwire.control.adaptive import Standing
from thinwire.exchange import NAMES, complete

pytestmark = pytest.mark.process
SPARSE = [name for name in NAMES if name != "dense"]


def _plan(name: str) -> dict[str, Any]:
    return {"exchange": name, "ratio": None if name == "dense" else 0.05}


# --- buckets of every layout


def _by_hand(rank: int, name: str, steps: int, accumulate: int) -> torch.Tensor:
    model = make("mlp")
    sync = thinwire.Synchronizer(model, **_plan(name))
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
    comm = thinwire.attach(model, **_plan(name))
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
    comm = thinwire.attach(model, **_plan(name))
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


# --- loss scaling, and gradients that are not finite


def _train_scaled(rank: int, name: str, scaled: bool) -> torch.Tensor:
    model = DDP(make("mlp"))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3, enabled=scaled)
    comm = thinwire.attach(model, **_plan(name), scaler=scaler if scaled else None)
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
    comm = thinwire.attach(model, **_plan(name), scaler=scaler)
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


# --- uneven inputs


def _uneven(rank: int, name: str) -> torch.Tensor:
    model = DDP(make("mlp"), bucket_cap_mb=0.001)
    comm = thinwire.attach(model, **_plan(name))
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
    comm = thinwire.attach(model, **_plan(name))
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


# --- what must not be attempted


def _different_plans(rank: int) -> None:
    model = DDP(make("mlp"))
    comm = thinwire.attach(model, exchange="topk-allgather", ratio=0.05, timeout=20)
    if rank == 1:
        # Nobody does this; a bug might.
        comm._pilot.standing = Standing(plan=complete("topk-allgather", 0.1))
    loss_of(model, rank, 0).backward()


def test_ranks_with_different_plans_are_told_so_by_rank_and_field() -> None:
    first, second = outcomes(_different_plans, 2)
    assert {first.error, second.error} <= {"PlanMismatch", "RemoteError"}
    assert "PlanMismatch" in {first.error, second.error}
    for outcome in (first, second):
        assert "rank 0" in outcome.message and "rank 1" in outcome.message and "plan" in outcome.message
        assert f"topk-allgather over direct at {('0.05', '0.1')[outcome.rank]}" in outcome.message or (
            outcome.error == "RemoteError"
        )


def _interrupted(rank: int, link: str, collective: str) -> float:
    model = DDP(make("mlp"))
    comm = thinwire.attach(model, exchange="star-topk", collective=collective, link=link, timeout=50)
    store = torch.distributed.group.WORLD.get_group_store()
    if rank == 1:
        store.get("rank 0 has seen its Ctrl-C")
        os.kill(os.getpid(), signal.SIGKILL)  # a clean farewell would wait for what rank 0 has begun
    pressed = []

    def press() -> None:
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.5, press).start()  # by then backward() waits for rank 1, which never comes
    try:
        loss_of(model, rank, 0).backward()
    except KeyboardInterrupt:
        took = time.monotonic() - pressed[0]
        store.set("rank 0 has seen its Ctrl-C", "")
        return took
    comm.close()
    return float("inf")


@pytest.mark.parametrize(("link", "collective"), [("tcp", "ring"), ("process", "ring"), ("tcp", "torch")])
@timing
def test_ctrl_c_ends_a_backward_that_waits_for_a_peer_within_a_second(link: str, collective: str) -> None:
    first, second = outcomes(_interrupted, 2, link=link, collective=collective)
    assert second.exitcode == -signal.SIGKILL
    assert first.value is not None and first.value < 1.0, first


def _one_fails(rank: int) -> None:
    model = DDP(make("mlp"))
    comm = thinwire.attach(model, exchange="star-topk", ratio=0.05, timeout=30)
    for step in range(3):
        model.zero_grad()
        loss_of(model, rank, step).backward()
        if rank == 1 and step == 1:
            raise KeyError("a broken sample")
    comm.close()


def test_a_rank_that_fails_in_its_own_code_ends_the_others_at_once_by_name() -> None:
    ended = outcomes(_one_fails, 3, limit=25)
    assert ended[1].error == "KeyError"
    for survivor in (ended[0], ended[2]):
        assert survivor.error in ("PeerLost", "RemoteError")
        assert "rank 1" in survivor.message


def _bad_input(rank: int) -> dict[str, str]:
    def refusal(model: nn.Module, wrap: bool = True, **arguments: Any) -> str:
        try:
            thinwire.attach(DDP(model) if wrap else model, **arguments)  # type: ignore[arg-type]
        except (ValueError, TypeError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    twice = DDP(make("mlp"))
    thinwire.attach(twice)
    try:
        thinwire.attach(twice)
        again = "accepted"
    except RuntimeError as error:
        again = str(error)
    return {
        "twice": again,
        "not ddp": refusal(make("mlp"), wrap=False),
        "exchange": refusal(make("mlp"), exchange="topk"),
        "collective": refusal(make("mlp"), exchange="star-topk", collective="star"),
        "gathered over torch": refusal(make("mlp"), exchange="topk-allgather", collective="torch"),
        "broadcast": refusal(make("mlp"), exchange="star-topk", broadcast="ring"),
        "values": refusal(make("mlp"), exchange="topk-allgather", values="int8"),
        "half reduced": refusal(make("mlp"), exchange="star-topk", values="float16"),
        "link": refusal(make("mlp"), link="udp"),
        "low pass": refusal(make("mlp"), low_pass=0.0),
        "ratio 0": refusal(make("mlp"), exchange="star-topk", ratio=0.0),
        "ratio 2": refusal(make("mlp"), exchange="star-topk", ratio=2.0),
        "ratio nan": refusal(make("mlp"), exchange="star-topk", ratio=float("nan")),
        "ratio of its own": refusal(make("mlp"), ratio=0.1),
        "complex": refusal(Complex()),
        "sparse": refusal(nn.Sequential(nn.Embedding(5, 3, sparse=True))),
    }


def test_bad_input_is_refused_before_anything_is_sent_with_the_way_out() -> None:
    refusals = run_ranks(_bad_input, 1)[0]
    expected = {
        "twice": "attached to this model already",
        "not ddp": "TypeError: attach needs a model wrapped in DistributedDataParallel.*thinwire.Synchronizer",
        "exchange": "'topk'. Known are: dense, topk-allgather, layerwise-topk, ms-topk, star-topk, var-topk",
        "collective": "collective for star-topk 'star'. Known are: ring, tree, halving, direct, torch",
        "gathered over torch": "collective for topk-allgather 'torch'. Known are: ring, tree, halving, direct",
        "broadcast": "Known are: tree, scatter",
        "values": "Known are: float32, float16",
        "half reduced": "star-topk adds values on the way",
        "link": "Known are: tcp, process",
        "low pass": r"low_pass must be in \(0, 1\]",
        "ratio 0": r"ratio must be in \(0, 1\], got ratio=0.0",
        "ratio 2": r"ratio must be in \(0, 1\], got ratio=2.0",
        "ratio nan": r"ratio must be in \(0, 1\], got ratio=nan",
        "ratio of its own": "ratio=0.1 belongs to a fixed exchange, and adaptive chooses for itself",
        "complex": "'phase' is torch.complex64",
        "sparse": "'0.weight' has sparse gradients",
    }
    for what, pattern in expected.items():
        assert re.search(pattern, refusals[what]), (what, refusals[what])
