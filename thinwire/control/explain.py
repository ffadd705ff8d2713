"""A decision in words: what was seen, what was considered, what was chosen and why."""

from __future__ import annotations

from thinwire.control.decision import Candidate, Decision, Standing
from thinwire.control.view import View
from thinwire.control.wording import rate_of, short
from thinwire.types import Plan, StepRecord

SHOWN = 8  # candidates
WIDTH = 61  # of the longest plan


def explain(
    decision: Decision | None,
    standing: Standing,
    view: View,
    last: StepRecord | None,
    objective: str | None = "goodput",
    confidence: tuple[float, float] | None = None,
) -> str:
    """The last decision as a short table, and how it has turned out since.

    Args:
        objective: that of the controller, None where there is nobody who decides.
        confidence: from 0 to 1, how far this rank trusts its own measurements of latency and rate by now.
    """
    plan = standing.plan
    if decision is None:
        return f"{plan}, {_without_decision(standing, objective is None)}.\n{_network(view.alpha, view.beta)}."
    what = str(plan) if decision.plan != decision.before else f"still {plan}"
    shown = [c for i, c in enumerate(decision.candidates) if i < SHOWN or c.plan == decision.plan]
    lines = [
        f"From step {decision.step} on: {what}, because {decision.trigger}.",
        _network(decision.alpha, decision.beta, decision.hope) + ".",
        _of_a_step(decision, standing.guessed),
        "Gain of the largest entries: " + ", ".join(f"{gain:.3g} at {c}" for c, gain in decision.gains.items()) + ".",
        "",
        f"  {'plan':<{WIDTH}} {'step':>9} {'gain':>6} {'steps':>6} {'cost':>9}",
        *(_row(candidate, decision.plan) for candidate in shown),
    ]
    if len(decision.candidates) > len(shown):
        lines.append(f"  and {len(decision.candidates) - len(shown)} more")
    lines += _why_not_the_first(decision, objective)
    lines += ["", "step: predicted; steps: times those of dense training; cost: their product."]
    if last is not None and last.step_seconds == last.step_seconds and last.step >= decision.step:
        predicted = "" if standing.guessed else f", predicted {short(decision.seconds)}"
        lines.append(f"Measured since: {short(last.step_seconds)} in step {last.step}{predicted}.")
    if confidence is not None:
        alpha, beta = confidence
        lines.append(f"This rank trusts its own latency by {alpha:.0%}, and its own rate by {beta:.0%}.")
    return "\n".join(lines)


def _why_not_the_first(decision: Decision, objective: str | None) -> list[str]:
    """Of the candidates, which are sorted by cost."""
    if decision.plan == decision.candidates[0].plan:
        return []
    if objective == "knee":
        return ["It is the knee of time against 1/gain that is taken, and not the least cost."]
    if decision.plan == decision.before:
        return ["The first is better by too little to change for it."]
    return ["Dense is taken wherever compressing is better by little."]


def _without_decision(standing: Standing, fixed: bool) -> str:
    if fixed:
        return "fixed"
    if standing.seconds is None:
        return "until the network has been measured"
    return f"since step {standing.since}, as it was decided before this run was resumed"


def _row(candidate: Candidate, chosen: Plan) -> str:
    mark = "*" if candidate.plan == chosen else " "
    seconds, cost = short(candidate.seconds), short(candidate.cost)
    return f"{mark} {candidate.plan!s:<{WIDTH}} {seconds:>9} {candidate.gain:>6.3f} {candidate.steps:>6.2f} {cost:>9}"


def _network(alpha: float | None, beta: float | None, hope: int = 1) -> str:
    if alpha is None or beta is None:
        return "The network has not been measured"
    hoped = f", in the hope of {rate_of(beta / hope)}" if hope > 1 else ""
    return f"The network: {short(alpha)} one way, {rate_of(beta)} per host{hoped}"


def _of_a_step(decision: Decision, guessed: bool) -> str:
    if guessed:
        return f"No step had been measured: {short(decision.rest)} outside the exchange are a guess."
    return (
        f"Of a step, {short(decision.rest)} are outside the exchange and {short(decision.compress)} go to compressing."
    )
