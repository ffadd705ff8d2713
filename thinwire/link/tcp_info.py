"""What the kernel knows about TCP connections: round trips, delivery rate, retransmissions. Linux only.

Elsewhere, and on any doubt, the answer is nothing. Connections that are not ours (gloo's) are looked at through a
duplicate of their descriptor; the original is never closed, written to or changed.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
from collections.abc import Iterable
from typing import NamedTuple

from thinwire.link.base import Stretch

# struct tcp_info of linux/tcp.h, which only ever grows at its end. Offsets from its beginning.
_STATE = struct.Struct("=B6xB")  # state, and flags of which the lowest bit is "app limited"
_ROUND_TRIP = struct.Struct("=II")  # smoothed, and its variation, in microseconds
_COUNT = struct.Struct("=I")
_LONG = struct.Struct("=Q")
_AT_ROUND_TRIP, _AT_RETRANSMITTED, _AT_BYTES_ACKED, _AT_BYTES_RECEIVED = 68, 100, 120, 128
_AT_NOT_SENT, _AT_LEAST_ROUND_TRIP, _AT_DELIVERY_RATE = 144, 148, 160
_AT_OUT_OF_ORDER = 224
_LEAST_BYTES = 168  # up to and with the delivery rate: Linux 4.9
_MOST_BYTES = 512

ESTABLISHED = 1
MAX_DESCRIPTORS = 4096  # looked at; a process with more of them is not searched to the end


class TcpInfo(NamedTuple):
    """One connection, in seconds, bytes and bytes per second.

    Attributes:
        round_trip: smoothed; it contains queues, and acknowledgements that the peer delayed.
        least_round_trip: of the last minutes, so it does not follow a rise.
        delivery_rate: at which the peer acknowledged, when last measured.
        app_limited: the sender had too little to send for that to be more than a lower bound.
        retransmitted: segments sent again so far.
        not_sent: bytes that wait in this host.
    """

    state: int
    round_trip: float
    round_trip_variation: float
    least_round_trip: float
    delivery_rate: float
    app_limited: bool
    retransmitted: int
    bytes_acked: int
    bytes_received: int
    not_sent: int


def tcp_info(sock: socket.socket) -> TcpInfo | None:
    """What the kernel knows about a connection; None if it does not tell."""
    if sys.platform != "linux":
        return None
    try:
        return parse(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MOST_BYTES))
    except OSError:
        return None


def out_of_order(sock: socket.socket) -> int:
    """How many packets have come so far before one that was sent earlier; 0 if the kernel does not tell (Linux 5.4)."""
    if sys.platform != "linux":
        return 0
    raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _AT_OUT_OF_ORDER + _COUNT.size)
    return int(_COUNT.unpack_from(raw, _AT_OUT_OF_ORDER)[0]) if len(raw) == _AT_OUT_OF_ORDER + _COUNT.size else 0


def parse(raw: bytes) -> TcpInfo | None:
    """Take a `struct tcp_info` apart; None if it is too short, as that of an old kernel is."""
    if len(raw) < _LEAST_BYTES:
        return None
    state, flags = _STATE.unpack_from(raw, 0)
    smoothed, variation = _ROUND_TRIP.unpack_from(raw, _AT_ROUND_TRIP)
    return TcpInfo(
        state=state,
        round_trip=smoothed / 1e6,
        round_trip_variation=variation / 1e6,
        least_round_trip=_COUNT.unpack_from(raw, _AT_LEAST_ROUND_TRIP)[0] / 1e6,
        delivery_rate=float(_LONG.unpack_from(raw, _AT_DELIVERY_RATE)[0]),
        app_limited=bool(flags & 1),
        retransmitted=_COUNT.unpack_from(raw, _AT_RETRANSMITTED)[0],
        bytes_acked=_LONG.unpack_from(raw, _AT_BYTES_ACKED)[0],
        bytes_received=_LONG.unpack_from(raw, _AT_BYTES_RECEIVED)[0],
        not_sent=_COUNT.unpack_from(raw, _AT_NOT_SENT)[0],
    )


class Seen(NamedTuple):
    """A connection of this process: the address of its other end, which connection it is, and what is known of it."""

    host: str
    inode: int
    info: TcpInfo


class Deliveries:
    """How fast connections deliver, from one look at them to the next."""

    def __init__(self) -> None:
        self._acked: dict[int, int] = {}

    def since(self, seen: Iterable[Seen], least: float = 1.0) -> Stretch | None:
        """What the fastest has delivered since the last look, among those that had enough to send: so many bytes."""
        seen = list(seen)
        fresh = [(each, each.info.bytes_acked - self._acked.get(each.inode, 0)) for each in seen]
        fresh = [(each, acked) for each, acked in fresh if acked >= least and not each.info.app_limited]
        self._acked = {each.inode: each.info.bytes_acked for each in seen}
        if not fresh:
            return None
        each, acked = max(fresh, key=lambda pair: pair[0].info.delivery_rate)
        return Stretch(acked, acked / each.info.delivery_rate) if each.info.delivery_rate > 0 else None


def connections() -> list[Seen]:
    """Every established TCP connection of this process, whoever made it."""
    if socket.getdefaulttimeout() is not None:  # Python would set it on the originals
        return []
    try:
        names = sorted(os.listdir("/proc/self/fd"), key=lambda name: (len(name), name))[:MAX_DESCRIPTORS]
    except OSError:
        return []
    seen = [_look_at(int(name)) for name in names if name.isdigit()]
    return [each for each in seen if each is not None]


def _look_at(descriptor: int) -> Seen | None:
    """None for what is not an established TCP connection, or has been closed since it was listed."""
    try:
        status = os.stat(descriptor)
        if not stat.S_ISSOCK(status.st_mode):
            return None
        with _duplicate(descriptor) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
                return None
            info, host = tcp_info(sock), str(sock.getpeername()[0])
    except OSError:
        return None
    return Seen(host, status.st_ino, info) if info is not None and info.state == ESTABLISHED else None


def _duplicate(descriptor: int) -> socket.socket:
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
