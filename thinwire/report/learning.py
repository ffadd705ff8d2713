"""Accuracy and loss, over time and over bytes."""

from __future__ import annotations

import numpy as np

from thinwire.report.charts import Axis, Chart, Pane, Series, bytes_axis, panes, summarised, time_axis
from thinwire.report.palette import BLUE, GREY, ORANGE
from thinwire.report.runs import Floats, Run
from thinwire.report.words import PERCENT


def quality_axis(quality: str) -> Axis:
    if quality == "perplexity":
        return Axis(label="perplexity on the test set", log=True)
    return Axis(label="accuracy on the test set", unit=PERCENT)


def evaluations(run: Run) -> dict[str, Floats]:
    """By name: training time, bytes sent so far, loss and quality of each evaluation."""
    listed = run.evaluations
    return {
        "trained": np.array([e.trained for e in listed]),
        "sent": run.sent_at(np.array([e.time for e in listed])),
        "loss": np.array([e.loss for e in listed]),
        "quality": np.array([e.quality for e in listed]),
    }


def items(run: Run) -> list[Chart | str]:
    if not run.settings and not run.evaluations and not len(run.losses[0]):
        return []  # as in the records of a script, which keeps its losses to itself
    seen = evaluations(run)
    loss_time = run.trained(run.losses[0])
    over = [
        ("time", "training time", seen["trained"], loss_time, time_axis("training time", run.trained_seconds)),
    ]
    sent, loss_sent = seen["sent"], run.sent_at(run.losses[0])
    largest = float(np.nanmax([*sent, *loss_sent, 0.0]))
    items: list[Chart | str] = []
    if largest > 0:
        over.append(("bytes", "bytes sent", sent, loss_sent, bytes_axis("sent by rank 0", largest)))
    for what, in_words, at_evaluation, at_loss, axis in over:
        items.append(_quality(run, what, in_words, at_evaluation, seen["quality"], axis))
        items.append(_loss(what, in_words, axis, at_loss, run.losses[2], at_evaluation, seen["loss"]))
    if not largest > 0:
        items.append("Over bytes: how much was sent was not recorded.")
    drawn = [item for item in items if isinstance(item, Chart)]
    return drawn + list(dict.fromkeys(item for item in items if isinstance(item, str)))


def _quality(run: Run, what: str, in_words: str, x: Floats, y: Floats, axis: Axis) -> Chart | str:
    known = np.isfinite(x) & np.isfinite(y)
    if not known.any():
        return "Accuracy: the run recorded no evaluation."
    drawn = [summarised(run.quality, BLUE, x, y)]
    drawn += _target(run, x[known])
    return panes(
        f"{run.quality}-{what}",
        f"{run.quality.capitalize()} over {in_words}",
        axis,
        Pane(y=quality_axis(run.quality), series=tuple(drawn)),
    )


def _target(run: Run, x: Floats) -> list[Series]:
    try:
        target = float(run.settings.get("target", ""))
    except ValueError:
        return []
    ends = np.array([0.0, float(x.max())])
    return [Series(name="target", colour=GREY, dash=2, x=ends, y=np.array([target, target]))]


def _loss(what: str, in_words: str, axis: Axis, x: Floats, y: Floats, tested_x: Floats, tested: Floats) -> Chart | str:
    drawn = []
    if (np.isfinite(x) & np.isfinite(y)).any():
        drawn.append(summarised("training, rank 0", BLUE, x, y))
    if (np.isfinite(tested_x) & np.isfinite(tested)).any():
        drawn.append(summarised("test set", ORANGE, tested_x, tested))
    if not drawn:
        return "Loss: the run recorded none."
    return panes(f"loss-{what}", f"Loss over {in_words}", axis, Pane(y=Axis(label="loss"), series=tuple(drawn)))
