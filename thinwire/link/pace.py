"""What one connection tells its link's meter: how fast its frames come in, and how long its round trips take."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from thinwire.link.frames import (
    AFTERS,
    FRAME_BYTES,
    HEADER_BYTES,
    LAY_UNIT,
    NEVER,
    Header,
    decode_delayed,
    decode_held,
)
from thinwire.link.meter import PIECE_SECONDS, Meter, age_of, ask_for_stamps
from thinwire.link.tcp_info import out_of_order
from thinwire.link.transfer import Ping

if TYPE_CHECKING:
    from thinwire.link.connection import Connection

MOST_SENT = 256  # messages to one peer that it has not told of; beyond that the oldest is forgotten
DRIFT = 5e-4  # by which two hosts' clocks may run apart, a second in half an hour
MAX_ASKED = 16  # pings to one peer without an answer; beyond that the oldest is forgotten


class Pace:
    """When bytes came to this host, and how fast those of one frame did."""

    def __init__(self, sock: socket.socket, meter: Meter) -> None:
        self.came_at = time.monotonic()  # when the last byte that was read had come to this host
        self._socket, self._meter = sock, meter
        self._out_of_order = out_of_order(sock)
        self._is_stamped = ask_for_stamps(sock)
        self._metered_to: float | None = None  # what has come of the arriving frame until then is in the meter
        self._unmetered = 0  # and these bytes have come since

    def note_read(self, extras: Iterable[tuple[int, int, bytes]]) -> None:
        """Something was read just now, and the kernel says this about it."""
        age = age_of(extras)
        self._is_stamped = age is not None
        self.came_at = time.monotonic() - (age or 0.0)

    def note_header(self, nbytes: int) -> None:
        """A frame of so many bytes of payload begins.

        What came in one packet with the header came at once. Packets may become larger or smaller while the connection
        lasts.
        """
        segment = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        if nbytes:
            self._meter.note(self.came_at, self.came_at, min(segment, nbytes + FRAME_BYTES))
        self._metered_to, self._unmetered = self.came_at, HEADER_BYTES - segment

    def note_held(self) -> None:
        """The frame has to wait for its receive: from here on it is we who are slow."""
        self._metered_to = None

    def note_payload(self, received: int, whole: bool) -> None:
        """Note that so many bytes have come, and when: the rest of the frame's first packet together with its header.

        Where the kernel does not tell when they came it was when they were read. That is right for as long as reading
        empties the socket and more is to come, but the last bytes may have lain there for any time.
        """
        self._meter.note_received(self.came_at)
        if self._metered_to is None or (whole and not self._is_stamped):
            return
        self._unmetered += received
        start, end = self._metered_to, self.came_at
        if self._unmetered > 0 and (whole or end - start >= PIECE_SECONDS):
            if not self._waited_for_one_that_was_lost():
                self._meter.note(start, max(start, end), self._unmetered)
            self._metered_to, self._unmetered = max(start, end), 0

    def _waited_for_one_that_was_lost(self) -> bool:
        """Whether packets came before others that were sent earlier: all are then let through at once, in the end."""
        before, self._out_of_order = self._out_of_order, out_of_order(self._socket)
        return self._out_of_order != before


class Pings:
    """The questions that one peer has not answered yet."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._tokens = 0
        self._asked: dict[int, Ping] = {}

    def ask(self, delayed: bool) -> Ping:
        self._tokens += 1
        self._asked[self._tokens] = Ping(self._connection, self._tokens, delayed)
        self._asked.pop(self._tokens - MAX_ASKED, None)
        return self._asked[self._tokens]

    def hear(self, header: Header, came_at: float) -> None:
        """What the peer claims is only believed as far as it makes the time shorter, but not less than nothing."""
        ping, meter = self._asked.pop(header.step, None), self._connection.link.meter
        if ping is not None and ping.gone:
            seconds = came_at - ping.left_at - decode_held(header)
            delayed = ping.delayed or decode_delayed(header) or meter.was_receiving(came_at)
            if seconds > 0:
                meter.note_round_trip(self._connection.peer, seconds, delayed)


class Echoes:
    """Round trips of messages that are sent anyway: each says which of the other side's came last, and how long ago.

    Used under the connection's lock, by who sends and by who reads.
    """

    def __init__(self, peer: int, meter: Meter) -> None:
        self._peer, self._meter = peer, meter
        self._sent: dict[int, tuple[int, float]] = {}  # by number: how many bytes, and when the last of them left
        self._newest: tuple[int, float] | None = None  # of the peer's: its number, and when it had come

    def sent(self, sequence: int, nbytes: int, at: float) -> None:
        self._sent.pop(sequence % AFTERS, None)
        self._sent[sequence % AFTERS] = nbytes, at
        if len(self._sent) > MOST_SENT:
            del self._sent[next(iter(self._sent))]

    def came(self, sequence: int, at: float) -> None:
        self._newest = sequence % AFTERS, at

    def newest(self) -> tuple[int, int]:
        """What the next message is to say: how long the newest of the peer's lies here, and its number."""
        if self._newest is None:
            return NEVER, 0
        after, came_at = self._newest
        return min(NEVER, max(0, int((time.monotonic() - came_at) / LAY_UNIT))), after

    def heard(self, header: Header, came_at: float) -> None:
        """A message has begun to come. Only the first that says so tells how long the way of another was.

        As far as clocks may run apart the time is taken for longer: it must not seem shorter than it was.
        """
        if header.lay == NEVER or header.after not in self._sent:
            return
        nbytes, left_at = self._sent[header.after]
        for earlier in list(self._sent):
            del self._sent[earlier]
            if earlier == header.after:
                break
        seconds = came_at - left_at - header.lay * LAY_UNIT * (1 - DRIFT)
        if seconds > 0:
            self._meter.note_echo(self._peer, seconds, nbytes + header.nbytes + 2 * FRAME_BYTES)
