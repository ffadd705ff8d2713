"""Marked and numbered datagrams between two ranks, of a given size and never cut up on the way."""

from __future__ import annotations

import select
import socket
import struct
import sys
import time
from collections.abc import Iterator

from thinwire.jobs.doctor.line import Line

SIZE, ANSWER, COUNTED = b"s", b"a", b"c"  # what a datagram is for
LARGEST_PACKET = 65_535

# Python has no names for these. With the last, packets may not be cut up, and no earlier experience counts.
_DISCOVER = {socket.AF_INET: (socket.IPPROTO_IP, 10), socket.AF_INET6: (socket.IPPROTO_IPV6, 23)}
_PATH_MTU = {socket.AF_INET: (socket.IPPROTO_IP, 14), socket.AF_INET6: (socket.IPPROTO_IPV6, 24)}
_DO_NOT_CUT_UP = 3
_HEADERS = {socket.AF_INET: 28, socket.AF_INET6: 48}  # of IP and UDP
_MARK = struct.Struct("!8scI")  # whose run, what for, and which


def open_socket(address: str, family: socket.AddressFamily) -> socket.socket:
    """A socket for datagrams at this address."""
    sock = socket.socket(family, socket.SOCK_DGRAM)
    sock.bind((address, 0))
    sock.setblocking(False)
    if sys.platform == "linux":
        sock.setsockopt(*_DISCOVER[family], _DO_NOT_CUT_UP)
    return sock


class Datagrams:
    """Those of one run between a socket of ours and a peer's.

    Args:
        peer: address and port.
        run: random bytes that tell runs apart.
    """

    def __init__(self, sock: socket.socket, peer: tuple[str, int], run: bytes) -> None:
        self._sock, self._peer, self._token = sock, peer, run[:8]

    def send(self, kind: bytes, number: int, nbytes: int = 0) -> None:
        """One packet of so many bytes with its headers, or as few as it needs. What cannot leave is as good as lost."""
        try:
            data = _MARK.pack(self._token, kind, number).ljust(nbytes - _HEADERS[self._sock.family], b"\0")
            self._sock.sendto(data, self._peer)
        except OSError:
            pass

    def numbers(self, kind: bytes) -> Iterator[int]:
        """The numbers of the peer's datagrams of this kind that have come."""
        while True:
            try:
                data, source = self._sock.recvfrom(LARGEST_PACKET)
            except OSError:  # no more
                return
            if len(data) >= _MARK.size and source[:2] == self._peer:
                token, what, number = _MARK.unpack_from(data)
                if (token, what) == (self._token, kind):
                    yield number

    def wait(self, until: float) -> bool:
        """For one to come, of whatever kind. Says whether there was time for it."""
        left = until - time.monotonic()
        if left > 0:
            select.select([self._sock], [], [], left)
        return left > 0

    def numbers_until(self, kind: bytes, until: float) -> Iterator[int]:
        """Those that have come by then."""
        while self.wait(until):
            yield from self.numbers(kind)

    def numbers_until_words(self, kind: bytes, line: Line, grace: float = 0.0) -> Iterator[int]:
        """Those that come until the peer says something over the line, and a little longer."""
        while not line.has_words:
            left = max(0.0, line.deadline - time.monotonic())
            ready, _, _ = select.select([self._sock, line.sock], [], [], left)
            yield from self.numbers(kind)
            if line.sock in ready or not left:
                break
        yield from self.numbers_until(kind, time.monotonic() + grace)

    def path_mtu(self) -> int | None:
        """Bytes of the largest packet by which the kernel goes on the way to the peer."""
        with socket.socket(self._sock.family, socket.SOCK_DGRAM) as probe:
            probe.connect(self._peer)
            try:
                return probe.getsockopt(*_PATH_MTU[self._sock.family])
            except OSError:
                return None
