"""What may be chosen: within bounds, at no more risk than is allowed, and never less of the gradient than is safe."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.laws.test_control import a_net, step
from thinwire.control.adaptive import RISK, Adaptive
from thinwire.control.decision import Decision, Standing
from thinwire.control.gain import GainCurve
from thinwire.control.hope import FACTOR, Hope
from thinwire.control.learning import safe_gain
from thinwire.control.prices import Prices, ways
from thinwire.control.view import Running, View
from thinwire.exchange import complete
from thinwire.link.thread import ThreadLink, ThreadWorld
from thinwire.train.sync import Synchronizer
from thinwire.types import Network

FAR_AND_SLOW = View(alpha=1e-2, beta=1e-6)
HALF_A_SECOND, A_LINE = Running(0.5, 10), Network(alpha=1e-3, beta=8e-8)


def decided_under_ddp(view: View, standing: Standing | None = None) -> Decision:
    """For a gradient of 8 MB that four ranks would send by torch's own all_reduce, where nothing is compressed."""
    prices = Prices(2_000_000, 4, 4, ways(4, has_group=True))
    decision = Adaptive().decide(view, standing or Standing(plan=complete("dense", 1.0)), 0, prices)
    assert decision is not None
    return decision


def test_what_backward_hides_of_a_dense_exchange_is_no_reason_to_compress() -> None:
    view = View(alpha=A_LINE.alpha, beta=A_LINE.beta / 4, rest=HALF_A_SECOND)
    assert decided_under_ddp(view).plan.exchange != "dense"
    hidden = view._replace(overlap=Running(0.4, 10), last_share=0.1)
    decision = decided_under_ddp(hidden)
    assert decision.plan == complete("dense", 1.0) and 0.5 < decision.seconds < 0.55
    # And as little as what was hidden is one to compress by another way, which cannot hide.
    learned = hidden._replace(extra={"dense over torch": Running(-0.2, 10)})
    ring = next(c for c in decided_under_ddp(learned).candidates if c.plan == complete("dense", 1.0, "ring"))
    assert ring.seconds > 0.6


@pytest.mark.parametrize("rate", [100e6, 300e6, 1e9])
def test_torchs_own_all_reduce_is_not_left_for_another_that_takes_as_long(rate: float) -> None:
    """Between two ranks its schedule is that of a ring."""
    prices = Prices(100_000, 4, 2, ways(2, has_group=True))
    view = View(alpha=2e-4, beta=8 / rate, rest=HALF_A_SECOND)
    decision = Adaptive().decide(view, Standing(plan=complete("dense", 1.0)), 0, prices)
    assert decision is not None and decision.plan == complete("dense", 1.0)
    seconds = {each.plan.collective: each.seconds for each in decision.candidates if each.plan.exchange == "dense"}
    assert seconds["ring"] < seconds["torch"] < 1.03 * seconds["ring"]


def test_but_where_it_cannot_hide_enough_it_is_compressed_all_the_same() -> None:
    far = View(alpha=A_LINE.alpha, beta=A_LINE.beta, rest=HALF_A_SECOND, overlap=Running(0.4, 10), last_share=0.1)
    assert decided_under_ddp(far).plan.exchange != "dense"


@pytest.mark.parametrize("rate", [5e6, 10e6, 20e6])
@pytest.mark.parametrize("objective", ["goodput", "knee"])
def test_a_gain_and_a_latency_that_go_up_and_down_do_not_change_the_plan_every_time(
    objective: str, rate: float
) -> None:
    controller, prices = Adaptive(objective=objective), Prices(2_000_000, 4, 8, ways(8, True, values="log4"))
    view = View(alpha=20e-3, beta=8 / rate, rest=Running(0.02, 10), gains=GainCurve(rate=0.5))
    standing, plans = Standing(plan=complete("dense", 1.0)), []
    for number in range(20):
        wobbling = view._replace(
            alpha=20e-3 * (1.15 if number % 3 else 1.0), gains=GainCurve(rate=0.5 + 0.06 * (number % 2))
        )
        decision = controller.decide(wobbling, standing, 1000 * number, prices)
        if decision is not None:
            standing = controller.standing_after(decision, wobbling)
            plans.append(decision.plan)
    assert len(plans) > 5 and len(set(plans)) <= 2 and plans[2:] == [plans[-1]] * len(plans[2:])


def test_the_knee_leaves_a_plan_that_keeps_less_in_as_much_time() -> None:
    controller, prices = (
        Adaptive(objective="knee", ratios=(0.05, 0.1)),
        Prices(300_000, 4, 4, ways(4, True, values="log4")),
    )
    view = View(alpha=1e-4, beta=8 / 800e6, rest=Running(0.02, 10), gains=GainCurve(rate=1.56))
    best = controller.decide(view, Standing(plan=complete("dense", 1.0)), 0, prices)
    assert best is not None and best.plan.exchange == "topk-allgather"
    worse = complete("star-topk", best.plan.ratio, "direct")
    standing = replace(controller.standing_after(best, view), plan=worse, alpha=2e-4)
    again = controller.decide(view, standing, 10_000, prices)
    assert again is not None and again.plan == best.plan


def test_what_runs_is_one_of_the_candidates_and_is_so_once() -> None:
    view = View(alpha=1e-3, beta=8e-8, rest=Running(0.02, 10), gains=GainCurve(rate=0.5))
    decision = decided_under_ddp(view)
    controller, prices = Adaptive(), Prices(2_000_000, 4, 4, ways(4, has_group=True))
    for _ in range(3):  # the network as it is, a little slower, and slower still: each time what ran is kept
        standing = controller.standing_after(decision, view)
        view = view._replace(beta=1.11 * (view.beta or 0.0))
        again = controller.decide(view, standing, decision.step + 1000, prices)
        assert again is not None
        plans = [candidate.plan for candidate in again.candidates]
        assert plans.count(again.plan) == 1 and len(set(plans)) == len(plans)
        decision = again


def test_a_hope_is_not_tried_out_at_any_price() -> None:
    prices, controller = Prices(2_000_000, 4, 4, ways(4, has_group=False)), Adaptive(horizon=60)
    known = View(alpha=A_LINE.alpha, rest=Running(0.02, 10), gains=GainCurve(rate=0.5))
    known = known._replace(beta=A_LINE.beta, seen_beta=A_LINE.beta)
    first = controller.decide(known, Standing(plan=complete("dense", 1.0, "ring")), 0, prices)
    assert first is not None and first.plan.exchange != "dense"
    standing = controller.standing_after(first, known)
    tried = controller.decide(known._replace(hope=Hope(FACTOR)), standing, 100, prices)
    assert tried is not None and tried.hope == FACTOR
    came_true = known._replace(beta=A_LINE.beta / FACTOR)  # but nobody has seen it
    believed = controller.decide(came_true, standing, 100, prices)
    assert believed is not None and believed.plan == tried.plan
    seen = controller.decide(came_true._replace(seen_beta=A_LINE.beta / FACTOR), standing, 100, prices)
    assert seen is not None and seen.plan.ratio > tried.plan.ratio > first.plan.ratio
    in_vain = controller.judge(tried.plan, known, A_LINE, prices).seconds
    assert in_vain <= RISK * controller.judge(first.plan, known, A_LINE, prices).seconds


@pytest.mark.parametrize("objective", ["goodput", "seconds", "knee"])
def test_what_is_allowed_is_chosen_also_where_no_hope_could_afford_it(objective: str) -> None:
    for least_gain in (0.0, 0.5, 1.0):
        controller = Adaptive(objective=objective, least_gain=least_gain)
        prices, _ = of_four(controller)
        standing = Standing(plan=complete("topk-allgather", 0.001), alpha=1e-2, beta=1e-6, gain=0.01, seconds=0.1)
        decision = controller.decide(FAR_AND_SLOW._replace(hope=Hope(FACTOR)), standing, 100, prices)
        assert decision is not None and decision.gain >= least_gain


def test_where_errors_grow_far_longer_than_usual_the_ratio_is_raised() -> None:
    controller = Adaptive(horizon=1000)
    prices, dense = of_four(controller)
    calm = FAR_AND_SLOW._replace(gains=GainCurve(rate=0.2))
    first = controller.decide(calm, dense, 0, prices)
    assert first is not None
    standing = controller.standing_after(first, calm)
    strained = calm._replace(strain=10.0)
    assert controller.decide(calm, standing, 100, prices) is None
    raised = controller.decide(strained, standing, 100, prices)
    assert raised is not None and "under the least allowed" in raised.trigger
    assert raised.plan.ratio > first.plan.ratio and raised.gain >= safe_gain(raised.plan.exchange, 10.0)


@pytest.mark.parametrize("age", range(50, 55))
def test_word_beside_torch_is_heeded_whenever_it_comes(age: int) -> None:
    view = View(alpha=A_LINE.alpha, beta=A_LINE.beta / 100, rest=HALF_A_SECOND, took=0.5)
    standing = Standing(plan=complete("dense", 1.0), alpha=view.alpha, beta=view.beta, gain=1.0, seconds=0.51)
    slow = view._replace(extra={"dense over torch": Running(2.0, 10)})  # as when a rate falls that nobody sees
    prices = Prices(2_000_000, 4, 4, ways(4, has_group=True))
    decision = Adaptive().decide(slow, standing, age, prices)
    assert decision is not None and decision.plan.collective != "torch"  # over our own connections it will be seen


def of_four(controller: Adaptive) -> tuple[Prices, Standing]:
    choice = ways(4, has_group=False, exchanges=("dense", *controller.exchanges))
    return Prices(100_000, 4, 4, choice), Standing(plan=complete("dense", 1.0, "ring"))


@pytest.mark.parametrize("objective", ["goodput", "seconds", "knee"])
def test_no_plan_is_chosen_that_sends_less_than_allowed(objective: str) -> None:
    for least_gain in (0.0, 0.05, 0.3, 0.9, 1.0):
        controller = Adaptive(objective=objective, least_gain=least_gain)
        prices, standing = of_four(controller)
        decision = controller.decide(FAR_AND_SLOW, standing, 0, prices)
        assert decision is not None and decision.gain >= least_gain
        assert (decision.plan.exchange == "dense") == (least_gain > 0.8)
        standing = controller.standing_after(decision, FAR_AND_SLOW)
        assert controller.decide(FAR_AND_SLOW, standing, 100, prices) is None


def test_where_only_seconds_count_nothing_is_too_little() -> None:
    controller = Adaptive(objective="seconds", ratios=(0.0001, 0.0001))
    prices, standing = of_four(controller)
    decision = controller.decide(FAR_AND_SLOW, standing, 0, prices)
    assert decision is not None and decision.plan.ratio == 0.0001 and decision.gain < 0.01
    assert controller.decide(FAR_AND_SLOW, controller.standing_after(decision, FAR_AND_SLOW), 100, prices) is None


@pytest.mark.parametrize("objective", ["goodput", "knee"])
@pytest.mark.parametrize("every", [1, 5, 7])  # steps between two at which ranks hear of each other
@pytest.mark.parametrize("warmup", [1, 25, 100])
def test_the_ratio_is_above_the_line_while_warming_up_and_within_bounds_after(
    objective: str, every: int, warmup: int
) -> None:
    controller = Adaptive(objective=objective, warmup=warmup)
    prices, standing = of_four(controller)
    for number in range(0, warmup + 2 * every, every):
        decision = controller.decide(FAR_AND_SLOW, standing, number + (number > 0), prices)
        if decision is not None:
            standing = controller.standing_after(decision, FAR_AND_SLOW)
            if decision.step < warmup:
                assert decision.plan.ratio >= 1 - 0.9 * decision.step / warmup - 1e-9
                assert decision.plan.ratio == float(f"{decision.plan.ratio:.2g}")
    at_once = Adaptive(objective=objective).decide(FAR_AND_SLOW, of_four(controller)[1], 0, prices)
    assert at_once is not None and standing.plan == at_once.plan


def test_warming_up_lays_schedules_out_only_once() -> None:
    controller = Adaptive(warmup=100)
    assert len({controller._priced_ratios(controller._ratios(step)) for step in range(100)}) == 1


def test_exchanges_are_the_same_in_whatever_order_they_are_named() -> None:
    both = {"star-topk", "topk-allgather"}
    assert repr(Adaptive(exchanges=both)) == repr(Adaptive(exchanges=("star-topk", "topk-allgather", "star-topk")))  # type: ignore[arg-type]


def test_a_plan_of_a_run_with_other_bounds_is_left_at_once() -> None:
    controller = Adaptive(ratios=(0.05, 0.1), exchanges=("topk-allgather",))
    prices, _ = of_four(controller)
    for plan in (complete("topk-allgather", 0.01), complete("star-topk", 0.06)):
        standing = Standing(plan=plan, alpha=1e-2, beta=1e-6, gain=0.2, seconds=0.1)
        decision = controller.decide(FAR_AND_SLOW, standing, 10, prices)
        assert decision is not None and decision.trigger == "the plan in force is out of bounds"
        assert decision.plan.exchange == "topk-allgather" and 0.05 <= decision.plan.ratio <= 0.1


def test_a_resumed_plan_whose_values_were_set_otherwise_is_left() -> None:
    controller = Adaptive(values="float32")
    prices = Prices(2_000_000, 4, 4, ways(4, has_group=False, values=controller.values))
    standing = Standing(
        plan=complete("topk-allgather", 0.01, values="log4"), alpha=1e-2, beta=1e-6, gain=0.2, seconds=0.1
    )
    decision = controller.decide(FAR_AND_SLOW, standing, 10, prices)
    assert decision is not None and decision.trigger == "the plan in force is out of bounds"
    assert decision.plan.values == "float32"


def test_a_price_beyond_a_tenth_of_the_entries_is_no_line_from_one_within() -> None:
    controller = Adaptive(ratios=(0.001, 1.0), exchanges=("topk-allgather",))
    prices = Prices(2_000_000, 4, 4, ways(4, has_group=False, exchanges=("dense", "topk-allgather"), values="log4"))
    ratios, view = controller._ratios(0), View(alpha=1e-3, beta=1e-7)
    learning = {"topk-allgather": controller._learning("topk-allgather", ratios, view)}
    network, dense = Network(alpha=1e-3, beta=1e-7), complete("dense", 1.0, "ring")
    for judged in controller._all_judged(ratios, learning, dense, view, network, prices):
        for i in np.flatnonzero(judged.ratios <= 0.5)[::7]:  # at 1 no index is needed, which is another jump
            exact = controller.judge(judged.at(i).plan, view, network, prices)
            assert judged.seconds[i] == pytest.approx(exact.seconds, rel=0.1), exact.plan  # across it: twice


def test_while_warming_up_values_are_sent_nearly_as_they_are() -> None:
    """Eight magnitudes are too few for entries of all sizes, so where many are sent they have sixteen bits."""
    controller, losses = Adaptive(warmup=100, exchanges=("topk-allgather",)), []

    def program(link: ThreadLink) -> None:
        net = a_net(20_000)
        sync = Synchronizer(net, controller, link=link)
        for number in range(80):
            step(sync, net, number, seconds=0.01)
            if link.rank == 0 and sync.last is not None and sync.last.plan.exchange == "topk-allgather":
                assert sync.last.plan.ratio > 0.1
                losses.append(1 - sync.last.gain)

    ThreadWorld(4, Network(alpha=1e-3, beta=1e-6)).run(program)
    assert losses and losses[0] < 1e-3


@pytest.mark.parametrize(
    "wrong",
    [
        {"exchanges": ()},
        {"exchanges": "star-topk"},
        {"exchanges": ("dense",)},
        {"exchanges": ("star-topk", "powersgd")},
        {"least_gain": 1.5},
        {"least_gain": math.nan},
        {"solver": "guess"},
        {"objective": "speed"},
        {"ratios": (0.1, 0.01)},
        {"ratios": 0.01},
        {"ratios": (0.01,)},
        {"ratios": ("0.01", "0.1")},
        {"change": "0.1"},
        {"least_gain": "0.1"},
        {"solver": "nsga2"},  # which only the knee has a use for
        {"warmup": True},
        {"horizon": math.inf},
        {"horizon": 0},
        {"patience": 2.5},
        {"warmup": -1},
        {"values": "int8"},
    ],
)
def test_wrong_settings_are_refused_at_once_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)).rstrip("s")):
        Adaptive(**wrong)


@pytest.mark.parametrize(
    "fixed", [{"collective": "tree"}, {"ratio": 0.1}, {"values": "float16"}, {"values": "float32"}]
)
def test_what_belongs_to_a_fixed_exchange_is_refused_where_it_would_have_no_effect(fixed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="adaptive chooses for itself"):
        Synchronizer(a_net(400), link=ThreadWorld(1).links[0], **fixed)


@pytest.mark.parametrize(
    ("fixed", "advice"),
    [
        ({"ratio": 0.1}, r"Set its bounds by exchange=thinwire\.Adaptive\(ratios=\(0\.001, 0\.1\)\), or name"),
        ({"values": "float16"}, r"Set its bounds by exchange=thinwire\.Adaptive\(values='float16'\), or name"),
        ({"collective": "tree"}, r"chooses for itself\. Name an exchange to fix its collective, like exchange="),
        ({"broadcast": "scatter"}, r"chooses for itself\. Name an exchange to fix its broadcast, like exchange="),
    ],
)
def test_what_is_advised_instead_of_a_fixed_setting_can_be_done(fixed: dict[str, Any], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        Synchronizer(a_net(400), link=ThreadWorld(1).links[0], **fixed)
