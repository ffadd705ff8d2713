"""When a plan is thought about again, what it moves with, and what never comes between ranks meanwhile."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.laws.test_control import Liar, a_net, step
from thinwire import records
from thinwire.control.adaptive import PAUSE_SECONDS, Adaptive
from thinwire.control.decision import Standing
from thinwire.control.hope import MOST_PATIENCE, PATIENCE, Hope
from thinwire.control.learning import safe_gain
from thinwire.control.prices import Prices, ways
from thinwire.control.replay import replay
from thinwire.control.view import Running, View
from thinwire.errors import LinkTimeout, PlanMismatch
from thinwire.exchange import complete
from thinwire.link.base import Reading
from thinwire.link.thread import ThreadLink, ThreadWorld
from thinwire.train.sync import Synchronizer
from thinwire.types import Network, Plan

THIN = Network(alpha=1e-3, beta=8e-6)  # 1 ms, 1 Mbit/s


def chosen_ratios(objective: str) -> list[float]:
    """On networks from 1 to 50 ms and 2 to 500 Mbit/s, where it compresses."""
    prices = Prices(200_000, 4, 8, ways(8, has_group=False))
    ratios = []
    for alpha in (1e-3, 5e-2):
        for rate in (2, 20, 100, 500):
            view = View(alpha=alpha, beta=8e-6 / rate, rest=Running(0.03))
            decision = Adaptive(objective=objective).decide(
                view, Standing(plan=complete("dense", 1.0, "ring")), 0, prices
            )
            assert decision is not None
            ratios += [decision.plan.ratio] if decision.plan.exchange != "dense" else []
    return ratios


def test_the_choice_moves_with_the_network_where_the_papers_does_not() -> None:
    ours, papers = chosen_ratios("goodput"), chosen_ratios("knee")
    assert len(ours) >= 6 and len(papers) >= 6
    assert max(ours) > 8 * min(ours)
    assert max(papers) < 2 * min(papers)


def test_a_gain_that_falls_below_what_is_safe_is_raised_again_and_stays_there(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    def program(link: ThreadLink) -> list[tuple[str, float]]:
        net, seen = a_net(20_000), []
        sync = Synchronizer(net, Adaptive(horizon=1000), link=link, records=path)
        for number in range(240):
            generator = torch.Generator().manual_seed(1000 * number + link.rank)
            spread = torch.linspace(-3, 3, net.weight.numel()).exp() if number < 60 else torch.ones(net.weight.numel())
            link.compute(0.02)
            net.weight.grad = torch.randn(net.weight.shape, generator=generator) * spread.view(net.weight.shape)
            sync.average_gradients()
            assert sync.last is not None
            seen.append((sync.last.plan.exchange, sync.last.gain))
        sync.close()
        return seen

    seen = ThreadWorld(4, Network(alpha=1e-3, beta=4 * THIN.beta)).run(program)[0]
    decisions = [record for record in records.read(path) if record["kind"] == "decision"]
    raised = [decision for decision in decisions if "under the least allowed" in decision["trigger"]]
    assert 1 <= len(raised) <= 2 and all(d["plan"]["ratio"] > d["before"]["ratio"] for d in raised)
    assert all(gain >= safe_gain(exchange) for exchange, gain in seen)


def test_a_step_that_takes_far_longer_than_predicted_is_thought_about_as_soon_as_any() -> None:
    def program(link: ThreadLink) -> int:
        net = a_net(4000)
        sync = Synchronizer(net, link=link)
        for number in range(40):
            step(sync, net, number, seconds=0.02)
        before = sync._pilot.standing.since
        for number in range(40, 60):
            step(sync, net, number, seconds=1.0)
            if sync._pilot.standing.since > before:
                return number - 40
        return 1000

    for steps in ThreadWorld(3, Network(alpha=1e-3, beta=1e-7)).run(program):
        assert steps <= PAUSE_SECONDS / 1.0 + 8  # as many more as it takes to believe it


def test_each_change_of_plan_is_one_line_at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="thinwire")

    def program(link: ThreadLink) -> list[str]:
        net = a_net(200_000)
        sync = Synchronizer(net, link=link)
        plans = [str(sync.plan)]
        for number in range(40):
            if link.rank == 0 and number == 20:
                link.world.wire.network = THIN
            step(sync, net, number, seconds=0.02)
            plans += [str(sync.plan)] if str(sync.plan) != plans[-1] else []
        return plans

    plans = ThreadWorld(3, Network(alpha=1e-3, beta=1e-9)).run(program)[0]
    lines = [record.getMessage() for record in caplog.records if " instead of " in record.getMessage()]
    assert len(plans) > 1
    for before, after in zip(plans, plans[1:], strict=False):
        assert sum(f": {after} instead of {before}, because " in line for line in lines) == 1


def test_what_has_changed_and_when_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    def program(link: ThreadLink) -> None:
        net = a_net(4000)
        sync = Synchronizer(net, link=link, records=path)
        for number in range(60):
            if link.rank == 0 and number == 30:
                link.world.wire.network = Network(alpha=2e-2, beta=1e-7)
            step(sync, net, number, seconds=0.02)
        sync.close()

    ThreadWorld(3, Network(alpha=1e-3, beta=1e-7)).run(program)
    changes = [record for record in records.read(path) if record["kind"] == "change"]
    assert [change["what"] for change in changes] == ["alpha"]
    assert changes[0]["before"] == pytest.approx(1e-3, rel=0.1) and changes[0]["after"] == pytest.approx(2e-2, rel=0.1)
    assert 0 <= changes[0]["ago"] < 5


def test_ranks_that_resume_at_different_steps_are_refused_by_name() -> None:
    def program(link: ThreadLink) -> str:
        net = a_net(400)
        sync = Synchronizer(net, link=link)
        state = sync.state_dict()
        sync.load_state_dict({**state, "step": 10 + 2 * link.rank})
        with pytest.raises(PlanMismatch) as refused:
            step(sync, net, 0)
        return str(refused.value)

    for rank, text in enumerate(ThreadWorld(2, THIN).run(program)):
        assert text.startswith(f"rank {1 - rank} has another step than rank {rank}, whose step is: {10 + 2 * rank}.")


@pytest.mark.parametrize(
    ("others_step", "expected"),
    [
        (False, "rank 0 heard nothing from rank 1 for .*plan resume"),  # where torch's own all_reduce says nothing
        (True, "rank 1 sent rank 0 a message with plan .* where rank 0 expects 'resume'"),
    ],
)
def test_a_rank_that_alone_has_loaded_a_state_is_told_at_which_step_it_resumes(
    others_step: bool, expected: str
) -> None:
    def program(link: ThreadLink) -> str:
        net = a_net(400)
        sync = Synchronizer(net, link=link)
        if link.rank == 0:
            sync.load_state_dict(sync.state_dict() | {"step": 10})
        if link.rank == 1 and not others_step:
            return ""
        with pytest.raises((LinkTimeout, PlanMismatch)) as caught:
            step(sync, net, 0)
        return str(caught.value)

    text = ThreadWorld(2, THIN).run(program)[0]
    assert re.match(expected, text)
    assert text.endswith("Rank 0 has loaded a state to resume at step 10, and so must all.")


def test_while_it_hopes_explain_and_the_records_still_say_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"

    def program(link: ThreadLink) -> str:
        net, seen = a_net(200_000), link.read_out
        sync = Synchronizer(net, link=link, records=path)
        link.read_out = lambda: replace_stretches(seen())  # type: ignore[method-assign]
        for number in range(5 * PATIENCE):  # it takes some until exchanges are known well enough to tell anything
            step(sync, net, number, seconds=0.02)
            if sync._pilot.standing.hope > 1:
                break
        if link.rank == 0:
            capsys.readouterr()
            sync.explain()
        sync.close()
        return capsys.readouterr().out if link.rank == 0 else ""

    text = ThreadWorld(3, Network(alpha=2e-2, beta=8e-7)).run(program)[0]
    assert "10 Mbit/s per host, in the hope of 80 Mbit/s" in text
    hoped = [r for r in records.read(path) if r["kind"] == "decision" and r["hope"] > 1]
    assert hoped and all(decision["beta"] == pytest.approx(8e-7, rel=0.01) for decision in hoped)
    assert hoped[0]["trigger"] == "nobody has seen the rate for a while, and it may be 80 Mbit/s by now"


def test_where_a_rise_would_change_nothing_none_is_hoped_for_for_long(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    def program(link: ThreadLink) -> tuple[Plan, Hope]:
        net, seen = a_net(200_000), link.read_out
        sync = Synchronizer(net, link=link, records=path)
        link.read_out = lambda: replace_stretches(seen())  # type: ignore[method-assign]
        for number in range(5 * PATIENCE):
            step(sync, net, number, seconds=0.02)
        plan, hope = sync.plan, sync._pilot.view.hope
        sync.close()
        return plan, hope

    found = ThreadWorld(3, Network(alpha=2e-2, beta=8e-8)).run(program)
    (plan, hope), *others = found
    assert others == [found[0]] * 2
    assert hope.factor == 1 and hope.patience == MOST_PATIENCE
    decisions = [r for r in records.read(path) if r["kind"] == "decision"]
    assert decisions and all(each["hope"] == 1 for each in decisions)
    again = replay(records.read(path))
    assert [each.step for each in again] == [each["step"] for each in decisions]
    assert again[-1].plan == plan


@pytest.mark.parametrize(("seconds", "every"), [(0.001, 4), (0.025, 3), (0.2, 1)])
def test_where_steps_are_short_and_nothing_is_new_only_some_are_taken_in(
    tmp_path: Path, seconds: float, every: int
) -> None:
    path = tmp_path / "run.jsonl"

    def program(link: ThreadLink) -> None:
        net = a_net(200_000)
        sync = Synchronizer(net, link=link, records=path)
        for number in range(100):
            if number == 90:
                link.world.wire.network = Network(alpha=0.1, beta=8e-8)
            step(sync, net, number, seconds=seconds)
        sync.close()

    ThreadWorld(3, Network(alpha=1e-2, beta=8e-8)).run(program)
    heard = [record["step"] for record in records.read(path) if record["kind"] == "heard" and record["step"] > 20]
    calm = [step for step in heard if step < 90]
    assert {after - before for before, after in itertools.pairwise(calm)} == {every}
    assert list(range(95, 100)) == [step for step in heard if step >= 95]  # since steps take far longer than expected


def replace_stretches(reading: Reading) -> Reading:
    return reading._replace(stretches=())


# --- whatever comes


def tried(link: ThreadLink, seed: int, path: Path) -> tuple[list[Any], View]:
    """A run with everything that can come between ranks: what each is told of the network, gradients, a resume."""
    shared, own = random.Random(seed), Liar(f"{seed} {link.rank}")
    controller = Adaptive(
        objective=shared.choice(["goodput", "seconds", "knee"]),
        warmup=shared.choice([0, 15]),
        patience=shared.choice([1, 5]),
        exchanges=shared.choice([("topk-allgather", "star-topk"), ("var-topk", "ms-topk", "layerwise-topk")]),
    )
    networks = [Network(alpha=shared.choice([1e-4, 5e-2]), beta=shared.choice([1e-9, 1e-6])) for _ in range(3)]
    seeing, resumes_at, honest = shared.choice(["junk", "some", "no rate"]), shared.randrange(10, 50), link.read_out

    def read_out() -> Reading:
        if seeing == "no rate":
            return replace_stretches(honest())
        return own.reading(link.world_size) if seeing == "junk" or own.random() < 0.3 else honest()

    net = a_net(4000)
    sync = Synchronizer(net, controller, link=link, records=path)
    link.read_out = read_out  # type: ignore[method-assign]
    plans = [sync.plan]
    for number in range(60):
        if link.rank == 0 and number % 20 == 0:
            link.world.wire.network = networks[number // 20]
        link.compute(own.choice([0.0, 1e-6, 0.02, 0.1, 60.0]))
        scale = own.choice([1.0] * 20 + [math.nan, 0.0, 1e22, 1e-25])
        net.weight.grad = torch.randn(net.weight.shape, generator=torch.Generator().manual_seed(number)) * scale
        sync.average_gradients()
        plans.append(sync.plan)
        if number == resumes_at:
            sync.load_state_dict(copy.deepcopy(sync.state_dict()))
    sync.close()
    return plans, sync._pilot.view


@pytest.mark.parametrize("seed", range(24))
def test_all_ranks_hold_the_same_view_and_decide_it_again_alike_whatever_comes(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    world = ThreadWorld(2 + seed % 4, Network(alpha=1e-3, beta=1e-8))
    (plans, view), *others = world.run(lambda link: tried(link, seed, path))
    assert all(other == (plans, view) for other in others)
    assert View.from_json(view.to_json()) == view
    written = list(records.read(path))
    made = [(record["step"], record["trigger"], record["plan"]) for record in written if record["kind"] == "decision"]
    again = [(d.step, d.trigger, vars(d.plan)) for d in replay(written)]
    assert made and again == made


def test_an_absurd_first_step_is_forgotten_within_a_few() -> None:
    running = Running(30.0)
    for _ in range(12):
        running = running.after(0.03)
    assert running.value < 0.06
    assert running._replace(samples=20).after(30.0).value < 0.1


@pytest.mark.parametrize("advantage", [0.02, 0.1, 0.4])
def test_a_plan_that_compresses_is_taken_only_where_it_is_better_than_dense_by_a_share(advantage: float) -> None:
    prices, margins = Prices(200_000, 4, 4, ways(4, has_group=False)), []
    for rate in (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000):
        view = View(alpha=1e-4, beta=8e-6 / rate, rest=Running(0.03))
        decision = Adaptive(advantage=advantage).decide(view, Standing(plan=complete("dense", 1.0, "ring")), 0, prices)
        assert decision is not None
        dense = min(c.cost for c in decision.candidates if c.plan.exchange == "dense")
        sparse = min(c.cost for c in decision.candidates if c.plan.exchange != "dense")
        assert (decision.plan.exchange == "dense") == (sparse >= dense * (1 - advantage))
        margins.append(sparse / dense)
    assert min(margins) < 1 - advantage < max(margins)
