"""How fast a link's connections may send, so that messages to several peers do not crowd each other out.

A round hands messages to several peers at once, and TCP sends each as if it were alone: in bursts, and at the whole
rate. Together they may overflow the queue of a slow line; what was lost is sent again, after everybody has waited for
it. So where packets are lost, the kernel is asked to pace each of several messages at its share of what the line
carries, for as long as that seems to be needed. A message that is alone may always go as fast as TCP lets it, and so
may a few small ones. A connection that was paced once is paced for good, if only by TCP's own window, and then shows
less of what a line can do: none is before it has to be.

What the line carries is taken from the rate at which bytes come in. They cannot come faster than they are let go, so
some steps let go of more, all ranks in the same ones: if the line has become faster, more comes in than before. Then
all goes freely until it is known how fast.
"""

from __future__ import annotations

import ipaddress
import math
import socket
import struct
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

_SO_MAX_PACING_RATE = 47  # Python has no name for it
_RATE = struct.Struct("=Q")  # bytes per second
_FASTEST = 2.0**60  # the greatest number of all would mean no pacing

BURST_BYTES = 2**16  # which the queue of any line can take
MORE = 1.05  # times the rate at which payload comes in: what a packet's headers need, and a little more
LOOK = 1.25  # the same in a step that looks whether the line has become faster
LOOK_EVERY = 3  # steps, of which one does
FASTER = 1.12  # times what came in before: the line has become faster
REMEMBERED = 4  # rates, of which the greatest counts: a process that was not let run makes them smaller, nothing larger
LOSSES = 4  # packets sent again since the last rate was noted; fewer may be the line's fault, or TCP's mistake
CAREFUL = 40  # rates after which it is tried whether packets are still lost without pacing
DIFFERENT = 1.02  # a rate that is nearer to what was asked for is not worth asking for


class Egress:
    """The way out of one host, which all its connections share."""

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = {peer: sock for peer, sock in sockets.items() if _can_be_paced(sock)}
        self._allowed: dict[int, float] = {}  # of those that are paced by now
        self._rates: deque[float] = deque(maxlen=REMEMBERED)
        self._rate = math.inf  # to keep to
        self._sent_again = 0
        self._careful = 0

    def note(self, rate: float, sent_again: int) -> None:
        """Payload came in at this rate, when there was much of it, and so many packets were sent again so far."""
        lost, self._sent_again = sent_again - self._sent_again, sent_again
        self._careful = CAREFUL if lost >= LOSSES else max(0, self._careful - 1)
        faster = bool(self._rates) and rate > FASTER * max(self._rates)
        self._rates.append(rate)
        is_free = self._careful == 0 or (faster and self._rate < math.inf)
        self._rate = math.inf if is_free else max(self._rates)

    def share(self, peers: Sequence[int], nbytes: int, step: int) -> None:
        """Messages of so many bytes in all are about to be sent to these peers at the same time."""
        fastest = _FASTEST
        if len(peers) > 1 and nbytes > BURST_BYTES:
            fastest = min(fastest, (MORE if step % LOOK_EVERY else LOOK) * self._rate / len(peers))
        for peer in peers:
            allowed = self._allowed.get(peer, _FASTEST)
            if peer in self._sockets and not 1 / DIFFERENT < fastest / allowed < DIFFERENT:
                _pace(self._sockets[peer], fastest)
                self._allowed[peer] = fastest


def _can_be_paced(sock: socket.socket) -> bool:
    """Not where there is no line."""
    return sys.platform == "linux" and not ipaddress.ip_address(sock.getpeername()[0].split("%")[0]).is_loopback


def _pace(sock: socket.socket, rate: float) -> None:
    with suppress(OSError):  # unknown to this kernel; or closed, which whoever sends will be told
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, _RATE.pack(max(1, int(rate))))
