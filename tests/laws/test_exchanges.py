"""Laws of every exchange over every collective, on the virtual clock."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import pytest
import torch

from thinwire.collectives import BROADCASTS
from thinwire.compress.base import Compensated
from thinwire.compress.values import VALUES
from thinwire.exchange import NAMES, TOLD, build, collectives_of, complete, values_for
from thinwire.link.thread import ThreadLink, ThreadWorld
from thinwire.types import Exchanged, Network, Plan, Told

WORLD_SIZES = (1, 2, 3, 4, 7, 8)
NETWORK = Network(alpha=1e-3, beta=1e-7)
SIZES = (400, 1, 0, 602)
NUMEL = sum(SIZES)
STEP = 5


def _plans(ratio: float) -> list[Plan]:
    plans = []
    for name in NAMES:
        for collective in collectives_of(name):
            if collective == "torch":
                continue  # needs a process group: tests/process
            broadcasts = BROADCASTS if name in ("star-topk", "var-topk") else ("tree",)
            plans += [complete(name, ratio, collective, broadcast) for broadcast in broadcasts]
    return plans + [
        dataclasses.replace(plan, values=values)
        for plan in plans
        for values in VALUES
        if values_for(plan.exchange, values) == values != plan.values
    ]


def _name(plan: Plan) -> str:
    return f"{plan.exchange}-{plan.collective}-{plan.broadcast}-{plan.values}"


every_plan = pytest.mark.parametrize("plan", _plans(0.05), ids=_name)
every_size = pytest.mark.parametrize("world_size", WORLD_SIZES)


class Outcome(NamedTuple):
    x: torch.Tensor  # (rank, entry)
    exchanged: list[Exchanged]
    errors: torch.Tensor
    seconds: float
    sent_bytes: int


def _run_on(x: torch.Tensor, plan: Plan, sizes: tuple[int, ...], network: Network = NETWORK) -> Outcome:
    exchange = build(plan, sizes)
    world = ThreadWorld(len(x), network)

    def program(link: ThreadLink) -> tuple[Exchanged, torch.Tensor]:
        fed = Compensated.of(x[link.rank].clone())
        out = torch.empty(fed.x.numel() + TOLD, dtype=x.dtype)
        return exchange.run(link, fed, plan.ratio, STEP, Told(energy=link.rank, holding=1.0), out), fed.x

    exchanged, errors = zip(*world.run(program), strict=True)
    seconds = max(link.now() for link in world.links)
    return Outcome(x, list(exchanged), torch.stack(errors), seconds, sum(link.sent_bytes for link in world.links))


@functools.cache
def run(plan: Plan, world_size: int, network: Network = NETWORK) -> Outcome:
    generator = torch.Generator().manual_seed(world_size)
    x = torch.randn(world_size, NUMEL, dtype=torch.float64, generator=generator)
    return _run_on(x, plan, SIZES, network)


@every_size
@every_plan
def test_every_rank_holds_the_same_bits(plan: Plan, world_size: int) -> None:
    outcome = run(plan, world_size)
    for exchanged in outcome.exchanged:
        assert torch.equal(exchanged.mean, outcome.exchanged[0].mean)
        assert exchanged.told == outcome.exchanged[0].told


@every_size
@every_plan
def test_nothing_is_lost(plan: Plan, world_size: int) -> None:
    outcome = run(plan, world_size)
    mean = outcome.exchanged[0].mean
    torch.testing.assert_close(outcome.x.mean(0), mean + outcome.errors.mean(0), rtol=0, atol=1e-9)


@every_size
@every_plan
def test_as_many_entries_are_sent_as_the_ratio_says(plan: Plan, world_size: int) -> None:
    expected = {"dense": NUMEL, "layerwise-topk": 20 + 1 + 30}.get(plan.exchange, 50)
    outcome = run(plan, world_size)
    for x, error in zip(outcome.x, outcome.errors, strict=True):
        assert int((x != error).sum()) == expected


@every_size
@every_plan
def test_bytes_sent_are_bytes_priced(plan: Plan, world_size: int) -> None:
    leader = STEP % world_size
    priced = build(plan, SIZES).sent_bytes(NUMEL, plan.ratio, world_size, 8, leader)
    assert run(plan, world_size).sent_bytes == priced


@pytest.mark.parametrize("overhead", [0.0, 3e-5])
@every_size
@every_plan
def test_seconds_on_the_clock_are_seconds_priced(plan: Plan, world_size: int, overhead: float) -> None:
    network = dataclasses.replace(NETWORK, overhead=overhead)
    outcome, exchange = run(plan, world_size, network), build(plan, SIZES)
    leader = STEP % world_size
    if plan.exchange == "var-topk":
        largest = outcome.x.square().topk(50).values.sum(1)
        leader = int(largest.argmax())
    assert outcome.seconds == exchange.seconds(network, NUMEL, plan.ratio, world_size, 8, leader)


@every_size
@every_plan
def test_numbers_ride_along_and_come_back_summed(plan: Plan, world_size: int) -> None:
    outcome = run(plan, world_size)
    told = outcome.exchanged[0].told
    if plan.exchange != "dense":
        sent = outcome.x.square().sum() - outcome.errors.square().sum()
        assert told.energy_sent == pytest.approx(float(sent), rel=1e-9)
    assert (told.energy, told.holding, told.not_finite) == (sum(range(world_size)), world_size, 0)


@every_size
@pytest.mark.parametrize("plan", [p for p in _plans(1.0) if p.values == "float32"], ids=_name)
def test_ratio_one_is_dense(plan: Plan, world_size: int) -> None:
    outcome = run(plan, world_size)
    torch.testing.assert_close(outcome.exchanged[0].mean, outcome.x.mean(0), rtol=0, atol=1e-12)
    assert not outcome.errors.any()


@pytest.mark.parametrize(
    "x", [torch.zeros(3, 40), torch.ones(3, 1), torch.full((3, 5), -2.0)], ids=["zeros", "one", "equal"]
)
@every_plan
def test_degenerate_gradients_are_exchanged_like_any(plan: Plan, x: torch.Tensor) -> None:
    outcome = _run_on(x, plan, (x.shape[1],))
    mean = outcome.exchanged[0].mean
    assert torch.equal(mean + outcome.errors.mean(0), x.mean(0))


@every_plan
def test_a_gradient_that_is_not_finite_hangs_nothing_and_is_told_to_all(plan: Plan) -> None:
    x = torch.randn(3, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[1, 17], x[1, 3] = torch.nan, torch.inf
    exchange = build(plan, (100,))

    def program(link: ThreadLink) -> Exchanged:
        fed = Compensated.of(x[link.rank].clone())
        out = torch.empty(100 + TOLD, dtype=x.dtype)
        return exchange.run(link, fed, plan.ratio, STEP, Told(not_finite=not fed.finite), out)

    for exchanged in ThreadWorld(3, NETWORK).run(program):
        assert exchanged.told.not_finite == 1


@every_size
@every_plan
def test_what_a_rank_says_that_it_sent_is_what_it_took_out(plan: Plan, world_size: int) -> None:
    outcome = run(plan, world_size)
    for before, after, exchanged in zip(outcome.x, outcome.errors, outcome.exchanged, strict=True):
        if plan.exchange == "dense":
            assert exchanged.sent is None
        else:
            assert exchanged.sent is not None
            assert exchanged.sent.tolist() == (before != after).nonzero().flatten().tolist()


def test_star_leads_in_turn_and_var_leads_by_energy() -> None:
    x = torch.zeros(3, 10, dtype=torch.float64)
    for rank in range(3):
        x[rank, rank] = 1.0 + (rank == 1)  # each rank would choose its own entry; rank 1's is the largest
    for step, leader in enumerate((0, 1, 2, 0)):
        assert _indices_chosen("star-topk", x, step) == [leader]
        assert _indices_chosen("var-topk", x, step) == [1]


def _indices_chosen(name: str, x: torch.Tensor, step: int) -> list[int]:
    exchange = build(complete(name, 0.1), (10,))

    def program(link: ThreadLink) -> Exchanged:
        out = torch.empty(10 + TOLD, dtype=x.dtype)
        return exchange.run(link, Compensated.of(x[link.rank].clone()), 0.1, step, Told(), out)

    return ThreadWorld(3).run(program)[0].mean.nonzero().flatten().tolist()
