"""Hope: that a rate which nobody has seen for long, as where messages are single packets, has risen meanwhile.

A fall would be seen, because then packets queue; but a rise may never be, since by the old rate it seems best to send
little. Exchanges then take less time than they did, and once that is beyond doubt it is hoped that the rate has
doubled; where their bytes take too little time for it to show, that is hoped now and then for no reason. To hope is to
decide for twice the rate.

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
FARTHEST = 8  # times the rate that was seen: where that changes nothing, nothing will
SURE, IN_VAIN = 3.0, -1.5  # log odds that leave no doubt, 20 to 1; and for giving up 4 to 1, as few hopes come true
MOST = 1.0  # that one step can add, whatever happened in it
UNLIKELY = -0.5  # below which nothing more is hoped for


@dataclass(frozen=True)
class Hope:
    """See the module.

    Attributes:
        factor: times the rate that was last seen is what to decide for.
        steps: since it was seen, or since more was hoped for.
        patience: for how many steps to hope for nothing more without a reason.
        evidence: log odds that the rate is `factor` times what it was and not half of that (Wald 1945); while nothing
            is hoped for, that it is twice what it was, as far as that speaks for it (Page 1954).
        highest: factor to hope for at once where half of it has come true; less after one that was in vain.
    """

    factor: int = 1
    steps: int = 0
    patience: int = PATIENCE
    evidence: float = 0.0
    highest: int = FARTHEST

    @property
    def is_open(self) -> bool:
        """Whether it is still to be seen what comes of it, or whether there is reason to hope."""
        return self.evidence >= MOST if self.factor == 1 else self.evidence < SURE and self.factor < FARTHEST

    def after_a_look(self) -> Hope:
        """The rate was seen, and is what it was."""
        return replace(self, steps=0, evidence=0.0) if self.factor == 1 else self._in_vain()

    def after_an_exchange(self, late: float, moving: float) -> Hope:
        """An exchange ended so much later than expected, and moving its bytes was expected to take so long.

        Both in deviations of what an exchange takes, since that is noise: log odds of normal distributions, one at 0
        and one where the rate would be half, or twice, what is expected.
        """
        if self.factor == 1:
            evidence = max(0.0, self._with(moving / 2 * (-late - moving / 4)))
            reason = SURE * self.patience / PATIENCE
            return replace(self, evidence=evidence) if evidence < reason else self._for_more()
        evidence = self._with(moving * (moving / 2 - late))
        if evidence <= IN_VAIN:
            return self._in_vain()
        if evidence < SURE or self.factor >= self.highest:
            return replace(self, evidence=min(evidence, SURE))
        return self._for_more()

    def _with(self, odds: float) -> float:
        return rounded(self.evidence + min(MOST, max(-MOST, odds)))

    def after_nothing(self) -> Hope:
        """Nobody has seen anything."""
        if self.steps + 1 < self.patience:
            return replace(self, steps=self.steps + 1)
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
