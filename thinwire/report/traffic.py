"""What was sent, what a gradient is made of, and how far gossip lets models drift apart."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from thinwire.report import words
from thinwire.report.charts import Axis, Chart, Pane, Table, known, panes, short, summarised, time_axis
from thinwire.report.palette import BLUE, GREEN, GREY
from thinwire.report.runs import Floats, Run
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
    """What each layer had of the bytes that were sent, beside what it has of a dense gradient."""
    if not sum(numel for _, numel in run.layers):
        return "Bytes per layer: the run did not record its layers." if run.settings else ""
    numels = np.array([numel for _, numel in run.layers], np.float64)
    sent, dense = np.array(run.sent_of_layers), float(np.nansum(run.columns["dense_bytes"]))
    known = len(sent) > 0 and dense > 0
    whole = numels / numels.sum() * (dense if known else 4.0 * numels.sum())
    rows = _merged([name for name, _ in run.layers], whole, sent if known else np.zeros(len(numels)))
    spec = {
        "kind": "bars",
        "names": [row.name for row in rows],
        "shares": short(np.array([row.dense for row in rows]) / whole.sum()),
        "labels": [_label(row, float(whole.sum()), known) for row in rows],
    }
    if known:
        spec["sent"] = short(np.array([row.sent for row in rows]) / sent.sum())
    return Chart(
        name="layers",
        title="Bytes per layer",
        note=_layers_note(float(whole.sum()), float(sent.sum()) if known else None),
        spec=spec,
        table=_layers_table(run, whole, sent if known else None),
    )


class _Row(NamedTuple):
    name: str
    dense: float
    sent: float


def _merged(names: list[str], dense: Floats, sent: Floats) -> list[_Row]:
    """The largest layers, and all others as one."""
    order = np.argsort(-dense, kind="stable")
    shown = order if len(order) <= LAYERS else order[: LAYERS - 1]
    rest = order[len(shown) :]
    others = [_Row(f"{len(rest)} others", float(dense[rest].sum()), float(sent[rest].sum()))] if len(rest) else []
    return [*(_Row(names[i], float(dense[i]), float(sent[i])) for i in shown), *others]


def _label(row: _Row, whole: float, known: bool) -> str:
    if known:
        return f"{words.nbytes(row.sent)} of {words.nbytes(row.dense)}"
    return f"{words.share(row.dense / whole, 2)}, {words.nbytes(row.dense)}"


def _layers_note(whole: float, sent: float | None) -> str:
    if sent is None:
        of_dense = f"Each layer’s share of the {words.nbytes(whole)} of a dense float32 gradient."
        return f"{of_dense} What was sent of each is not known."
    return (
        f"Each layer’s share of the {words.nbytes(sent)} that rank 0 sent, and of the {words.nbytes(whole)} that dense "
        "steps would have sent. How many entries of each were sent is recorded about once a second."
    )


def _layers_table(run: Run, dense: Floats, sent: Floats | None) -> Table:
    header = ("layer", "entries", "share of dense", "dense")
    rows: list[tuple[str, ...]] = []
    for i in np.argsort(-dense, kind="stable")[:200]:
        name, numel = run.layers[i]
        row = [name, f"{numel:,}", words.share(float(dense[i] / dense.sum())), words.nbytes(float(dense[i]))]
        if sent is not None:
            row += [words.share(float(sent[i] / sent.sum())), words.nbytes(float(sent[i]))]
        rows.append(tuple(row))
    return Table(header if sent is None else (*header, "share of what was sent", "sent"), rows)


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
