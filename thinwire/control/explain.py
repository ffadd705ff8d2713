"""A decision in words: what was seen, what was considered, what was chosen and why."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from thinwire.control.decision import Candidate, Decision, Standing
from thinwire.control.gain import GainCurve
from thinwire.control.view import View
from thinwire.control.wording import rate_of, short
from thinwire.types import Plan, StepRecord, way_in_words

SHOWN = 8  # candidates
WIDTH = 80  # of a terminal that nobody has made wider


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
    if decision is None and objective is not None and last is not None and last.dense_bytes == 0:
        return f"{plan}, as there is nobody to exchange with."
    if decision is None:
        return f"{plan}, {_without_decision(standing, objective is None)}.\n{_network(view, view.alpha, view.beta)}."
    what = str(plan) if decision.plan != decision.before else f"still {plan}"
    shown = [c for i, c in enumerate(decision.candidates) if i < SHOWN or c.plan == decision.plan]
    lines = [
        f"From step {decision.step}: {what},",
        f"because {decision.trigger}.",
        _network(view, decision.alpha, decision.beta, decision.hope) + ".",
        _of_a_step(decision, standing.guessed),
        _gains(decision),
        "",
        *_table(shown, decision.plan),
    ]
    if len(decision.candidates) > len(shown):
        lines.append(f"  and {len(decision.candidates) - len(shown)} more")
    lines += [*_why_not_the_first(decision, objective), "", _legend(shown)]
    if (since := _measured_since(decision, view, last)) is not None:
        predicted = "" if standing.guessed else f"; predicted: {short(decision.seconds)}"
        lines.append(f"Measured since: {since}{predicted}.")
    if confidence is not None:
        alpha, beta = (f"{100 * trust:.0f} %" for trust in confidence)
        lines.append(f"Confidence of this rank's own measurements: latency {alpha}, rate {beta}.")
    return "\n".join(line for each in lines for line in _wrapped(each))


def _wrapped(line: str) -> list[str]:
    """A sentence as lines that fit; what is set in columns stays as it is."""
    return [line] if line.startswith(("  ", "* ")) else textwrap.wrap(line, WIDTH, break_on_hyphens=False) or [""]


def _measured_since(decision: Decision, view: View, last: StepRecord | None) -> str | None:
    """A step since then: as all ranks told of it, or else as this rank alone saw its last; None if none was timed."""
    if view.took is not None and view.step > decision.step:  # since ranks tell of the step before
        return f"{short(view.took)} in one step, the mean over all ranks"
    if last is not None and last.step_seconds == last.step_seconds and last.step >= decision.step:
        return f"{short(last.step_seconds)} in step {last.step}, on this rank alone"
    return None


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


def _table(candidates: Sequence[Candidate], chosen: Plan) -> list[str]:
    """Below each other, with a star at what was chosen, and as wide as what stands in it."""
    rows = [("plan", "ratio", "step", "gain", "steps", "cost"), *map(_row, candidates)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    gap = "  " if 2 + sum(widths) + 2 * (len(widths) - 1) <= WIDTH else " "
    marks = [" ", *("*" if candidate.plan == chosen else " " for candidate in candidates)]
    return [
        f"{mark} " + gap.join([name.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])])
        for mark, (name, *numbers) in zip(marks, rows, strict=True)
    ]


def _row(candidate: Candidate) -> tuple[str, ...]:
    plan = candidate.plan
    way = way_in_words(plan.exchange, plan.collective, plan.broadcast, "float32").removesuffix(" broadcast")
    ratio = "1" if plan.exchange == "dense" else f"{plan.ratio:.3g} ({float(f'{1 / plan.ratio:.3g}'):g}x)"
    seconds, cost = (short(number).replace(" ", "") for number in (candidate.seconds, candidate.cost))
    return way, ratio, seconds, f"{candidate.gain:.3f}", f"{candidate.steps:.2f}", cost


def _legend(candidates: Sequence[Candidate]) -> str:
    """What the columns are, and what many plans of a table share and is not said in every row of it."""
    said = ["step: predicted; steps: times those of dense training; cost: their product."]
    broadcasts = sorted({c.plan.broadcast for c in candidates} - {"tree"})
    said += [f"{name}: how the indices are broadcast." for name in broadcasts]
    for values in sorted({c.plan.values for c in candidates} - {"float32"}):
        names = dict.fromkeys(c.plan.exchange for c in candidates if c.plan.values == values)
        said.append(f"{', '.join(names)}: with {values} values.")
    return " ".join(said)


def _network(view: View, alpha: float | None, beta: float | None, hope: int = 1) -> str:
    if alpha is None or beta is None:
        return "The network has not been measured"
    doubt = ""
    if hope > 1:
        doubt = f", in the hope of {rate_of(beta / hope)}"
    elif view.seen_beta is not None and beta == view.beta and beta < view.seen_beta:  # a hope of earlier that came true
        doubt = f" by how long exchanges take, {rate_of(view.seen_beta)} when it was last seen"
    return f"The network: {short(alpha)} one way, {rate_of(beta)} per host{doubt}"


def _of_a_step(decision: Decision, guessed: bool) -> str:
    if guessed:
        return f"No step had been measured: {short(decision.rest)} outside the exchange are a guess."
    return (
        f"Of a step, {short(decision.rest)} are outside the exchange and {short(decision.compress)} go to compressing."
    )


def _gains(decision: Decision) -> str:
    """What is held of every gradient before one was seen is no measurement."""
    usual = [gain for _, gain in GainCurve().points()]
    whose = " in a usual model, as none was measured" if list(decision.gains.values()) == usual else ""
    return (
        f"Gain of the largest entries{whose}: {', '.join(f'{gain:.3g} at {c}' for c, gain in decision.gains.items())}."
    )
