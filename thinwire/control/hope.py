"""Hope: that a rate which nobody has seen for long, as where messages are single packets, has risen meanwhile.

A fall would be seen, because then packets queue; but a rise may never be, since by the old rate it seems best to send
little. Exchanges then take less time than they did, and when that is beyond doubt it is hoped that the rate has
doubled; where their bytes take too little time for it to show, that is hoped now and then for no reason. To hope is to
decide for twice the rate.

If more is then sent, the rate may be seen. If not, how much longer exchanges take than those before tells whether the
hope was in vain, and then it is done half as readily; or whether it has come true, and then twice as much is hoped for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from thinwire.control.agreement import rounded

PATIENCE = 20  # steps without a look at the rate, before anything is hoped for
MOST_PATIENCE = 160  # after which a hope in vain, some six steps of a plan that sends too much, costs little
FARTHEST = 8  # times the rate that was seen: where that changes nothing, nothing will
SURE, IN_VAIN = 3.0, -1.5  # log odds that leave no doubt, 20 to 1; and for giving up 4 to 1, as few hopes come true
MOST = 1.0  # that one step can add, whatever happened in it
UNLIKELY = -0.5  # below which nothing more is hoped for


@dataclass(frozen=True)
class Hope:
    """See the module. All times in seconds.

    Attributes:
        factor: times the rate that was last seen is what to decide for.
        steps: since it was seen, or since more was hoped for.
        patience: for how many steps to hope for nothing more without a reason.
        evidence: log odds that the rate is `factor` times what it was and not half of that (Wald 1945); while nothing
            is hoped for, that it is twice what it was, as far as that speaks for it (Page 1954).
        highest: factor to hope for at once where half of it has come true; less after one that was in vain.
        moved: what moving its bytes takes the plan that ran before more was hoped for, if that is true.
        saved: what that plan then takes less than by the rate by which it was known what is usual.
    """

    factor: int = 1
    steps: int = 0
    patience: int = PATIENCE
    evidence: float = 0.0
    highest: int = FARTHEST
    moved: float = 0.0
    saved: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether it is still to be seen what comes of it."""
        return self.factor > 1 and self.evidence < SURE

    def after_a_look(self) -> Hope:
        """The rate was seen, and is what it was."""
        return replace(self, steps=0, evidence=0.0) if self.factor == 1 else self._in_vain()

    def after_an_exchange(self, late: float, moving: float, noise: float) -> Hope:
        """An exchange ended so much later than expected, and moving its bytes was expected to take so long.

        If what is hoped for is true, it has come about lately, and exchanges of all plans take what is expected; or
        long ago, and then what is usual has come to be less, and only those of another plan than before tell.

        Args:
            noise: the deviation of what an exchange takes.
        """
        if self.factor == 1:
            return self._with_a_hint(_odds(-moving / 2, late, noise), moving, shows=moving / 2 > noise)
        if not self.is_open:
            return self if self.factor == FARTHEST else self._after_nothing(self.patience, moving)
        lately, long_ago = _odds(moving, late, noise), _odds(moving - self.moved, late - self.saved, noise)
        evidence = rounded(self.evidence - min(lately, long_ago))
        if evidence <= IN_VAIN:
            return self._in_vain()
        if evidence >= SURE and self.factor < self.highest:
            return self._for_more(moving)
        return replace(self, evidence=min(evidence, SURE))._after_nothing(self.patience, moving)

    def _with_a_hint(self, odds: float, moving: float, shows: bool) -> Hope:
        evidence = max(0.0, rounded(self.evidence + odds))
        if evidence >= (SURE if self.patience == PATIENCE else SURE + MOST):
            return self._for_more(moving)
        return replace(self, evidence=evidence)._after_nothing(MOST_PATIENCE if shows else self.patience, moving)

    def _after_nothing(self, patience: int, moving: float) -> Hope:
        """Nobody has seen anything."""
        if self.steps + 1 < patience:
            return replace(self, steps=self.steps + 1)
        return self._for_more(moving) if self.evidence > UNLIKELY and self.factor < FARTHEST else self._in_vain()

    def _for_more(self, moving: float) -> Hope:
        factor, half = 2 * self.factor, rounded(moving / 2)
        highest = self.highest if factor <= self.highest else FARTHEST
        saved = rounded(half + (self.saved if self.is_open else 0.0))
        return Hope(factor, patience=self.patience, highest=highest, moved=half, saved=saved)

    def _in_vain(self) -> Hope:
        return Hope(patience=min(2 * self.patience, MOST_PATIENCE), highest=self.factor // 2)

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Hope:
        return cls(
            factor=int(state["factor"]),
            steps=int(state["steps"]),
            patience=int(state["patience"]),
            evidence=float(state["evidence"]),
            highest=int(state["highest"]),
            moved=float(state["moved"]),
            saved=float(state["saved"]),
        )


def _odds(worse: float, late: float, noise: float) -> float:
    """The log odds that an exchange is `worse` rather than 0 later, of normal distributions, when it was so late."""
    return min(MOST, max(-MOST, worse * (late - worse / 2) / noise**2))
