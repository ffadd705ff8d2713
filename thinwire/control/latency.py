"""Round trips in, the latency out: one number for each peer, and one that a collective sees.

Noise has a side. Nothing makes a round trip shorter than it is, and everything else (a queue, a process that is not let
run) makes it longer: so the latency is taken from the least of the last few. When the network itself becomes slower,
that least would hold the estimate back: so when several in a row are all above it, what was before them is forgotten;
one is enough where the ranks together have come to hold the latency to be higher than this one does.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

from thinwire.control.samples import (
    CONFIRMED,
    IN_A_ROW,
    IN_A_ROW_FOR_SURE,
    LONG_AGO_SECONDS,
    NOTICEABLE,
    Sample,
    Trust,
    is_within,
)
from thinwire.link.base import Reading

WIRE_BYTES = 116  # of a probe or its answer, with the headers of TCP (32) and IP (20)
ROUND_TRIPS = (2e-7, 200.0)  # seconds that can be believed
TRIPS_KEPT = 8  # of each peer
TELLING = 0.15  # of what a message took there and another back it may have waited if it is to tell of a rise
ONE_GO = 14_000  # bytes that TCP sends at once after a pause, before it waits for an acknowledgement
FAR_AWAY, FAR_AWAY_SECONDS = 2.0, 1e-3  # times the median latency, and more than that: peers on another site


class Echo(NamedTuple):
    """A message to a peer and the beginning of one back.

    Attributes:
        seconds: for which they were on their way.
        nbytes: of both.
        waited: seconds of these at most, if as many bytes were on their way to and from every other peer, by the rate
            that is held to be true; infinite if there is none to go by.
    """

    peer: int
    seconds: float
    nbytes: int
    waited: float

    @property
    def is_telling(self) -> bool:
        """Of a rise: what little it waited, and that TCP sent it in one go."""
        return self.waited <= TELLING * self.seconds and self.nbytes <= ONE_GO


class Latencies:
    """What the round trips to `world_size` ranks say.

    A probe's own bytes take time, too, so whoever asks says what a byte takes: `beta`, None if that is not known.

    Attributes:
        rejected: numbers that could not be believed.
    """

    def __init__(self, world_size: int) -> None:
        self.rejected = 0
        self._world_size = world_size
        self._trips: dict[int, deque[Sample]] = {}
        self._delayed: dict[int, deque[Sample]] = {}
        # How much longer delayed round trips were, step by step, and how far above expectation, at each that knows.
        self._queueing: deque[float] = deque(maxlen=TRIPS_KEPT)
        self._risen: deque[Sample] = deque(maxlen=IN_A_ROW_FOR_SURE)
        self._far_looks = Counter[int]()  # at each peer, in a row that found it much farther away than the others

    def note(self, reading: Reading, step: int, now: float, beta: float | None, agreed: float | None) -> None:
        """Take in the round trips of a step, where all ranks together hold the latency to be what is agreed."""
        clear, delayed = self._least_of_each(reading.round_trips), self._least_of_each(reading.delayed)
        echoes = [Echo(*echo, self._waited(echo[2], beta)) for echo in reading.echoes]
        telling = [echo for echo in echoes if echo.is_telling]
        at_least = [(echo.peer, echo.seconds - echo.waited) for echo in telling]
        self._look_for_a_rise(clear, self._least_of_each([*reading.delayed, *at_least]), step, now)
        at_most = [(echo.peer, echo.seconds) for echo in telling]
        for peer, seconds in self._least_of_each([*reading.delayed, *at_most]).items():
            self._delayed.setdefault(peer, deque(maxlen=TRIPS_KEPT)).append(Sample(step, now, seconds, 0.25))
        if (since := self._risen_since(agreed, step, beta)) is not None:
            self._forget_all_before(since)
        for peer, seconds in delayed.items():
            self._use_delayed(peer, seconds, step, now)
        for echo in echoes:
            self._use_shorter(echo, step, now)
        for peer, seconds in clear.items():
            samples = self._trips.setdefault(peer, deque(maxlen=TRIPS_KEPT))
            samples.append(Sample(step, now, seconds))
            self._forget_before_a_rise(samples)

    def common(self, step: int, beta: float | None) -> float | None:
        """The latency as one number, None if nothing is known: of the median peer, or the farthest if that is far.

        A collective waits for the farthest. But of many peers one always seems farther than it is, so it counts only if
        that is so beyond doubt.
        """
        found = self._by_peer(beta)
        if not found:
            return None
        self._note_who_is_far(found, step)
        far = [found[peer] for peer, looks in self._far_looks.items() if looks >= IN_A_ROW and peer in found]
        return max(far, default=statistics.median(found.values()))

    def trusted(self, step: int, now: float, beta: float | None) -> dict[int, tuple[float, Trust]]:
        """That to each peer of which anything is known, and how far to trust it; -1 stands for some peer."""
        return {
            peer: (latency, Trust.of(self._trips[peer], _least(self._trips[peer]), TRIPS_KEPT, step, now))
            for peer, latency in sorted(self._by_peer(beta).items())
        }

    @property
    def are_rising(self) -> bool:
        """Whether the last round trips were longer than they should be."""
        return bool(self._risen)

    @property
    def known_at(self) -> int:
        """The step at which something was last learned."""
        return max((trips[-1].step for trips in self._trips.values() if trips), default=0)

    def _by_peer(self, beta: float | None) -> dict[int, float]:
        own_time = WIRE_BYTES * (beta or 0.0)
        return {peer: _latency(trips, own_time) for peer, trips in self._trips.items() if trips}

    def _note_who_is_far(self, found: dict[int, float], step: int) -> None:
        limit = FAR_AWAY * statistics.median_low(found.values()) + FAR_AWAY_SECONDS
        for peer, latency in found.items():
            if latency <= limit:
                self._far_looks[peer] = 0
            elif self._trips[peer][-1].step == step:  # or it may be the others that have come nearer since
                self._far_looks[peer] += 1

    def _least_of_each(self, trips: Iterable[tuple[int, float]]) -> dict[int, float]:
        """The least of each peer's; the others had to wait for something."""
        least: dict[int, float] = {}
        for peer, seconds in trips:
            if -1 <= peer < self._world_size and is_within(seconds, ROUND_TRIPS):
                least[peer] = min(seconds, least.get(peer, seconds))
            else:
                self.rejected += 1
        return least

    def _waited(self, nbytes: int, beta: float | None) -> float:
        return math.inf if beta is None else (self._world_size - 1) * nbytes * beta

    def _use_shorter(self, echo: Echo, step: int, now: float) -> None:
        """If messages took less than round trips did that waited for nothing, those are over."""
        known = self._trips.get(echo.peer)
        if known and is_within(echo.seconds, ROUND_TRIPS) and echo.seconds < _least(known):
            known.append(Sample(step, now, echo.seconds, 0.25))

    def _use_delayed(self, peer: int, seconds: float, step: int, now: float) -> None:
        """A round trip that met payload was none the shorter for it, so it counts if it is shorter than any known.

        Or if for long there was no other: where payload is always on its way, its queues are part of the latency.
        """
        known = self._trips.setdefault(peer, deque(maxlen=TRIPS_KEPT))
        if not known or seconds < _least(known) or now - known[-1].time > LONG_AGO_SECONDS:
            known.append(Sample(step, now, seconds, 0.25))

    # --- when it has become longer

    def _look_for_a_rise(self, clear: dict[int, float], delayed: dict[int, float], step: int, now: float) -> None:
        """Note how much farther away than expected the peer is that is least so.

        All peers together, because with many each is asked seldom. Where only those are known that met payload, it has
        to be more than such round trips were longer than others in the last steps anyway.
        """
        risen, risen_if_delayed = self._relative(clear), self._relative(delayed)
        usual = 1.0 if risen < math.inf else min(self._queueing, default=1.0)
        if min(risen, risen_if_delayed) <= 1 + NOTICEABLE:
            self._risen.clear()
        elif (least := min(risen, risen_if_delayed)) < math.inf and least > usual * (1 + NOTICEABLE):
            self._risen.append(Sample(step, now, least))
            return
        if risen_if_delayed < math.inf:
            self._queueing.append(max(1.0, risen_if_delayed))

    def _relative(self, least: dict[int, float]) -> float:
        """To the least that is known of each peer, at the peer where that is least; infinity if nothing is known."""
        known = {peer: _least(self._trips[peer]) for peer in least if self._trips.get(peer)}
        return min((least[peer] / value for peer, value in known.items()), default=math.inf)

    def _risen_since(self, agreed: float | None, step: int, beta: float | None) -> int | None:
        """The step from which on everybody is farther away; None if that is not so.

        Samples above expectation are alike if it is the network that has changed; noise is different every time. And it
        may have come just before: with what was seen then, one peer would be held to be where it was.
        """
        if self._is_confirmed(agreed, step, beta):
            return step
        last = list(self._risen)[-IN_A_ROW:]
        if len(last) < IN_A_ROW:
            return None
        least, second, *_ = sorted(sample.value for sample in last)
        is_rise = second <= least * (1 + NOTICEABLE) or len(self._risen) == IN_A_ROW_FOR_SURE
        return last[0].step if is_rise else None

    def _is_confirmed(self, agreed: float | None, step: int, beta: float | None) -> bool:
        """Whether the last round trips are above expectation, and so is what all ranks together hold to be true."""
        farthest = max(self._by_peer(beta).values(), default=None)
        if agreed is None or farthest is None or not self._risen:
            return False
        newest = self._risen[-1]
        return agreed > farthest * CONFIRMED and newest.step == step and newest.value > CONFIRMED

    def _forget_all_before(self, step: int) -> None:
        """What was before is over, for all peers. Of what came since, that which met payload is better than nothing."""
        for peer in self._trips.keys() | self._delayed.keys():
            since = [*self._trips.get(peer, ()), *self._delayed.get(peer, ())]
            since = sorted({sample for sample in since if sample.step >= step})
            self._trips[peer] = deque(since, maxlen=TRIPS_KEPT)
        self._risen.clear()
        self._queueing.clear()

    def _forget_before_a_rise(self, samples: deque[Sample]) -> None:
        """The same for one peer, which may have become farther away than the others."""
        recent = list(samples)[-IN_A_ROW_FOR_SURE:]
        if _least(recent) > _least(samples) * (1 + NOTICEABLE):
            samples.clear()
            samples.extend(recent)


def _latency(trips: Iterable[Sample], own_time: float) -> float:
    half = _least(trips) / 2
    return max(half - own_time, half / 2)


def _least(samples: Iterable[Sample]) -> float:
    return min([sample.value for sample in samples])
