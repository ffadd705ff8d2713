"""The first look at a network that is idle: some pings, then messages of growing size until they tell the rate."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.control.view import is_off

PINGS = 3
SIZES = tuple(1 << shift for shift in range(14, 23, 2))  # bytes, 16 KiB to 4 MiB
LONG_ENOUGH = 0.02  # seconds that a message's bytes take to say enough about the rate
PATIENCE = 1.0  # seconds after which no longer message is sent, whatever is known
AGAIN, ALIKE = 3, 1.2  # times at most, until two rates are so near each other


def survey(ping: Callable[[], None], send: Callable[[int], float], beta: Callable[[], float | None]) -> None:
    """Look until the rate is known.

    Args:
        ping: measures the latency to all peers.
        send: sends so many bytes to the next rank and has all agree on what was found; gives the seconds that it took.
        beta: what all agree on so far, in seconds per byte.
    """
    for _ in range(PINGS):
        ping()
    for nbytes in SIZES:
        seconds = send(nbytes)
        by_rate = nbytes * (beta() or 0.0)  # too long by far if a sender had to wait for a processor
        if min(by_rate, seconds) >= LONG_ENOUGH or seconds >= PATIENCE:
            break
    for _ in range(AGAIN):  # the last, until the rate stays what it was: it may have waited for a busy processor
        before = beta()
        if before is None or seconds >= PATIENCE / AGAIN:
            return
        seconds = send(nbytes)
        after = beta()
        if after is None or not is_off(after, before, ALIKE):
            return
