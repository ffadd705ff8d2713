"""What was sent, what a gradient is made of, and how far gossip lets models drift apart."""

from __future__ import annotations

import numpy as np

from thinwire.report import words
from thinwire.report.charts import Axis, Chart, Pane, Table, known, panes, short, summarised, time_axis
from thinwire.report.palette import BLUE, GREEN, GREY
from thinwire.report.runs import Run
from thinwire.report.words import BYTES, fitting

LAYERS = 10


def per_step(run: Run) -> Chart | str:
    time, sent, dense = (run.columns[name] for name in ("time", "sent_bytes", "dense_bytes"))
    if not (sent > 0).any():
        return "Bytes per step: not recorded." if len(sent) else "Bytes: the run recorded no steps."
    unit = fitting(BYTES, float(np.nanmax([np.nanmax(sent), np.nanmax(dense) if np.isfinite(dense).any() else 0.0])))
    drawn = [summarised("sent", BLUE, time, np.where(sent > 0, sent, np.nan), gaps=run.gaps)]
    if (dense > 0).any():
        x, y = known(time, dense)
        ends = [0, -1] if (y == y[0]).all() else slice(None)
        drawn.append(summarised("dense, by a ring", GREY, x[ends], y[ends], dash=2))
    return panes(
        "bytes",
        "Bytes sent per step",
        time_axis("time since the start", run.seconds, run.begun),
        Pane(y=Axis(label="by rank 0", unit=unit, log=True), series=tuple(drawn)),
        note=_saved(run),
        group="time",
    )


def _saved(run: Run) -> str:
    sent, dense = np.nansum(run.columns["sent_bytes"]), np.nansum(run.columns["dense_bytes"])
    if not (sent > 0 and dense > 0):
        return ""
    less = words.times(dense / sent)
    return f"In all {words.nbytes(sent)} of the {words.nbytes(dense)} that dense steps would have sent: {less} less."


def per_layer(run: Run) -> Chart | str:
    total = sum(numel for _, numel in run.layers)
    if not total:
        return "Bytes per layer: the run did not record its layers."
    ordered = sorted(run.layers, key=lambda layer: -layer[1])
    shown = ordered if len(ordered) <= LAYERS else ordered[: LAYERS - 1]
    rest = ordered[len(shown) :]
    rows = [*shown, *([(f"{len(rest)} others", sum(numel for _, numel in rest))] if rest else [])]
    labels = [f"{words.share(numel / total, 2)}, {words.nbytes(4.0 * numel)}" for _, numel in rows]
    spec = {
        "kind": "bars",
        "names": [name for name, _ in rows],
        "shares": short(np.array([numel / total for _, numel in rows])),
        "labels": labels,
    }
    table = Table(
        ("layer", "entries", "share of bytes", "dense, float32"),
        [(name, f"{n:,}", words.share(n / total), words.nbytes(4.0 * n)) for name, n in ordered[:200]],
    )
    return Chart(
        name="layers",
        title="Bytes per layer",
        note=f"Each layer’s share of the {words.nbytes(4.0 * total)} of a dense float32 gradient.",
        spec=spec,
        table=table,
    )


def consensus(run: Run) -> Chart | str:
    time, distance = run.consensus
    if not (distance > 0).any():
        return "Consensus distance: recorded only by gossip methods, whose hosts hold models of their own."
    drawn = summarised("distance", GREEN, time, np.where(distance > 0, distance, np.nan), gaps=run.gaps)
    return panes(
        "consensus",
        "Consensus distance",
        time_axis("time since the start", run.seconds, run.begun),
        Pane(y=Axis(label="distance of the hosts’ models from their mean", log=True), series=(drawn,)),
        note="How far the hosts’ models are apart. It should fall, or stay small beside the model.",
        wide=True,
        group="time",
    )
