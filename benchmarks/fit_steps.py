"""Candidate forms of the steps that a gain costs, and of the gain at a ratio, fitted to steps_to_accuracy.json.

python benchmarks/fit_steps.py

A form is judged by the models that it has not seen: each in turn is left out, the form is fitted to the others, and the
root mean square of log(predicted / measured) is taken over those left out. The constants printed are those of a fit to
all; thinwire/control/learning.py and gain.py hold them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from thinwire.control.gain import CANDIDATES, GainCurve

RESULTS = Path(__file__).parent / "results" / "steps_to_accuracy.json"
MAIN = (
    "mlp-digits",
    "cnn-digits",
    "cnn-digits-cool",
    "mlp-fashion",
    "cnn-fashion",
    "cnn-fashion-cool",
    "transformer-text",
)
# Those that gather against those that reduce; those that send each rank's largest against the rest.
GATHERED = {"topk-allgather": 0, "ms-topk": 0, "layerwise-topk": 0, "star-topk": 1, "var-topk": 1}
LARGEST = {"topk-allgather": 0, "ms-topk": 0, "layerwise-topk": 1, "star-topk": 1, "var-topk": 1}
EXCHANGES = {"topk-allgather": 0, "ms-topk": 0, "layerwise-topk": 1, "star-topk": 2, "var-topk": 3}

Array = np.ndarray[Any, Any]


class Row(NamedTuple):
    """A run, and how many times the steps of dense it took to a target, or at least took, if it never got there."""

    task: str
    exchange: str
    ratio: float
    world_size: int
    target: int
    gain: float
    dense: float
    factor: float
    reached: bool


def rows(runs: list[dict[str, Any]]) -> list[Row]:
    """One for every run and target, beside the dense run that started the same and saw the same data."""
    dense = {(*_setting(run), run["seed"]): run["steps"] for run in runs if run["exchange"] == "dense"}
    found = []
    for run in runs:
        for target, steps in enumerate(run["steps"] if run["exchange"] != "dense" else ()):
            base = dense[*_setting(run), run["seed"]][target]
            found.append(
                Row(
                    *(run[field] for field in Row._fields[:4]),
                    target=target,
                    gain=min(run["gain"], 0.9999),
                    dense=base,
                    factor=(steps or run["curve"][-1][0]) / base,
                    reached=steps is not None,
                )
            )
    return found


def _setting(run: dict[str, Any]) -> tuple[str, int]:
    return run["task"], run["world_size"]


class Form(NamedTuple):
    """log(factor) of rows by parameters, with where to start; the first few parameters are one for each group."""

    log_factor: Callable[[Array, Array, dict[str, Array]], Array]
    start: tuple[float, ...]
    shared: tuple[float, ...] = ()


FORMS = {
    "N_0 gain^-p": Form(lambda p, q, x: -p * np.log(x["gain"]), (0.3,)),
    "N_0 (1 + a (1/gain - 1)^b)": Form(lambda p, q, x: np.log1p(p * (1 / x["gain"] - 1) ** q[0]), (0.3,), (0.5,)),
    "N_0 (1 + a sqrt(1/gain - 1))": Form(lambda p, q, x: np.log1p(p * np.sqrt(1 / x["gain"] - 1)), (0.3,)),
    "N_0 (1 + a log(1/gain))": Form(lambda p, q, x: np.log1p(-p * np.log(x["gain"])), (0.3,)),
    "N_0 (1 + a (1/gain - 1))": Form(lambda p, q, x: np.log1p(p * (1 / x["gain"] - 1)), (0.1,)),
    "N_0 ratio^-p": Form(lambda p, q, x: -p * np.log(x["ratio"]), (0.2,)),
    "N_0 + d (1/gain - 1)": Form(lambda p, q, x: np.log1p(p * (1 / x["gain"] - 1) / x["dense"]), (10.0,)),
    "N_0 + d sqrt(1/gain - 1)": Form(lambda p, q, x: np.log1p(p * np.sqrt(1 / x["gain"] - 1) / x["dense"]), (30.0,)),
    "N_0 + d (1/gain - 1)^(2/3)": Form(
        lambda p, q, x: np.log1p(p * (1 / x["gain"] - 1) ** (2 / 3) / x["dense"]), (30.0,)
    ),
    "N_0 + d (1/gain - 1)^b": Form(
        lambda p, q, x: np.log1p(p * (1 / x["gain"] - 1) ** q[0] / x["dense"]), (30.0,), (0.5,)
    ),
    "N_0 + d N_0^c (1/gain - 1)^b": Form(
        lambda p, q, x: np.log1p(p * (1 / x["gain"] - 1) ** q[0] * x["dense"] ** (q[1] - 1)), (5.0,), (0.7, 0.5)
    ),
}
GROUPS = {"one": dict.fromkeys(EXCHANGES, 0), "gathered": GATHERED, "largest": LARGEST, "each": EXCHANGES}


def residuals(form: Form, group: dict[str, int], parameters: Array, found: list[Row]) -> Array:
    """log(predicted / measured); of a target that was not reached only what is predicted too low is wrong."""
    x = {field: np.array([getattr(row, field) for row in found]) for field in ("gain", "ratio", "dense", "factor")}
    members = np.array([group[row.exchange] for row in found])
    shared = parameters[len(parameters) - len(form.shared) :]
    off = form.log_factor(parameters[members], shared, x) - np.log(x["factor"])
    return np.where([row.reached for row in found], off, np.minimum(off, 0.0))


def fit(form: Form, group: dict[str, int], found: list[Row]) -> Array:
    start = form.start * (max(group.values()) + 1) + form.shared
    solved = least_squares(lambda p: residuals(form, group, p, found), start, bounds=(0, np.inf))
    result: Array = solved.x
    return result


def left_out(form: Form, group: dict[str, int], found: list[Row]) -> dict[str, Array]:
    """Residuals of each model by a fit to the others."""
    result = {}
    for task in sorted({row.task for row in found}):
        seen = [row for row in found if row.task != task]
        result[task] = residuals(form, group, fit(form, group, seen), [row for row in found if row.task == task])
    return result


def rms(values: Array) -> float:
    return float(np.sqrt(np.mean(values**2)))


def print_steps(found: list[Row]) -> None:
    main = [row for row in found if row.task in MAIN and row.world_size == 4]
    print(f"steps to accuracy: {len(main)} rows of {len({row.task for row in main})} models")
    print(f"{'form':<40} {'constants':<10} left out  all    bias of each model left out      fitted")
    for name, form in FORMS.items():
        for grouping, group in GROUPS.items():
            parameters, out = fit(form, group, main), left_out(form, group, main)
            print(
                f"{name:<40} {grouping:<10} {rms(np.concatenate(list(out.values()))):8.3f} "
                f"{rms(residuals(form, group, parameters, main)):6.3f}",
                " ".join(f"{np.mean(values):+6.2f}" for values in out.values()),
                np.round(parameters, 3),
            )
    form, group = FORMS["N_0 + d (1/gain - 1)^(2/3)"], GROUPS["largest"]
    parameters = fit(form, group, main)
    print("\nthe chosen form, elsewhere and in parts: rms, bias")
    for setting in sorted({(row.task, row.world_size) for row in found}):
        part = residuals(form, group, parameters, [row for row in found if (row.task, row.world_size) == setting])
        print(f"{setting!s:<40} {rms(part):.3f} {np.mean(part):+.3f}")
    for target in range(3):
        part = residuals(form, group, parameters, [row for row in main if row.target == target])
        print(f"{('early', 'middle', 'late')[target]:<40} {rms(part):.3f} {np.mean(part):+.3f}")
    for exchange in EXCHANGES:
        part = residuals(form, group, parameters, [row for row in main if row.exchange == exchange])
        print(f"{exchange:<40} {rms(part):.3f} {np.mean(part):+.3f}")
    for low, high in ((0, 0.02), (0.02, 0.05), (0.05, 0.2), (0.2, 1)):
        part = residuals(form, group, parameters, [row for row in main if low <= row.gain < high])
        print(f"gain {low:g} to {high:<33g} {rms(part):.3f} {np.mean(part):+.3f}")


def print_gains(runs: list[dict[str, Any]]) -> None:
    """gain_e(c) = 1 - exp(-A f_e o(c)^s_e), A of each setting; and A by the histogram of gradients without error."""
    dense = [run for run in runs if run["exchange"] == "dense" and run["kept_at_ratios"]]
    runs = [run for run in runs if run["exchange"] != "dense" and not run["task"].endswith("hot")]
    settings = sorted({_setting(run) for run in runs})
    log_odds = np.log([run["ratio"] / (1 - run["ratio"]) * 9 for run in runs])
    rates = np.log([-np.log1p(-min(run["gain"], 0.999)) for run in runs])
    where = np.array([settings.index(_setting(run)) for run in runs])
    who = np.array([EXCHANGES[run["exchange"]] for run in runs])
    M, E = len(settings), 4

    def off(p: Array) -> Array:
        result: Array = p[where] + np.append(0.0, p[M : M + E - 1])[who] + p[M + E - 1 :][who] * log_odds - rates
        return result

    solved = least_squares(off, np.concatenate((np.zeros(M + E - 1), np.ones(E)))).x
    print(f"\ngains: {len(runs)} runs, rms {rms(off(solved)):.3f} of the logarithm")
    print("A", {setting: round(float(np.exp(a)), 2) for setting, a in zip(settings, solved, strict=False)})
    for run in dense:
        if _setting(run) in settings:
            kept = -np.log1p(-run["kept_at_ratios"][0])
            print(_setting(run), f"A / -log(1 - K(0.1)) = {np.exp(solved[settings.index(_setting(run))]) / kept:.2f}")
    shapes = zip(np.exp(np.append(0.0, solved[M : M + E - 1])), solved[M + E - 1 :], strict=True)
    for name, (f, s) in zip(("topk-allgather", "layerwise-topk", "star-topk", "var-topk"), shapes, strict=True):
        print(f"{name:<16} f {f:.2f}  s {s:.2f}")


def print_foretold(runs: list[dict[str, Any]]) -> None:
    """The gain at one ratio by a run at another: by what its largest entries held, and by the curve."""
    runs = [run for run in runs if run["exchange"] == "topk-allgather" and not run["task"].endswith("hot")]
    errors: dict[str, list[tuple[float, float]]] = {"smaller": [], "larger": []}
    for here in runs:
        curve = GainCurve().with_measured(here["exchange"], here["ratio"], here["gain"])
        for there in runs:
            if (*_setting(here), here["seed"]) == (*_setting(there), there["seed"]) and here is not there:
                kept = here["kept_at_ratios"][CANDIDATES.index(there["ratio"])]
                foretold = np.log(np.array([kept, curve.gain(there["exchange"], there["ratio"])]) / there["gain"])
                errors["smaller" if there["ratio"] < here["ratio"] else "larger"].append(tuple(foretold))
    for which, pairs in errors.items():
        by_kept, by_curve = (rms(column) for column in np.array(pairs).T)
        print(f"foretold for {which} ratios, {len(pairs)} pairs: rms by K {by_kept:.2f}, by the curve {by_curve:.2f}")


def print_table(found: list[Row]) -> None:
    """By exchange and ratio: of each model the gain, and the factor as the geometric mean over targets and seeds."""
    print(f"\n| exchange | ratio | {' | '.join(MAIN)} |\n| --- | --- |{' --- |' * len(MAIN)}")
    for exchange in EXCHANGES:
        for ratio in sorted({row.ratio for row in found}, reverse=True):
            same = [row for row in found if (row.exchange, row.ratio, row.world_size) == (exchange, ratio, 4)]
            cells = [_cell([row for row in same if row.task == task]) for task in MAIN]
            if any(cells):
                print(f"| {exchange} | {ratio:g} | {' | '.join(cells)} |")


def _cell(found: list[Row]) -> str:
    if not found:
        return ""
    factor = np.exp(np.mean(np.log([row.factor for row in found])))
    missed = "" if all(row.reached for row in found) else "over "
    return f"{np.mean([row.gain for row in found]):.3f}: {missed}{factor:.2f}"


def print_failures(runs: list[dict[str, Any]]) -> None:
    print("\ntargets not reached: gain, error over gradient at the end")
    for run in runs:
        missed = sum(steps is None for steps in run["steps"])
        if missed:
            names = [run[field] for field in ("task", "exchange", "ratio", "world_size", "seed")]
            print(*names, f"{missed} of 3", run["gain"], run["curve"][-1][3])


if __name__ == "__main__":
    everything = json.loads(RESULTS.read_text())["runs"]
    print_steps(rows(everything))
    print_gains(everything)
    print_foretold(everything)
    print_table(rows(everything))
    print_failures(everything)
