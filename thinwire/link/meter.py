"""What comes in and when: the arrival curve of a whole link, and round trips.

A process that shares its processor with others reads late, and late reading must not look like a slow network. So
times are those at which bytes came to this host, where the kernel tells them (Linux does, to the packet): how long they
have lain there is subtracted from the time of reading. Clocks are this host's; two hosts' are never compared.
"""

from __future__ import annotations

import math
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from thinwire.link.base import Stretch

T = TypeVar("T")

MAX_PIECES = 4096  # remembered between two readings, about 100 bytes each; the newest are kept
MAX_ROUND_TRIPS = 256
MAX_STRETCHES = 2  # to look at, since each look takes 0.1 ms
PIECE_SECONDS = 0.0005  # what comes within so long may be noted as one piece
LEAST_SECONDS = 0.005  # of a stretch; in less the timing of single packets shows
BRIEF_SECONDS = 0.0004  # of one that is taken whole, for want of better ones
QUIET_SECONDS = 0.001  # after payload has come, in which what comes may have queued behind it
MARGIN = 1.1  # for a rate that is not known better
PAUSE_SECONDS = 0.01  # without much coming in are the sender's
SHORTEST_SECONDS = 1e-6  # in which anything can happen
LEAST_SHARE = 0.4  # of a busy period's bytes in its stretch

# --- stamps

_SO_TIMESTAMPNS = 35  # Python has no name for it; also the type of the message that brings the stamp
_STAMP = struct.Struct("@ll")  # seconds and nanoseconds on the wall clock
STAMP_BYTES = 0 if sys.platform != "linux" else socket.CMSG_SPACE(_STAMP.size)
LONGEST_AGE = 10.0  # seconds; beyond that somebody has set the clock


def ask_for_stamps(sock: socket.socket) -> bool:
    """Let the kernel say with every read when its last byte came; False where it cannot."""
    if sys.platform != "linux":
        return False
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    except OSError:
        return False
    return True


def age_of(extras: Iterable[tuple[int, int, bytes]]) -> float | None:
    """Seconds since the last byte that was read came to this host; None if the kernel did not say.

    The stamp is on the wall clock, so it is only used for this difference, and only if that makes sense.
    """
    for level, kind, data in extras:
        if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(data) == _STAMP.size:
            seconds, nanoseconds = _STAMP.unpack(data)
            age = (time.time_ns() - seconds * 1_000_000_000 - nanoseconds) / 1e9
            return age if 0 <= age <= LONGEST_AGE else None
    return None


# --- the curve


class Meter:
    """Filled by a link's I/O thread, which only appends; read out by another."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[float, float, int]] = deque(maxlen=MAX_PIECES)
        self._round_trips: deque[tuple[int, float]] = deque(maxlen=MAX_ROUND_TRIPS)
        self._delayed: deque[tuple[int, float]] = deque(maxlen=MAX_ROUND_TRIPS)
        self._echoes: deque[tuple[int, float, int]] = deque(maxlen=MAX_ROUND_TRIPS)
        self.rate = math.inf  # of the last fast stretch
        self._received_at = self._sent_until = -math.inf

    def note(self, start: float, end: float, nbytes: int) -> None:
        """So many bytes came over one connection between two times, or at once."""
        self._pieces.append((start, end, nbytes))

    def note_round_trip(self, peer: int, seconds: float, delayed: bool = False) -> None:
        (self._delayed if delayed else self._round_trips).append((peer, seconds))

    def note_echo(self, peer: int, seconds: float, nbytes: int) -> None:
        """A message took so long to a peer and another back, of so many bytes together."""
        self._echoes.append((peer, seconds, nbytes))

    def note_received(self, at: float) -> None:
        """Payload was coming in at that time."""
        self._received_at = max(self._received_at, at)

    def note_sent(self, at: float, nbytes: int) -> None:
        """The kernel has taken so many bytes. They leave one after the other, as fast as others came in."""
        self._sent_until = max(self._sent_until, at) + MARGIN * nbytes / self.rate

    def was_receiving(self, at: float) -> bool:
        return self._received_at > at - QUIET_SECONDS

    def sends_for(self, at: float) -> float:
        """The seconds from then on in which what the kernel has taken still leaves; a guess."""
        return max(0.0, self._sent_until - at)

    def round_trips(self) -> tuple[tuple[int, float], ...]:
        """Those since the last call that met no payload."""
        return tuple(_drained(self._round_trips))

    def delayed(self) -> tuple[tuple[int, float], ...]:
        """Those that did."""
        return tuple(_drained(self._delayed))

    def echoes(self) -> tuple[tuple[int, float, int], ...]:
        """Those of messages."""
        return tuple(_drained(self._echoes))

    def stretches(self) -> tuple[Stretch, ...]:
        """The fastest part of each of the largest busy periods since the last call."""
        drained = _drained(self._pieces)
        if not any(end > start for start, end, _ in drained):
            return ()  # single packets say nothing, and looking takes its time
        pieces = np.array(drained, dtype=np.float64).reshape(-1, 3)
        periods = sorted(busy_periods(pieces), key=lambda busy: -float(busy[:, 2].sum()))
        parts = [fastest_part(busy) for busy in periods[:MAX_STRETCHES]]
        found = [part for part in parts if part is not None and part.nbytes > 0]
        found = [part for part in found if part.seconds >= LEAST_SECONDS] or found
        if found:
            self.rate = max(nbytes / seconds for nbytes, seconds in found)
        return tuple(found)


def _drained(queue: deque[T]) -> list[T]:
    """Everything in a queue that another thread may still append to."""
    return [queue.popleft() for _ in range(len(queue))]


def busy_periods(pieces: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """Pieces (start, end, bytes) in groups, each without a moment at which nothing was coming in."""
    pieces = pieces[np.argsort(pieces[:, 0], kind="stable")]
    until = np.maximum.accumulate(pieces[:, 1])
    gaps = np.flatnonzero(pieces[1:, 0] > until[:-1]) + 1
    return np.split(pieces, gaps) if len(pieces) else []


class _Curve(NamedTuple):
    """Times, the bytes that had come by then, and whether a rate may be counted from then on.

    It may not from just before something that came at once: that was on its way before.
    """

    times: NDArray[np.float64]
    came: NDArray[np.float64]
    counts: NDArray[np.bool_]


def fastest_part(pieces: NDArray[np.float64]) -> Stretch | None:
    """The part of a busy period in which bytes came fastest; None if it was too short to tell.

    A sender that pauses (TCP that feels its way, a process that is not let run) makes a busy period longer, but nothing
    makes bytes come faster than the narrowest part of the way lets them through. A good share of the bytes, and not the
    fastest few, because packets that were held up somewhere come in bunches.
    """
    times, came, counts = _without_pauses(_arrival_curve(pieces))
    starts, begun = times[counts], came[counts]
    if not len(starts):
        return None
    if LEAST_SECONDS > times[-1] - starts[0] >= BRIEF_SECONDS:  # it says little, but better than nothing
        return Stretch(round(came[-1] - begun[0]), float(times[-1] - starts[0]))
    begun = begun[starts <= times[-1] - LEAST_SECONDS]
    starts = starts[: len(begun)]
    if not len(starts):
        return None
    ends = np.interp(begun + LEAST_SHARE * came[-1], came, times)
    ends = np.maximum(ends, starts + LEAST_SECONDS)
    bytes_in = np.interp(ends, times, came) - begun
    best = int(np.argmax(bytes_in / (ends - starts)))
    return Stretch(round(bytes_in[best]), float(ends[best] - starts[best]))


def _arrival_curve(pieces: NDArray[np.float64]) -> _Curve:
    """As if the bytes of a piece had come evenly from its start to its end."""
    start, end, nbytes = pieces.T
    takes_time = end > start
    start = np.minimum(start, end - SHORTEST_SECONDS)
    rate = nbytes / (end - start)
    times = np.concatenate([start, end])
    order = np.argsort(times, kind="stable")
    times, slopes = times[order], np.cumsum(np.concatenate([rate, -rate])[order])
    came = np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(times))])
    return _Curve(times, came, np.concatenate([takes_time, np.ones(len(end), bool)])[order])


def _without_pauses(curve: _Curve) -> _Curve:
    """The curve as if the sender had never paused for long.

    Where the round trip is long and a message is not, TCP sends a little and waits for the acknowledgement, several
    times over; none of these bunches alone might last long enough to tell a rate.
    """
    seconds, came = np.diff(curve.times), np.diff(curve.came)
    if not np.any(seconds >= PAUSE_SECONDS):
        return curve
    rate = came / np.maximum(seconds, SHORTEST_SECONDS)
    order = np.argsort(rate)
    typical = rate[order][np.searchsorted(np.cumsum(came[order]), curve.came[-1] / 2)]
    goes_on = (seconds < PAUSE_SECONDS) | (rate >= LEAST_SHARE * typical)
    return _Curve(
        np.append(0.0, np.cumsum(seconds[goes_on])),
        np.append(0.0, np.cumsum(came[goes_on])),
        curve.counts[np.append(True, goes_on)],
    )
