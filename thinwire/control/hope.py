"""Hope: that a rate which nobody has seen for long, as where messages are single packets, has risen meanwhile.

A fall would be seen, because then packets queue; but a rise may never be, since by the old rate it seems best to send
little. So now and then, and soon where exchanges take less time than they did, decisions are made for twice the rate.
If more is then sent, the rate is seen, or steps take longer for nothing; if it was in vain, it is done half as readily.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

PATIENCE = 20  # steps without a look at the rate, before anything is hoped for
MOST_PATIENCE = 160  # after which a hope in vain, some six steps of a plan that sends too much, costs little
HINT = 6  # steps for which one counts whose exchange took less: three in a row are reason enough
FARTHEST = 8  # times the rate that was seen: where that changes nothing, nothing will
TRIAL = 8  # steps, after which it can be told what came of a hope
DEARER = 1.15  # times what a step took before: that is not what was hoped for


@dataclass(frozen=True)
class Hope:
    """See the module.

    Attributes:
        factor: times the rate that was last seen is what to decide for.
        steps: since it was seen, or since more was hoped for; one whose exchange took less counts as several.
        patience: for how many steps to hope for nothing more.
        before: the seconds of a step before anything was hoped for.
    """

    factor: int = 1
    steps: int = 0
    patience: int = PATIENCE
    before: float = 0.0

    def after_a_look(self) -> Hope:
        """The rate was seen, and is what it was."""
        return replace(self, steps=0) if self.factor == 1 else self._in_vain()

    def after_nothing(self, step_seconds: float) -> Hope:
        """Nobody has seen anything, and this is what steps take."""
        if self.factor > 1 and self.steps >= TRIAL and step_seconds > DEARER * self.before:
            return self._in_vain()
        if self.steps + 1 < self.patience:
            return replace(self, steps=self.steps + 1)
        before = step_seconds if self.factor == 1 else self.before
        return replace(self, steps=0, factor=min(2 * self.factor, FARTHEST), before=before)

    def _in_vain(self) -> Hope:
        return Hope(patience=min(2 * self.patience, MOST_PATIENCE))

    def after_a_hint(self) -> Hope:
        """An exchange took less than it did, as it would at a higher rate. It may have been for another reason."""
        return replace(self, steps=self.steps + HINT)

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Hope:
        counts = {name: int(state[name]) for name in ("factor", "steps", "patience")}
        return cls(**counts, before=float(state["before"]))
