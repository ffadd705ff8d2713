"""What the largest entries hold, by a histogram, and what an exchange will send, by what was seen."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from thinwire.compress import base, histogram
from thinwire.compress.histogram import Histogram
from thinwire.control.gain import CANDIDATES, SHAPES, GainCurve


def exact_gains(x: torch.Tensor) -> np.ndarray:
    """By sorting."""
    squares = np.sort(x.double().square().numpy())[::-1]
    kept = np.cumsum(squares)
    return np.array([kept[max(1, int(ratio * len(kept))) - 1] for ratio in CANDIDATES]) / kept[-1]


def counted_gains(x: torch.Tensor) -> np.ndarray:
    found = Histogram.of(x)
    assert found.not_finite == 0
    return found.energy_at(CANDIDATES) / found.energy


def gradient_of_a_cnn() -> torch.Tensor:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 10)
    )
    F.cross_entropy(net(torch.randn(16, 1, 8, 8)), torch.arange(16) % 10).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def mostly_zero(numel: int) -> torch.Tensor:
    x = torch.zeros(numel)
    x[:: numel // 300] = torch.linspace(-1, 1, len(x[:: numel // 300]))
    return x


def two_values(numel: int) -> torch.Tensor:
    """At opposite ends of their bins, which is the worst that can be."""
    x = torch.ones(numel)
    x[::50] = 2 - 1e-5
    return x


NUMEL = 300_000
GENERATOR = np.random.default_rng(0)
TENSORS = {
    "gaussian": torch.from_numpy(GENERATOR.standard_normal(NUMEL)),
    "laplace": torch.from_numpy(GENERATOR.laplace(size=NUMEL)).float(),
    "student": torch.from_numpy(GENERATOR.standard_t(2, NUMEL)).float(),
    "equal": torch.full((NUMEL,), 0.3),
    "mostly zero": mostly_zero(NUMEL),
    "two values": two_values(NUMEL),
    "gradient of a CNN": gradient_of_a_cnn(),
    "small numbers": torch.from_numpy(GENERATOR.standard_normal(NUMEL) * 1e-36).float(),
    "half precision": torch.from_numpy(GENERATOR.standard_normal(NUMEL)).bfloat16(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_counting_gives_the_gain_of_an_exact_top_k_at_every_candidate_ratio_within_two_percent(name: str) -> None:
    np.testing.assert_allclose(counted_gains(TENSORS[name]), exact_gains(TENSORS[name]), rtol=0.02)


@pytest.mark.parametrize("name", TENSORS)
def test_counting_a_sample_and_the_largest_whole_is_as_good(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histogram, "_SAMPLE", 1 << 16)
    np.testing.assert_allclose(counted_gains(TENSORS[name]), exact_gains(TENSORS[name]), rtol=0.02)


@pytest.mark.parametrize("name", TENSORS)
def test_without_compiled_loops_the_counts_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Histogram.of(TENSORS[name]).counts
    monkeypatch.setattr(base, "kernels", None)
    again = Histogram.of(TENSORS[name]).counts
    if TENSORS[name].dtype == torch.float64:  # rounding to float32 lifts a few over the edge of their bin
        assert np.abs(again - counted).sum() < 1e-4 * NUMEL
    else:
        np.testing.assert_array_equal(again, counted)


def test_rows_of_a_power_of_two_do_not_hide_columns_from_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histogram, "_SAMPLE", 1 << 14)
    x = torch.randn(512, 1024) * torch.linspace(0.1, 3, 1024)
    np.testing.assert_allclose(counted_gains(x.flatten()), exact_gains(x.flatten()), rtol=0.02)


def test_the_histogram_of_two_parts_is_that_of_the_whole() -> None:
    whole = TENSORS["student"]
    parts, at_once = Histogram.of(whole[:1000]) + Histogram.of(whole[1000:]), Histogram.of(whole)
    np.testing.assert_array_equal(parts.counts, at_once.counts)
    assert (parts.numel, parts.not_finite, parts.energy) == (at_once.numel, at_once.not_finite, at_once.energy)


def test_nothing_holds_nothing() -> None:
    for x in (torch.zeros(0), torch.zeros(5), torch.full((3,), 1e-300, dtype=torch.float64)):
        found = Histogram.of(x)
        assert found.energy == 0
        assert found.energy_at([0.001, 1.0]).tolist() == [0.0, 0.0]


def test_one_entry_is_all_there_is() -> None:
    found = Histogram.of(torch.tensor([-3.0]))
    assert found.energy == pytest.approx(9.0, rel=0.008)
    assert found.energy_at([0.001, 1.0]).tolist() == [found.energy] * 2


def test_a_subnormal_is_a_number() -> None:
    assert Histogram.of(torch.full((4,), 1e-39)).energy == pytest.approx(4e-78, rel=0.1)  # few bits are left there


@pytest.mark.parametrize("numel", [6, 40_000])
def test_what_is_not_finite_is_counted_apart(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histogram, "_SAMPLE", 1 << 13)
    x = torch.ones(numel)
    x[:5] = torch.tensor([math.nan, math.inf, -math.inf, math.nan, 1.0])
    found = Histogram.of(x)
    assert 2 <= found.not_finite <= 4
    assert 0 < found.energy <= 1.01 * numel
    assert np.isfinite(found.energy_at(CANDIDATES)).all()
    assert Histogram.of(torch.full((numel,), math.nan)).not_finite > 0
    assert Histogram.of(torch.full((numel,), 1e300, dtype=torch.float64)).not_finite == numel


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=50), st.floats(0.001, 1), st.floats(0.001, 1))
def test_more_entries_never_hold_less(entries: list[float], one: float, other: float) -> None:
    found = Histogram.of(torch.tensor(entries))
    less, more = found.energy_at(sorted((one, other)))
    assert 0 <= less <= more * (1 + 1e-12)
    assert more <= found.energy


RATIOS = np.geomspace(1e-4, 1.0, 200)

curves = st.builds(
    lambda kept, measured: _curve(kept, measured),
    st.lists(st.tuples(st.sampled_from(CANDIDATES), st.floats(-1, 2) | st.just(math.nan)), max_size=12),
    st.lists(st.tuples(st.sampled_from([*SHAPES, "dense"]), st.floats(-1, 2), st.floats(-1, 2)), max_size=12),
)


def _curve(kept: list[tuple[float, float]], measured: list[tuple[str, float, float]]) -> GainCurve:
    curve = GainCurve()
    for told, sent in itertools.zip_longest(kept, measured):
        curve = curve.with_kept(*told) if told else curve
        curve = curve.with_measured(*sent) if sent else curve
    return curve


@given(curves, st.sampled_from([*SHAPES, "dense"]))
def test_a_gain_is_a_share_never_falls_with_the_ratio_and_is_one_at_one(curve: GainCurve, exchange: str) -> None:
    gains = [curve.gain(exchange, float(ratio)) for ratio in RATIOS]
    assert all(0 <= gain <= 1 for gain in gains)
    assert gains == sorted(gains)
    assert gains[-1] == 1


@given(curves)
def test_a_curve_survives_as_json(curve: GainCurve) -> None:
    assert GainCurve.from_json(json.loads(json.dumps(curve.to_json()))) == curve


@pytest.mark.parametrize("exchange", SHAPES)
def test_what_was_sent_lately_is_expected_again(exchange: str) -> None:
    curve = GainCurve().with_kept(0.1, 0.9)
    for _ in range(200):
        curve = curve.with_kept(0.1, 0.6).with_measured(exchange, 0.02, 0.25)
    assert curve.gain(exchange, 0.02) == pytest.approx(0.25, rel=1e-3)


def test_one_odd_step_does_not_change_what_is_expected_much() -> None:
    curve = GainCurve().with_measured("topk-allgather", 0.01, 0.2)
    odd = curve.with_measured("topk-allgather", 0.01, 0.9)
    assert odd.gain("topk-allgather", 0.01) == pytest.approx(0.2, rel=0.15)


def test_followers_send_less_than_leaders() -> None:
    curve = GainCurve().with_kept(0.1, 0.9)
    for ratio in CANDIDATES:
        assert curve.gain("star-topk", ratio) < curve.gain("topk-allgather", ratio)


def test_a_gain_of_old_is_forgotten_when_only_histograms_come() -> None:
    curve = GainCurve().with_measured("topk-allgather", 0.001, 0.5)
    for _ in range(10):
        curve = curve.with_kept(0.1, 0.8)
    assert curve == _curve([(0.1, 0.8)] * 10, [])


def test_ratios_that_were_tried_out_have_the_gain_that_was_found_and_others_lie_between() -> None:
    found = dict(zip(CANDIDATES, (0.8, 0.5, 0.3, 0.2, 0.1), strict=True))
    curve = GainCurve().with_measured("star-topk", 0.01, 0.2).with_explored("star-topk", found)
    for ratio, gain in found.items():
        assert curve.gain("star-topk", ratio) == pytest.approx(gain, rel=1e-3)
    for low, high in itertools.pairwise(sorted(found)):
        assert found[low] < curve.gain("star-topk", math.sqrt(low * high)) < found[high]
    assert curve.gain("topk-allgather", 0.01) > curve.gain("star-topk", 0.01)
    assert GainCurve.from_json(json.loads(json.dumps(curve.to_json()))) == curve


def test_a_gain_that_has_changed_since_ratios_were_tried_out_is_noticed() -> None:
    curve = GainCurve()
    assert curve.since_explored() == math.inf
    curve = curve.with_measured("star-topk", 0.01, 0.2).with_explored("star-topk", dict.fromkeys(CANDIDATES, 0.5))
    assert curve.since_explored() == pytest.approx(1, rel=1e-3)
    for _ in range(20):
        curve = curve.with_measured("star-topk", 0.01, 0.1)
    assert curve.since_explored() < 0.9


def test_a_sample_that_stands_for_several_steps_weighs_as_much_as_that_many() -> None:
    begun = GainCurve().with_measured("topk-allgather", 0.01, 0.2)
    one_by_one = begun
    for _ in range(4):
        one_by_one = one_by_one.with_measured("topk-allgather", 0.01, 0.3)
    at_once = begun.with_measured("topk-allgather", 0.01, 0.3, steps=4)
    assert at_once.gain("topk-allgather", 0.01) == pytest.approx(one_by_one.gain("topk-allgather", 0.01), rel=1e-5)


def test_what_was_tried_out_before_still_holds_where_the_next_try_finds_nothing() -> None:
    """As when the gradients of all trial steps were not finite."""
    curve = GainCurve(rate=0.5).with_explored("topk-allgather", {0.1: 0.3, 0.01: 0.05})
    since = curve._replace(rate=0.8)
    before = [since.gain("topk-allgather", ratio) for ratio in (0.1, 0.02, 0.01)]
    after = since.with_explored("topk-allgather", {})
    assert [after.gain("topk-allgather", ratio) for ratio in (0.1, 0.02, 0.01)] == pytest.approx(before, rel=1e-5)
    assert since.since_explored() == pytest.approx(1.6) and after.since_explored() == 1.0
