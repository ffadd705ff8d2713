"""Hope: that a rate which nobody has seen for long, as where messages are single packets, has risen meanwhile.

A fall would be seen, because then packets queue; but a rise may never be, since by the old rate it seems best to send
little. So now and then, and soon where exchanges take less time than they did, decisions are made for twice the rate.
If more is then sent, it is seen; if that was in vain, it is done half as readily.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

PATIENCE = 20  # steps without a look at the rate, before anything is hoped for
MOST_PATIENCE = 160  # after which a hope in vain, some six steps of a plan that sends too much, costs little
HINT = 6  # steps for which one counts whose exchange took less: three in a row are reason enough
FARTHEST = 32  # times the rate that was seen: where that changes nothing, nothing will


@dataclass(frozen=True)
class Hope:
    """See the module.

    Attributes:
        factor: times the rate that was last seen is what to decide for.
        steps: since it was seen, or since more was hoped for; one whose exchange took less counts as several.
        patience: for how many steps to hope for nothing more.
    """

    factor: int = 1
    steps: int = 0
    patience: int = PATIENCE

    def after_a_look(self) -> Hope:
        """The rate was seen, and is what it was."""
        if self.factor == 1:
            return replace(self, steps=0)
        return Hope(patience=min(2 * self.patience, MOST_PATIENCE))

    def after_nothing(self) -> Hope:
        """Nobody has seen anything."""
        if self.steps + 1 < self.patience:
            return replace(self, steps=self.steps + 1)
        return replace(self, steps=0, factor=min(2 * self.factor, FARTHEST))

    def after_a_hint(self) -> Hope:
        """An exchange took less than it did, as it would at a higher rate. It may have been for another reason."""
        return replace(self, steps=self.steps + HINT)

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Hope:
        return cls(**{name: int(state[name]) for name in ("factor", "steps", "patience")})
