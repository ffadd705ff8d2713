"""Hope: what noise may do to it, and how it ends."""

from __future__ import annotations

import random

import pytest

from thinwire.control.hope import FACTOR, LIKELY, MOST_PATIENCE, PATIENCE, USUAL_NOISE, Hope, Noise

TRIALS = 1000


def ends_sure(draw: random.Random, moving: float, moved: float, noise: float, true: bool, long_ago: bool) -> bool:
    """Whether a hope ends in certainty, over exchanges that are late by noise, and by what is not as hoped for.

    `moving` and `moved` are what the bytes of the plan now and of the one before take, if the hope is true.
    """
    hope = Hope(FACTOR, moved=moved)
    while hope.is_open:
        later = 0.0 if true else (FACTOR - 1) * moving
        usual = (FACTOR - 1) * moved if true and long_ago else 0.0
        hope = hope.after_an_exchange(later + usual + draw.gauss(0, noise), moving, noise)
    return hope.factor > 1


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 1.0, 3.0])  # what bytes take longer in vain, over the noise
@pytest.mark.parametrize("times", [1, 4])  # as many bytes as before
def test_noise_alone_makes_few_hopes_come_true(share: float, times: int) -> None:
    moving = share / (FACTOR - 1)
    draw = random.Random(1)
    sure = sum(ends_sure(draw, moving, moving / times, 1.0, true=False, long_ago=False) for _ in range(TRIALS))
    assert sure <= 0.07 * TRIALS  # two sums may each be sure by mistake, with odds of 1 to 20 at most


@pytest.mark.parametrize("long_ago", [False, True])
def test_a_hope_that_is_true_is_mostly_confirmed_where_it_shows(long_ago: bool) -> None:
    moving = 3.0 / (FACTOR - 1)
    draw = random.Random(2)
    sure = sum(ends_sure(draw, moving, moving / 4, 1.0, true=True, long_ago=long_ago) for _ in range(TRIALS))
    assert sure >= 0.75 * TRIALS  # in vain by mistake: odds of 1 to 4


def test_over_exchanges_that_tell_nothing_it_is_given_up_after_a_while() -> None:
    hope = Hope(FACTOR)
    for _ in range(PATIENCE - 1):
        hope = hope.after_silence()
        assert hope.is_open
    assert hope.after_silence().factor == 1


def test_where_nothing_is_hoped_for_silence_is_no_reason_to() -> None:
    assert Hope().after_silence() == Hope()


def test_steps_that_nobody_heard_of_count_for_how_long_a_rate_was_not_seen() -> None:
    hope = Hope()
    for _ in range(PATIENCE // 4 - 1):
        hope = hope.after_an_exchange(0.0, 0.0, 1.0, steps=4)
        assert hope.factor == 1
    assert hope.after_an_exchange(0.0, 0.0, 1.0, steps=4).factor == FACTOR


@pytest.mark.parametrize("times", [1.0, 2.0])  # as many bytes as before are sent in hope
def test_a_hope_in_vain_is_waited_longer_and_longer_for_up_to_a_limit(times: float) -> None:
    hope = Hope()
    for _ in range(10):
        while not hope.is_open:
            hope = hope.after_an_exchange(0.0, 0.01 * FACTOR, 1.0)
        while hope.is_open:
            hope = hope.after_an_exchange(0.0, 0.01 * times, 1.0)
    assert hope.patience == MOST_PATIENCE


@pytest.mark.parametrize("patience", [PATIENCE, MOST_PATIENCE])
@pytest.mark.parametrize("moving", [0.01, 10.0])  # over the noise
def test_nothing_is_hoped_for_without_a_reason_before_patience_ends(moving: float, patience: int) -> None:
    hope = Hope(patience=patience)
    for _ in range(patience - 1):
        hope = hope.after_an_exchange(0.0, moving, 1.0)
        assert hope.factor == 1
    assert hope.after_an_exchange(0.0, moving, 1.0).is_open


def test_what_is_tried_and_what_seems_likely_is_heard_of_at_once() -> None:
    assert not Hope().is_urgent
    assert Hope(FACTOR).is_urgent
    assert Hope(evidence=LIKELY).is_urgent and not Hope(evidence=LIKELY - 0.1).is_urgent


EXCHANGE, MOVING, TIMES = 8e-3, 1.7e-3, 3  # seconds; what of them moves bytes; times as many are sent in hope


def steps_to_certainty(draw: random.Random, share: float, alike: float, rises_at: int, steps: int) -> int | None:
    """When a rate that rises 8 times at that step is believed to have: exchanges differ by such a share.

    Args:
        alike: the correlation of one exchange with the next.
    """
    hope, noise, drift = Hope(), Noise(), 0.0
    for step in range(steps):
        drift = alike * drift + draw.gauss(0, 1) * (1 - alike**2) ** 0.5
        moving = MOVING * (TIMES if hope.is_open else 1)
        rate = FACTOR if step >= rises_at else 1
        took = (EXCHANGE - MOVING + moving / rate) * (1 + share * drift)
        moving /= hope.factor
        expected = EXCHANGE - MOVING + moving
        known, noise = noise, noise if hope.is_open else noise.after((took - expected) / expected)
        hope = hope.after_an_exchange(took - expected, moving, known.deviation * expected)
        if hope.has_come_true:
            return step
    return None


@pytest.mark.parametrize(("share", "alike"), [(0.05, 0.0), (0.1, 0.5), (0.2, 0.0), (0.35, 0.0)])
def test_exchanges_that_differ_much_are_seldom_taken_for_a_risen_rate(share: float, alike: float) -> None:
    draws = [random.Random(seed) for seed in range(40)]
    found = [steps_to_certainty(draw, share, alike, rises_at=2000, steps=1000) for draw in draws]
    assert sum(step is not None for step in found) <= 2


@pytest.mark.parametrize(("share", "alike"), [(0.05, 0.0), (0.1, 0.5), (0.2, 0.0), (0.35, 0.0)])
def test_and_one_that_has_risen_is_mostly_found_out_all_the_same(share: float, alike: float) -> None:
    draws = [random.Random(seed) for seed in range(40)]
    found = [steps_to_certainty(draw, share, alike, rises_at=300, steps=1000) for draw in draws]
    assert sum(step is not None and step >= 300 for step in found) >= 35


def test_what_is_alike_counts_for_less_and_what_hardly_differs_for_no_more_than_is_usual() -> None:
    alternating, steady, calm = Noise(), Noise(), Noise()
    for step in range(200):
        alternating = alternating.after(0.3 if step % 2 else -0.3)
        steady = steady.after(0.3 if step // 20 % 2 else -0.3)
        calm = calm.after(0.001)
    assert alternating.deviation == pytest.approx(0.3, rel=0.01)
    assert steady.deviation > 2 * alternating.deviation
    assert calm.deviation == USUAL_NOISE
