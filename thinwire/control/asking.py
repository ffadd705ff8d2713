"""Whom to probe and when: so seldom that neither the wire nor a processor notices."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

PROBE_BYTES = 128  # of a probe and its answer, as links count them
PROBE_SHARE = 0.009  # of the bytes sent: under 1 %
CALM_SHARE = 0.003  # while nothing moves, so that there is something left for when it does
PROBES_PER_SECOND = 50.0  # each wakes two processes, who then do not compute
CALM_PROBES_PER_SECOND = 10.0
# Probes: what there may be on average, and at most after a calm. On eight hosts that share two cores something always
# seems to move, and with forty a second a step took 7 % longer.
SAVED_PER_SECOND, MOST_SAVED = 15.0, 100.0
LEAST_PROBES_PER_SECOND = 1.0  # whatever is sent
LONGEST_STEP = 1.0  # seconds between two chances to ask, for which some are saved: a pause is no calm
PROBES_AT_ONCE = 4
RESTLESS = 8  # steps after something was not as expected


class Asking:
    """Asks the other ranks in turn. Each begins behind itself, so that they do not all ask the same one."""

    def __init__(self, world_size: int, rank: int | None, clock: Callable[[], float]) -> None:
        turn = [((rank or 0) + i) % world_size for i in range(world_size)]
        self._turn = deque(peer for peer in turn if peer != rank)
        self._clock = clock
        self._asked_at = self._saved_at = clock()
        self._saved = MOST_SAVED
        self._sent_bytes = self._probe_bytes = 0
        self._restless = 0

    def note_step(self, sent_bytes: int, probe_bytes: int) -> None:
        """So much was sent since the beginning, and so much of late for the sake of measuring."""
        self._sent_bytes = max(self._sent_bytes, sent_bytes)
        self._probe_bytes += max(0, probe_bytes)
        self._restless = max(0, self._restless - 1)

    def begin(self) -> None:
        """What was asked so far was a first look, which steps that send little would otherwise pay for for long."""
        self._probe_bytes = 0

    def be_restless(self) -> None:
        """Something was not as expected: ask more for some steps."""
        self._restless = RESTLESS

    @property
    def is_restless(self) -> bool:
        return self._restless > 0

    def due(self) -> list[int]:
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
