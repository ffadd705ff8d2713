"""What triggers a decision, and how it is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thinwire.control.adaptive import Adaptive
from thinwire.control.decision import UNFELT, Decision, Standing
from thinwire.control.explain import explain
from thinwire.control.gain import GainCurve
from thinwire.control.hope import FACTOR, PATIENCE, Hope
from thinwire.control.prices import Prices, way_of, ways
from thinwire.control.view import Running, Seen, View
from thinwire.exchange import complete
from thinwire.types import Network, Plan, StepRecord, Told

PRICES = Prices(2_000_000, 4, 4, ways(4, has_group=True))
KNOWN = View(alpha=1e-3, beta=8e-8, rest=Running(0.05, 10), gains=GainCurve(rate=0.5))


def decided(view: View, standing: Standing, step: int = 100, controller: Adaptive | None = None) -> Decision:
    decision = (controller or Adaptive()).decide(view, standing, step, PRICES)
    assert decision is not None
    return decision


def standing_at(view: View, controller: Adaptive | None = None, step: int = 0) -> Standing:
    controller = controller or Adaptive()
    return controller.standing_after(decided(view, Standing(plan=complete("dense", 1.0)), step, controller), view)


def test_a_rate_that_falls_while_more_is_hoped_for_is_said_to_have_fallen() -> None:
    standing = standing_at(KNOWN._replace(hope=Hope(FACTOR)))
    fallen = KNOWN._replace(beta=20 * 8e-8)
    assert decided(fallen, standing).trigger == "rate went from 100 Mbit/s to 5 Mbit/s"
    assert decided(KNOWN, standing).trigger == "the rate is taken as it was last seen, 100 Mbit/s"
    came_true = KNOWN._replace(beta=8e-8 / FACTOR)
    decision = decided(came_true, standing)
    assert decision.trigger == "the rate is what was hoped for, 800 Mbit/s" and decision.hope == 1
    assert Adaptive().decide(came_true, Adaptive().standing_after(decision, came_true), 200, PRICES) is None


def test_a_rate_that_nobody_has_seen_is_said_to_be_none_that_was_seen() -> None:
    taken = KNOWN._replace(seen_beta=8 * 8e-8)
    decision = decided(taken, Standing(plan=complete("dense", 1.0)))
    text = " ".join(explain(decision, standing_at(taken), taken, None).split())
    assert "100 Mbit/s per host by how long exchanges take, 12.5 Mbit/s when it was last seen." in text
    seen = KNOWN._replace(seen_beta=8e-8)
    assert "100 Mbit/s per host." in explain(decision, standing_at(seen), seen, None)


def test_what_is_changed_in_hope_is_not_said_to_be_for_the_latency() -> None:
    hoping = KNOWN._replace(hope=Hope(FACTOR), alpha=1.15e-3)
    assert "it may be" in decided(hoping, standing_at(KNOWN)).trigger
    assert "latency went" in decided(hoping._replace(hope=Hope()), standing_at(KNOWN)).trigger


@pytest.mark.parametrize("hosts", [2, 8])
def test_a_latency_that_no_way_would_feel_is_no_reason(hosts: int) -> None:
    near = KNOWN._replace(alpha=2e-5)
    prices = Prices(2_000_000, 4, hosts, ways(hosts, has_group=True))
    first = Adaptive().decide(near, Standing(plan=complete("dense", 1.0)), 0, prices)
    assert first is not None
    standing = Adaptive().standing_after(first, near)
    felt = UNFELT * first.seconds / (2 * (hosts - 1))  # by a ring
    for alpha, is_reason in ((1e-5, False), (4e-5, False), (2e-5 + 0.9 * felt, False), (2e-5 + 1.1 * felt, True)):
        decision = Adaptive().decide(near._replace(alpha=alpha), standing, 1000, prices)
        assert (decision is not None) == is_reason


def test_where_latency_and_rate_have_changed_both_are_named() -> None:
    standing = standing_at(KNOWN)
    decision = decided(KNOWN._replace(alpha=1.15e-3, beta=8e-6), standing)
    assert decision.trigger == "latency went from 1 ms to 1.15 ms and rate went from 100 Mbit/s to 1 Mbit/s"
    assert decision.plan.ratio < decided(KNOWN._replace(alpha=1.15e-3), standing).plan.ratio


def test_a_network_that_changes_while_warming_up_is_a_reason_too() -> None:
    controller = Adaptive(warmup=5000)
    standing = standing_at(KNOWN, controller, step=100)
    assert controller.decide(KNOWN, standing, 200, PRICES) is None
    assert "rate went" in decided(KNOWN._replace(beta=8e-6), standing, 200, controller).trigger
    assert "latency went" in decided(KNOWN._replace(alpha=0.1), standing, 200, controller).trigger
    assert decided(KNOWN, standing, 100 + 500, controller).trigger == "warm-up"


def test_the_further_one_plans_the_less_is_sent() -> None:
    dense = Standing(plan=complete("dense", 1.0))
    ratios = [decided(KNOWN, dense, 9, Adaptive(horizon=horizon)).plan.ratio for horizon in (100, 1000, 3000)]
    assert ratios[0] > ratios[1] > ratios[2]
    assert decided(KNOWN, dense, 9_000).plan.ratio == ratios[0]


def test_the_first_step_that_is_measured_is_a_reason_even_if_it_takes_what_was_guessed() -> None:
    guess = KNOWN._replace(rest=None)
    standing = standing_at(guess)
    assert standing.guessed and Adaptive().decide(guess, standing, 5, PRICES) is None
    measured = guess._replace(rest=Running(guess.rest_seconds))
    decision = decided(measured, standing, 5)
    assert decision.trigger.startswith("a step was measured")
    assert Adaptive().decide(measured, Adaptive().standing_after(decision, measured), 10, PRICES) is None


@pytest.mark.parametrize("patience", [4, 5, 6, 10])
@pytest.mark.parametrize("age", range(100, 104))
def test_what_is_slow_to_change_is_noticed_at_whatever_step_there_is_word(patience: int, age: int) -> None:
    controller = Adaptive(patience=patience)
    standing = standing_at(KNOWN, controller)
    assert "gain went" in decided(KNOWN._replace(gains=GainCurve(rate=0.2)), standing, age, controller).trigger


def test_what_was_tried_out_in_vain_is_left_after_three_steps() -> None:
    standing = standing_at(KNOWN._replace(hope=Hope(FACTOR)), step=100)
    assert Adaptive().decide(KNOWN._replace(hope=Hope(FACTOR)), standing, 103, PRICES) is None
    assert Adaptive().decide(KNOWN, standing, 102, PRICES) is None
    assert Adaptive().decide(KNOWN._replace(settling=1), standing, 103, PRICES) is None
    assert "as it was last seen" in decided(KNOWN, standing, 103).trigger


def test_too_little_gain_is_a_reason_while_warming_up_too() -> None:
    controller = Adaptive(warmup=5000, ratios=(0.001, 0.01), least_gain=0.2)
    sent = KNOWN._replace(beta=8e-6)
    standing = standing_at(sent, controller, step=4400)
    assert standing.plan.exchange != "dense" and controller.decide(sent, standing, 4500, PRICES) is None
    fallen = sent._replace(gains=GainCurve(rate=0.2))
    decision = decided(fallen, standing, 4500, controller)
    assert "under the least allowed" in decision.trigger and decision.plan.ratio > standing.plan.ratio


@pytest.mark.parametrize("hope", [1, FACTOR])
def test_only_what_is_ten_times_what_it_was_is_answered_before_it_has_settled(hope: int) -> None:
    view = KNOWN._replace(hope=Hope(hope))
    standing = standing_at(view)
    for times, is_far in ((2, False), (9, False), (11, True), (1 / 11, True)):
        moving = view._replace(beta=times * 8e-8, settling=1)
        assert (Adaptive().decide(moving, standing, 100, PRICES) is not None) == is_far
        assert Adaptive().decide(moving._replace(settling=0), standing, 100, PRICES) is not None


def test_deciding_takes_no_more_than_its_share_of_the_time_in_a_large_world() -> None:
    """Pricing 100 ranks takes some 0.15 s: at a step of 50 ms that is worth waiting 30 steps for, whatever happens."""
    prices, controller = Prices(2_000_000, 4, 100, ways(100, True, ("dense",))), Adaptive(advantage=0.01)
    first = controller.decide(KNOWN, Standing(plan=complete("dense", 1.0)), 0, prices)
    assert first is not None
    standing = replace(controller.standing_after(first, KNOWN), seconds=0.05)
    elsewhere, a_little = KNOWN._replace(alpha=0.1), KNOWN._replace(alpha=1.2e-3)
    assert [controller.decide(elsewhere, standing, step, prices) is not None for step in (25, 35)] == [False, True]
    assert [controller.decide(a_little, standing, step, prices) is not None for step in (250, 350)] == [False, True]
    slow = elsewhere._replace(took=5.0)  # as steps have become, whatever was expected
    assert controller.decide(slow, standing, 5, prices) is not None
    in_hope = replace(standing, hope=FACTOR, beta=8e-8 / FACTOR)  # which is over, and what was tried costs time
    assert controller.decide(KNOWN, in_hope, 3, prices) is not None


def test_a_list_will_do_for_what_may_be_chosen() -> None:
    as_lists = Adaptive(exchanges=["star-topk"], ratios=[0.01, 0.1])  # type: ignore[arg-type]
    assert as_lists == Adaptive(exchanges=("star-topk",), ratios=(0.01, 0.1)) and hash(as_lists)


def test_a_change_of_exactly_what_makes_one_is_one() -> None:
    view = KNOWN._replace(alpha=1.0)
    controller = Adaptive(change=0.5)
    standing = standing_at(view, controller)
    assert (
        decided(view._replace(alpha=1.5), standing, controller=controller).trigger == "latency went from 1 s to 1.5 s"
    )
    assert "latency" not in decided(view._replace(alpha=1.499), standing, controller=controller).trigger


def test_gains_that_were_tried_out_follow_what_is_sent_since() -> None:
    plan = Plan(exchange="topk-allgather", collective="direct", ratio=0.01)
    curve = GainCurve().with_measured("topk-allgather", 0.01, 0.3).with_explored("topk-allgather", {0.01: 0.25})
    before = curve.gain("topk-allgather", plan.ratio)
    for _ in range(200):
        curve = curve.with_measured("topk-allgather", 0.01, 0.05)
    assert curve.gain("topk-allgather", plan.ratio) < before / 4


def test_a_hope_by_which_torch_sends_everything_is_not_kept_for_ever() -> None:
    dense, view = complete("dense", 1.0), KNOWN._replace(hope=Hope(FACTOR))
    told = Told(timed=4, step_seconds=1.0, exchange_seconds=0.8)
    for step in range(PATIENCE):
        assert view.hope.is_open
        view = view.after(Seen(step, 0, dense, dense, told), PRICES)
    assert view.hope.factor == 1


def explained(view: View, measured: float = 0.2) -> str:
    decision = decided(view, Standing(plan=complete("dense", 1.0)), step=5)
    last = StepRecord(
        step=9,
        plan=decision.plan,
        seconds=0.1,
        compress_seconds=0.0,
        sent_bytes=1,
        dense_bytes=1,
        gain=0.5,
        skipped=False,
        step_seconds=measured,
    )
    return explain(decision, Adaptive().standing_after(decision, view), view, last, confidence=(0.9, 0.25))


def test_seconds_are_said_as_seconds_and_columns_stand_below_each_other() -> None:
    text = explained(KNOWN._replace(beta=8e-6), measured=2.5)
    assert "e+" not in text and "2.5 s in step 9, on this rank alone" in text
    rows = [line for line in text.splitlines() if line[2:].startswith(("plan ", "dense", "topk", "star"))]
    assert len(rows) > 5 and len({len(row) for row in rows}) == 1
    assert {row[rows[0].index("ratio") + 4] for row in rows[1:]} <= {"1", ")"}


@pytest.mark.parametrize("exchanges", [("topk-allgather", "star-topk"), ("layerwise-topk", "var-topk")])
@pytest.mark.parametrize("network", [Network(alpha=1e-6, beta=1e-10), Network(alpha=5e-2, beta=8e-8)])
@pytest.mark.parametrize("ratio", [0.00103, 0.1, 1.0])
def test_what_is_said_fits_a_terminal_that_is_not_wide(
    exchanges: tuple[str, ...], network: Network, ratio: float
) -> None:
    controller = Adaptive(exchanges=exchanges, ratios=(ratio, ratio))
    prices = Prices(2_000_000, 4, 4, controller.ways(4, has_group=True))
    view = KNOWN._replace(alpha=network.alpha, beta=network.beta)
    first = controller.decide(view, Standing(plan=complete("dense", 1.0)), 5, prices)
    assert first is not None
    for i in range(len(first.candidates)):  # every way comes to stand in the table
        some = replace(first, candidates=first.candidates[i:], plan=first.candidates[i].plan)
        text = explain(some, controller.standing_after(some, view), view, None, confidence=(0.9, 0.25))
        assert max(map(len, text.splitlines())) <= 80, text
        assert f"{some.plan}," in " ".join(text.split())


def test_how_values_are_sent_is_said_once_and_not_in_every_row() -> None:
    prices = Prices(2_000_000, 4, 4, Adaptive().ways(4, has_group=True))
    view = KNOWN._replace(alpha=0.05)
    decision = Adaptive().decide(view, Standing(plan=complete("dense", 1.0)), 5, prices)
    assert decision is not None and decision.plan.values == "log4"
    text = explain(decision, Adaptive().standing_after(decision, view), view, None)
    assert text.count("log4") == 2  # with the plan that was chosen, and below the table
    assert "topk-allgather: with log4 values." in " ".join(text.split())


def test_what_was_seen_is_said_with_how_far_it_is_trusted() -> None:
    text = explained(KNOWN)
    assert "The network: 1 ms one way, 100 Mbit/s per host." in text
    assert "Of a step, 50 ms are outside the exchange and " in text
    assert "Gain of the largest entries: " in text and " at 0.001." in text
    assert text.endswith("Confidence of this rank's own measurements: latency 90 %, rate 25 %.")


def test_what_was_measured_since_is_what_all_ranks_told_of_or_else_said_to_be_of_one_rank_and_step() -> None:
    alone = "Measured since: 200 ms in step 9, on this rank alone; predicted: "
    assert alone in " ".join(explained(KNOWN).split())
    assert alone in " ".join(explained(KNOWN._replace(took=0.3, step=5)).split())  # of the step before the decision
    told = explained(KNOWN._replace(took=0.3, step=6))
    assert "Measured since: 300 ms in one step, the mean over all ranks; predicted: " in told and "alone" not in told


def test_a_knee_is_not_explained_by_costs() -> None:
    knee = Adaptive(objective="knee")
    standing = standing_at(KNOWN, knee)
    decision = decided(KNOWN._replace(alpha=0.05), standing, controller=knee)
    text = explain(decision, standing, KNOWN, None, objective="knee")
    assert decision.plan != decision.candidates[0].plan
    assert "It is the knee of time against 1/gain that is taken" in text and "too little to change" not in text


def test_what_was_guessed_is_not_said_to_be_measured_or_predicted() -> None:
    text = explained(View(alpha=1e-3, beta=8e-8))
    assert "No step had been measured: 100 ms outside the exchange are a guess." in text
    assert "predicted: 2" not in text and "Measured since: 200 ms in step 9, on this rank alone." in text


def test_gains_that_nobody_has_measured_are_said_to_be_those_of_a_usual_model() -> None:
    usual = "Gain of the largest entries in a usual model, as none was measured: 0.835 at 0.1,"
    assert usual in " ".join(explained(View(alpha=1e-3, beta=8e-8)).split())
    for curve in (GainCurve().with_kept(0.1, 0.5), GainCurve().with_measured("star-topk", 0.01, 0.1)):
        assert "usual" not in explained(View(alpha=1e-3, beta=8e-8, gains=curve))


@pytest.mark.parametrize("network", [Network(alpha=1e-3, beta=8e-8), Network(alpha=0.05, beta=1e-5)])
def test_every_way_is_among_the_candidates(network: Network) -> None:
    view = KNOWN._replace(alpha=network.alpha, beta=network.beta)
    found = {way_of(c.plan) for c in decided(view, Standing(plan=complete("dense", 1.0))).candidates}
    assert found == set(PRICES.ways)
