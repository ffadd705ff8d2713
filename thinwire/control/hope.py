"""Hope: that a rate which nobody has seen for long, as where messages are single packets, has risen meanwhile.

A fall would be seen, because then packets queue; but a rise may never be, since by the old rate it seems best to send
little. Exchanges then take less time than they did, and when that is beyond doubt it is hoped that the rate has risen.
Their bytes may take too little time for it to show, or latency may have changed with it, so that is also hoped now and
then for no reason. To hope is to decide for FACTOR times the rate: much, so that it soon shows whether it is true.

If more is then sent, the rate may be seen. If not, how much longer exchanges take than those before tells whether the
hope has come true, and then that is the rate, and there may be more to hope for; or was in vain, and then it is done
half as readily.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from thinwire.control.agreement import rounded

FACTOR = 8  # times the rate that was seen: where that changes nothing, nothing will
PATIENCE = 20  # steps without a look at the rate until one hopes; and for which a hope lasts that shows nothing
WARY = 2 * PATIENCE  # the same where there is reason for doubt from the beginning
MOST_PATIENCE = 160  # after which a hope in vain, some four steps of a plan that sends too much, costs 1 % at most
SURE, IN_VAIN = 3.0, -1.5  # log odds that leave no doubt, 20 to 1; and for giving up 4 to 1, as few hopes come true
SURER = 4.0  # what it takes after one in vain, as noise may look like a rise again, or where one is wary
MOST = 1.0  # that one step can add, whatever happened in it
TWICE = 2  # a hope must be sure so often, one time after the other: a machine that is busy stays so for some steps
LIKELY = 1.5  # log odds that more than one step must have spoken for
USUAL_NOISE = 0.15  # of what an exchange takes: so much more or less is usual anywhere
NEWEST_NOISE = 0.05  # the weight of the newest sample
MOST_ALIKE = 0.95  # the correlation of one exchange with the next that is believed


class Noise(NamedTuple):
    """How much longer or shorter exchanges take than is usual, as a share of what they take.

    Attributes:
        square: the mean square of that share.
        product: the mean product of two in a row: where a machine is busy it stays so for a while.
        last: the last one.

    >>> noise = Noise()
    >>> for share in (0.3, -0.3) * 50:
    ...     noise = noise.after(share)
    >>> round(noise.deviation, 2)
    0.3
    """

    square: float = USUAL_NOISE**2
    product: float = 0.0
    last: float = 0.0

    def after(self, share: float) -> Noise:
        share = max(-1.0, min(share, 1.0))
        square = self.square + NEWEST_NOISE * (share**2 - self.square)
        product = self.product + NEWEST_NOISE * (share * self.last - self.product)
        return Noise(rounded(square), rounded(product), rounded(share))

    @property
    def deviation(self) -> float:
        """Of exchanges that had nothing to do with each other, and as many would say as much as these do.

        Of n samples that are alike with a correlation of r, the mean is as uncertain as that of n (1 - r) / (1 + r).
        """
        alike = max(0.0, min(self.product / self.square, MOST_ALIKE)) if self.square > 0 else 0.0
        return max(USUAL_NOISE, math.sqrt(self.square * (1 + alike) / (1 - alike)))


class Hope(NamedTuple):
    """See the module. All times in seconds.

    Attributes:
        factor: times the rate that is known is what to decide for: 1 or FACTOR.
        steps: since it was seen, or since there was hope.
        patience: for how many steps to hope for nothing without a reason.
        evidence: log odds that the rate has lately become `factor` times what it was, and is not what it was (Wald
            1945); while nothing is hoped for, that it is twice what it was, as far as that speaks for it (Page 1954).
        long_ago: the same log odds, should it have risen long ago.
        moved: what moving its bytes takes the plan that ran before there was hope, if that is true.
        sure: how often the evidence has left no doubt.
    """

    factor: int = 1
    steps: int = 0
    patience: int = PATIENCE
    evidence: float = 0.0
    long_ago: float = 0.0
    moved: float = 0.0
    sure: int = 0

    @property
    def is_open(self) -> bool:
        """Whether it is still to be seen what comes of it."""
        return self.factor > 1 and not self.has_come_true

    @property
    def is_urgent(self) -> bool:
        """Whether the next exchange counts: what is tried costs time, and so does a rise that is not known of."""
        return self.is_open or (self.evidence >= LIKELY and self.patience < MOST_PATIENCE)

    @property
    def has_come_true(self) -> bool:
        return self.sure >= TWICE

    @property
    def _beyond_doubt(self) -> float:
        """The log odds that leave none: the more hopes were in vain, the less likely is that this one is not."""
        return SURE + rounded(math.log(max(1.0, self.patience / PATIENCE)))

    def after_a_look(self) -> Hope:
        """The rate was seen, and is what it was."""
        return self._replace(steps=0, evidence=0.0) if self.factor == 1 else self._in_vain()

    def after_silence(self, steps: int = 1) -> Hope:
        """An exchange tells nothing, so that a hope can only be given up after a while."""
        if self.factor == 1:
            return self
        return self._in_vain() if self.steps + steps >= PATIENCE else self._replace(steps=self.steps + steps)

    def after_an_exchange(self, late: float, moving: float, noise: float, steps: int = 1) -> Hope:
        """An exchange ended so much later than expected, and moving its bytes was expected to take so long.

        Args:
            noise: the deviation of what an exchange takes.
            steps: since the last one that was heard of.
        """
        hope = self._replace(steps=self.steps + steps)
        if self.factor == 1:
            return hope._with_a_hint(_odds(-moving / 2, late, noise), moving)
        return hope._with_a_trial(late, moving, noise)

    def _with_a_hint(self, odds: float, moving: float) -> Hope:
        evidence = max(0.0, rounded(self.evidence + odds))
        needed = SURE if self.patience == PATIENCE else SURER
        if evidence >= needed or self.steps >= self.patience:
            return Hope(FACTOR, patience=self.patience, moved=rounded(moving / FACTOR))
        return self._replace(evidence=evidence)

    def _with_a_trial(self, late: float, moving: float, noise: float) -> Hope:
        """If what is hoped for is true, it has come about lately, and exchanges of all plans take what is expected.

        Or long ago, and then what is usual has come to be less, and only those of another plan than before tell. Each
        has a sum of its own: the better of both, taken at every step, would find good news in any noise.
        """
        more = FACTOR - 1  # times as long, if the rate is what it was
        lately = rounded(self.evidence - _odds(more * moving, late, noise))
        long_ago = rounded(self.long_ago - _odds(more * (moving - self.moved), late - more * self.moved, noise))
        best = max(lately, long_ago)
        if best >= self._beyond_doubt:
            return self._replace(evidence=0.0, long_ago=0.0, steps=0, sure=self.sure + 1)
        if best <= IN_VAIN or self.steps >= PATIENCE:
            return self._in_vain()
        return self._replace(evidence=lately, long_ago=long_ago)

    def for_nothing(self) -> Hope:
        """What runs would run by this hope too, so there is nothing to try, and nothing to find out for long."""
        return Hope(patience=MOST_PATIENCE)

    def _in_vain(self) -> Hope:
        return Hope(patience=min(2 * self.patience, MOST_PATIENCE))

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Hope:
        return cls(
            factor=int(state["factor"]),
            steps=int(state["steps"]),
            patience=int(state["patience"]),
            evidence=float(state["evidence"]),
            long_ago=float(state["long_ago"]),
            moved=float(state["moved"]),
            sure=int(state["sure"]),
        )


def _odds(worse: float, late: float, noise: float) -> float:
    """The log odds that an exchange is `worse` rather than 0 later, of normal distributions, when it was so late."""
    return min(MOST, max(-MOST, worse * (late - worse / 2) / noise**2))
