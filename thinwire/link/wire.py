"""The physical model of a wire, used twice: to run ranks on a virtual clock, and to price a schedule unrun.

A message of b bytes that a host sends at time t
    starts leaving at       s = max(t, egress free),       and its egress is free again at  s + b beta,
    reaches the peer at     a = s + alpha,                                                   (first byte)
    has arrived at          max(a, ingress free) + b beta, and its ingress is free again then.
Bytes are handed through as they come (cut-through), so an idle path takes alpha + b beta. A host sends its messages in
order, and takes messages in the order in which their first bytes come, the lowest sender first when they come together.

Of k messages that it sends together each has a k-th of the egress, which is how TCP shares a line, and how a `TcpLink`
paces them: each takes k b beta to leave, and has not arrived before its last byte has left and flown for alpha.

A host's processor is busy for `overhead` seconds before it hands a message to its egress, and for as long again once it
takes up a message that has arrived. The wire knows nothing of that: whoever runs a rank moves that rank's clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
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


class Parcel(NamedTuple, Generic[M]):
    """A message that is to leave at `time`."""

    dst: int
    nbytes: int
    time: float
    message: M


class _Coming(NamedTuple, Generic[M]):
    """What `rank` will see: its turn, or a message whose last byte comes no earlier than that."""

    rank: int
    nbytes: int = 0
    last_byte: float = 0.0
    message: M | None = None


class Wire(Generic[M]):
    """Every host's egress and ingress, and what happens next on them.

    `next()` gives events in the order of time. That is what makes the order of messages at an ingress right: whoever
    could still send something earlier has its turn first.
    """

    def __init__(self, network: Network, world_size: int) -> None:
        self.network = network
        self._egress_free = [0.0] * world_size
        self._ingress_free = [0.0] * world_size
        self._coming: list[tuple[float, int, int, int, _Coming[M]]] = []
        self._order = 0

    def turn(self, rank: int, time: float) -> None:
        """Let `rank` go on at `time`."""
        self._push(time, rank, _Coming(rank))

    def send(self, src: int, dst: int, nbytes: int, time: float, message: M, latencies: int = 1) -> None:
        """Send at `time`; the first byte takes so many latencies."""
        self.send_together(src, [Parcel(dst, nbytes, time, message)], latencies)

    def send_together(self, src: int, parcels: Sequence[Parcel[M]], latencies: int = 1) -> None:
        """Send several messages which share the egress evenly."""
        free, flight = self._egress_free[src], latencies * self.network.alpha
        for parcel in parcels:
            start = max(parcel.time, free)
            end = start + len(parcels) * parcel.nbytes * self.network.beta
            self._egress_free[src] = max(self._egress_free[src], end)
            self._push(start + flight, src, _Coming(parcel.dst, parcel.nbytes, end + flight, parcel.message))

    def next(self) -> tuple[float, Turn | Arrival[M]] | None:
        """The next event and its time; for an arrival, the time of the message's last byte. None when all is quiet."""
        if not self._coming:
            return None
        time, is_message, _, _, coming = heapq.heappop(self._coming)
        if not is_message:
            return time, Turn(coming.rank)
        taken = max(time, self._ingress_free[coming.rank]) + coming.nbytes * self.network.beta
        self._ingress_free[coming.rank] = taken
        return max(taken, coming.last_byte), Arrival(coming.rank, cast(M, coming.message))

    def _push(self, time: float, src: int, coming: _Coming[M]) -> None:
        heapq.heappush(self._coming, (time, coming.message is not None, src, self._order, coming))
        self._order += 1
