"""Hope: that a rate which nobody has seen for long, as where messages are single packets, has risen meanwhile.

A fall would be seen, because then packets queue; but a rise may never be, since by the old rate it seems best to send
little. Exchanges then take less time than they did, which is reason enough to hope; and where their bytes take too
little time for that to show, it is hoped now and then for no reason. To hope is to decide for twice the rate.

If more is then sent, the rate may be seen. If not, how long exchanges take tells whether the hope was in vain, and then
it is done half as readily; or whether it has come true, and then twice as much is hoped for at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from thinwire.control.agreement import rounded

PATIENCE = 20  # steps without a look at the rate, before anything is hoped for
MOST_PATIENCE = 160  # after which a hope in vain, some six steps of a plan that sends too much, costs little
HINTS = 3  # exchanges that took less are reason enough
FARTHEST = 8  # times the rate that was seen: where that changes nothing, nothing will
SURE, IN_VAIN = 3.0, -1.5  # log odds that leave no doubt, 20 to 1; and for giving up 4 to 1, as few hopes come true
MOST = 1.0  # that one step can add, whatever happened in it
UNLIKELY = -0.5  # below which nothing more is hoped for


@dataclass(frozen=True)
class Hope:
    """See the module.

    Attributes:
        factor: times the rate that was last seen is what to decide for.
        steps: since it was seen, or since more was hoped for; one whose exchange took less counts as several.
        patience: for how many steps to hope for nothing more.
        evidence: log odds that the rate is `factor` times what it was and not half of that (Wald 1945).
        highest: factor to hope for at once where half of it has come true; less after one that was in vain.
    """

    factor: int = 1
    steps: int = 0
    patience: int = PATIENCE
    evidence: float = 0.0
    highest: int = FARTHEST

    @property
    def is_open(self) -> bool:
        """Whether it is still to be seen what comes of it."""
        return 1 < self.factor < FARTHEST and self.evidence < SURE

    def after_a_look(self) -> Hope:
        """The rate was seen, and is what it was."""
        return replace(self, steps=0) if self.factor == 1 else self._in_vain()

    def after_nothing(self) -> Hope:
        """Nobody has seen anything."""
        return self._after(1)

    def after_a_hint(self) -> Hope:
        """An exchange took less than it did, as it would at a higher rate. It may have been for another reason."""
        return self._after(-(-self.patience // HINTS))

    def after_an_exchange(self, late: float, worse: float) -> Hope:
        """An exchange ended so much later than hoped for, and at half the rate it would be `worse` later.

        Both in deviations of what an exchange takes, which is noise: log odds of a normal distribution at 0 and at
        `worse`.
        """
        evidence = rounded(self.evidence + min(MOST, max(-MOST, worse * (worse / 2 - late))))
        if evidence <= IN_VAIN:
            return self._in_vain()
        if evidence < SURE or self.factor >= self.highest:
            return replace(self, evidence=min(evidence, SURE))
        return self._for_more()

    def _after(self, steps: int) -> Hope:
        waited = self.steps + steps
        if waited < self.patience:
            return replace(self, steps=waited)
        if self.factor == FARTHEST:
            return replace(self, steps=0)
        return self._for_more() if self.evidence > UNLIKELY else self._in_vain()

    def _for_more(self) -> Hope:
        factor = 2 * self.factor
        return Hope(factor, patience=self.patience, highest=self.highest if factor <= self.highest else FARTHEST)

    def _in_vain(self) -> Hope:
        return Hope(patience=min(2 * self.patience, MOST_PATIENCE), highest=self.factor // 2)

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Hope:
        counts = {name: int(state[name]) for name in ("factor", "steps", "patience", "highest")}
        return cls(**counts, evidence=float(state["evidence"]))
