"""Laws of trying ratios out: only what can be undone is tried, how often, and over what."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.laws.test_control import a_net
from tests.process.decisions import decision_for
from thinwire.control.adaptive import Adaptive
from thinwire.control.decision import Decision, Standing
from thinwire.control.prices import Prices
from thinwire.control.view import View
from thinwire.exchange import complete
from thinwire.link.thread import ThreadLink, ThreadWorld
from thinwire.train.explore import Explorer
from thinwire.train.sync import Synchronizer
from thinwire.types import Network, Plan


class Wrapped(nn.Module):
    """A model under another name, with more that is trained than is averaged."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.head = net, nn.Linear(3, 3)


def an_explorer(net: nn.Module, model: Any = None, step: Any = print, comm: Any = None) -> Explorer:
    """For a run of one rank that asks for it."""
    comm = Synchronizer(net, Adaptive(explore="restore"), link=ThreadWorld(1).links[0]) if comm is None else comm
    return Explorer(comm, model or net, torch.optim.SGD(net.parameters(), lr=0.1), step)


def test_a_model_that_is_not_what_is_averaged_is_refused_by_the_first_parameter_that_it_lacks() -> None:
    net = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 2))
    with pytest.raises(ValueError, match="'0.weight' is averaged, but is none of this model's"):
        an_explorer(net, nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 2)))
    with pytest.raises(ValueError, match=r"'1.weight' is averaged, .* Give the model that comm was made for"):
        an_explorer(net, net[0])
    an_explorer(net, Wrapped(net))


def test_what_is_no_step_or_no_synchronizer_is_refused_with_a_reason() -> None:
    with pytest.raises(TypeError, match="step must be a function that trains on a batch, got Tensor"):
        an_explorer(a_net(400), step=torch.zeros(3))
    with pytest.raises(TypeError, match="comm must be what attach gave, or a Synchronizer, got Linear"):
        an_explorer(a_net(400), comm=nn.Linear(2, 2))


# --- how often


class Curious(Adaptive):
    """Always wants to try ratios out, once there is a network."""

    def wants_exploring(self, view: View) -> bool:
        return view.assumed is not None


class Run:
    """One rank's training, in which it is noted before which step ratios were tried out."""

    def __init__(self, link: ThreadLink, controller: Adaptive, iterations: int = 10) -> None:
        self.net = a_net(4000)
        self.sync = Synchronizer(self.net, controller, link=link)
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.0)
        self.explorer = Explorer(self.sync, self.net, optimizer, self._step, iterations=iterations)
        self.explored: list[int] = []
        self._find, self.explorer.explore = self.explorer.explore, self._explore  # type: ignore[method-assign]

    def train(self, steps: int, steepness: float = 3.0) -> None:
        for _ in range(steps):
            self.explorer.step((self.sync.step, steepness))

    def _step(self, batch: tuple[int, float]) -> None:
        number, steepness = batch
        generator = torch.Generator().manual_seed(1000 * number + self.sync.link.rank)
        weight = self.net.weight
        spread = torch.linspace(-steepness, steepness, weight.numel()).exp().view(weight.shape)
        self.sync.link.compute(0.01)  # type: ignore[attr-defined]
        weight.grad = torch.randn(weight.shape, generator=generator) * spread
        self.sync.average_gradients()

    def _explore(self) -> dict[float, float]:
        self.explored.append(self.sync.step)
        return self._find()


def explored(stages: list[tuple[int, float]], controller: Adaptive, iterations: int) -> list[int]:
    """When two ranks tried ratios out, over so many steps with gradients as steep as this, one after the other."""

    def program(link: ThreadLink) -> list[int]:
        run = Run(link, controller, iterations)
        for steps, steepness in stages:
            run.train(steps, steepness)
        return run.explored

    first, second = ThreadWorld(2, Network(alpha=1e-3, beta=1e-5)).run(program)
    assert first == second
    return first


def test_a_gradient_that_stays_the_same_is_explored_once_whatever_the_plan_does_to_its_gain() -> None:
    assert len(explored([(200, 3.0)], Adaptive(explore="restore"), 10)) == 1


def test_a_gain_that_has_changed_is_explored_again_but_not_before_there_were_ten_times_as_many_real_steps() -> None:
    curious = Adaptive(explore="restore", gain_change=0.5)  # more than it changes by while errors build up
    (first,) = explored([(200, 3.0)], curious, 1)
    early = explored([(20, 3.0), (60, 1.0)], curious, 1)
    late = explored([(80, 3.0), (40, 1.0)], curious, 1)
    assert early == [first, first + 50] and first < 20  # five ratios, for one step each
    assert late[0] == first and len(late) == 2 and late[1] > 80


def test_a_resumed_run_goes_on_with_what_was_found_and_waits_as_if_it_were_just_now() -> None:
    def program(link: ThreadLink) -> tuple[list[int], list[int]]:
        first = Run(link, Curious(explore="restore"), 1)
        first.train(60)
        second = Run(link, Curious(explore="restore"), 1)
        second.sync.load_state_dict(first.sync.state_dict())
        second.train(60)
        return first.explored, second.explored

    for first, second in ThreadWorld(2, Network(alpha=1e-3, beta=1e-5)).run(program):
        assert len(first) == 2 and first[1] - first[0] == 50
        assert second == [60 + 50]


def test_a_resumed_run_that_waits_is_not_warned_of_having_no_explorer() -> None:
    def program(link: ThreadLink) -> None:
        first = Run(link, Curious(explore="restore"))
        first.train(20)
        second = Run(link, Curious(explore="restore"))
        second.sync.load_state_dict(first.sync.state_dict())
        second.train(120)
        assert second.explored == []

    ThreadWorld(2, Network(alpha=1e-3, beta=1e-5)).run(program)


# --- over what


@dataclass(frozen=True, kw_only=True)
class Decided(Adaptive):
    """One plan for good."""

    explore: str = "restore"
    plan: Plan

    def decide(self, view: View, standing: Standing, step: int, prices: Prices) -> Decision | None:
        return decision_for(self.plan, standing, step, "habit") if standing.plan != self.plan else None


@pytest.mark.parametrize(
    ("plan", "tried"),
    [
        (complete("topk-allgather", 0.05, "ring"), "topk-allgather over ring"),
        (complete("topk-allgather", 0.05, values="float16"), "topk-allgather over direct, float16 values"),
        (complete("var-topk", 0.05, "tree", "scatter"), "var-topk over tree, scatter broadcast"),
        (complete("dense", 1.0, "ring"), "topk-allgather over direct, log4 values"),
    ],
)
def test_ratios_are_tried_out_over_what_runs_if_that_compresses(plan: Plan, tried: str) -> None:
    def program(link: ThreadLink) -> set[str]:
        run = Run(link, Decided(plan=plan, exchanges=("topk-allgather", "var-topk")))
        run.train(3)
        seen, step = set(), run.explorer._step
        run.explorer._step = lambda batch: (seen.add(str(run.sync.plan).partition(" at ")[0]), step(batch))
        run.explorer.explore()
        assert run.sync.plan == plan
        return seen

    assert ThreadWorld(2, Network(alpha=1e-3, beta=1e-5)).run(program) == [{tried}] * 2


# --- what is put back


class MasterWeights(torch.optim.Optimizer):
    """Momentum in float32 for parameters of half the width, and the weights themselves, on which small steps add up."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state, grad = self.state[parameter], parameter.grad.float()
            momentum = state.setdefault("momentum", torch.zeros_like(grad))
            momentum.mul_(0.9).add_(grad)
            state.setdefault("weights", parameter.float().clone()).sub_(momentum, alpha=1e-3)
            parameter.copy_(state["weights"])


def test_what_an_optimizer_keeps_in_more_bits_than_its_parameters_is_put_back_with_all_of_them() -> None:
    net = nn.Linear(40, 100, dtype=torch.bfloat16)
    sync = Synchronizer(net, Adaptive(explore="restore"), link=ThreadWorld(1).links[0])
    optimizer, other = MasterWeights(net.parameters()), torch.optim.Adam(nn.Linear(2, 2).parameters())

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        sync.average_gradients()
        optimizer.step()
        other.param_groups[0]["lr"] *= 0.5

    explorer = Explorer(sync, net, optimizer, step, also=[other])
    for number in range(3):
        explorer.step(torch.randn(16, 40, generator=torch.Generator().manual_seed(number)).bfloat16())
    before, rate = copy.deepcopy(dict(optimizer.state)), other.param_groups[0]["lr"]
    explorer.explore()
    assert other.param_groups[0]["lr"] == rate
    assert list(optimizer.state) == [net.weight, net.bias]
    for was, kept in zip(before.values(), optimizer.state.values(), strict=True):
        for name in ("momentum", "weights"):
            assert kept[name].dtype == torch.float32
            assert torch.equal(kept[name], was[name]), name
