"""The time of a step: what was predicted, what was measured, where it went."""

from __future__ import annotations

import numpy as np

from thinwire.report import words
from thinwire.report.charts import Axis, Chart, Pane, Series, averaged, held, known, panes, summarised, time_axis
from thinwire.report.palette import AMBER, BLUE, GREEN, GREY, ORANGE
from thinwire.report.runs import Floats, Run
from thinwire.report.words import MILLISECONDS

MOST_DOTS = 500
STACKED = 80


def predicted(run: Run) -> Chart | str:
    measured, expected = run.columns["step_seconds"], run.columns["predicted_seconds"]
    # Nobody knows when the first step after a start began. What it waited in its exchange is known, and may be long.
    measured = np.where(np.isfinite(measured), measured, run.columns["seconds"])
    if not np.isfinite(measured).any():
        return "Step time: the run recorded none."
    drawn = [summarised("measured", BLUE, run.columns["time"], measured, gaps=run.gaps)]
    note = "Nothing was predicted: the plan was fixed."
    if np.isfinite(expected).any():
        drawn.append(held("predicted", ORANGE, run.step_starts, expected, run.seconds, gaps=run.gaps))
        off = np.abs(_off(run))
        half, most = (words.share(float(np.quantile(off, part)), 2) for part in (0.5, 0.9))
        note = f"Half of all steps took within {half} of what was predicted, nine of ten within {most}."
    if drawn[0].low is not None:
        note += " The line is the median of neighbouring steps; the pale band reaches from the fastest to the slowest."
    return panes(
        "step-time",
        "Step time, predicted and measured" if len(drawn) > 1 else "Step time",
        time_axis("time since the start", run.seconds, run.begun),
        Pane(y=Axis(label="step", unit=MILLISECONDS, log=_spread(measured) > 20), series=tuple(drawn)),
        note=note,
        wide=True,
        group="time",
    )


def parts(run: Run) -> Chart | str:
    whole, exchange, compress = (run.columns[name] for name in ("step_seconds", "seconds", "compress_seconds"))
    parts = [np.maximum(whole - exchange, 0.0), compress, np.maximum(exchange - compress, 0.0)]
    if not np.isfinite(sum(parts, np.zeros(len(whole)))).any():
        return "Parts of a step: the method does not record them."
    time, means = averaged(run.columns["time"], parts, STACKED, run.gaps)
    named = zip(("compute", "compress", "exchange"), (GREEN, AMBER, BLUE), means, strict=True)
    drawn = tuple(Series(name=name, colour=colour, x=time, y=mean) for name, colour, mean in named)
    return panes(
        "parts",
        "Where a step’s time goes",
        time_axis("time since the start", run.seconds, run.begun),
        Pane(y=Axis(label="step", unit=MILLISECONDS, low=0.0), series=drawn, kind="stack"),
        note="The mean of neighbouring steps. What of an exchange the backward pass hides is counted as exchange.",
        group="time",
    )


def calibration(run: Run) -> Chart | str:
    predicted, measured = _pairs(run)
    if len(measured) < 2:
        return "Predicted against measured: there was no prediction." if len(run.plan_of_step) else ""
    off = np.log(measured / predicted)
    places = np.unique([*np.linspace(0, len(off) - 1, MOST_DOTS).astype(int), int(off.argmin()), int(off.argmax())])
    ends = np.array([min(predicted.min(), measured.min()), max(predicted.max(), measured.max())])
    places = places[np.argsort(predicted[places])]
    drawn = (
        Series(name="as predicted", colour=GREY, dash=2, x=ends, y=ends),
        Series(name="a step", colour=BLUE, style="dots", x=predicted[places], y=measured[places]),
    )
    low, high = ends / MILLISECONDS.size / (1.1, 1 / 1.1)
    return panes(
        "calibration",
        "Measured against predicted",
        Axis(label="predicted", unit=MILLISECONDS, log=True, low=low, high=high),
        Pane(y=Axis(label="measured", unit=MILLISECONDS, log=True, low=low, high=high), series=drawn),
        note="Each dot is a step. On the line the prediction was right, above it the step took longer.",
    )


def _pairs(run: Run) -> tuple[Floats, Floats]:
    predicted, measured = known(run.columns["predicted_seconds"], run.columns["step_seconds"])
    usable = (predicted > 0) & (measured > 0)
    return predicted[usable], measured[usable]


def _off(run: Run) -> Floats:
    predicted, measured = _pairs(run)
    return (measured - predicted) / predicted if len(predicted) else np.zeros(1)


def _spread(values: Floats) -> float:
    usable = values[np.isfinite(values) & (values > 0)]
    return float(usable.max() / np.median(usable)) if len(usable) else 1.0
