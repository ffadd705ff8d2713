"""What the benchmark of the controller's choices makes of what it measured."""

from __future__ import annotations

from typing import Any

import pytest

from thinwire.bench.regret import STEPS, _Bench, _line, _steps_to, summarise
from thinwire.link.thread import ThreadLink, ThreadWorld
from thinwire.types import Network

BEFORE, TRUTH, NEAR = 0.001, 0.02, 0.021


def a_cell(**figures: Any) -> dict[str, Any]:
    usual = {
        "hosts": 4,
        "size": 1_000_000,
        "latency": "5ms",
        "rate": "60mbit",
        "chosen": "dense over ring",
        "regret": 0.0,
        "alpha_error": 0.01,
        "beta_error": 0.02,
        "prediction_error": 0.1,
        "alpha_steps": 5,
        "beta_steps": 7,
    }
    return usual | figures


# --- when a number has arrived


def test_a_number_has_arrived_at_the_step_from_which_on_it_stays_near_the_truth() -> None:
    assert _steps_to(TRUTH, [None, BEFORE, BEFORE, *[NEAR] * 20], BEFORE) == 4


def test_to_pass_by_the_truth_is_not_to_arrive() -> None:
    trace = [BEFORE, NEAR, *[3 * TRUTH] * 12, *[NEAR] * 12]
    assert _steps_to(TRUTH, trace, BEFORE) == 15


def test_to_be_elsewhere_now_and_then_after_arriving_is_no_matter() -> None:
    assert _steps_to(TRUTH, [BEFORE, *[NEAR, NEAR, 2 * TRUTH] * 7], BEFORE) == 2


@pytest.mark.parametrize("trace", [[BEFORE] * 30, [None] * 30, [*[BEFORE] * 29, NEAR]])
def test_what_never_came_to_stay_has_taken_more_steps_than_there_were(trace: list[float | None]) -> None:
    assert _steps_to(TRUTH, trace, BEFORE) == 31


def test_where_a_number_is_what_it_was_there_is_nothing_to_follow() -> None:
    assert _steps_to(TRUTH, [NEAR] * 30, before=TRUTH) is None


# --- all cells together


def test_steps_are_those_of_cells_in_which_that_number_changed() -> None:
    first, latency = a_cell(alpha_steps=None, beta_steps=None), a_cell(alpha_steps=8, beta_steps=None)
    both = a_cell(alpha_steps=4, beta_steps=20)
    found = summarise([first, latency, both])
    assert (found["alpha_steps"], found["beta_steps"], found["never_near"]) == (6, 20, 0)


def test_a_cell_is_never_near_if_one_of_the_numbers_that_changed_is_not() -> None:
    never = STEPS + 1
    cells = [a_cell(alpha_steps=never), a_cell(alpha_steps=None, beta_steps=never), a_cell(beta_steps=None)]
    assert summarise([*cells, a_cell(alpha_steps=None, beta_steps=None)])["never_near"] == 2


@pytest.mark.parametrize(("number", "expected"), [(1, 0.01), (9, 0.09), (10, 0.09), (11, 0.1), (20, 0.18)])
def test_nine_of_ten_regrets_are_at_most_the_ninetieth_percentile(number: int, expected: float) -> None:
    assert summarise([a_cell(regret=i / 100) for i in range(number, 0, -1)])["p90_regret"] == expected


@pytest.mark.parametrize("size", [1, 150])
def test_a_gradient_may_have_any_number_of_entries(size: int) -> None:
    def program(link: ThreadLink) -> int:
        bench = _Bench(link, size, 0.01)
        return int(bench._step(bench._going_on())["seconds"] != 0)  # NaN, of the first

    assert ThreadWorld(2, Network(alpha=1e-3, beta=1e-8)).run(program) == [1, 1]


def test_a_figure_that_no_cell_has_is_none() -> None:
    found = summarise([a_cell(alpha_steps=None, beta_steps=None, alpha_error=None)])
    assert found["alpha_steps"] is found["beta_steps"] is found["alpha_error"] is None


def test_the_line_of_a_cell_says_what_is_not_known_and_what_never_came() -> None:
    line = _line(a_cell(alpha_error=None, alpha_steps=None, beta_steps=STEPS + 1))
    assert "alpha     -, beta  2.0%" in line and line.endswith("steps to the truth: alpha -, beta never")


# --- what is no step's time


def test_what_was_measured_between_two_cells_is_no_time_of_the_run_that_goes_on() -> None:
    class Paused:
        pauses = 0

        def pause(self) -> None:
            self.pauses += 1

    bench, run = _Bench.__new__(_Bench), Paused()
    bench._adaptive = run  # type: ignore[assignment]
    assert bench._going_on() is run and run.pauses == 1  # type: ignore[comparison-overlap]
