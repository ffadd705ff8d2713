"""Monitor: what this rank makes of what its link notices: the latency alpha and the time per byte beta of its network.

A message of b bytes takes alpha + b beta. A probe goes there and back, so
    round trip = 2 (alpha + p beta),    p = 116 bytes that a probe occupies on the wire,
and a stretch of b bytes that came in without a pause takes b beta.

Noise has a side. Nothing makes a round trip shorter than it is, and everything else (a queue, a process that is not let
run) makes it longer: so alpha is taken from the least of the last few. When the network itself becomes slower, that
least would hold the estimate back: so when several in a row are all above it, what was before them is forgotten; one is
enough where the ranks together have come to hold the latency to be higher than this one does. A rate errs both ways
(senders that serve several at once, packets in bunches), so beta is a median over the last few steps; two in a row that
are long or steady, alike, and far from those before are a change, and so are two of more than twice the rate, or one
where the ranks together hold it to be higher: the ones before are forgotten. A stretch that is over in a moment is
likely to be from one sender that was serving all its peers: it says how fast the network is at least, and nothing
beyond.

Only numbers come in here, and whatever they are, none goes out that cannot be.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from thinwire.link.base import Reading, Stretch

PROBE_BYTES = 128  # of a probe and its answer, as links count them
WIRE_BYTES = 116  # of either, with the headers of TCP (32) and IP (20)

ROUND_TRIPS = (2e-7, 200.0)  # seconds that can be believed
RATES = (1.0, 1e13)  # bytes per second that can be believed

TRIPS_KEPT = 8  # of each peer
STEPS_OLD = 6  # after which a rate is not of this time
STEPS_KEPT = 5  # of which there is a rate
IN_A_ROW = 3  # steps on the same side are a change, fewer are a blip
IN_A_ROW_FOR_SURE = 5  # although no two of them are alike, or for one peer among many
FIRST_LOOKS = 5  # at an estimate that is still to be found, before it can have changed
NOTICEABLE = 0.1  # the relative difference that a change makes
LONG_STRETCH = 0.02  # seconds after which a rate becomes no more certain
BRIEF_STRETCH = 0.0025  # seconds, in which senders that serve all their peers at the same time need not overlap
MANY_BYTES = 1 << 15
ALIKE, FAR = 1.2, 1.4  # the ratio up to which two rates are alike, and from which on they are of different networks
MOST = 0.8  # the quantile of its stretches that a step's rate is: senders that do not overlap make it lower
FAR_FASTER = 2.0  # the ratio from which on two in a row leave no doubt of a rise, however brief they are
OLD_SECONDS = 10.0  # after which a sample is half as certain
LONG_AGO_SECONDS = 30.0  # after which a round trip is no reason any more to disbelieve a longer one that was delayed

PROBE_SHARE = 0.009  # of the bytes sent: under 1 %
CALM_SHARE = 0.005  # while nothing moves, so that there is something left for when it does
PROBES_PER_SECOND = 50.0  # each wakes two processes, who then do not compute
CALM_PROBES_PER_SECOND = 10.0
SAVED_PER_SECOND, MOST_SAVED = 15.0, 100.0  # probes: what there may be on average, and at most after a calm
LEAST_PROBES_PER_SECOND = 1.0  # whatever is sent
LONGEST_STEP = 1.0  # seconds between two chances to ask, for which some are saved: a pause is no calm
PROBES_AT_ONCE = 4
RESTLESS = 8  # steps after a number has moved, or seemed to
FAR_AWAY, FAR_AWAY_SECONDS = 2.0, 1e-3  # times the median latency, and more than that: peers on another site
CONFIRMED = 1.25  # the ratio by which others must have seen latency or rate rise, for one look to confirm it


class Estimate(NamedTuple):
    """A number and how far to trust it.

    Attributes:
        value: None if nothing is known.
        confidence: from 0 to 1: many samples, alike and recent.
        samples: how many it was made of.
        age: seconds since the newest of them.
    """

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


class _Sample(NamedTuple):
    step: int
    time: float
    value: float
    weight: float = 1.0
    nbytes: int = 0
    brief: bool = False
    steady: bool = False  # made of several that were alike

    @property
    def is_much(self) -> bool:
        return self.weight >= 0.5 and self.nbytes >= MANY_BYTES


@dataclass
class _Watch:
    """Looks for a value that has left where it was for good."""

    what: str
    settled: float = math.nan
    looks: int = 0
    away: list[_Sample] = field(default_factory=list)

    def look(self, now: _Sample) -> Change | None:
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
        rejected: numbers that could not be believed.
    """

    def __init__(self, world_size: int, rank: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.world_size = world_size
        self.changes: deque[Change] = deque(maxlen=256)
        self.rejected = 0
        self._clock = clock
        self._step = 0
        self._trips: dict[int, deque[_Sample]] = {}
        self._delayed: dict[int, deque[_Sample]] = {}
        # How much longer delayed round trips were, step by step, and how far above expectation, at each that knows.
        self._queueing: deque[float] = deque(maxlen=TRIPS_KEPT)
        self._risen: deque[_Sample] = deque(maxlen=IN_A_ROW_FOR_SURE)
        self._rates: deque[_Sample] = deque(maxlen=STEPS_KEPT)
        self._alpha: float | None = None  # what all these say together
        self._beta: float | None = None
        self._beta_told_at = 0
        self._far_looks = Counter[int]()  # at each peer, in a row that found it much farther away than the others
        self._doubts = 0  # how many rates in a row were far from what was believed
        self._doubted_at = 0  # the step of the last of them
        self._watches = [_Watch("alpha"), _Watch("beta")]
        self._asked_at = self._saved_at = clock()
        self._saved = MOST_SAVED
        self._sent_bytes = self._probe_bytes = 0
        self._restless = 0
        # Each rank begins behind itself, so that they do not all ask the same one.
        turn = [((rank or 0) + i) % world_size for i in range(world_size)]
        self._turn = deque(peer for peer in turn if peer != rank)

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
        now = self._clock()
        before = self._alpha, self._beta
        self._step += 1
        self._sent_bytes = max(self._sent_bytes, sent_bytes)
        self._probe_bytes += max(0, reading.probe_bytes)
        self._note_round_trips(reading, now, agreed_alpha)
        self._note_rate(reading.stretches, now, agreed_beta)
        self._beta = beta = self._median_beta()
        self._alpha = alpha = self._common_alpha()
        has_moved, changes = any(map(_are_apart, before, (alpha, beta))), list[Change]()
        self._restless = max(0, self._restless - 1)
        if has_moved or self._risen:
            self.be_restless()
        for watch, value, is_new in (
            (self._watches[0], alpha, any(trips[-1].step == self._step for trips in self._known_trips())),
            (self._watches[1], beta, self._rate_known_at == self._step),
        ):
            if value is not None and is_new and (change := watch.look(_Sample(self._step, now, value))):
                changes.append(change)
        self.changes.extend(changes)
        return changes

    def alpha_now(self) -> float | None:
        """The latency as one number, None if nothing is known: of the median peer, or of the farthest if that is far.

        A collective waits for the farthest. But of many peers one always seems farther than it is, so it counts only if
        that is so beyond doubt.
        """
        return self._alpha

    def beta_now(self) -> float | None:
        """Seconds per byte."""
        return self._beta

    def _common_alpha(self) -> float | None:
        found = self._latencies()
        if not found:
            return None
        self._note_who_is_far(found)
        far = [found[peer] for peer, looks in self._far_looks.items() if looks >= IN_A_ROW and peer in found]
        return max(far, default=statistics.median(found.values()))

    def _latencies(self) -> dict[int, float]:
        own_time = WIRE_BYTES * (self._beta or 0.0)
        return {peer: _latency(trips, own_time) for peer, trips in self._trips.items() if trips}

    def _note_who_is_far(self, found: dict[int, float]) -> None:
        limit = FAR_AWAY * statistics.median_low(found.values()) + FAR_AWAY_SECONDS
        for peer, latency in found.items():
            if latency <= limit:
                self._far_looks[peer] = 0
            elif self._trips[peer][-1].step == self._step:  # or it may be the others that have come nearer since
                self._far_looks[peer] += 1

    def _median_beta(self) -> float | None:
        if not self._rates:
            return None
        return 1 / weighted_quantile([(sample.value, sample.weight) for sample in self._rates], 0.5)

    @property
    def beta_is_new(self) -> bool:
        """Whether anything was learned about it since it was last told."""
        return self._rate_known_at > self._beta_told_at

    def beta_was_told(self) -> None:
        self._beta_told_at = self._rate_known_at

    @property
    def _rate_known_at(self) -> int:
        return self._rates[-1].step if self._rates else 0

    @property
    def is_in_doubt(self) -> bool:
        """Whether the last steps look like another network, so that the next one should be looked at too.

        Not for long, if nothing more is seen: looking costs something.
        """
        return 0 < self._doubts <= IN_A_ROW and self._step < self._doubted_at + IN_A_ROW

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
        own_time = WIRE_BYTES * (self.beta_now() or 0.0)
        return {
            peer: Estimate(_latency(trips, own_time), *self._trust(trips, _least(trips), TRIPS_KEPT))
            for peer, trips in sorted(self._trips.items())
            if trips
        }

    def beta(self) -> Estimate:
        value = self.beta_now()
        return Estimate() if value is None else Estimate(value, *self._trust(self._rates, 1 / value, STEPS_KEPT))

    # --- what to ask

    def be_restless(self) -> None:
        """Something was not as expected: ask more for some steps."""
        self._restless = RESTLESS

    def probes_due(self) -> list[int]:
        """The peers to probe now: in turn, as many as what was sent pays for, and at least one a second.

        Where hosts have little to compute with, numbers seem to move all the time: so there is only as much
        restlessness as was saved up for in calm.
        """
        now, peers = self._clock(), len(self._turn)
        since = now - self._asked_at
        self._saved = min(MOST_SAVED, self._saved + SAVED_PER_SECOND * min(now - self._saved_at, LONGEST_STEP))
        self._saved_at = now
        share, rate = (PROBE_SHARE, PROBES_PER_SECOND) if self._restless else (CALM_SHARE, CALM_PROBES_PER_SECOND)
        paid = (share * self._sent_bytes - self._probe_bytes) / PROBE_BYTES
        due = min(int(paid), int(since * rate), int(self._saved), PROBES_AT_ONCE, peers)
        self._saved -= max(0, due)
        if due <= 0:
            due = min(int(since * LEAST_PROBES_PER_SECOND), 1, peers)
        if due <= 0:
            return []
        self._asked_at = now
        asked = [self._turn[i] for i in range(due)]
        self._turn.rotate(-due)
        return asked

    # --- round trips

    def _note_round_trips(self, reading: Reading, now: float, agreed_alpha: float | None) -> None:
        clear, delayed = self._least_of_each(reading.round_trips), self._least_of_each(reading.delayed)
        self._look_for_a_rise(clear, delayed, now)
        for peer, seconds in delayed.items():
            self._delayed.setdefault(peer, deque(maxlen=TRIPS_KEPT)).append(_Sample(self._step, now, seconds, 0.25))
        if self._is_a_rise() or self._is_confirmed(agreed_alpha):
            self._forget_all_before(self._risen[0].step)
        for peer, seconds in delayed.items():
            self._use_delayed(peer, seconds, now)
        for peer, seconds in clear.items():
            samples = self._trips.setdefault(peer, deque(maxlen=TRIPS_KEPT))
            samples.append(_Sample(self._step, now, seconds))
            self._forget_before_a_rise(samples)

    def _least_of_each(self, trips: Iterable[tuple[int, float]]) -> dict[int, float]:
        """The least of each peer's; the others had to wait for something."""
        least: dict[int, float] = {}
        for peer, seconds in trips:
            if -1 <= peer < self.world_size and _is_within(seconds, ROUND_TRIPS):
                least[peer] = min(seconds, least.get(peer, seconds))
            else:
                self.rejected += 1
        return least

    def _use_delayed(self, peer: int, seconds: float, now: float) -> None:
        """A round trip that met payload was none the shorter for it, so it counts if it is shorter than any known.

        Or if for long there was no other: where payload is always on its way, its queues are part of the latency.
        """
        known = self._trips.setdefault(peer, deque(maxlen=TRIPS_KEPT))
        if not known or seconds < _least(known) or now - known[-1].time > LONG_AGO_SECONDS:
            known.append(_Sample(self._step, now, seconds, 0.25))

    def _look_for_a_rise(self, clear: dict[int, float], delayed: dict[int, float], now: float) -> None:
        """Note how much farther away than expected the peer is that is least so.

        All peers together, because with many each is asked seldom. Where only those are known that met payload, it has
        to be more than such round trips were longer than others in the last steps anyway.
        """
        risen, risen_if_delayed = self._relative(clear), self._relative(delayed)
        usual = 1.0 if risen < math.inf else min(self._queueing, default=1.0)
        if min(risen, risen_if_delayed) <= 1 + NOTICEABLE:
            self._risen.clear()
        elif (least := min(risen, risen_if_delayed)) < math.inf and least > usual * (1 + NOTICEABLE):
            self._risen.append(_Sample(self._step, now, least))
            return
        if risen_if_delayed < math.inf:
            self._queueing.append(max(1.0, risen_if_delayed))

    def _relative(self, least: dict[int, float]) -> float:
        """To the least that is known of each peer, at the peer where that is least; infinity if nothing is known."""
        known = {peer: _least(self._trips[peer]) for peer in least if self._trips.get(peer)}
        return min((least[peer] / value for peer, value in known.items()), default=math.inf)

    def _forget_all_before(self, step: int) -> None:
        """What was before is over, for all peers. Of what came since, that which met payload is better than nothing."""
        for peer in self._trips.keys() | self._delayed.keys():
            since = [*self._trips.get(peer, ()), *self._delayed.get(peer, ())]
            since = sorted({sample for sample in since if sample.step >= step})
            self._trips[peer] = deque(since, maxlen=TRIPS_KEPT)
        self._risen.clear()
        self._queueing.clear()

    def _is_a_rise(self) -> bool:
        """Samples above expectation are alike if it is the network that has changed; noise is different every time."""
        if len(self._risen) < IN_A_ROW:
            return False
        least, second, *_ = sorted(sample.value for sample in self._risen)
        return second <= least * (1 + NOTICEABLE) or len(self._risen) == IN_A_ROW_FOR_SURE

    def _is_confirmed(self, agreed_alpha: float | None) -> bool:
        """Whether the last round trips are above expectation, and so is what all ranks together hold to be true."""
        farthest = max(self._latencies().values(), default=None)
        if agreed_alpha is None or farthest is None or not self._risen:
            return False
        return agreed_alpha > farthest * CONFIRMED and self._risen[-1].step == self._step

    def _forget_before_a_rise(self, samples: deque[_Sample]) -> None:
        """The same for one peer, which may have become farther away than the others."""
        recent = list(samples)[-IN_A_ROW_FOR_SURE:]
        if _least(recent) > _least(samples) * (1 + NOTICEABLE):
            samples.clear()
            samples.extend(recent)

    def _known_trips(self) -> list[deque[_Sample]]:
        return [trips for trips in self._trips.values() if trips]

    # --- rates

    def _note_rate(self, stretches: Iterable[Stretch], now: float, agreed_beta: float | None) -> None:
        """A step's rate is near the highest: some stretches came from a rank that was sending to others too."""
        seen = list(stretches)
        believed = [each for each in seen if _can_be_believed(*each)]
        self.rejected += len(seen) - len(believed)
        if not believed:
            return
        rates = [nbytes / seconds for nbytes, seconds in believed]
        sample = _Sample(
            self._step,
            now,
            weighted_quantile([(rate, nbytes) for rate, (nbytes, _) in zip(rates, believed, strict=True)], MOST),
            weight=min(1.0, sum(seconds for _, seconds in believed) / LONG_STRETCH),
            nbytes=sum(nbytes for nbytes, _ in believed),
            brief=max(seconds for _, seconds in believed) < BRIEF_STRETCH,
            steady=len(rates) > 1 and max(rates) <= ALIKE * min(rates),
        )
        if self._tells_nothing(sample):
            return
        self._rates = deque((each for each in self._rates if self._is_young_beside(sample, each)), maxlen=STEPS_KEPT)
        believed_rate = 1 / (self._median_beta() or 1 / sample.value)
        is_far = not believed_rate / FAR <= sample.value <= believed_rate * FAR
        self._doubts, self._doubted_at = self._doubts + 1 if is_far else 0, self._step
        self._rates.append(sample)
        self._forget_before_a_jump(agreed_beta)

    def _is_young_beside(self, sample: _Sample, other: _Sample) -> bool:
        """A long stretch of long ago would outweigh those of today; but not one that is told of by a few packets."""
        is_better = sample.brief and not other.brief and sample.time - other.time < LONG_AGO_SECONDS
        return is_better or other.step >= self._step - STEPS_OLD

    def _tells_nothing(self, sample: _Sample) -> bool:
        """Whether it is a brief one that may come from senders of the rate that is known.

        They may have been serving all their peers, or a few packets have come in a bunch: long ones know better.
        """
        is_known = any(not each.brief and sample.time - each.time < LONG_AGO_SECONDS for each in self._rates)
        if not sample.brief or not is_known:
            return False
        known = 1 / (self._beta or math.inf)
        return known / (self.world_size - 1) <= sample.value * (1 + NOTICEABLE) and sample.value < known * FAR

    def _forget_before_a_jump(self, agreed_beta: float | None) -> None:
        """Do not wait for the median to follow where the last steps leave no doubt.

        As after one that saw more than twice the rate, if others have seen it rise; two that did so; two that saw a
        rise or a fall, the same one, and had much to see it by or saw it several times; three that saw a rise.

        So few packets alone are not enough for a fall: to them, a busy machine that lets nobody run for a while looks
        like a slow network. But several times in a row, nothing looks far faster than it is.
        """
        for number in (1, 2, IN_A_ROW):
            before, recent = list(self._rates)[:-number], list(self._rates)[-number:]
            if not before:
                return
            usual = weighted_quantile([(sample.value, sample.weight) for sample in before], 0.5)
            low, high = min(sample.value for sample in recent), max(sample.value for sample in recent)
            is_sure = high <= low * ALIKE and (all(s.is_much for s in recent) or all(s.steady for s in recent))
            is_confirmed = agreed_beta is not None and agreed_beta * usual * CONFIRMED < 1
            rose, fell = low > usual * FAR, high * FAR < usual
            if (rose and number == IN_A_ROW) or ((rose or fell) and is_sure and number == 2):
                self._rates = deque(recent, maxlen=STEPS_KEPT)
                return
            if low > usual * FAR_FASTER and (is_confirmed or number == 2):
                # They may still be bunches, and if they are brief the brief ones after them may say so.
                doubtful = [sample._replace(brief=sample.brief or not sample.is_much) for sample in recent]
                self._rates = deque(doubtful, maxlen=STEPS_KEPT)
                return

    def _trust(self, samples: Iterable[_Sample], value: float, wanted: int) -> tuple[float, int, float]:
        """Confidence, number and age of the samples behind a value."""
        kept = list(samples)
        age = max(0.0, self._clock() - kept[-1].time) if kept[-1].step < self._step else 0.0
        spread = statistics.median(abs(sample.value / value - 1) for sample in kept)
        enough = sum(sample.weight for sample in kept) / wanted
        return min(1.0, enough) / (1 + spread) * 2 ** (-age / OLD_SECONDS), len(kept), age


def _latency(trips: Iterable[_Sample], own_time: float) -> float:
    half = _least(trips) / 2
    return max(half - own_time, half / 2)


def _least(samples: Iterable[_Sample]) -> float:
    return min([sample.value for sample in samples])


def _can_be_believed(nbytes: int, seconds: float) -> bool:
    return _is_within(seconds, (1e-9, 1e6)) and _is_within(nbytes / seconds, RATES)


def _are_apart(before: float | None, after: float | None) -> bool:
    """Whether a number has become another, or known."""
    return after is not None and (before is None or abs(after / before - 1) > NOTICEABLE)


def _is_within(value: float, bounds: tuple[float, float]) -> bool:
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
