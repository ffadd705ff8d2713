"""What was seen of the network and when, and how far to trust what many such samples say together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

IN_A_ROW = 3  # steps on the same side are a change, where nothing else speaks for one
IN_A_ROW_FOR_SURE = 5  # although no two of them are alike, or for one peer among many
NOTICEABLE = 0.1  # the relative difference that a change makes
CONFIRMED = 1.25  # the ratio by which others must have seen latency or rate rise, for one look to confirm it
OLD_SECONDS = 10.0  # after which a sample is half as certain
LONG_AGO_SECONDS = 30.0  # after which a sample is no reason any more to disbelieve one that is less sure


class Sample(NamedTuple):
    """One number, seen at one step.

    Attributes:
        weight: 1 for what is as sure as it gets.
        nbytes: that it was made of, where it is a rate.
        brief: and whether these came in too little time to say more than how fast the network is at least.
        steady: made of several that were alike.
    """

    step: int
    time: float
    value: float
    weight: float = 1.0
    nbytes: int = 0
    brief: bool = False
    steady: bool = False


class Trust(NamedTuple):
    """How far to trust an estimate.

    Attributes:
        confidence: from 0 to 1: many samples, alike and recent.
        samples: how many there are.
        age: seconds since the newest of them.
    """

    confidence: float = 0.0
    samples: int = 0
    age: float = math.inf

    @classmethod
    def of(cls, samples: Iterable[Sample], value: float, wanted: int, step: int, now: float) -> Trust:
        """In a value that was made of these samples, when so many of them would be enough."""
        kept = list(samples)
        age = max(0.0, now - kept[-1].time) if kept[-1].step < step else 0.0
        spread = statistics.median(abs(sample.value / value - 1) for sample in kept)
        enough = sum(sample.weight for sample in kept) / wanted
        return cls(min(1.0, enough) / (1 + spread) * 2 ** (-age / OLD_SECONDS), len(kept), age)


def is_within(value: float, bounds: tuple[float, float]) -> bool:
    """Which no NaN is."""
    return bounds[0] <= value <= bounds[1]


def weighted_quantile(pairs: list[tuple[float, float]], share: float) -> float:
    """The least value at which so much of the weight lies at or below it.

    >>> weighted_quantile([(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)], 0.5)
    2.0
    """
    wanted = share * sum(weight for _, weight in pairs)
    reached = 0.0
    for value, weight in sorted(pairs):
        reached += weight
        if reached >= wanted:
            return value
    return max(pairs)[0]
