"""A stream of a fraction of a second over a connection: as much as the path takes, timed where it comes in."""

from __future__ import annotations

import bisect
import itertools
import socket
import time

import numpy as np

from thinwire.jobs.doctor.line import time_of
from thinwire.link.meter import STAMP_BYTES, ask_for_stamps, fastest_part

WAITING_BYTES = 32 << 10  # that the kernel holds before it sends them: they come after the end of a stream


def send(sock: socket.socket, seconds: float) -> None:
    """For so long, as much as the path takes. The end is an OSError if it comes while the path takes nothing."""
    piece = bytes(WAITING_BYTES)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, WAITING_BYTES)
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        sock.settimeout(left)
        sock.send(piece)


def take(sock: socket.socket, until: float) -> list[tuple[float, int]]:
    """When bytes came and how many, to the end of the stream or of the time. The first entry is the beginning."""
    ask_for_stamps(sock)
    room = [memoryview(bytearray(1 << 20))]
    arrivals = [(time.monotonic(), 0)]
    while (left := until - time.monotonic()) > 0:
        sock.settimeout(left)
        try:
            received, extras, _, _ = sock.recvmsg_into(room, STAMP_BYTES)
        except OSError:
            break
        if not received:
            break
        arrivals.append((time_of(extras), received))
    return arrivals


def rates(arrivals: list[tuple[float, int]], filled: bool) -> tuple[float | None, float | None]:
    """What the path carries and what was moved over the whole stream; None if too little came to tell.

    The former is the rate of the second half of the bytes. On a path that TCP cannot fill in the time it is the rate at
    which they came fastest, if that is more.

    >>> [round(rate) for rate in rates([(0.0, 0), (0.01, 500), (0.02, 1000), (0.03, 1000)], filled=True)]
    [100000, 83333]
    >>> rates([(0.0, 0)], filled=True)
    (None, None)
    """
    times, came = [at for at, _ in arrivals], list(itertools.accumulate(nbytes for _, nbytes in arrivals))
    half = bisect.bisect_left(came, came[-1] / 2)
    if len(arrivals) < 3 or times[-1] <= times[half]:
        return None, None
    rate = (came[-1] - came[half]) / (times[-1] - times[half])
    if not filled:
        # The first bytes came in an unknown time.
        pieces = [(times[i - 1], max(times[i - 1], times[i]), arrivals[i][1]) for i in range(2, len(arrivals))]
        part = fastest_part(np.array(pieces, dtype=np.float64))
        rate = max(rate, part.nbytes / part.seconds) if part is not None else rate
    return rate, came[-1] / (times[-1] - times[0])
