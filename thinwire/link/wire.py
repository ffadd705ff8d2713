"""The physical model of a wire, used twice: to run ranks on a virtual clock, and to price a schedule unrun.

A message of b bytes that a host sends at time t
    starts leaving at       s = max(t, egress free),       and its egress is free again at  s + b beta,
    reaches the peer at     a = s + alpha,                                                   (first byte)
    has arrived at          max(a, ingress free) + b beta, and its ingress is free again then.
Bytes are handed through as they come (cut-through), so an idle path takes alpha + b beta. A host sends its messages in
order, and takes messages in the order in which their first bytes come, the lowest sender first when they come together.

A host's processor is busy for `overhead` seconds before it hands a message to its egress, and for as long again once it
takes up a message that has arrived. The wire knows nothing of that: whoever runs a rank moves that rank's clock.
"""

from __future__ import annotations

import heapq
from typing import Generic, NamedTuple, TypeVar, cast

from thinwire.types import Network

M = TypeVar("M")


class Turn(NamedTuple):
    """A rank's clock has come to this time: it may go on."""

    rank: int


class Arrival(NamedTuple, Generic[M]):
    """A message has come to `dst` whole."""

    dst: int
    message: M


class Wire(Generic[M]):
    """Every host's egress and ingress, and what happens next on them.

    `next()` gives events in the order of time. That is what makes the order of messages at an ingress right: whoever
    could still send something earlier has its turn first.
    """

    def __init__(self, network: Network, world_size: int) -> None:
        self.network = network
        self._egress_free = [0.0] * world_size
        self._ingress_free = [0.0] * world_size
        self._coming: list[tuple[float, int, int, int, int, int, M | None]] = []
        self._order = 0

    def turn(self, rank: int, time: float) -> None:
        """Let `rank` go on at `time`."""
        self._push(time, 0, rank, rank, 0, None)

    def send(self, src: int, dst: int, nbytes: int, time: float, message: M, latencies: int = 1) -> None:
        """Send at `time`; the first byte takes so many latencies."""
        start = max(time, self._egress_free[src])
        self._egress_free[src] = start + nbytes * self.network.beta
        self._push(start + latencies * self.network.alpha, 1, src, dst, nbytes, message)

    def next(self) -> tuple[float, Turn | Arrival[M]] | None:
        """The next event and its time; for an arrival, the time of the message's last byte. None when all is quiet."""
        if not self._coming:
            return None
        time, is_message, _, _, rank, nbytes, message = heapq.heappop(self._coming)
        if not is_message:
            return time, Turn(rank)
        done = max(time, self._ingress_free[rank]) + nbytes * self.network.beta
        self._ingress_free[rank] = done
        return done, Arrival(rank, cast(M, message))

    def _push(self, time: float, is_message: int, src: int, rank: int, nbytes: int, message: M | None) -> None:
        heapq.heappush(self._coming, (time, is_message, src, self._order, rank, nbytes, message))
        self._order += 1
