"""Stretches in which bytes came in without a pause go in, the seconds per byte come out.

A stretch of b bytes takes b beta. A rate errs both ways (senders that serve several at once, packets in bunches), so
beta is a median over the last few steps; two in a row that are long or steady, alike, and far from those before are a
change, and so are two of more than twice the rate, or one where the ranks together hold it to be higher: the ones
before are forgotten. A stretch that is over in a moment is likely to be from one sender that was serving all its peers:
it says how fast the network is at least, and nothing beyond.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from thinwire.control.samples import (
    CONFIRMED,
    IN_A_ROW,
    LONG_AGO_SECONDS,
    NOTICEABLE,
    Sample,
    Trust,
    is_within,
    weighted_quantile,
)
from thinwire.link.base import Stretch

RATES = (1.0, 1e13)  # bytes per second that can be believed
STEPS_OLD = 6  # after which a rate is not of this time
STEPS_KEPT = 5  # of which there is a rate
LONG_STRETCH = 0.02  # seconds after which a rate becomes no more certain
BRIEF_STRETCH = 0.0025  # seconds, in which senders that serve all their peers at the same time need not overlap
MANY_BYTES = 1 << 15
ALIKE, FAR = 1.2, 1.4  # the ratio up to which two rates are alike, and from which on they are of different networks
HIGH = 0.8  # the quantile of its stretches that a step's rate is: senders that do not overlap make it lower
FAR_FASTER = 2.0  # the ratio from which on two in a row leave no doubt of a rise, however brief they are


class Rates:
    """What the stretches say to one rank among `world_size`.

    Attributes:
        beta: seconds per byte, None if nothing is known.
        rejected: stretches that could not be believed.
    """

    def __init__(self, world_size: int) -> None:
        self.beta: float | None = None
        self.rejected = 0
        self._world_size = world_size
        self._samples: deque[Sample] = deque(maxlen=STEPS_KEPT)
        self._doubts = 0  # how many in a row were far from what was believed

    def note(self, stretches: Iterable[Stretch], step: int, now: float, agreed: float | None) -> None:
        """Take in the stretches of a step, where all ranks together hold beta to be what is agreed.

        A step's rate is near the highest: some stretches came from a rank that was sending to others too.
        """
        seen = list(stretches)
        believed = [each for each in seen if _can_be_believed(*each)]
        self.rejected += len(seen) - len(believed)
        if not believed:
            return
        rates = [nbytes / seconds for nbytes, seconds in believed]
        sample = Sample(
            step,
            now,
            weighted_quantile([(rate, nbytes) for rate, (nbytes, _) in zip(rates, believed, strict=True)], HIGH),
            weight=min(1.0, sum(seconds for _, seconds in believed) / LONG_STRETCH),
            nbytes=sum(nbytes for nbytes, _ in believed),
            brief=max(seconds for _, seconds in believed) < BRIEF_STRETCH,
            steady=len(rates) > 1 and max(rates) <= ALIKE * min(rates),
        )
        if self._tells_nothing(sample):
            return
        self._samples = deque((each for each in self._samples if _is_young_beside(sample, each)), maxlen=STEPS_KEPT)
        usual = _usual(self._samples) if self._samples else sample.value
        is_far = not usual / FAR <= sample.value <= usual * FAR
        self._doubts = self._doubts + 1 if is_far else 0
        self._samples.append(sample)
        self._forget_before_a_jump(agreed)
        self.beta = 1 / _usual(self._samples)

    def trust(self, step: int, now: float) -> Trust:
        return Trust() if self.beta is None else Trust.of(self._samples, 1 / self.beta, STEPS_KEPT, step, now)

    @property
    def known_at(self) -> int:
        """The step at which something was last learned."""
        return self._samples[-1].step if self._samples else 0

    def are_in_doubt(self, step: int) -> bool:
        """Whether the last steps look like another network, so that the next one should be looked at too.

        Not for long, if nothing more is seen: looking costs something.
        """
        return 0 < self._doubts <= IN_A_ROW and step < self.known_at + IN_A_ROW

    def _tells_nothing(self, sample: Sample) -> bool:
        """Whether it is a brief one that may come from senders of the rate that is known.

        They may have been serving all their peers, or a few packets have come in a bunch: long ones know better.
        """
        is_known = any(not each.brief and sample.time - each.time < LONG_AGO_SECONDS for each in self._samples)
        if not sample.brief or not is_known or self.beta is None:
            return False
        known = 1 / self.beta
        return known / max(1, self._world_size - 1) <= sample.value * (1 + NOTICEABLE) and sample.value < known * FAR

    def _forget_before_a_jump(self, agreed: float | None) -> None:
        """Do not wait for the median to follow where the last steps leave no doubt.

        As after one that saw more than twice the rate, if others have seen it rise; two that did so; two that saw a
        rise or a fall, the same one, and had much to see it by or saw it several times; three that saw a rise.

        So few packets alone are not enough for a fall: to them, a busy machine that lets nobody run for a while looks
        like a slow network. But several times in a row, nothing looks far faster than it is.
        """
        for number in (1, 2, IN_A_ROW):
            before, recent = list(self._samples)[:-number], list(self._samples)[-number:]
            if not before:
                return
            usual = _usual(before)
            low, high = min(sample.value for sample in recent), max(sample.value for sample in recent)
            is_sure = high <= low * ALIKE and (all(_is_much(s) for s in recent) or all(s.steady for s in recent))
            is_confirmed = agreed is not None and agreed * usual * CONFIRMED < 1
            rose, fell = low > usual * FAR, high * FAR < usual
            if (rose and number == IN_A_ROW) or ((rose or fell) and is_sure and number == 2):
                self._samples = deque(recent, maxlen=STEPS_KEPT)
                return
            if low > usual * FAR_FASTER and (is_confirmed or number == 2):
                # They may still be bunches, and if they are brief the brief ones after them may say so.
                doubtful = [sample._replace(brief=sample.brief or not _is_much(sample)) for sample in recent]
                self._samples = deque(doubtful, maxlen=STEPS_KEPT)
                return


def _usual(samples: Iterable[Sample]) -> float:
    return weighted_quantile([(sample.value, sample.weight) for sample in samples], 0.5)


def _is_much(sample: Sample) -> bool:
    return sample.weight >= 0.5 and sample.nbytes >= MANY_BYTES


def _is_young_beside(sample: Sample, other: Sample) -> bool:
    """A long stretch of long ago would outweigh those of today; but not one that is told of by a few packets."""
    is_better = sample.brief and not other.brief and sample.time - other.time < LONG_AGO_SECONDS
    return is_better or other.step >= sample.step - STEPS_OLD


def _can_be_believed(nbytes: int, seconds: float) -> bool:
    return is_within(seconds, (1e-9, 1e6)) and is_within(nbytes / seconds, RATES)
