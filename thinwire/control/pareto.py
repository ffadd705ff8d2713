"""The paper's choice of the ratio: a knee of the front of time against 1/gain.

Reference: Tyagi & Swany 2023, Eq. (6): c_opt = argmin F(t_sync(c), 1/gain(c)) for c in [c_low, c_high], the time of
compression being taken for constant. The paper does not say which point of the front it takes; its published code takes
the least augmented scalarisation with weights w = (0.6 for time, 0.4 for 1/gain), calling pymoo's ASF with 1/w. Pymoo
divides by the weights that it is given (ASF = max_i F_i / w_i; Wierzbicki 1980), so what is minimised is
    max(0.6 t^, 0.4 g^)
with t^ and g^ the two objectives scaled to [0, 1] over the front.

Where more entries take longer and keep more, every ratio is on the front. The first term then rises with the ratio and
the second falls, and the knee is where they cross: a search with a population adds nothing to a sweep. NSGA-II is here
because the paper uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Curve: TypeAlias = Callable[[float], float]

WEIGHTS = (0.6, 0.4)  # time, 1/gain
SOLVERS = ("sweep", "nsga2")
_SWEPT = 200
_CLOSE = 1e-4  # the knee is found to this share of the ratio


class Front(NamedTuple):
    """The ratios that no other beats in both objectives, ascending, with their seconds and gains."""

    ratios: Array
    seconds: Array
    gains: Array


def check_solver(name: str) -> None:
    """Refuse a solver that is unknown or not installed, before ranks wait for the one that lacks it."""
    if name not in SOLVERS:
        raise ValueError(f"unknown solver {name!r}. Known are: {', '.join(SOLVERS)}.")
    if name == "nsga2":
        try:
            import pymoo  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "solver='nsga2' needs pymoo: pip install 'thinwire[moo]'. solver='sweep' finds the same."
            ) from error


def front(seconds: Curve, gain: Curve, low: float, high: float, solver: str = "sweep") -> Front:
    """The Pareto front of time and 1/gain for ratios from `low` to `high`.

    Args:
        seconds: the time of a step, or of its exchange, at a ratio.
        gain: the share of energy kept at a ratio, in (0, 1].
        solver: "sweep" looks at 200 ratios from end to end; "nsga2" has pymoo look for them, as the paper does.
    """
    if not 0 < low <= high <= 1:
        raise ValueError(f"ratios must satisfy 0 < low <= high <= 1, got {low=}, {high=}.")
    check_solver(solver)
    found = np.geomspace(low, high, _SWEPT) if solver == "sweep" else _nsga2(seconds, gain, low, high)
    # NSGA-II comes near to the ends, not onto them; both solvers should scale by the same two.
    ratios = np.unique(np.clip(np.append(found, (low, high)), low, high))
    times, gains = np.array([seconds(r) for r in ratios]), np.array([gain(r) for r in ratios])
    kept = _undominated(times, gains)
    return Front(ratios[kept], times[kept], gains[kept])


class Knee(NamedTuple):
    """The ratio at which max(0.6 t^, 0.4 g^) is least, and what that is at any seconds and gain."""

    ratio: float
    cost: Callable[[float, float], float]


def knee(seconds: Curve, gain: Curve, low: float, high: float, solver: str = "sweep") -> Knee:
    """The knee of that front, and its measure.

    The best point of the front is only as near as its neighbours are far: 40 of them, as the paper's population has,
    lie 10 % apart and more. So the search goes on between these neighbours until the ratio is known to 0.01 %, with
    time and 1/gain scaled as the front has them.

    >>> round(knee(lambda c: 0.01 + 5 * c, lambda c: c**0.5, 0.001, 0.1).ratio, 4)
    0.0136
    """
    points = front(seconds, gain, low, high, solver)
    scaled = _scaled(points)

    def cost(ratio: float) -> float:
        return scaled(seconds(ratio), gain(ratio))

    costs = [scaled(t, g) for t, g in zip(points.seconds, points.gains, strict=True)]
    best = int(np.argmin(costs))
    left, right = points.ratios[max(best - 1, 0)], points.ratios[min(best + 1, len(costs) - 1)]
    while right - left > _CLOSE * right:
        between = np.linspace(left, right, 9)
        best = int(np.argmin([cost(r) for r in between]))
        left, right = between[max(best - 1, 0)], between[min(best + 1, 8)]
    return Knee(float((left + right) / 2), scaled)


def _scaled(points: Front) -> Callable[[float, float], float]:
    """max(0.6 t^, 0.4 g^), from seconds and gain."""
    least = points.seconds.min(), (1 / points.gains).min()
    most = points.seconds.max(), (1 / points.gains).max()
    spans = [high - low or 1.0 for low, high in zip(least, most, strict=True)]  # a flat objective decides nothing

    def cost(seconds: float, gain: float) -> float:
        objectives = zip(WEIGHTS, (seconds, 1 / gain), least, spans, strict=True)
        return float(max(weight * (value - low) / span for weight, value, low, span in objectives))

    return cost


def _undominated(seconds: Array, gains: Array) -> Array:
    """Which points are on the front: from the fastest on, those that keep more than all faster ones."""
    order = np.lexsort((-gains, seconds))
    before = np.maximum.accumulate(np.append(0.0, gains[order][:-1]))
    return np.sort(order[gains[order] > before])


def _nsga2(seconds: Curve, gain: Curve, low: float, high: float) -> Array:
    """The ratios of NSGA-II's last front, with the settings of the paper's code: Deb et al. 2002, in pymoo."""
    from pymoo.algorithms.moo.nsga2 import NSGA2
    from pymoo.core.problem import ElementwiseProblem
    from pymoo.operators.crossover.sbx import SBX
    from pymoo.operators.mutation.pm import PM
    from pymoo.operators.sampling.rnd import FloatRandomSampling
    from pymoo.optimize import minimize

    class Problem(ElementwiseProblem):  # type: ignore[misc]  # pymoo has no types
        def __init__(self) -> None:
            super().__init__(n_var=1, n_obj=2, xl=low, xu=high)

        def _evaluate(self, x: Array, out: dict[str, list[float]], *_: object, **__: object) -> None:
            out["F"] = [seconds(float(x[0])), 1 / gain(float(x[0]))]

    algorithm = NSGA2(
        pop_size=40,
        n_offsprings=10,
        sampling=FloatRandomSampling(),
        crossover=SBX(prob=0.9, eta=15),
        mutation=PM(eta=20),
        eliminate_duplicates=True,
    )
    found = minimize(Problem(), algorithm, ("n_gen", 40), seed=1, verbose=False)
    return np.asarray(found.X, dtype=np.float64).reshape(-1)
