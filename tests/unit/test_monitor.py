"""What the monitor makes of what a link notices: noise, blips, changes and nonsense."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.control.asking import (
    LEAST_PROBES_PER_SECOND,
    LONGEST_STEP,
    MOST_SAVED,
    PROBE_BYTES,
    PROBES_AT_ONCE,
    SAVED_PER_SECOND,
)
from thinwire.control.latency import WIRE_BYTES
from thinwire.control.monitor import Estimate, Monitor
from thinwire.link.base import Reading, Stretch

ALPHA, BETA = 0.005, 8e-8  # 5 ms, 100 Mbit/s
STEP_SECONDS = 0.1
STEP_BYTES = 500_000

Noise = Callable[[random.Random], float]


def none(_: random.Random) -> float:
    return 0.0


def often_late(rng: random.Random) -> float:
    """A process that shares its processor: two of three answers are late, by anything from a little to very much."""
    return 0.0005 * rng.paretovariate(1.1) if rng.random() < 0.67 else 0.0


class Network:
    """What a monitor would be told of a network that can be changed, on a clock of its own."""

    def __init__(self, world_size: int = 4, noise: Noise = none, seed: int = 0) -> None:
        self.now, self.sent_bytes, self.probe_bytes = 0.0, 0, 0
        self.alpha, self.beta = ALPHA, BETA
        self.farther: dict[int, float] = {}  # peers, and by how much
        self.agreed: float | None = None
        self.monitor = Monitor(world_size, rank=0, clock=lambda: self.now)
        self._noise, self._rng = noise, random.Random(seed)
        self._asked: list[int] = []

    def round_trip(self, peer: int) -> float:
        alpha = self.alpha + self.farther.get(peer, 0.0)
        return 2 * (alpha + WIRE_BYTES * self.beta) + self._noise(self._rng)

    def step(self, nbytes: int = STEP_BYTES) -> None:
        self.now += STEP_SECONDS
        self.sent_bytes += nbytes
        probed = len(self._asked) * PROBE_BYTES
        self.probe_bytes += probed
        trips = tuple((peer, self.round_trip(peer)) for peer in self._asked)
        rate = self._rng.gauss(1.0, 0.05) / self.beta
        stretches = (Stretch(nbytes // 2, nbytes / 2 / rate),) if nbytes >= 1000 else ()
        self.monitor.note(Reading(trips, stretches, probed), self.sent_bytes, self.agreed)
        self._asked = self.monitor.asking.due()

    def steps(self, number: int, nbytes: int = STEP_BYTES) -> None:
        for _ in range(number):
            self.step(nbytes)

    def steps_until(self, is_there: Callable[[], bool]) -> int:
        for number in range(1, 50):
            self.step()
            if is_there():
                return number
        return 50


def value(estimate: Estimate) -> float:
    assert estimate.value is not None
    return estimate.value


# --- what the network is


@pytest.mark.parametrize("noise", [none, often_late])
@pytest.mark.parametrize("far", [{7}, {6, 7}, {4, 5, 6, 7}])
def test_where_some_peers_are_on_another_site_the_latency_is_theirs_since_everybody_waits_for_them(
    far: set[int], noise: Noise
) -> None:
    network = Network(8, noise)
    network.farther = dict.fromkeys(far, 0.03)
    network.steps(100)
    assert value(network.monitor.alpha()) == pytest.approx(ALPHA + 0.03, rel=0.1)
    network.farther = {}
    network.steps(100)
    assert value(network.monitor.alpha()) == pytest.approx(ALPHA, rel=0.1)


@pytest.mark.parametrize("steps", [0, 50])
def test_one_answer_that_is_very_late_makes_no_peer_a_far_one(steps: int) -> None:
    network = Network(8)
    network.steps(steps)
    network.farther = {3: 0.2}
    network.steps(3)
    assert value(network.monitor.alpha()) == pytest.approx(ALPHA, rel=0.05)


@pytest.mark.parametrize(("world_size", "far"), [(3, {2}), (5, {3, 4}), (8, {6, 7})])
def test_a_site_that_becomes_even_farther_is_never_taken_for_a_near_one(world_size: int, far: set[int]) -> None:
    network = Network(world_size)
    network.farther = dict.fromkeys(far, 0.03)
    network.steps(60)
    for more in (0.06, 0.12):
        network.farther = dict.fromkeys(far, more)
        for _ in range(60):
            network.step()
            assert value(network.monitor.alpha()) > 0.03
        assert value(network.monitor.alpha()) == pytest.approx(ALPHA + more, rel=0.1)


def test_what_the_others_have_agreed_on_keeps_nobody_from_seeing_that_some_are_far() -> None:
    network = Network(8, often_late)
    network.farther = {6: 0.03, 7: 0.03}
    network.agreed = 1.4 * ALPHA
    network.steps(150)
    assert value(network.monitor.alpha()) == pytest.approx(ALPHA + 0.03, rel=0.1)


@pytest.mark.parametrize("noise", [none, often_late])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_latency_and_rate_are_found_through_the_noise(world_size: int, noise: Noise) -> None:
    network = Network(world_size, noise)
    network.steps(30)
    # One peer is asked once a step: three late answers in a row, two of them alike, then pass for a change.
    assert value(network.monitor.alpha()) == pytest.approx(ALPHA, rel=0.1 if world_size == 2 else 0.05)
    assert value(network.monitor.beta()) == pytest.approx(BETA, rel=0.1)
    assert set(network.monitor.pairs()) == set(range(1, world_size))


def test_what_a_probe_itself_takes_is_not_latency() -> None:
    network = Network()
    network.alpha, network.beta = 0.0005, 8e-7  # 10 Mbit/s: a probe's bytes take a fifth of the latency
    network.steps(10)
    assert value(network.monitor.alpha()) == pytest.approx(0.0005, rel=0.03)


def test_nothing_is_known_before_anything_was_seen() -> None:
    monitor = Monitor(4)
    assert monitor.alpha() == monitor.beta() == Estimate()
    monitor.note(Reading(), 0)
    assert monitor.alpha().value is None and monitor.pairs() == {}


def test_a_peer_that_is_farther_away_is_told_apart() -> None:
    monitor = Monitor(4, rank=0)
    for _ in range(5):
        monitor.note(Reading(((1, 0.002), (2, 0.002), (3, 0.080))), 0)
    assert {peer: value(each) for peer, each in monitor.pairs().items()} == {1: 0.001, 2: 0.001, 3: 0.040}
    assert value(monitor.alpha()) == 0.040  # everybody waits for the farthest


def test_a_stretch_at_half_the_rate_from_a_sender_with_two_receivers_is_outvoted() -> None:
    monitor = Monitor(4)
    for _ in range(5):
        monitor.note(Reading(stretches=(Stretch(10_000, 0.02), Stretch(10_000, 0.01), Stretch(10_000, 0.01))), 0)
    assert value(monitor.beta()) == pytest.approx(1e-6)


def test_confidence_grows_with_samples_and_fades_with_time() -> None:
    network = Network()
    network.step()
    network.step()
    early = network.monitor.alpha().confidence, network.monitor.beta().confidence
    network.steps(20)
    late = network.monitor.alpha().confidence, network.monitor.beta().confidence
    network.now += 60
    network.monitor.note(Reading(), network.sent_bytes)
    old = network.monitor.alpha(), network.monitor.beta()
    assert early < (0.5, 0.5) < (0.9, 0.9) < late
    assert max(each.confidence for each in old) < 0.05 and min(each.age for each in old) >= 60


# --- when it changes


@pytest.mark.parametrize("noise", [none, often_late])
@pytest.mark.parametrize("factor", [10.0, 1.5, 0.67, 0.1])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_a_change_of_latency_is_followed_within_six_steps(world_size: int, factor: float, noise: Noise) -> None:
    network = Network(world_size, noise, seed=3)
    network.steps(20)
    network.alpha *= factor
    near = network.alpha * 0.85, network.alpha * 1.15
    assert network.steps_until(lambda: near[0] < value(network.monitor.alpha()) < near[1]) <= 6


@pytest.mark.parametrize("factor", [10.0, 2.0, 0.5, 0.1])
def test_a_change_of_rate_is_followed_within_six_steps(factor: float) -> None:
    network = Network()
    network.steps(20)
    network.beta *= factor
    near = network.beta * 0.85, network.beta * 1.15
    assert network.steps_until(lambda: near[0] < value(network.monitor.beta()) < near[1]) <= 6


def beta_after(*steps: tuple[int, Stretch]) -> float:
    """What a monitor of four ranks finds after so many steps in which there was that stretch, and so on."""
    monitor = Monitor(4)
    for number, stretch in steps:
        for _ in range(number):
            monitor.note(Reading(stretches=(stretch,)), 0)
    return value(monitor.beta())


def test_what_was_learned_of_the_rate_is_new_until_it_was_told() -> None:
    monitor = Monitor(4)
    assert not monitor.beta_is_new
    for _ in range(2):
        monitor.note(Reading(stretches=(Stretch(1_000_000, 0.05),)), 0)
        monitor.note(Reading(), 0)
        assert monitor.beta_is_new and monitor.beta_now() == pytest.approx(5e-8)
        monitor.beta_was_told()
        monitor.note(Reading(), 0)
        assert not monitor.beta_is_new and monitor.beta_now() == pytest.approx(5e-8)


def test_a_rate_that_falls_far_is_known_after_two_long_steps() -> None:
    assert beta_after((5, Stretch(1_000_000, 0.05)), (2, Stretch(1_000_000, 1.25))) == pytest.approx(1.25e-6)


def test_two_steps_with_little_to_send_are_no_change_yet() -> None:
    assert beta_after((5, Stretch(4_000, 0.02)), (2, Stretch(4_000, 1.0))) == pytest.approx(5e-6)


def test_two_steps_with_little_to_send_are_a_change_if_they_tell_the_same_several_times() -> None:
    monitor = Monitor(4)
    for seconds in (0.02, 0.02, 0.02, 1.0, 1.0):
        monitor.note(Reading(stretches=(Stretch(4_000, seconds), Stretch(4_100, seconds))), 0)
    assert value(monitor.beta()) == pytest.approx(1 / 4_000, rel=0.05)


def test_brief_stretches_at_a_share_of_the_rate_are_of_senders_that_serve_all_their_peers() -> None:
    assert beta_after((5, Stretch(200_000, 0.02)), (20, Stretch(7_000, 0.002))) == pytest.approx(1e-7)


def test_brief_stretches_at_less_than_any_share_are_a_slower_network() -> None:
    assert beta_after((5, Stretch(200_000, 0.02)), (20, Stretch(2_000, 0.002))) == pytest.approx(1e-6)


def test_brief_stretches_far_above_the_rate_are_a_faster_network_after_three() -> None:
    assert beta_after((5, Stretch(200_000, 0.02)), (3, Stretch(50_000, 0.001))) == pytest.approx(2e-8)


def test_after_a_step_at_another_rate_the_next_is_worth_a_look() -> None:
    monitor, doubts = Monitor(4), []
    for seconds in (0.05, 0.05, 0.05, 1.25, 0.05, 0.05, 1.25, 1.25, 1.25, 1.25):
        monitor.note(Reading(stretches=(Stretch(1_000_000, seconds),)), 0)
        doubts.append(monitor.is_in_doubt)
    assert doubts == [False, False, False, True, False, False, True, True, False, False]


def test_a_doubt_that_nothing_settles_is_given_up_after_a_few_steps() -> None:
    monitor = Monitor(4)
    for seconds in (0.1, 0.1, 0.2):
        monitor.note(Reading(stretches=(Stretch(100_000, seconds),)), 0)
    doubts = []
    for _ in range(4):
        doubts.append(monitor.is_in_doubt)
        monitor.note(Reading(), 0)
    assert doubts == [True, True, True, False]


def test_one_step_at_another_rate_is_a_blip() -> None:
    monitor = Monitor(4)
    for seconds in (0.05, 0.05, 0.05, 1.25, 0.05, 0.05, 0.01, 0.05):
        monitor.note(Reading(stretches=(Stretch(1_000_000, seconds),)), 0)
        assert value(monitor.beta()) == pytest.approx(5e-8)


def test_a_rise_is_followed_although_each_of_many_peers_is_asked_seldom() -> None:
    network = Network(world_size=16)
    network.steps(40, nbytes=20_000)  # pays for one probe a step
    network.alpha *= 4
    for _ in range(6):
        network.step(20_000)
    assert value(network.monitor.alpha()) == pytest.approx(4 * ALPHA, rel=0.15)


@pytest.mark.parametrize(("agreed", "is_believed"), [(None, False), (ALPHA, False), (3 * ALPHA, True)])
def test_one_round_trip_is_enough_where_the_others_have_seen_a_rise(agreed: float | None, is_believed: bool) -> None:
    network = Network()
    network.steps(20)
    far = Reading(((1, 8 * ALPHA), (2, 8 * ALPHA), (3, 8 * ALPHA)))
    network.monitor.note(far, network.sent_bytes, agreed)
    assert value(network.monitor.alpha()) == pytest.approx(4 * ALPHA if is_believed else ALPHA, rel=0.1)


def test_but_what_the_others_have_seen_alone_moves_nobody() -> None:
    network = Network()
    network.steps(20)
    near = Reading(((1, network.round_trip(1)),))
    network.monitor.note(near, network.sent_bytes, 3 * ALPHA)
    assert value(network.monitor.alpha()) == pytest.approx(ALPHA, rel=0.1)


def test_one_peer_that_moves_away_alone_is_noticed() -> None:
    monitor = Monitor(4, rank=0)
    for _ in range(10):
        monitor.note(Reading(((1, 0.002), (2, 0.002), (3, 0.002))), 0)
    for _ in range(6):
        monitor.note(Reading(((1, 0.002), (2, 0.002), (3, 0.050))), 0)
    assert value(monitor.pairs()[3]) == 0.025 and value(monitor.pairs()[1]) == 0.001


# --- messages there and back


def after_echoes(monitor: Monitor, number: int, seconds: float, nbytes: int = 1000) -> float:
    """What is held of the latency after so many steps in which a message to each peer and one back took so long."""
    for _ in range(number):
        monitor.note(Reading(echoes=tuple((peer, seconds, nbytes) for peer in (1, 2, 3))), 0)
    return value(monitor.alpha())


def probed(round_trip: float, steps: int = 10) -> Monitor:
    """A monitor that has asked all others, on a network of 100 Mbit/s."""
    monitor = Monitor(4, rank=0)
    trips = tuple((peer, round_trip) for peer in (1, 2, 3))
    for _ in range(steps):
        monitor.note(Reading(trips, (Stretch(1_000_000, 0.08),)), 0)
    return monitor


def test_messages_tell_of_a_rise_within_three_steps_and_nobody_has_to_ask() -> None:
    assert after_echoes(probed(0.002), 3, 0.1) == pytest.approx(0.05, rel=0.01)


def test_messages_tell_of_a_fall_at_once() -> None:
    assert after_echoes(probed(0.1), 1, 0.003) == pytest.approx(0.0015, rel=0.1)


def test_a_message_that_may_have_waited_for_others_tells_of_no_rise_but_of_a_fall() -> None:
    large = 300_000  # from three peers: 72 ms at this rate
    assert after_echoes(probed(0.002), 20, 0.1, large) == pytest.approx(0.001, rel=0.02)
    assert after_echoes(probed(0.2), 1, 0.1, large) == pytest.approx(0.05, rel=0.001)


def test_no_message_makes_the_latency_less_than_half_of_what_it_took_whether_the_rate_is_known_or_not() -> None:
    for monitor in (probed(0.002), Monitor(4, rank=0)):
        monitor.note(Reading(((1, 0.002), (2, 0.002), (3, 0.002))), 0)
        assert after_echoes(monitor, 3, 0.0019, 5000) == pytest.approx(0.00095, rel=0.02)


def test_a_message_that_is_a_little_late_confirms_no_rise_that_others_have_seen() -> None:
    monitor = probed(0.002)
    monitor.note(Reading(echoes=((1, 0.0025, 100), (2, 0.0025, 100), (3, 0.0025, 100))), 0, 0.0014)
    assert value(monitor.alpha()) == pytest.approx(0.001, rel=0.02)


def test_a_rate_that_falls_is_not_taken_for_a_latency_that_rises() -> None:
    """Of messages of which nobody has asked anything since it fell, of 1 kB each from three peers."""
    monitor = probed(0.008)
    for _ in range(10):
        slow = tuple((peer, 0.008 + 3 * 2000 * 8 / 3e6, 2000) for peer in (1, 2, 3))
        monitor.note(Reading(stretches=(Stretch(3000, 3000 * 8 / 3e6),), echoes=slow), 0)
        assert value(monitor.alpha()) == pytest.approx(0.004, rel=0.1)
    assert value(monitor.beta()) == pytest.approx(8 / 3e6, rel=0.05)


def test_messages_that_take_longer_than_probes_as_they_always_do_change_nothing() -> None:
    monitor = probed(0.002)
    for seconds in (0.0021, 0.0025, 0.0030, 0.0026, 0.0028) * 6:
        after_echoes(monitor, 1, seconds)
        monitor.note(Reading(((1, 0.002),)), 0)
    assert value(monitor.alpha()) == pytest.approx(0.001, rel=0.05)


def test_where_the_rate_is_unknown_messages_tell_of_no_rise() -> None:
    monitor = Monitor(4, rank=0)
    for _ in range(10):
        monitor.note(Reading(((1, 0.002), (2, 0.002), (3, 0.002))), 0)
    assert after_echoes(monitor, 10, 0.1) == 0.001


def test_noise_just_before_a_rise_leaves_no_peer_where_it_was() -> None:
    monitor = probed(0.002)
    for late in (0.0025, 0.0026):
        monitor.note(Reading(((1, late), (2, late), (3, late))), 0)
    for peer in (1, 2, 3, 1, 2, 3):
        monitor.note(Reading(((peer, 0.1),)), 0)
    assert {peer: round(value(pair), 3) for peer, pair in monitor.pairs().items()} == {1: 0.05, 2: 0.05, 3: 0.05}


# --- round trips that met payload


def noted(monitor: Monitor, number: int, clear: float | None, delayed: float | None) -> float:
    for _ in range(number):
        monitor.note(
            Reading(
                round_trips=() if clear is None else ((1, clear), (2, clear)),
                delayed=() if delayed is None else ((1, delayed), (3, delayed)),
            ),
            0,
        )
    return value(monitor.alpha())


def test_round_trips_that_had_to_wait_do_not_count_while_others_are_known() -> None:
    monitor = Monitor(4, rank=0)
    noted(monitor, 1, clear=0.010, delayed=None)
    monitor.note(Reading(((3, 0.010),)), 0)
    assert noted(monitor, 20, clear=0.010, delayed=0.060) == 0.005
    assert not monitor.changes


def test_one_that_had_to_wait_and_was_faster_all_the_same_does_count() -> None:
    monitor = Monitor(2, rank=0)
    noted(monitor, 5, clear=0.010, delayed=None)
    monitor.note(Reading(delayed=((1, 0.004),)), 0)
    assert value(monitor.alpha()) == 0.002


def test_they_are_better_than_nothing_but_hardly_trusted() -> None:
    monitor = Monitor(4, rank=0)
    assert noted(monitor, 20, clear=None, delayed=0.010) == 0.005
    assert monitor.alpha().confidence < 0.3


def test_a_rise_is_followed_when_all_that_is_left_had_to_wait() -> None:
    monitor = Monitor(4, rank=0)
    noted(monitor, 10, clear=0.010, delayed=0.0105)
    assert noted(monitor, 6, clear=None, delayed=0.040) == 0.020
    assert noted(monitor, 2, clear=0.010, delayed=0.0105) == 0.005


def test_longer_queues_as_usual_are_not_a_rise() -> None:
    monitor = Monitor(4, rank=0)
    noted(monitor, 10, clear=0.010, delayed=0.025)
    assert min(value(monitor.pairs()[peer]) for peer in (1, 2)) == 0.005
    noted(monitor, 10, clear=None, delayed=0.025)
    assert min(value(monitor.pairs()[peer]) for peer in (1, 2)) == 0.005


# --- what is said about changes


def test_a_change_is_recorded_with_the_step_at_which_it_began() -> None:
    network = Network()
    network.steps(20)
    assert not network.monitor.changes
    network.alpha, network.beta = 3 * ALPHA, 3 * BETA
    network.steps(20)
    changes = {change.what: change for change in network.monitor.changes}
    assert set(changes) == {"alpha", "beta"}
    for change in changes.values():
        assert 20 <= change.step <= 26 and change.time == pytest.approx(change.step * STEP_SECONDS)
        assert change.after == pytest.approx(3 * change.before, rel=0.2)


def test_a_blip_is_not_a_change() -> None:
    network = Network()
    network.steps(20)
    network.alpha, network.beta = 10 * ALPHA, 10 * BETA
    network.steps(2)
    network.alpha, network.beta = ALPHA, BETA
    network.steps(20)
    assert not network.monitor.changes
    assert value(network.monitor.alpha()) == pytest.approx(ALPHA, rel=0.05)
    assert value(network.monitor.beta()) == pytest.approx(BETA, rel=0.1)


def test_a_rate_that_is_now_above_and_now_below_is_not_a_change() -> None:
    monitor = Monitor(4)
    for seconds in [0.05] * 10 + [0.05 * 1.15, 0.05 / 1.15] * 10:
        monitor.note(Reading(stretches=(Stretch(1_000_000, seconds),)), 0)
    assert not monitor.changes


def test_however_restless_it_asks_no_more_than_was_saved_up() -> None:
    seconds, now, asked = 20.0, 0.0, 0
    monitor = Monitor(8, 0, lambda: now)
    for _ in range(round(seconds / 0.01)):
        now += 0.01
        monitor.asking.be_restless()
        monitor.note(Reading(), 10**9)  # which would pay for any number of probes
        asked += len(monitor.asking.due())
    most = MOST_SAVED + SAVED_PER_SECOND * seconds
    assert 0.9 * most < asked <= most + seconds * LEAST_PROBES_PER_SECOND


def test_a_pause_is_no_calm_in_which_probes_are_saved_up() -> None:
    now = 0.0
    monitor = Monitor(8, 0, lambda: now)

    def asked_in(steps: int) -> int:
        nonlocal now
        asked = 0
        for _ in range(steps):
            now += 0.02
            monitor.asking.be_restless()
            monitor.note(Reading(), 10**9)
            asked += len(monitor.asking.due())
        return asked

    asked_in(1000)  # until nothing is left
    for _ in range(10):  # of a program that tests for a minute now and then
        now += 60.0
        assert asked_in(100) <= SAVED_PER_SECOND * (2.0 + LONGEST_STEP) + 2 * PROBES_AT_ONCE


@pytest.mark.parametrize(("rate_before", "is_believed"), [(1 / 10, True), (1 / 1.8, False)])
def test_two_brief_stretches_of_far_more_than_was_known_are_a_rise(rate_before: float, is_believed: bool) -> None:
    brief, monitor = Stretch(20_000, 0.001), Monitor(4)
    rate = brief.nbytes / brief.seconds
    for _ in range(10):
        monitor.note(Reading(stretches=(Stretch(20_000, 0.001 / rate_before),)), 0)
    monitor.note(Reading(stretches=(brief,)), 0)
    assert value(monitor.beta()) == pytest.approx(1 / (rate_before * rate))  # one may be packets that came in a bunch
    monitor.note(Reading(stretches=(brief,)), 0)
    assert (value(monitor.beta()) == pytest.approx(1 / rate)) == is_believed


@pytest.mark.parametrize(("agreed", "is_believed"), [(None, False), (1.0, False), (2.0, True), (8.0, True)])
def test_one_look_at_a_higher_rate_is_enough_where_others_have_seen_it(agreed: float | None, is_believed: bool) -> None:
    slow, fast, monitor = Stretch(50_000, 0.02), Stretch(20_000, 0.001), Monitor(4)
    agreed_beta = agreed and slow.seconds / slow.nbytes / agreed
    for _ in range(10):
        monitor.note(Reading(stretches=(slow,)), 0, agreed_beta=agreed_beta)
    monitor.note(Reading(stretches=(fast,)), 0, agreed_beta=agreed_beta)
    believed = fast if is_believed else slow
    assert value(monitor.beta()) == pytest.approx(believed.seconds / believed.nbytes)


def test_two_bunches_are_not_held_to_be_the_network_for_long() -> None:
    monitor = Monitor(8)
    for _ in range(5):
        monitor.note(Reading(stretches=(Stretch(500_000, 0.05),)), 0)
    for _ in range(2):
        monitor.note(Reading(stretches=(Stretch(63_000, 0.003),)), 0)
    for _ in range(5):
        monitor.note(Reading(stretches=(Stretch(15_000, 0.0015),)), 0)
    assert value(monitor.beta()) == pytest.approx(1e-7, rel=0.1)


def test_a_rise_that_a_long_stretch_saw_is_not_given_up_for_a_senders_share() -> None:
    monitor = Monitor(8)
    for _ in range(5):
        monitor.note(Reading(stretches=(Stretch(500_000, 0.05),)), 0)
    monitor.note(Reading(stretches=(Stretch(800_000, 0.02),)), 0, agreed_beta=1 / 30e6)
    for _ in range(5):
        monitor.note(Reading(stretches=(Stretch(28_000, 0.002),)), 0)
    assert value(monitor.beta()) == pytest.approx(1 / 40e6, rel=0.1)


@pytest.mark.parametrize("noise", [1.05, 1.3, 1.5, 4.0])
def test_what_long_stretches_have_told_is_not_forgotten_for_a_brief_one(noise: float) -> None:
    monitor = Monitor(8)
    for _ in range(5):
        monitor.note(Reading(stretches=(Stretch(500_000, 0.05),)), 0)
    share, bunch = Stretch(7_000, 0.002), Stretch(round(20_000 * noise), 0.002)
    for stretch in ([share] * 8 + [bunch]) * 3 + [share] * 8:
        monitor.note(Reading(stretches=(stretch,)), 0)
        assert value(monitor.beta()) == pytest.approx(1e-7, rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_a_noisy_machine_is_not_a_changing_network(seed: int) -> None:
    network = Network(8, often_late, seed)
    network.steps(300)
    assert not network.monitor.changes


# --- nonsense

NONSENSE = (math.nan, math.inf, -math.inf, 0.0, -1.0, 1e300, 5e-324)
numbers = st.one_of(st.sampled_from(NONSENSE), st.floats(), st.floats(1e-6, 10))
sizes = st.one_of(st.integers(-(2**70), 2**70), st.integers(1, 10**9))
readings = st.builds(
    Reading,
    st.lists(st.tuples(st.integers(-5, 10), numbers)).map(tuple),
    st.lists(st.builds(Stretch, sizes, numbers)).map(tuple),
    sizes,
    st.lists(st.tuples(st.integers(-5, 10), numbers)).map(tuple),
    st.lists(st.tuples(st.integers(-5, 10), numbers, sizes)).map(tuple),
)


@given(st.lists(st.tuples(readings, sizes), max_size=12))
def test_no_nonsense_gets_out_whatever_comes_in(noted: list[tuple[Reading, int]]) -> None:
    monitor = Monitor(4, rank=1)
    for reading, sent_bytes in noted:
        monitor.note(reading, sent_bytes)
        assert set(monitor.asking.due()) <= {0, 2, 3}
        for estimate in (monitor.alpha(), monitor.beta(), *monitor.pairs().values()):
            assert estimate.value is None or 1e-14 <= estimate.value <= 100
            assert 0 <= estimate.confidence <= 1


@pytest.mark.parametrize("bad", NONSENSE)
def test_nonsense_changes_nothing_and_is_counted(bad: float) -> None:
    network = Network()
    network.steps(10)
    before = value(network.monitor.alpha()), value(network.monitor.beta())
    network.monitor.note(Reading(((1, bad), (77, 0.001)), (Stretch(1000, bad), Stretch(-5, 1.0))), network.sent_bytes)
    assert (value(network.monitor.alpha()), value(network.monitor.beta())) == before
    assert network.monitor.rejected == 4


# --- probes


@pytest.mark.parametrize("nbytes", [1_000, 30_000, 500_000])
def test_probes_stay_under_one_percent_of_the_bytes_sent(nbytes: int) -> None:
    network = Network()
    network.steps(500, nbytes)
    floor = network.now * PROBE_BYTES  # one a second, whatever is sent
    assert network.probe_bytes <= max(0.01 * network.sent_bytes, floor)
    assert network.probe_bytes > 0


def test_what_is_not_as_expected_makes_it_ask_more() -> None:
    network = Network()
    network.steps(200, 30_000)
    before = network.probe_bytes
    network.steps(8, 30_000)
    calm, before = network.probe_bytes - before, network.probe_bytes
    network.monitor.asking.be_restless()
    network.steps(8, 30_000)
    assert network.probe_bytes - before > 1.5 * calm > 0


def test_steps_that_send_little_do_not_pay_for_a_first_look() -> None:
    """Or they would have nothing to ask with when the network changes soon."""
    network = Network()
    network.sent_bytes = 50_000
    for _ in range(3):
        network._asked = [1, 2, 3]
        network.step(0)
    network.monitor.asking.begin()
    network.steps(30, 2_000)
    network.alpha = 10 * ALPHA
    for _ in range(10):
        network.monitor.asking.be_restless()  # for a step was not what it was
        network.step(2_000)
    assert value(network.monitor.alpha()) == pytest.approx(10 * ALPHA, rel=0.1)


def test_without_traffic_there_is_one_probe_a_second_each_peer_in_turn() -> None:
    network = Network()
    asked: list[int] = []
    for _ in range(65):
        network.step(0)
        asked += network._asked
    assert asked == [1, 2, 3, 1, 2, 3]


def test_a_rank_alone_probes_nobody() -> None:
    network = Network(world_size=1)
    network.steps(30)
    assert network.monitor.asking.due() == []
