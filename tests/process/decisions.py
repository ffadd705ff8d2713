"""Decisions that no measurement led to, for controllers that always know what they want."""

from __future__ import annotations

from thinwire.control.decision import Decision, Standing
from thinwire.types import Plan


def decision_for(plan: Plan, standing: Standing, step: int, trigger: str) -> Decision:
    """This plan from this step on, whatever was seen."""
    return Decision(
        step=step,
        trigger=trigger,
        plan=plan,
        before=standing.plan,
        seconds=1.0,
        alpha=1.0,
        beta=1.0,
        rest=1.0,
        gain=1.0,
        gains={},
        candidates=(),
    )
