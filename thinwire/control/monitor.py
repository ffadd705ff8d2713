"""Monitor: what this rank makes of what its link notices: the latency alpha and the time per byte beta of its network.

A message of b bytes takes alpha + b beta. A probe goes there and back, so
    round trip = 2 (alpha + p beta),    p = 116 bytes that a probe occupies on the wire,
and a stretch of b bytes that came in without a pause takes b beta. latency.py has what comes of the one, rate.py of the
other, asking.py whom to probe. Only numbers come in here, and whatever they are, none goes out that cannot be.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from thinwire.control.asking import Asking
from thinwire.control.latency import Latencies
from thinwire.control.rate import Rates
from thinwire.control.samples import IN_A_ROW_FOR_SURE, NOTICEABLE, Sample
from thinwire.link.base import Reading

FIRST_LOOKS = 5  # at an estimate that is still to be found, before it can have changed
MOST_CHANGES = 256


class Estimate(NamedTuple):
    """A number, None if nothing is known, and how far to trust it: see `Trust`."""

    value: float | None = None
    confidence: float = 0.0
    samples: int = 0
    age: float = math.inf


class Change(NamedTuple):
    """The network is not what it was: which number (alpha or beta), since which step and when, from what to what."""

    what: str
    step: int
    time: float
    before: float
    after: float


@dataclass
class _Watch:
    """Looks for a value that has left where it was for good."""

    what: str
    settled: float = math.nan
    looks: int = 0
    away: list[Sample] = field(default_factory=list)

    def look(self, now: Sample) -> Change | None:
        self.looks += 1
        if self.looks <= FIRST_LOOKS:
            self.settled = now.value
        if abs(now.value / self.settled - 1) <= NOTICEABLE:
            self.away = []
            self.settled += (now.value - self.settled) / 10
            return None
        if self.away and (now.value > self.settled) != (self.away[0].value > self.settled):
            self.away = []  # to one side and to the other is noise
        self.away = [*self.away, now]
        if len(self.away) < IN_A_ROW_FOR_SURE:
            return None
        first, before = self.away[0], self.settled
        self.away, self.settled = [], now.value
        return Change(self.what, first.step, first.time, before, now.value)


class Monitor:
    """The network as one rank among `world_size` sees it.

    Args:
        rank: which of them, so that it is not told to probe itself.
        clock: seconds that never run backwards.

    Attributes:
        changes: what has changed and when, the newest last, as many as there is room for.
        asking: whom to probe.
    """

    def __init__(self, world_size: int, rank: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.changes: deque[Change] = deque(maxlen=MOST_CHANGES)
        self.asking = Asking(world_size, rank, clock)
        self._clock = clock
        self._step = 0
        self._latencies, self._rates = Latencies(world_size), Rates(world_size)
        self._alpha: float | None = None  # what round trips say together
        self._beta_told_at = 0
        self._watches = _Watch("alpha"), _Watch("beta")

    def note(
        self,
        reading: Reading,
        sent_bytes: int,
        agreed_alpha: float | None = None,
        agreed_beta: float | None = None,
    ) -> list[Change]:
        """Take in what the link noticed during a step; give what has changed by it. Bytes count from the beginning.

        What is agreed is what all ranks together hold latency and rate to be: some may have seen a change before this
        one.
        """
        now, before = self._clock(), (self._alpha, self._rates.beta)
        self._step += 1
        self._rates.note(reading.stretches, self._step, now, agreed_beta)
        is_known = not self._rates.are_in_doubt(self._step)
        self._latencies.note(reading, self._step, now, self._rates.beta if is_known else None, agreed_alpha)
        self._alpha = self._latencies.common(self._step, self._rates.beta)
        after = self._alpha, self._rates.beta
        self.asking.note_step(sent_bytes, reading.probe_bytes)
        if any(map(_are_apart, before, after)) or self._latencies.are_rising:
            self.asking.be_restless()
        changes = list[Change]()
        for watch, value, known_at in zip(
            self._watches, after, (self._latencies.known_at, self._rates.known_at), strict=True
        ):
            if value is not None and known_at == self._step and (change := watch.look(Sample(self._step, now, value))):
                changes.append(change)
        self.changes.extend(changes)
        return changes

    @property
    def rejected(self) -> int:
        """How many numbers could not be believed."""
        return self._latencies.rejected + self._rates.rejected

    def alpha_now(self) -> float | None:
        """The latency as one number, None if nothing is known: see `Latencies.common`."""
        return self._alpha

    def beta_now(self) -> float | None:
        """Seconds per byte."""
        return self._rates.beta

    @property
    def beta_is_new(self) -> bool:
        """Whether anything was learned about it since it was last told."""
        return self._rates.known_at > self._beta_told_at

    def beta_was_told(self) -> None:
        self._beta_told_at = self._rates.known_at

    def beta_is_unheard_of(self) -> None:
        """What was told of it no longer counts."""
        self._beta_told_at = 0

    @property
    def is_in_doubt(self) -> bool:
        """Whether the last steps look like another network, so that the next one should be looked at too."""
        return self._rates.are_in_doubt(self._step)

    # --- and how far to trust it

    def alpha(self) -> Estimate:
        pairs = list(self.pairs().values())
        if not pairs:
            return Estimate()
        return Estimate(
            self.alpha_now(),
            statistics.median(pair.confidence for pair in pairs),
            sum(pair.samples for pair in pairs),
            min(pair.age for pair in pairs),
        )

    def pairs(self) -> dict[int, Estimate]:
        """The latency to each peer of which anything is known; -1 stands for some peer."""
        trusted = self._latencies.trusted(self._step, self._clock(), self._rates.beta)
        return {peer: Estimate(latency, *trust) for peer, (latency, trust) in trusted.items()}

    def beta(self) -> Estimate:
        return Estimate(self._rates.beta, *self._rates.trust(self._step, self._clock()))


def _are_apart(before: float | None, after: float | None) -> bool:
    """Whether a number has become another, or known."""
    return after is not None and (before is None or abs(after / before - 1) > NOTICEABLE)
