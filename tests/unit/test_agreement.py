"""Ranks that see different numbers come to hold one, whatever some of them see."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.control.agreement import ALPHAS, START, moved, off, rounded


def settle(own: list[float | None], agreed: float | None, steps: int) -> float | None:
    """What is agreed on after so many steps in which nothing changes."""
    for _ in range(steps):
        told = [off(value, agreed, START.alpha, ALPHAS) for value in own]
        agreed = moved(agreed, sum(o for o, _ in told), sum(k for _, k in told), len(own), START.alpha, ALPHAS)
    return agreed


@given(st.floats(1e-6, 10.0), st.integers(1, 16))
def test_ranks_that_see_the_same_agree_at_once(value: float, ranks: int) -> None:
    assert settle([value] * ranks, None, 1) == pytest.approx(value, rel=1e-6)


@given(st.floats(1e-5, 1.0), st.floats(1e-5, 1.0))
def test_a_change_that_all_see_is_followed_at_once(before: float, after: float) -> None:
    assert settle([after] * 4, before, 1) == pytest.approx(after, rel=1e-5)


@pytest.mark.parametrize("absurd", [1e-7, 1e-6, 50.0, 100.0])
@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_one_rank_that_is_absurdly_wrong_drags_the_others_along_only_so_far(absurd: float, ranks: int) -> None:
    agreed = settle([0.005] * (ranks - 1) + [absurd], 0.005, 200)
    assert agreed is not None
    assert 4 ** (-1 / (ranks - 1)) - 1e-5 <= agreed / 0.005 <= 4 ** (1 / (ranks - 1)) + 1e-5


@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_one_that_is_alone_with_what_it_sees_moves_the_others_only_so_far_at_a_time(ranks: int) -> None:
    alone: list[float | None] = [0.05, *[None] * (ranks - 1)]
    agreed = settle(alone, 0.005, 1)
    assert agreed is not None and 0.005 < agreed < 0.005 * 2.6
    assert settle(alone, 0.005, 100) == pytest.approx(0.05, rel=0.01)  # but nobody says otherwise
    assert settle([0.05] * (ranks // 2) + [None] * (ranks // 2), 0.005, 1) == pytest.approx(0.05, rel=1e-5)


@given(st.lists(st.sampled_from([None, math.nan, math.inf, -1.0, 0.0, 1e300]), min_size=1, max_size=8))
def test_ranks_that_know_nothing_move_nobody(own: list[float | None]) -> None:
    assert settle(own, None, 3) is None
    assert settle(own, 0.02, 3) == 0.02


@given(st.floats(allow_nan=True), st.floats(allow_nan=True), st.one_of(st.none(), st.floats(1e-6, 10)))
def test_whatever_the_sums_are_the_result_can_be_believed(off_sum: float, known: float, agreed: float | None) -> None:
    value = moved(agreed, off_sum, known, 4, START.alpha, ALPHAS)
    assert value == agreed or (value is not None and ALPHAS[0] <= value <= ALPHAS[1])


@given(st.floats(1e-12, 1e3))
def test_the_last_bits_of_a_computation_do_not_matter(value: float) -> None:
    assert rounded(value) == rounded(rounded(value)) == pytest.approx(value, rel=1e-6)
