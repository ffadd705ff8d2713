"""The candidates of each decision, their front, and what was chosen."""

from __future__ import annotations

import math

import numpy as np

from thinwire.report import words
from thinwire.report.charts import Axis, Chart, Table, short
from thinwire.report.palette import colours
from thinwire.report.runs import Decision, Floats, Run
from thinwire.report.words import MEGABITS, MILLISECONDS

MOST_DECISIONS = 200


def front(run: Run) -> Chart | str:
    usable = [d for d in run.decisions if any(c.seconds > 0 and np.isfinite(c.gain) for c in d.candidates)]
    if not usable:
        return (
            "Decisions: the plan was fixed, so none was made." if len(run.plan_of_step) else "Decisions: none was made."
        )
    shown = _shown(usable)
    exchanges = tuple(dict.fromkeys(c.plan.exchange for d in shown for c in d.candidates))
    names = tuple(dict.fromkeys(str(c.plan) for d in shown for c in d.candidates))
    where = {name: i for i, name in enumerate(names)}
    spec = {
        "kind": "front",
        "x": Axis(label="predicted step", unit=MILLISECONDS, log=True).to_json(),
        "y": Axis(label="gain, share of the gradient’s energy sent", low=0.0, high=1.0).to_json(),
        "names": names,
        "exchanges": [{"name": n, "colour": c} for n, c in zip(exchanges, colours(exchanges), strict=True)],
        "decisions": [_decision_spec(decision, exchanges, where) for decision in shown],
    }
    left_out = len(run.decisions) - len(shown)
    note = (
        "Up and to the left is better: a faster step that keeps more. The line is the front, the ring what was chosen."
    )
    if left_out:
        made = words.count(len(run.decisions), "decision")
        note += f" Of {made}, {len(shown)} are shown, before all those that changed the plan."
    return Chart(
        name="front",
        title="What was considered at each decision",
        note=note,
        wide=True,
        spec=spec,
        table=_decision_table(shown),
    )


def _shown(decisions: list[Decision]) -> list[Decision]:
    """All, or the changes of plan and as many others as there is room for, evenly spread."""
    if len(decisions) <= MOST_DECISIONS:
        return decisions
    changes = [i for i, d in enumerate(decisions) if d.plan != d.before]
    others = [i for i, d in enumerate(decisions) if d.plan == d.before]
    room = max(MOST_DECISIONS - len(changes), 0)
    kept = {*_spread_out(changes, MOST_DECISIONS), *_spread_out(others, room)}
    return [decisions[i] for i in sorted(kept)]


def _spread_out(places: list[int], count: int) -> list[int]:
    if len(places) <= count:
        return places
    return [places[i] for i in np.unique(np.linspace(0, len(places) - 1, count).astype(int))] if count else []


def _decision_spec(decision: Decision, exchanges: tuple[str, ...], where: dict[str, int]) -> dict[str, object]:
    candidates = [c for c in decision.candidates if c.seconds > 0 and np.isfinite(c.gain)]
    seconds, gains = (np.array([getattr(c, name) for c in candidates]) for name in ("seconds", "gain"))
    front = _on_front(seconds, gains)
    return {
        "head": f"Step {decision.step:,}, after {words.seconds(decision.time)}",
        "changed": decision.plan != decision.before,
        "what": _what(decision),
        "why": decision.trigger,
        "seen": f"{words.seconds(decision.alpha)} one way, {words.rate(_rate(decision))} per host",
        "expected": words.seconds(decision.seconds),
        "x": short(seconds / MILLISECONDS.size),
        "y": short(gains),
        "cost": short(np.array([c.cost for c in candidates]) / MILLISECONDS.size),
        "name": [where[str(c.plan)] for c in candidates],
        "exchange": [exchanges.index(c.plan.exchange) for c in candidates],
        "front": [int(i) for i in front],
        "chosen": next((i for i, c in enumerate(candidates) if c.plan == decision.plan), -1),
    }


def _rate(decision: Decision) -> float:
    return 1 / decision.beta if decision.beta > 0 else math.nan


def _what(decision: Decision) -> str:
    if decision.plan == decision.before:
        return f"still {decision.plan}"
    return f"{decision.plan} instead of {decision.before}"


def _on_front(seconds: Floats, gains: Floats) -> list[int]:
    """Those that no other beats in both, the fastest first."""
    best, front = -np.inf, []
    for i in np.lexsort((-gains, seconds)):
        if gains[i] > best:
            best = gains[i]
            front.append(int(i))
    return front


def _decision_table(decisions: list[Decision]) -> Table:
    header = (
        "step",
        "time (s)",
        "plan",
        "because",
        "latency (ms)",
        "rate (Mbit/s)",
        "expected step (ms)",
        "considered",
    )
    rows = [
        (
            f"{d.step:,}",
            words.digits(d.time, 4),
            _what(d),
            d.trigger,
            words.digits(d.alpha * 1e3),
            words.digits(_rate(d) / MEGABITS.size),
            words.digits(d.seconds * 1e3),
            str(len(d.candidates)),
        )
        for d in decisions
    ]
    return Table(header, rows)
