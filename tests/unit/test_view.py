"""What all ranks hold to be true: what an exchange takes beyond its price, and a rate that is too brief to see."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from thinwire.control.agreement import START, off
from thinwire.control.hope import FACTOR, MOST_PATIENCE, PATIENCE, Hope
from thinwire.control.prices import Prices, way_of, ways
from thinwire.control.view import ANOTHER, DOUBT, HELD_BACK, Running, Seen, View
from thinwire.exchange import complete
from thinwire.types import Network, Plan, Told

RANKS = 4
PRICES = Prices(1_000_000, 4, RANKS, ways(RANKS, has_group=False))
DIRECT, RING = (complete("topk-allgather", 0.01, collective) for collective in ("direct", "ring"))
HERE = Network(alpha=0.001, beta=8e-8)  # 1 ms, 100 Mbit/s
REST = 0.05


def begun() -> View:
    return View(alpha=HERE.alpha, beta=HERE.beta)


def after_steps(view: View, plan: Plan, number: int, extra: float, truth: Network = HERE, told: bool = True) -> View:
    """Steps that take `extra` seconds beyond what they cost on the network that there is, whether or not it is seen."""
    for step in range(number):
        exchange = PRICES.seconds(way_of(plan), plan.ratio, truth) + extra
        alpha_off, _ = off(truth.alpha, view.alpha, START.alpha, (0.0, math.inf))
        beta_off, _ = off(truth.beta, view.beta, START.beta, (0.0, math.inf))
        numbers = Told(
            alpha_off=RANKS * alpha_off,
            alpha_known=RANKS,
            beta_off=RANKS * beta_off if told else 0.0,
            beta_known=RANKS if told else 0.0,
            timed=RANKS,
            step_seconds=RANKS * (REST + exchange),
            exchange_seconds=RANKS * exchange,
        )
        view = view.after(Seen(step, 0, plan, plan, numbers), PRICES)
    return view


def near(seconds: float) -> object:
    """Latency and rate are priced within one per cent of what they are."""
    return pytest.approx(seconds, abs=0.01 * PRICES.seconds(way_of(RING), RING.ratio, HERE))


def extra_of(view: View, plan: Plan, runs: Plan | None = None) -> float:
    """While that runs, or the plan itself."""
    way = way_of(plan)
    expected = np.array([REST + PRICES.seconds(way, plan.ratio, HERE)])
    return float(view.extra_of(way, way_of(runs or plan), expected)[0])


def test_a_way_that_has_not_run_is_held_to_take_as_much_beyond_its_price_as_the_one_that_runs() -> None:
    view = after_steps(begun(), DIRECT, 10, extra=0.002)
    view = after_steps(view, RING, 10, extra=0.006)
    star = complete("star-topk", 0.01, "ring")
    assert extra_of(view, DIRECT) == near(0.002) and extra_of(view, RING) == near(0.006)
    assert extra_of(view, star, runs=RING) == near(0.006)
    assert extra_of(view, star, runs=DIRECT) == near(0.002)


def test_what_two_ways_took_beyond_their_prices_does_not_decide_between_them_while_they_are_close() -> None:
    view = after_steps(begun(), DIRECT, 10, extra=0.002)
    view = after_steps(view, RING, 10, extra=0.012)
    assert extra_of(view, DIRECT, runs=RING) == extra_of(view, RING) == near(0.012)


def test_but_a_way_that_was_seen_to_take_far_longer_is_not_taken_for_as_fast_as_its_price() -> None:
    view = after_steps(begun(), DIRECT, 10, extra=0.3)
    view = after_steps(view, RING, 10, extra=0.006)
    doubt = DOUBT * (REST + PRICES.seconds(way_of(DIRECT), DIRECT.ratio, HERE))
    assert extra_of(view, DIRECT, runs=RING) == near(0.3 - doubt)


def test_nor_is_every_other_way_held_to_be_as_slow_as_one_that_is_out_of_proportion() -> None:
    view = after_steps(begun(), DIRECT, 10, extra=0.3)
    doubt = DOUBT * (REST + PRICES.seconds(way_of(RING), RING.ratio, HERE))
    assert extra_of(view, RING, runs=DIRECT) == pytest.approx(doubt) and doubt < 0.1


def test_what_a_way_took_on_another_network_is_no_reason_not_to_try_it_again() -> None:
    view = after_steps(begun(), DIRECT, 10, extra=0.3)
    view = after_steps(view, RING, 10, extra=0.005)
    view = after_steps(view, RING, 10, extra=0.006, truth=replace(HERE, beta=HERE.beta * 2 * ANOTHER))
    assert extra_of(view, DIRECT, runs=RING) == extra_of(view, RING) == pytest.approx(0.006, rel=0.1)


def test_a_network_that_is_nearly_the_same_leaves_all_that_was_learned() -> None:
    view = after_steps(begun(), DIRECT, 10, extra=0.3)
    view = after_steps(view, RING, 10, extra=0.005, truth=replace(HERE, beta=HERE.beta * 1.2))
    assert extra_of(view, DIRECT) == near(0.3)


def test_one_step_that_took_long_is_not_believed_before_the_network_is_seen_to_be_the_same() -> None:
    view = after_steps(begun(), DIRECT, 10, extra=0.002)
    view = after_steps(view, DIRECT, HELD_BACK - 1, extra=0.5)
    assert extra_of(view, DIRECT) == near(0.002)


def test_what_a_way_takes_on_another_network_is_learned_within_a_few_steps_of_trust() -> None:
    thin = replace(HERE, beta=HERE.beta * 5)
    view = after_steps(begun(), DIRECT, 30, extra=0.002)
    view = after_steps(view, DIRECT, HELD_BACK + 6, extra=0.3, truth=thin)
    assert extra_of(view, DIRECT) == pytest.approx(0.3, rel=0.2)


def test_on_the_same_network_one_exchange_that_hangs_moves_it_by_no_more_than_a_tenth_of_what_it_took() -> None:
    view = after_steps(begun(), DIRECT, 30, extra=0.002)
    view = after_steps(after_steps(view, DIRECT, 1, extra=0.5), DIRECT, HELD_BACK, extra=0.002)
    usual = PRICES.seconds(way_of(DIRECT), DIRECT.ratio, HERE) + 0.002
    assert 0.002 < extra_of(view, DIRECT) < 0.002 + 0.11 * usual


def unseen(view: View, number: int, plan: Plan = DIRECT, extra: float = 0.002, truth: Network = HERE) -> View:
    return after_steps(view, plan, number, extra, truth, told=False)


def known(plan: Plan = DIRECT) -> View:
    """Steps of this plan take what they take on this network, and the rate was seen."""
    return after_steps(begun(), plan, 10, extra=0.002)


TINY = complete("topk-allgather", 0.0001, "direct")  # whose bytes take so little time that no rate shows in it


def test_a_network_that_has_become_too_fast_to_see_is_told_by_the_time_that_is_saved() -> None:
    view = unseen(known(), 15, truth=replace(HERE, beta=HERE.beta / 10))
    assert view.assumed is not None and HERE.beta / 20 < view.assumed.beta < HERE.beta / 3


def test_three_exchanges_that_take_far_less_are_reason_enough_and_two_are_not() -> None:
    faster = replace(HERE, beta=HERE.beta / 10)
    assert unseen(known(), 2, truth=faster).hope.factor == 1
    assert unseen(known(), 3, truth=faster).hope.factor == FACTOR


def test_nor_are_single_ones_among_others_that_take_what_they_did() -> None:
    view = known()
    for _ in range(PATIENCE // 4 - 1):
        view = unseen(unseen(view, 1, truth=replace(HERE, beta=HERE.beta / 10)), 3)
        assert view.hope.factor == 1


def test_also_where_a_rise_would_show_in_the_time_of_exchanges_it_is_hoped_for_after_a_while_without_a_reason() -> None:
    assert unseen(known(), PATIENCE - 1).hope.factor == 1
    assert unseen(known(), PATIENCE).hope.factor == FACTOR


def test_a_rate_that_nobody_can_see_may_be_higher_after_a_while_but_is_not_said_to_be_measured() -> None:
    view = unseen(known(TINY), PATIENCE - 1, TINY)
    assert view.assumed == view.network == HERE
    view = unseen(view, 1, TINY)
    assert view.assumed == replace(HERE, beta=HERE.beta / FACTOR) and view.network == HERE


def test_what_was_hoped_for_in_vain_is_hoped_for_half_as_readily() -> None:
    view, waits = known(TINY), []
    for _ in range(3):
        steps = 0
        while view.assumed == HERE:
            view, steps = unseen(view, 1, TINY), steps + 1
        waits.append(steps)
        view = after_steps(view, TINY, 1, extra=0.002)  # and the rate is seen
        assert view.assumed == HERE
    assert waits == [PATIENCE, 2 * PATIENCE, min(4 * PATIENCE, MOST_PATIENCE)]


def test_when_more_is_sent_and_takes_as_long_as_at_the_old_rate_the_hope_is_given_up_within_a_few_steps() -> None:
    view = unseen(after_steps(known(), TINY, 10, extra=0.002), PATIENCE, TINY)
    assert view.hope.factor == FACTOR
    view = unseen(view, 3, DIRECT)
    assert view.assumed == HERE and view.hope.patience == 2 * PATIENCE


def test_when_more_is_sent_and_takes_about_what_was_hoped_for_that_is_the_rate_until_it_is_seen() -> None:
    view = unseen(after_steps(known(), TINY, 10, extra=0.002), PATIENCE, TINY)
    faster = replace(HERE, beta=HERE.beta / 6)
    for _ in range(3):
        view = unseen(view, 10, DIRECT, truth=faster)
        assert view.network == replace(HERE, beta=HERE.beta / FACTOR) and view.hope.factor == 1
    view = after_steps(view, DIRECT, 2, extra=0.002, truth=faster)
    assert view.assumed == view.network and view.network is not None
    assert view.network.beta == pytest.approx(faster.beta, rel=0.1)


def test_so_it_does_where_the_rate_had_risen_long_before_and_only_another_plan_shows_it() -> None:
    faster = replace(HERE, beta=HERE.beta / 10)
    view = unseen(known(TINY), MOST_PATIENCE, TINY, truth=faster)
    while view.assumed == HERE:
        view = unseen(view, 1, TINY, truth=faster)
    view = unseen(view, PATIENCE // 2, DIRECT, truth=faster)
    assert view.network == replace(HERE, beta=HERE.beta / FACTOR)


def test_of_a_rate_that_has_risen_a_hundredfold_no_more_is_taken_for_true_than_one_hope_after_another() -> None:
    much_faster = replace(HERE, beta=HERE.beta / 100)
    view = after_steps(known(), TINY, 10, extra=0.002)
    for times in (FACTOR, FACTOR**2):
        steps = 0
        while view.network != replace(HERE, beta=HERE.beta / times):
            assert view.assumed is not None
            sent = min(0.5, 0.001 * HERE.beta / view.assumed.beta)  # the more the faster it is held to be
            view = unseen(view, 1, complete("topk-allgather", sent, "direct"), truth=much_faster)
            steps += 1
            assert steps <= MOST_PATIENCE + PATIENCE


def test_what_other_ways_took_is_forgotten_when_a_hope_has_come_true() -> None:
    view = after_steps(after_steps(begun(), RING, 10, extra=0.3), TINY, 10, extra=0.002)
    view = unseen(view, PATIENCE, TINY)
    assert str(way_of(RING)) in view.extra
    view = unseen(view, 10, DIRECT, truth=replace(HERE, beta=HERE.beta / FACTOR))
    assert view.network == replace(HERE, beta=HERE.beta / FACTOR) and str(way_of(RING)) not in view.extra


def test_no_hope_comes_true_where_nothing_is_known_to_compare_with() -> None:
    view = begun()._replace(hope=Hope(FACTOR))
    for _ in range(PATIENCE):
        view = unseen(view._replace(extra={}, held_back=()), 1)
        assert view.network == HERE
    assert view.hope.factor == 1


def test_what_has_come_true_stays_so_where_only_the_latency_changes() -> None:
    view = unseen(after_steps(known(), TINY, 10, extra=0.002), PATIENCE, TINY)
    faster = replace(HERE, beta=HERE.beta / FACTOR)
    view = unseen(view, 10, DIRECT, truth=faster)
    view = unseen(view, 3, DIRECT, truth=replace(faster, alpha=2 * HERE.alpha))
    assert view.assumed is not None and view.assumed.beta == pytest.approx(faster.beta)


def test_a_way_that_hardly_ran_before_is_compared_with_those_that_did_and_no_hope_stays_open_for_ever() -> None:
    view = unseen(after_steps(known(), TINY, 10, extra=0.002), PATIENCE, TINY)
    assert view.hope.factor == FACTOR and str(way_of(RING)) not in view.extra
    view = unseen(view, 5, complete("topk-allgather", 0.05, "ring"))
    assert view.assumed == HERE


def test_while_it_is_open_what_comes_of_a_hope_nothing_is_learned_from_how_long_exchanges_take() -> None:
    view = unseen(after_steps(known(), TINY, 10, extra=0.002), PATIENCE, TINY)
    for _ in range(6):
        view = unseen(view, 1, DIRECT)
        assert extra_of(view, DIRECT) == pytest.approx(0.002, rel=0.01)


@pytest.mark.parametrize(("times", "patience"), [(0.5, PATIENCE), (2.0, 2 * PATIENCE)])
def test_where_the_network_gets_better_all_that_was_in_vain_is_forgotten(times: float, patience: int) -> None:
    view = after_steps(unseen(known(TINY), PATIENCE, TINY), TINY, 1, extra=0.002)
    view = view._replace(hope=view.hope._replace(patience=MOST_PATIENCE))
    view = after_steps(view, TINY, 1, extra=0.002, truth=replace(HERE, alpha=times * HERE.alpha))
    assert view.hope.patience == patience


def test_a_hope_that_is_seen_to_be_true_is_the_new_rate_and_there_may_be_more() -> None:
    view = known(TINY)
    for _ in range(2):
        view = unseen(view, PATIENCE, TINY)
        assert view.assumed is not None and view.assumed != view.network
        view = after_steps(view, TINY, 1, extra=0.002, truth=view.assumed)
        assert view.hope.factor == 1 and view.hope.patience == PATIENCE and view.network == view.assumed
        view = after_steps(view, TINY, 10, extra=0.002, truth=view.assumed)


def told_of(energy_sent: float, gradient: float) -> Seen:
    told = Told(energy=RANKS * 1.0, energy_sent=RANKS * energy_sent, gradient=RANKS * gradient)
    return Seen(0, 0, DIRECT, None, told)


def test_errors_that_are_as_long_as_unrelated_gradients_make_them_are_no_strain() -> None:
    view = begun()
    for _ in range(200):
        view = view.after(told_of(energy_sent=0.1, gradient=0.1), PRICES)  # x^2 = g^2 / gain
    assert view.strain == pytest.approx(1.0, rel=0.01)
    for _ in range(200):
        view = view.after(told_of(energy_sent=0.1, gradient=0.02), PRICES)
    assert view.strain == pytest.approx(5.0, rel=0.01)


@pytest.mark.parametrize("gradient", [0.0, 1e-30, -1.0])
def test_a_gradient_that_vanishes_makes_no_error_endless(gradient: float) -> None:
    view = begun()
    for _ in range(1000):
        view = view.after(told_of(energy_sent=0.1, gradient=gradient), PRICES)
    assert 1 <= view.strain <= 10


def test_times_count_only_if_all_ranks_know_theirs() -> None:
    told = Told(timed=RANKS - 1, step_seconds=RANKS * 0.1, exchange_seconds=RANKS * 0.05)
    assert begun().after(Seen(1, 0, DIRECT, DIRECT, told), PRICES).rest is None
    view = begun().after(Seen(1, 0, DIRECT, DIRECT, told._replace(timed=RANKS)), PRICES)
    assert view.rest is not None and view.rest.value == pytest.approx(0.05) and view.took == pytest.approx(0.1)


def test_torch_alone_hides_behind_backward_and_never_its_last_part() -> None:
    torch_way, ring = way_of(complete("dense", 1.0)), way_of(complete("dense", 1.0, "ring"))
    told = Told(
        timed=RANKS,
        step_seconds=RANKS * 0.5,
        exchange_seconds=RANKS * 0.1,
        overlap_seconds=RANKS * 0.3,
        last_share=RANKS * 0.25,
    )
    view = begun().after(Seen(1, 0, DIRECT, DIRECT, told), PRICES)
    prices = np.array([0.1, 0.2, 0.4, 1.0])
    latencies = 4 * (RANKS - 1) * HERE.alpha
    last_parts = latencies + 0.25 * (prices - latencies)
    assert last_parts[0] > 0.03
    expected = pytest.approx([*last_parts[:3], 0.7], rel=1e-3)
    assert view.exposed(torch_way, prices, HERE, PRICES) == expected
    assert view.exposed(ring, prices, HERE, PRICES) == pytest.approx(prices)
    assert begun().exposed(torch_way, prices, HERE, PRICES) == pytest.approx(prices)


def test_what_torch_hides_is_lent_to_no_other_way_while_it_runs_or_after() -> None:
    torch_plan = complete("dense", 1.0)
    view = begun()._replace(extra={str(way_of(torch_plan)): Running(-0.03, 10)})
    assert extra_of(view, torch_plan) == -0.03
    assert extra_of(view, RING, runs=torch_plan) == 0
    assert extra_of(view, RING) == extra_of(view, DIRECT, runs=RING) == 0


def test_a_dense_plan_leaves_no_strain() -> None:
    view = begun()._replace(strain=8.0)
    told = Told(energy=RANKS * 1.0, energy_sent=RANKS * 1.0)
    for _ in range(200):
        view = view.after(Seen(0, 0, complete("dense", 1.0), None, told), PRICES)
    assert view.strain == pytest.approx(1.0, rel=0.01)


def test_numbers_of_another_version_are_refused() -> None:
    state = Seen(1, 0, DIRECT, DIRECT, Told()).to_json()
    assert Seen.from_json(state).plan == DIRECT
    with pytest.raises(ValueError, match="another version"):
        Seen.from_json(state | {"told": state["told"][:-1]})


def test_a_view_comes_back_from_json_as_it_was() -> None:
    view = after_steps(after_steps(begun(), DIRECT, 10, 0.02), RING, 10, 0.01, replace(HERE, alpha=0.02))
    assert View.from_json(view.to_json()) == view
