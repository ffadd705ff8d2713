"""Corners of DDP in which an error could be lost, doubled, or put in the wrong place."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel

import thinwire
from tests.process.launch import run_ranks
from tests.process.models import batch, flat_gradients, flat_parameters, loss_of, make
from thinwire.control.prices import Way
from thinwire.exchange import NAMES

pytestmark = pytest.mark.process
SPARSE = [name for name in NAMES if name != "dense"]


def _plan(name: str) -> dict[str, Any]:
    return {"exchange": name, "ratio": None if name == "dense" else 0.05}


class Branches(nn.Module):
    """Two branches and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.branches = nn.ModuleList(nn.Linear(64, 8) for _ in range(2))
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.head(self.branches[branch](x))


def _step(model: nn.Module, rank: int, step: int, branch: int) -> None:
    x, y = batch(rank, step)
    F.cross_entropy(model(x, branch), y).backward()


def _some_have_an_error(rank: int) -> None:
    model = DDP(make("mlp"))
    comm = thinwire.attach(model, exchange="dense", collective="torch")
    state = comm.state_dict()
    if rank == 1:
        for error in state["error"].values():
            error.fill_(0.5)
    comm.load_state_dict(state)
    for step in range(3):
        model.zero_grad()
        loss_of(model, rank, step).backward()
    assert not any(error.any() for error in comm.state_dict()["error"].values())
    comm.close()


def test_a_dense_run_may_start_with_an_error_on_some_ranks_only() -> None:
    run_ranks(_some_have_an_error, 2)


def _some_hold_back(rank: int) -> None:
    model = DDP(Branches(), find_unused_parameters=True)
    comm = thinwire.attach(model, exchange="dense", collective="torch")
    state = comm.state_dict()
    for error in state["error"].values():
        error.fill_(0.5)
    comm.load_state_dict(state)
    for step, branch in enumerate((0 if rank == 0 else 1, 0, 1, 0)):
        model.zero_grad()
        _step(model, rank, step, branch)
    assert not any(error.any() for error in comm.state_dict()["error"].values())
    comm.close()


def test_ranks_that_hold_different_errors_back_stay_together() -> None:
    run_ranks(_some_hold_back, 2)


def _channels_last(rank: int, name: str) -> None:
    def train(model: nn.Module, average: Any) -> None:
        for step in range(5):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            average()

    plain = make("cnn")
    sync = thinwire.Synchronizer(plain, **_plan(name))
    train(plain, sync.average_gradients)
    for ddp in ({}, {"gradient_as_bucket_view": True}):
        model = DDP(make("cnn").to(memory_format=torch.channels_last), bucket_cap_mb=0.001, **ddp)
        comm = thinwire.attach(model, **_plan(name))
        train(model, lambda: None)
        for parameter, error in sync.state_dict()["error"].items():
            torch.testing.assert_close(comm.state_dict()["error"][parameter], error, rtol=1e-4, atol=1e-6)
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
        comm.close()
    sync.close()


@pytest.mark.parametrize("name", ["topk-allgather", "star-topk"])
def test_errors_have_their_parameters_order_in_channels_last_too(name: str) -> None:
    run_ranks(_channels_last, 2, name=name)


def _reformatted(rank: int) -> str:
    model = DDP(make("cnn"))
    comm = thinwire.attach(model, **_plan("topk-allgather"))
    loss_of(model, rank, 0).backward()
    model.module.to(memory_format=torch.channels_last)
    try:
        loss_of(model, rank, 1).backward()
    except RuntimeError as error:
        comm.close()
        return str(error)
    return "accepted"


def test_a_change_of_memory_format_is_refused_by_name() -> None:
    assert "'body.3.weight' has changed its memory format" in run_ranks(_reformatted, 1)[0]


def _is_freed(rank: int, find_unused: bool) -> tuple[bool, int]:
    module = make("mlp")
    model = DDP(module, find_unused_parameters=find_unused)
    comm = thinwire.attach(model, **_plan("topk-allgather"))
    loss_of(model, rank, 0).backward()
    comm.close()
    watched = weakref.ref(model), weakref.ref(comm)
    del model, comm
    gc.collect()
    hooks = sum(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters())
    return all(each() is None for each in watched), hooks


@pytest.mark.parametrize("find_unused", [False, True])
def test_what_is_no_longer_needed_is_freed_though_the_module_stays(find_unused: bool) -> None:
    assert run_ranks(_is_freed, 1, find_unused=find_unused) == [(True, 0)]


def _is_copied(rank: int) -> None:
    model = DDP(make("mlp"))
    comm = thinwire.attach(model, **_plan("topk-allgather"))
    averaged = AveragedModel(model)
    for step in range(2):
        model.zero_grad()
        loss_of(model, rank, step).backward()
        averaged.update_parameters(model)
    assert torch.equal(flat_parameters(averaged), flat_parameters(model))
    again = copy.deepcopy(model)
    loss_of(again, rank, 0).backward()
    comm.close()


def test_an_attached_model_can_be_copied() -> None:
    run_ranks(_is_copied, 2)


def _stale_and_unused(rank: int) -> None:
    model = DDP(Branches(), find_unused_parameters=True)
    comm = thinwire.attach(model, **_plan("topk-allgather"))
    _step(model, rank, 0, branch=0)
    before = {name: p.grad.clone() for name, p in model.module.named_parameters() if p.grad is not None}
    errors = comm.state_dict()["error"]
    _step(model, rank, 1, branch=1)  # nobody uses branch 0, and its gradient was not zeroed
    for name in ("branches.0.weight", "branches.0.bias"):
        assert torch.equal(model.module.get_parameter(name).grad, before[name])
        assert torch.equal(comm.state_dict()["error"][name], errors[name])
    comm.close()


def test_an_old_gradient_of_a_parameter_that_nobody_used_is_left_alone() -> None:
    run_ranks(_stale_and_unused, 2)


def _left_and_unused(rank: int, bucket_view: bool) -> list[str]:
    model = DDP(Branches(), find_unused_parameters=True, gradient_as_bucket_view=bucket_view)
    comm = thinwire.attach(model, **_plan("topk-allgather"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _step(model, rank, 0, branch=0)
        model.zero_grad()
        _step(model, rank, 1, branch=1)
        assert not any(issubclass(warning.category, thinwire.ThinwireWarning) for warning in caught)
        for step in (2, 3):
            _step(model, rank, step, branch=0)  # and what branch 1 had got is still there
    comm.close()
    return [str(warning.message) for warning in caught if issubclass(warning.category, thinwire.ThinwireWarning)]


@pytest.mark.parametrize("bucket_view", [False, True])
def test_a_gradient_that_was_not_zeroed_and_is_not_used_is_warned_of_once_by_name(bucket_view: bool) -> None:
    for said in run_ranks(_left_and_unused, 2, bucket_view=bucket_view):
        assert len(said) == 1
        assert "gradient of 'branches.1." in said[0]


class Scaled(nn.Module):
    """A parameter of the outermost module's own, before a model."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.inner = make("mlp")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.scale)


def _changed_since(rank: int, what: str, plan: dict[str, Any]) -> list[torch.Tensor]:
    """The gradients after some steps of plain DDP and of ours, where something was changed before `attach`."""
    found = []
    for attached in (False, True):
        module: nn.Module = Scaled()
        if what == "ignored":
            # DDP takes no notice of that, for a parameter of the outermost module's own.
            DDP._set_params_and_buffers_to_ignore_for_model(module, ["scale"])
        module.scale.requires_grad_(what != "freed")
        model = DDP(module, find_unused_parameters=True, bucket_cap_mb=0.001)
        module.scale.requires_grad_(what != "frozen")
        comm = thinwire.attach(model, **plan) if attached else None
        assert module.scale.requires_grad == (what != "frozen")
        for step in range(3):
            model.zero_grad()
            loss_of(model, rank, step).backward()
        found.append(flat_gradients(model))
        if comm is not None:
            comm.close()
    return found


@pytest.mark.parametrize("what", ["frozen", "freed", "ignored"])
@pytest.mark.parametrize(
    "plan",
    [{"exchange": "dense", "collective": "torch"}, {"exchange": "topk-allgather", "ratio": 1.0}],
    ids=lambda plan: plan["exchange"],
)
def test_what_was_frozen_freed_or_ignored_since_ddp_wrapped_it_is_averaged_as_ddp_does(
    what: str, plan: dict[str, Any]
) -> None:
    for plain, ours in run_ranks(_changed_since, 2, what=what, plan=plan):
        torch.testing.assert_close(ours, plain)


def _passes_after_resuming(rank: int) -> bool:
    model = DDP(Branches(), find_unused_parameters=True)
    comm = thinwire.attach(model, exchange="dense", collective="torch")
    comm.load_state_dict(comm.state_dict())
    for step in range(2):
        model.zero_grad()
        _step(model, rank, step, branch=0)
    comm.close()
    return comm.memory.empty


def test_a_parameter_that_is_never_used_and_has_no_error_holds_no_dense_step_up() -> None:
    assert run_ranks(_passes_after_resuming, 2) == [True, True]


def _late(rank: int) -> float:
    model = make("mlp")
    sync = thinwire.Synchronizer(model, "var-topk", ratio=0.05)
    loss_of(model, rank, 0).backward()
    if rank == 1:
        threading.Event().wait(0.6)  # this rank computes longer
    sync.average_gradients()
    sync.close()
    assert sync.last is not None
    return sync.last.seconds - sync.last.compress_seconds


def test_waiting_for_a_late_rank_is_not_compression() -> None:
    assert run_ranks(_late, 2)[0] > 0.5


def _half_precision_dense(rank: int) -> float:
    model = DDP(make("mlp").bfloat16())
    comm = thinwire.attach(model, exchange="dense", collective="torch")
    x, y = batch(rank, 0)
    F.cross_entropy(model(x.bfloat16()).float(), y).backward()
    comm.close()
    assert comm.last is not None
    return comm.last.sent_bytes / comm.last.dense_bytes


def test_no_compression_saves_nothing_in_half_precision_either() -> None:
    assert run_ranks(_half_precision_dense, 2) == pytest.approx([1.0, 1.0], abs=0.01)


class TwoTypes(nn.Module):
    def __init__(self, first: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 100, dtype=first), nn.Linear(100, 10, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x.to(self.first.weight.dtype)).bfloat16()).float()


def _sent_over_priced(rank: int, first: torch.dtype, under_ddp: bool) -> float:
    net: nn.Module = TwoTypes(first)
    if under_ddp:
        net = DDP(net)
        comm = thinwire.attach(net, exchange="dense", collective="torch")
    else:
        comm = thinwire.Synchronizer(net, exchange="dense", collective="torch")
    loss_of(net, rank, 0).backward()
    if not under_ddp:
        comm.average_gradients()
    comm.close()
    assert comm.last is not None
    _, priced = comm._pilot.prices.volume(Way("dense", "torch"), 1.0)
    return 2 * comm.last.sent_bytes / priced


@pytest.mark.parametrize("first", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("under_ddp", [True, False])
def test_dense_over_torch_is_priced_by_the_bytes_that_it_sends_whatever_the_types(
    first: torch.dtype, under_ddp: bool
) -> None:
    found = run_ranks(_sent_over_priced, 2, first=first, under_ddp=under_ddp)
    assert found == pytest.approx([1.0, 1.0], abs=0.01)  # without DDP sixteen numbers ride along


def _has_another_hook(rank: int) -> str:
    model = DDP(make("mlp"))
    model.register_comm_hook(None, fp16_compress_hook)
    try:
        thinwire.attach(model)
    except RuntimeError as error:
        return str(error)
    return "accepted"


def test_a_model_with_a_hook_of_its_own_is_refused_before_a_connection_is_made() -> None:
    assert "has a communication hook already" in run_ranks(_has_another_hook, 1)[0]


def _divided_otherwise(rank: int) -> str:
    model = DDP(make("mlp"))
    thinwire.attach(model, **_plan("topk-allgather"))
    try:
        with Join([model], divide_by_initial_world_size=False):
            loss_of(model, rank, 0).backward()
    except ValueError as error:
        return str(error)
    return "accepted"


def test_a_join_that_divides_otherwise_is_refused() -> None:
    assert "divide_by_initial_world_size=False" in run_ranks(_divided_otherwise, 1)[0]


BATCHES = (6, 4, 0)


def _joined(rank: int, name: str) -> torch.Tensor:
    model = DDP(make("mlp"), bucket_cap_mb=0.001)
    comm = thinwire.attach(model, **_plan(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Join([model]):
        for step in range(BATCHES[rank]):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
    comm.close()
    return flat_parameters(model)


@pytest.mark.parametrize("name", ["dense", "topk-allgather", "star-topk"])
def test_a_rank_that_has_joined_contributes_no_gradient_but_its_error(name: str) -> None:
    from tests.process.test_ddp import reference_step

    results = run_ranks(_joined, 3, name=name)
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sizes = [p.numel() for p in model.parameters()]
    error = torch.zeros(3, sum(sizes))
    for step in range(max(BATCHES)):
        grads = []
        for rank in range(3):
            optimizer.zero_grad()
            if step < BATCHES[rank]:
                loss_of(model, rank, step).backward()
            grads.append(flat_gradients(model) if step < BATCHES[rank] else torch.zeros(sum(sizes)))
        x = torch.stack(grads) + error
        sent = x * reference_step(name, x, sizes, 0.05, step)
        error = x - sent
        for p, part in zip(model.parameters(), sent.mean(0).split(sizes), strict=True):
            p.grad = part.view_as(p).clone()
        optimizer.step()
    for parameters in results:
        torch.testing.assert_close(parameters, flat_parameters(model), rtol=1e-4, atol=1e-6)


def _mixed_types(rank: int, name: str, static_graph: bool) -> torch.Tensor:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.narrow = nn.Linear(64, 8)
            self.wide = nn.Linear(8, 8).double()
            self.low = nn.Linear(8, 10).bfloat16()
            self.nothing = nn.Parameter(torch.zeros(0))
            self.alone = nn.Parameter(torch.zeros(0, dtype=torch.float16))  # the only one in its bucket
            self.one = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.wide(self.narrow(x).double()) * self.one
            return self.low(x.bfloat16()).float() + self.nothing.sum() + self.alone.sum()

    model = DDP(Mixed(), static_graph=static_graph)
    comm = thinwire.attach(model, **_plan(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    assert comm.step == 4
    comm.close()
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_parameters_of_several_types_and_sizes_train_alike_on_all_ranks(name: str, static_graph: bool) -> None:
    first, second = run_ranks(_mixed_types, 2, name=name, static_graph=static_graph)
    assert torch.equal(first, second) and torch.isfinite(first).all()


def _in_a_part_of_the_world(rank: int) -> torch.Tensor | None:
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    model = DDP(make("mlp"), process_group=group)
    comm = thinwire.attach(model, **_plan("star-topk"))
    for step in range(3):
        model.zero_grad()
        loss_of(model, rank, step).backward()
    assert comm.link.world_size == 2
    comm.close()
    return flat_gradients(model)


def test_a_model_may_live_in_a_part_of_the_world() -> None:
    first, outsider, second = run_ranks(_in_a_part_of_the_world, 3)
    assert outsider is None
    assert torch.equal(first, second)


def _two_models(rank: int) -> None:
    models = [DDP(make("mlp")) for _ in range(2)]
    comms = [thinwire.attach(m, **_plan(name)) for m, name in zip(models, ("star-topk", "topk-allgather"), strict=True)]
    for step in range(4):
        for model in models:
            model.zero_grad()
            loss_of(model, rank, step).backward()
    assert [comm.step for comm in comms] == [4, 4]
    for comm in comms:
        comm.close()


def test_two_models_may_be_attached_in_one_process() -> None:
    run_ranks(_two_models, 2)


def test_a_compiled_module_has_the_same_parameter_names() -> None:
    from thinwire.train.layout import Layout

    plain = make("mlp")
    names = [(f"_orig_mod.{name}", p) for name, p in plain.named_parameters()]
    assert Layout.of(names).slices.keys() == Layout.of(plain.named_parameters()).slices.keys()
