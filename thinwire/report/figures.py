"""The charts of one run. Where there is nothing to draw there is a sentence that says why."""

from __future__ import annotations

from thinwire.report import decisions, learning, network, steps, traffic
from thinwire.report.charts import Section
from thinwire.report.runs import Run


def sections(run: Run) -> list[Section]:
    """All charts in the order in which they are read."""
    return [
        Section(name="learning", title="Learning", items=learning.items(run)),
        Section(name="network", title="The network and the plan", items=[network.timeline(run)]),
        Section(
            name="steps",
            title="Where the time goes",
            items=[steps.predicted(run), steps.parts(run), steps.calibration(run)],
        ),
        Section(name="decisions", title="Decisions", items=[decisions.front(run)]),
        Section(
            name="bytes",
            title="Bytes and consensus",
            items=[traffic.per_step(run), traffic.per_layer(run), traffic.consensus(run)],
        ),
    ]
