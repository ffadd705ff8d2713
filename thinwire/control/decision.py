"""Decision: what was seen, considered and chosen. Standing: what of it holds until the next one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from thinwire.types import Plan

UNFELT = 0.01  # of a step: what a change of latency makes of it at most is no reason for anything


class Candidate(NamedTuple):
    """One plan as it was judged.

    Attributes:
        seconds: a whole step, predicted.
        gain: the share of the gradient's energy that it sends.
        steps: how many times the steps of dense training it needs.
    """

    plan: Plan
    seconds: float
    gain: float
    steps: float

    @property
    def cost(self) -> float:
        """Seconds for what one dense step would have learned."""
        return self.seconds * self.steps


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What was seen, what was considered, what was chosen, and what made it necessary.

    Attributes:
        step: the first step that runs by it.
        trigger: what had changed, in words.
        alpha, beta: the network as it was known.
        hope: times that rate is what was decided for (control/hope.py).
        rest: the seconds of a step outside its exchange.
        compress: what of `seconds` is our own computing.
        candidates: every way at its best ratio, and what was chosen, the best first.
        before: what ran until then.
    """

    step: int
    trigger: str
    plan: Plan
    before: Plan
    seconds: float
    alpha: float
    beta: float
    hope: int = 1
    rest: float
    compress: float = 0.0
    gain: float
    gains: dict[str, float]
    candidates: tuple[Candidate, ...]

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {  # not asdict, which would copy every candidate first
            "plan": asdict(self.plan),
            "before": asdict(self.before),
            "candidates": [c._asdict() | {"plan": asdict(c.plan), "cost": c.cost} for c in self.candidates],
        }


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The plan in force, and what was known when it was chosen.

    Attributes:
        beta: what was decided for: what was known then, divided by `hope`.
        guessed: no step had been measured yet, so `seconds` counts what is usual for computing.
    """

    plan: Plan
    since: int = 0
    alpha: float | None = None
    beta: float | None = None
    hope: int = 1
    gain: float | None = None
    seconds: float | None = None
    guessed: bool = False

    @property
    def expected_seconds(self) -> float | None:
        """Of a step; None where nothing was predicted, or only guessed."""
        return None if self.guessed else self.seconds

    @property
    def known_beta(self) -> float | None:
        """What was known when it was decided, whatever was hoped for."""
        return None if self.beta is None else self.beta * self.hope

    def feels(self, alpha: float, world_size: int) -> bool:
        """Whether this latency makes a difference to any way: a ring, which has the most, waits for it 2 (N - 1) times.

        Where it is a hundredth of a millisecond it is twice that or half of it in no time.
        """
        if self.alpha is None or self.seconds is None:
            return True
        return 2 * (world_size - 1) * abs(alpha - self.alpha) >= UNFELT * self.seconds

    def is_left_alone_by(self, decision: Decision) -> bool:
        """Whether something was hoped for, and it would change nothing: then nothing can come of that hope."""
        return self.hope == 1 < decision.hope and decision.plan == self.plan

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Standing:
        return cls(**{**state, "plan": Plan(**state["plan"])})
