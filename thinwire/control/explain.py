"""A decision in words: what was seen, what was considered, what was chosen and why."""

from __future__ import annotations

from thinwire.control.adaptive import Candidate, Decision, Standing
from thinwire.control.view import View
from thinwire.control.wording import rate_of
from thinwire.types import Plan, StepRecord

SHOWN = 8  # candidates


def explain(
    decision: Decision | None, standing: Standing, view: View, last: StepRecord | None, fixed: bool = False
) -> str:
    """The last decision as a short table, and how it has turned out since."""
    plan = standing.plan
    if decision is None:
        return f"{plan}, {_without_decision(standing, fixed)}.\n{_network(view.alpha, view.beta)}."
    what = str(plan) if decision.plan != decision.before else f"still {plan}"
    shown = [c for i, c in enumerate(decision.candidates) if i < SHOWN or c.plan == decision.plan]
    lines = [
        f"From step {decision.step} on: {what}, because {decision.trigger}.",
        _network(decision.alpha, decision.beta, decision.hope)
        + f", {_ms(decision.rest)} of a step outside the exchange.",
        "",
        f"  {'plan':<54} {'step':>9} {'gain':>6} {'steps':>6} {'cost':>9}",
        *(_row(candidate, decision.plan) for candidate in shown),
    ]
    if len(decision.candidates) > len(shown):
        lines.append(f"  and {len(decision.candidates) - len(shown)} more")
    lines += ["", "step: predicted; steps: times those of dense training; cost: their product."]
    if last is not None and last.step_seconds == last.step_seconds and last.step >= decision.step:
        lines.append(
            f"Measured since: {_ms(last.step_seconds)} in step {last.step}, predicted {_ms(decision.seconds)}."
        )
    return "\n".join(lines)


def _without_decision(standing: Standing, fixed: bool) -> str:
    if fixed:
        return "fixed"
    if standing.seconds is None:
        return "until the network has been measured"
    return f"since step {standing.since}, as it was decided before this run was resumed"


def _row(candidate: Candidate, chosen: Plan) -> str:
    mark = "*" if candidate.plan == chosen else " "
    seconds, cost = _ms(candidate.seconds), _ms(candidate.cost)
    return f"{mark} {candidate.plan!s:<54} {seconds:>9} {candidate.gain:>6.3f} {candidate.steps:>6.2f} {cost:>9}"


def _network(alpha: float | None, beta: float | None, hope: int = 1) -> str:
    if alpha is None or beta is None:
        return "The network has not been measured"
    hoped = f", in the hope of {rate_of(beta / hope)}" if hope > 1 else ""
    return f"The network: {_ms(alpha)} one way, {rate_of(beta)} per host{hoped}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 10 else f"{seconds:.3g} s"
