"""The front and its knee, swept and searched."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from thinwire.control import paper, pareto
from thinwire.types import Network

LOW, HIGH = 0.001, 0.1
CURVES: dict[str, Callable[[float], float]] = {
    **{model: paper.gain_curve(readings) for model, readings in paper.GAINS.items()},
    "root": lambda ratio: ratio**0.5,
    "saturating": lambda ratio: ratio / (ratio + 0.01),
    "nearly flat": lambda ratio: ratio**0.05,
}
NETWORKS = [Network(alpha=1e-3, beta=8e-9 / 25), Network(alpha=5e-2, beta=8e-9), Network(alpha=1e-3, beta=8e-9)]


def _seconds(network: Network, numel: int = 61_100_840) -> Callable[[float], float]:
    return lambda ratio: min(price(network, 4 * numel, ratio, 8) for price in paper.COMPRESSED.values())


@pytest.mark.parametrize("network", NETWORKS, ids=str)
@pytest.mark.parametrize("curve", CURVES)
def test_both_solvers_choose_the_same_ratio_within_2_percent(curve: str, network: Network) -> None:
    pytest.importorskip("pymoo")
    swept, searched = (
        pareto.knee(_seconds(network), CURVES[curve], LOW, HIGH, solver=solver).ratio for solver in pareto.SOLVERS
    )
    assert swept == pytest.approx(searched, rel=0.02)


@pytest.mark.parametrize("curve", CURVES)
def test_the_knee_is_where_the_weighted_objectives_cross(curve: str) -> None:
    """With time and 1/gain monotone, max(0.6 t^, 0.4 g^) is least where both are equal."""
    seconds, gain = _seconds(NETWORKS[2]), CURVES[curve]
    ratio, cost = pareto.knee(seconds, gain, LOW, HIGH)
    time = (seconds(ratio) - seconds(LOW)) / (seconds(HIGH) - seconds(LOW))
    loss = (1 / gain(ratio) - 1 / gain(HIGH)) / (1 / gain(LOW) - 1 / gain(HIGH))
    assert 0.6 * time == pytest.approx(0.4 * loss, rel=2e-3)  # the ratio is known to 0.01 %
    assert cost(seconds(ratio), gain(ratio)) == pytest.approx(0.6 * time, rel=2e-3)


def test_pymoos_own_asf_takes_the_same_point_of_the_front() -> None:
    """The published code's call, ASF().do(F, 1/w), is max(w F)."""
    asf = pytest.importorskip("pymoo.decomposition.asf").ASF()
    points = pareto.front(_seconds(NETWORKS[0]), CURVES["resnet18"], LOW, HIGH)
    objectives = np.stack([points.seconds, 1 / points.gains], axis=1)
    scaled = (objectives - objectives.min(0)) / (objectives.max(0) - objectives.min(0))
    chosen = points.ratios[asf.do(scaled, 1 / np.array(pareto.WEIGHTS)).argmin()]
    neighbours = points.ratios[np.abs(points.ratios / chosen - 1) < 0.05]
    assert neighbours[0] <= pareto.knee(_seconds(NETWORKS[0]), CURVES["resnet18"], LOW, HIGH).ratio <= neighbours[-1]


def test_the_knee_of_affine_time_does_not_see_the_network() -> None:
    """Scaling to [0, 1] takes latency and rate out of the paper's rule: why it is not our default."""
    knees = {
        round(pareto.knee(lambda c, a=a, b=b: a + b * c, CURVES["resnet18"], LOW, HIGH).ratio, 5)  # type: ignore[misc]
        for a, b in ((1e-3, 1.0), (1e-1, 1e-2), (0.0, 1e3))
    }
    assert len(knees) == 1


def test_only_what_nothing_beats_is_on_the_front() -> None:
    points = pareto.front(lambda c: abs(c - 0.01) + 0.001, CURVES["root"], LOW, HIGH)
    assert points.ratios[0] == pytest.approx(0.01, rel=0.03)  # fewer entries than that take longer and keep less
    assert points.ratios[-1] == HIGH
    assert (np.diff(points.seconds) > 0).all()
    assert (np.diff(points.gains) > 0).all()


def test_a_single_ratio_and_flat_objectives_have_a_knee_too() -> None:
    assert pareto.knee(lambda c: c, CURVES["root"], 0.01, 0.01).ratio == 0.01
    assert pareto.knee(lambda c: 1.0, CURVES["root"], LOW, HIGH).ratio == HIGH
    assert pareto.knee(lambda c: c, lambda c: 0.5, LOW, HIGH).ratio == LOW


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.1), (0.1, 0.01), (0.1, 2.0), (float("nan"), 0.1)])
def test_bounds_that_are_none_are_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="low <= high"):
        pareto.front(lambda c: c, lambda c: c, low, high)


def test_an_unknown_solver_is_refused_with_those_known() -> None:
    for refuse in (pareto.check_solver, lambda name: pareto.knee(lambda c: c, lambda c: c, LOW, HIGH, solver=name)):
        with pytest.raises(ValueError, match=r"unknown solver 'annealing'\. Known are: sweep, nsga2"):
            refuse("annealing")


@pytest.fixture
def without_pymoo(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("pymoo"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)


@pytest.mark.usefixtures("without_pymoo")
def test_without_pymoo_the_extra_is_named() -> None:
    with pytest.raises(ImportError, match=r"thinwire\[moo\]"):
        pareto.knee(lambda c: c, lambda c: c, LOW, HIGH, solver="nsga2")


@pytest.mark.usefixtures("without_pymoo")
def test_without_pymoo_its_solver_is_refused_before_anything_has_to_be_decided() -> None:
    pareto.check_solver("sweep")
    with pytest.raises(ImportError, match=r"thinwire\[moo\]"):
        pareto.check_solver("nsga2")
