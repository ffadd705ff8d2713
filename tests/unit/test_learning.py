"""How many more steps a plan needs, held against the runs that the constants were taken from."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.control.gain import RMS_ERROR as GAIN_ERROR
from thinwire.control.gain import SHAPES, GainCurve
from thinwire.control.learning import DELAYS, RMS_ERROR, delay, safe_gain

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "steps_to_accuracy.json"
RUNS: list[dict[str, Any]] = json.loads(RESULTS.read_text())["runs"]
COMPRESSED = [run for run in RUNS if run["exchange"] != "dense"]
TRAININGS = (  # with SGD; the rest are checks
    "mlp-digits",
    "cnn-digits",
    "cnn-digits-cool",
    "mlp-fashion",
    "cnn-fashion",
    "cnn-fashion-cool",
    "transformer-text",
)

exchanges = st.sampled_from(sorted(DELAYS))
gains = st.floats(1e-4, 1.0)


def errors_of_steps(runs: list[dict[str, Any]]) -> list[float]:
    """log(predicted / measured), for every target; of one that was not reached only too few steps are an error."""
    errors = []
    for run in runs:
        for target, steps in enumerate(run["steps"]):
            predicted = dense_steps(run, target) + delay(run["exchange"], run["gain"])
            error = math.log(predicted / (steps or run["curve"][-1][0]))
            errors.append(error if steps else min(0.0, error))
    return errors


def dense_steps(like: dict[str, Any], target: int) -> float:
    """Of the dense run that started the same and saw the same data."""
    same = ("task", "world_size", "seed")
    (run,) = [run for run in RUNS if run["exchange"] == "dense" and all(run[name] == like[name] for name in same)]
    return float(run["steps"][target])


def rms(values: list[float]) -> float:
    return math.sqrt(np.mean(np.square(values)))


def test_the_kept_runs_took_the_steps_that_are_predicted_within_the_stated_error() -> None:
    main = [run for run in COMPRESSED if run["task"] in TRAININGS and run["world_size"] == 4]
    assert {run["task"] for run in main} == set(TRAININGS)
    assert {run["exchange"] for run in main} == set(DELAYS)
    assert rms(errors_of_steps(main)) <= RMS_ERROR


@pytest.mark.parametrize("task", TRAININGS)
def test_no_training_is_far_off(task: str) -> None:
    errors = errors_of_steps([run for run in COMPRESSED if run["task"] == task and run["world_size"] == 4])
    assert abs(np.mean(errors)) <= RMS_ERROR


def test_the_gain_of_a_run_at_one_ratio_tells_that_of_the_others() -> None:
    runs, found = [run for run in COMPRESSED if not run["task"].endswith("hot")], []  # which diverge
    for here in runs:
        curve = GainCurve().with_measured(here["exchange"], here["ratio"], here["gain"])
        for there in runs:
            if all(here[name] == there[name] for name in ("task", "world_size", "seed")):
                expected = curve.gain(there["exchange"], there["ratio"])
                found.append(math.log(expected / there["gain"]))
    # Both ends have the error that the curve was fitted with.
    assert rms(found) <= 2**0.5 * GAIN_ERROR


def test_at_a_safe_gain_every_run_reached_every_target() -> None:
    for run in COMPRESSED:
        if run["task"] in TRAININGS and run["gain"] >= safe_gain(run["exchange"]):
            assert None not in run["steps"], run["task"]
    assert safe_gain("dense") == 0


def test_where_every_run_reached_every_target_its_error_was_not_too_long_either() -> None:
    for run in COMPRESSED:
        if run["task"] in TRAININGS and run["gain"] >= safe_gain(run["exchange"]):
            later = [error for *_, error in run["curve"][len(run["curve"]) // 4 :]]
            strain = statistics.median(later) ** 2 / (1 / run["gain"] - 1)
            assert safe_gain(run["exchange"], strain) <= 1.2 * run["gain"], run["task"]


@given(st.sampled_from(sorted(DELAYS)), st.floats(0.1, 10), st.floats(0.1, 10))
def test_the_longer_errors_become_the_more_has_to_be_sent(exchange: str, one: float, other: float) -> None:
    less, more = sorted((one, other))
    assert 0 < safe_gain(exchange, less) <= safe_gain(exchange, more) < 0.2
    assert safe_gain("dense", other) == 0


def test_dense_training_is_never_late() -> None:
    assert delay("dense", 0.5) == 0


@given(exchanges)
def test_sending_everything_costs_no_steps(exchange: str) -> None:
    assert delay(exchange, 1.0) == 0


@given(exchanges, gains, gains)
def test_sending_more_never_costs_steps(exchange: str, one: float, other: float) -> None:
    assert delay(exchange, max(one, other)) <= delay(exchange, min(one, other))


@given(exchanges, gains)
def test_a_little_more_gain_changes_little(exchange: str, gain: float) -> None:
    assert delay(exchange, gain * (1 - 1e-6)) == pytest.approx(delay(exchange, gain), rel=1e-5, abs=0.005)


@pytest.mark.parametrize("gain", [0.0, -1.0, math.nan])
def test_what_sends_nothing_never_arrives(gain: float) -> None:
    assert delay("star-topk", gain) == math.inf


def test_every_exchange_that_compresses_has_its_constants() -> None:
    assert set(DELAYS) == set(SHAPES)
