"""The network as it was and as it was measured, and under it the plan that ran."""

from __future__ import annotations

import numpy as np

from thinwire.report.charts import Axis, Chart, Lane, Pane, Series, held, panes, summarised, time_axis
from thinwire.report.palette import BLUE, GREY, VIOLET, colours
from thinwire.report.runs import USUAL_VALUES, Floats, Run
from thinwire.report.words import MEGABITS, MILLISECONDS, PERCENT

MOST_STRETCHES = 600


def timeline(run: Run) -> Chart | str:
    latency, rate = _latency(run), _rate(run)
    rows: list[Pane | Lane] = [
        Pane(y=axis, series=tuple(drawn), height=150) for axis, drawn in (latency, rate) if drawn
    ]
    has_network = bool(rows)
    rows += _lanes(run)
    if not rows:
        return "The network and the plan: the run recorded no steps."
    ratio = _ratio(run)
    rows += [ratio] if ratio is not None else []
    return panes(
        "network",
        "The network, and the plan that ran on it" if has_network else "The plan",
        time_axis("time since the start", run.seconds, run.begun),
        *rows,
        note=_note(run, has_network),
        wide=True,
        group="time",
    )


def _note(run: Run, has_network: bool) -> str:
    note = "The network as it was measured, and under it the plan that ran on it."
    if len(run.truth[0]):
        note = "Truth is what the lab did to the network, the mean over hosts and routes. Under it, the plan that ran."
    if not has_network:
        note = "The network is left out: it was neither shaped by the lab nor measured."
    return f"{note} Where lines are interrupted, the run was: it ended, and was resumed." if run.gaps else note


def _latency(run: Run) -> tuple[Axis, list[Series]]:
    time, latency, _ = run.truth
    return Axis(label="latency, one way", unit=MILLISECONDS, log=True), [
        *_truth(run, time, latency),
        *_measured(run, run.columns["alpha"]),
    ]


def _rate(run: Run) -> tuple[Axis, list[Series]]:
    time, _, rate = run.truth
    beta = run.columns["beta"]
    measured = np.divide(1.0, beta, out=np.full(len(beta), np.nan), where=beta > 0)
    return Axis(label="rate per host", unit=MEGABITS, log=True), [*_truth(run, time, rate), *_measured(run, measured)]


def _truth(run: Run, time: Floats, values: Floats) -> list[Series]:
    """From when it was trained on; what the network was before that nobody felt."""
    first = max(int(np.searchsorted(time, run.begun, side="right")) - 1, 0)
    time, values = np.maximum(time[first:], run.begun), values[first:]
    if not (values > 0).any():
        return []
    return [held("truth", GREY, time, np.where(values > 0, values, np.nan), run.seconds, thick=True)]


def _measured(run: Run, values: Floats) -> list[Series]:
    if not (values > 0).any():
        return []
    return [summarised("measured", BLUE, run.columns["time"], np.where(values > 0, values, np.nan), gaps=run.gaps)]


def _lanes(run: Run) -> list[Pane | Lane]:
    if not len(run.plan_of_step):
        return []
    lanes = [_lane(run, "exchange", [plan.exchange for plan in run.plans])]
    if any(plan.collective for plan in run.plans):
        lanes.append(_lane(run, "collective", [plan.way or "none" for plan in run.plans]))
    if any(plan.values != USUAL_VALUES for plan in run.plans):
        lanes.append(_lane(run, "values", [plan.values for plan in run.plans]))
    if any(isinstance(plan.ratio, str) for plan in run.plans):
        lanes.append(_lane(run, "compressor", [str(plan.ratio or "none") for plan in run.plans]))
    return [*lanes]


def _lane(run: Run, label: str, name_of_plan: list[str]) -> Lane:
    """A stretch for as long as the name stays the same. Too many to see are looked at in as many places as can be."""
    names = tuple(dict.fromkeys(name_of_plan))
    of_step = np.array([names.index(name) for name in name_of_plan])[run.plan_of_step]
    time, resumed = run.columns["time"], np.array([over for _, over in run.gaps])
    if np.count_nonzero(np.diff(of_step)) > MOST_STRETCHES:
        places = np.linspace(0, len(time) - 1, MOST_STRETCHES).astype(int)
        time, of_step = time[places], of_step[places]
    part = np.searchsorted(resumed, time)  # how often it had been resumed
    last = np.flatnonzero(np.append((np.diff(of_step) != 0) | (np.diff(part) > 0), True))
    ends, which = time[last], tuple(int(name) for name in of_step[last])
    starts = np.append(run.step_starts[0], ends[:-1])
    first = np.flatnonzero(np.diff(part[last])) + 1  # after a gap
    starts[first] = resumed[part[last][first] - 1]
    return Lane(label=label, names=names, colours=colours(names), starts=starts, ends=ends, which=which)


def _ratio(run: Run) -> Pane | None:
    ratios = np.array([plan.ratio if isinstance(plan.ratio, float) else np.nan for plan in run.plans])
    if not (ratios > 0).any():
        return None
    end = float(run.columns["time"][-1])
    drawn = held("ratio", VIOLET, run.step_starts, ratios[run.plan_of_step], end, gaps=run.gaps)
    return Pane(y=Axis(label="ratio, share of entries sent", unit=PERCENT, log=True), series=(drawn,), height=96)
