"""The same training under several methods: one table, and their curves over each other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from thinwire.report import words
from thinwire.report.charts import Axis, Chart, Pane, Section, Series, Table, bytes_axis, panes, summarised, time_axis
from thinwire.report.learning import evaluations, quality_axis
from thinwire.report.palette import AMBER, BLUE, GREEN, GREY, ORANGE, PINK, SKY, VIOLET
from thinwire.report.runs import Comparison, Floats, Run

PLAIN = "ddp"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method, the median over its seeds; NaN where a number is not known or the target was not reached.

    Attributes:
        seconds: of training until the target was reached.
        speed_up: how many times sooner than the first method; NaN if that one failed.
        at_least: that one never came there, so `speed_up` counts all the time that it had.
        sent_bytes: by rank 0, in the whole run.
        quality: accuracy or perplexity at the end.
    """

    method: str
    seeds: int
    steps: float
    seconds: float
    speed_up: float
    at_least: bool
    sent_bytes: float
    quality: float
    step_seconds: float
    ended: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """The table of a compare.

    Attributes:
        target: what the time is measured to, NaN if there is nothing to measure it by.
        chosen: whether somebody named it; otherwise it is the best that every run reached.
        baseline: the first method, which the others are compared with.
    """

    quality: str
    target: float
    chosen: bool
    baseline: str
    rows: list[Row]

    def to_json(self) -> dict[str, Any]:
        own = ("quality", "target", "chosen", "baseline")
        return {key: getattr(self, key) for key in own} | {"rows": [vars(row) for row in self.rows]}


def result(comparison: Comparison) -> Result:
    """Time to target, bytes and accuracy of each method."""
    by_method: dict[str, list[Run]] = {}
    for run in comparison.runs:
        by_method.setdefault(run.method or run.name, []).append(run)
    quality = comparison.quality
    target = comparison.target if comparison.target is not None else _reached_by_all(comparison.runs, quality)
    baseline = next(iter(by_method))
    to_target = {method: _median([reached(run, target) for run in runs]) for method, runs in by_method.items()}
    base = to_target[baseline]
    had = base if math.isfinite(base) else _median([run.trained_seconds for run in by_method[baseline]])
    if any(run.how_it_ended == "failed" for run in by_method[baseline]):
        base = had = math.nan  # it is no measure for the others
    rows = [
        Row(
            method=method,
            seeds=len(runs),
            steps=_median([run.num_steps for run in runs]),
            seconds=to_target[method],
            speed_up=had / to_target[method] if to_target[method] > 0 else math.nan,
            at_least=math.isnan(base),
            sent_bytes=_median([float(run.sent_at(np.array([math.inf]))[0]) for run in runs]),
            quality=_median([run.evaluations[-1].quality if run.evaluations else math.nan for run in runs]),
            step_seconds=_median([_step_seconds(run) for run in runs]),
            ended=", ".join(dict.fromkeys(run.how_it_ended or "unfinished" for run in runs)),
        )
        for method, runs in by_method.items()
    ]
    return Result(quality=quality, target=target, chosen=comparison.chosen, baseline=baseline, rows=rows)


def reached(run: Run, target: float) -> float:
    """The training time at the first evaluation that was good enough."""
    if run.quality == "perplexity":
        return next((e.trained for e in run.evaluations if e.quality <= target), math.nan)
    return next((e.trained for e in run.evaluations if e.quality >= target), math.nan)


def table(found: Result) -> Table:
    """As it is shown; what was not reached is said so."""
    to_target = (
        f"time to {shown_quality(found.quality, found.target)}" if math.isfinite(found.target) else "time to target"
    )
    over = f"speed-up over {found.baseline}"
    header = ("method", to_target, over, found.quality, "sent by rank 0", "steps", "step", "ended")
    rows = [
        (
            row.method if row.seeds == 1 else f"{row.method} (median of {row.seeds})",
            words.seconds(row.seconds) if math.isfinite(row.seconds) else "not reached",
            speedup(row),
            shown_quality(found.quality, row.quality),
            words.nbytes(row.sent_bytes),
            f"{row.steps:,.0f}",
            words.seconds(row.step_seconds),
            row.ended,
        )
        for row in found.rows
    ]
    return Table(header, rows)


def speedup(row: Row) -> str:
    if not math.isfinite(row.speed_up):
        return "–"
    return f"more than {words.times(row.speed_up)}" if row.at_least else words.times(row.speed_up)


def shown_quality(quality: str, value: float) -> str:
    return words.share(value) if quality == "accuracy" else words.digits(value)


def section(comparison: Comparison, found: Result) -> Section:
    runs = [run for run in comparison.runs if run.evaluations]
    if not runs:
        return Section(name="curves", title="Curves", items=["Curves: no run recorded an evaluation."])
    hues = colours([run.method or run.name for run in comparison.runs])
    time = time_axis("training time", max(run.trained_seconds for run in runs))
    sent = [evaluations(run)["sent"] for run in runs]
    largest = max((float(np.nanmax([*column, 0.0])) for column in sent), default=0.0)
    items: list[Chart | str] = []
    for what, axis in (("quality", quality_axis(found.quality)), ("loss", Axis(label="loss on the test set"))):
        title = found.quality.capitalize() if what == "quality" else "Loss"
        items.append(
            _curves(f"all-{what}-time", f"{title} over training time", runs, hues, time, axis, "trained", what, found)
        )
        if largest > 0:
            over = bytes_axis("sent by rank 0", largest)
            items.append(
                _curves(f"all-{what}-bytes", f"{title} over bytes sent", runs, hues, over, axis, "sent", what, found)
            )
    if not largest > 0:
        items.append("Over bytes: how much was sent was not recorded.")
    return Section(name="curves", title="Curves", items=items)


def _curves(
    name: str,
    title: str,
    runs: list[Run],
    hues: dict[str, tuple[int, int]],
    x: Axis,
    y: Axis,
    across: str,
    what: str,
    found: Result,
) -> Chart | str:
    drawn: list[Series] = []
    for run in runs:
        method, seen = run.method or run.name, evaluations(run)
        colour, dash = hues[method]
        line = summarised(method, colour, seen[across], seen[what], dash=dash)
        drawn += [line] if len(line.x) else []
    if not drawn:
        return f"{title}: not recorded."
    if what == "quality" and math.isfinite(found.target):
        drawn.append(_target_line(found.target, drawn))
    return panes(name, title, x, Pane(y=y, series=tuple(drawn), height=280))


def _target_line(target: float, drawn: list[Series]) -> Series:
    ends = np.array([0.0, max(float(series.x.max()) for series in drawn)])
    return Series(name="target", colour=GREY, dash=3, x=ends, y=np.array([target, target]))


def colours(methods: list[str]) -> dict[str, tuple[int, int]]:
    """A colour and a pattern of dashes for each method: plain DDP is grey, adaptive blue."""
    own = {PLAIN: (GREY, 0), "adaptive": (BLUE, 0)}
    free = [ORANGE, GREEN, PINK, VIOLET, AMBER, SKY]
    others = [method for method in dict.fromkeys(methods) if method not in own]
    return own | {method: (free[i % len(free)], i % 3) for i, method in enumerate(others)}


def _reached_by_all(runs: list[Run], quality: str) -> float:
    """The best that every run was seen to reach; those that failed do not count."""
    seen: list[Floats] = [evaluations(run)["quality"] for run in runs if run.how_it_ended != "failed"]
    known = [column[np.isfinite(column)] for column in seen]
    if not known or not all(len(column) for column in known):
        return math.nan
    return float(min(c.max() for c in known) if quality == "accuracy" else max(c.min() for c in known))


def _step_seconds(run: Run) -> float:
    known = run.columns["step_seconds"][np.isfinite(run.columns["step_seconds"])]
    return float(np.median(known)) if len(known) else math.nan


def _median(values: list[float]) -> float:
    """NaN if any is: the median of those that came through would flatter."""
    return math.nan if any(math.isnan(value) for value in values) else float(median(values))
