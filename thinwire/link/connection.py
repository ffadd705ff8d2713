"""Frames to and from one peer, over one non-blocking socket.

Only the link's I/O thread reads. Anybody may send or post; a lock per connection keeps frames whole and in order.

A frame whose receive is posted is read straight into its tensor. A frame that comes early is kept, within bounds;
beyond them it stays in the kernel, TCP holds the sender back, and reading goes on when its receive is posted.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import torch

from thinwire.errors import PeerLost
from thinwire.link.arrival import Arrival
from thinwire.link.backlog import unacknowledged, unsent
from thinwire.link.base import where
from thinwire.link.failure import cut_off, refused, told
from thinwire.link.frames import (
    ABORT,
    DATA,
    FRAME_BYTES,
    GOODBYE,
    HEADER_BYTES,
    LOST,
    PING,
    PONG,
    PROBES,
    SEQUENCES,
    FrameError,
    Header,
    decode_header,
    dtype_code,
)
from thinwire.link.meter import STAMP_BYTES
from thinwire.link.pace import Echoes, Pace, Pings
from thinwire.link.transfer import Pong, Receiving, Sending, bytes_of, on_host
from thinwire.types import Moment

if TYPE_CHECKING:
    from thinwire.link.tcp import TcpLink

MAX_EARLY_BYTES = 64 * 2**20  # kept for one peer before its receives are posted
EARLY_FRAME_COST = 1024  # what an early frame counts on top of its payload, so that empty ones are bounded too
SEND_BYTES = 2**20  # at most this much per system call, so that the lock is never held for long


class Connection:
    """One peer's frames. What cannot go on raises `Failure`; what that means for the link is the link's business."""

    def __init__(self, link: TcpLink, peer: int, sock: socket.socket, run_id: bytes) -> None:
        self.link, self.peer, self.socket = link, peer, sock
        self.heard_at = self.accepted_at = time.monotonic()
        self.said_goodbye = False  # by the peer
        self.probe_bytes = 0  # of pings and pongs sent
        self._run_id = run_id
        self._lock = threading.Lock()
        self._broken = False  # the peer takes nothing any more
        self._given_up = False  # reading failed: nothing more can be understood
        self._to_send: deque[Sending] = deque()
        self._frames_sent = 0
        self._shut = False  # nothing will follow what was sent
        self._on_the_way = 0  # when we last looked
        self._posted: deque[Receiving] = deque()
        self._early: deque[Arrival] = deque()  # not claimed by a receive yet, the oldest first
        self._early_cost = 0
        self._head = bytearray(HEADER_BYTES)
        self._head_filled = 0
        self._frames_begun = 0
        self._held: Header | None = None  # a frame too large to keep that waits for its receive
        self._arriving: Arrival | None = None
        self._parting = False  # nothing may follow our farewell
        self._pace = Pace(sock, link.meter)
        self._pings = Pings(self)
        self.echoes = Echoes(peer, link.meter)

    # --- sending

    def send(self, sending: Sending) -> None:
        """Queue a frame, and let as much leave as the kernel takes now. Never blocks."""
        with self._lock:
            if self.said_goodbye:
                sending.wake()
                return
            self._to_send.append(sending)
            if len(self._to_send) == 1:
                self._send_some()

    def send_tensor(self, tensor: torch.Tensor, moment: Moment) -> Sending:
        host = on_host(tensor)
        if host is not tensor:
            host.copy_(tensor)
        sending = Sending(self, host, moment, DATA, bytes_of(host), dtype_code(tensor.dtype))
        self.send(sending)
        return sending

    def farewell(self, kind: int, text: bytes, moment: Moment) -> None:
        """Say goodbye, or say why we go."""
        with self._lock:
            self._parting = True
        self.send(Sending(self, torch.empty(0), moment, kind, memoryview(text), 0))

    def flush(self) -> None:
        """Go on sending what is queued. For the I/O thread, when the socket takes more."""
        with self._lock:
            self._send_some()

    def _send_some(self) -> None:
        """Until nothing is left or the kernel takes no more; at most one large piece, so that others get a turn."""
        room = SEND_BYTES
        while self._to_send and room > 0 and not self._broken:
            sending = self._to_send[0]
            if not sending.gone:  # Ctrl-C may have kept an earlier call from noticing
                sending.begin(self._run_id, self._frames_sent)
                pieces = sending.next_pieces(room)
                sending.left_at = time.monotonic()
                try:
                    # Sending and noting it are one step of the interpreter, which looks for signals between steps:
                    # bytes that left but were not noted would leave again, or be dropped as if they were still here.
                    sending.taken.extend(map(self.socket.sendmsg, (pieces,)))
                except BlockingIOError:
                    return
                except OSError:
                    # Whether the peer has died or said goodbye stands in what it sent last: the reader finds out.
                    self._broken = True
                    return
                room -= sending.taken[-1]
                self.accepted_at = time.monotonic()
                self.link.meter.note_sent(self.accepted_at, sending.taken[-1])
            if sending.gone:
                self._frames_sent = (sending.sequence + 1) % SEQUENCES
                if sending.kind == DATA:
                    self.echoes.sent(sending.sequence, sending.nbytes, sending.left_at)
                sending.finish()
                self._to_send.popleft()

    @property
    def wants_to_send(self) -> bool:
        return bool(self._to_send) and not (self._broken or self.said_goodbye)

    def drop_unsent(self) -> None:
        """Forget the frames of which nothing has left yet."""
        with self._lock:
            while self._to_send and not self._to_send[-1].started:
                self._to_send[-1].wake()
                self._to_send.pop()

    def still_leaving(self) -> bool:
        """After our goodbye: is anything of ours still on its way to a peer that may want it?

        What the kernel has taken is not there yet. Should the peer say something to a socket that we have closed, our
        kernel would answer with a reset, and drop what it has not delivered. For the I/O thread only.
        """
        if self.wants_to_send:
            return True
        if self.said_goodbye or self._hung_up():
            return False
        on_the_way = unacknowledged(self.socket)
        if on_the_way != self._on_the_way:
            self._on_the_way, self.accepted_at = on_the_way, time.monotonic()
        return on_the_way > 0

    def _hung_up(self) -> bool:
        """Let nothing follow what was sent. Has the peer gone already? The reader may have given up, so ask."""
        try:
            if not self._shut:
                self._shut = True
                self.socket.shutdown(socket.SHUT_WR)
            self._broken |= self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        except OSError:
            self._broken = True
        return self._broken

    # --- measuring, for the I/O thread only

    def has_unsent(self) -> bool:
        """Does something wait in this host to be sent?"""
        return bool(self._to_send) or unsent(self.socket) > 0

    def has_unacknowledged(self) -> bool:
        """Has something been sent that the peer's host has not confirmed?"""
        try:
            return unacknowledged(self.socket) > 0
        except OSError:
            return False

    def ping(self, delayed: bool) -> None:
        """Ask for a sign of life; `delayed` if the question shares its way with payload."""
        self._probe(self._pings.ask(delayed))

    def _probe(self, probe: Sending) -> None:
        """Send it at once, or never: what waits behind a payload would only tell how long that took."""
        with self._lock:
            if not (self._to_send or self._parting or self._broken or self.said_goodbye):
                self.probe_bytes += FRAME_BYTES
                self._to_send.append(probe)
                self._send_some()

    # --- receiving

    def post(self, tensor: torch.Tensor, moment: Moment) -> Receiving:
        receiving = Receiving(self, tensor, moment)
        with self._lock:
            if self._early:
                self._claim(self._early[0], receiving)
            elif self.said_goodbye:
                receiving.wake()
            else:
                self._posted.append(receiving)
        return receiving

    def _claim(self, arrival: Arrival, receiving: Receiving) -> None:
        receiving.check(arrival.header)
        self._early.popleft()
        self._early_cost -= _early_cost(arrival.header)
        arrival.receiving = receiving
        if arrival is not self._arriving:
            arrival.hand_over()

    @property
    def is_held(self) -> bool:
        """A frame waits in the kernel for its receive."""
        return self._held is not None

    @property
    def wants_to_read(self) -> bool:
        if self.said_goodbye or self._given_up:
            return False
        held = self._held
        return held is None or self._broken or self._place(held)

    def _place(self, header: Header) -> bool:
        """Is there room for this frame: a posted receive, or space for an early one?"""
        return bool(self._posted) or self._early_cost + _early_cost(header) <= MAX_EARLY_BYTES

    def read(self) -> None:
        """Take in what has come, at most one frame, so that others have their turn. For the I/O thread only."""
        if self._arriving is None:
            if self._held is None and not self._read_header():
                return
            if not self._begin():
                return
        arrival = self._arriving
        assert arrival is not None
        received = self._receive(arrival.room())
        arrival.take(received)
        if received and arrival.header.kind == DATA:
            self._pace.note_payload(received, arrival.whole)
        if received and arrival.header.kind not in PROBES:
            self.heard_at = time.monotonic()
        if arrival.whole:
            self._end(arrival)

    def _read_header(self) -> bool:
        received = self._receive([memoryview(self._head)[self._head_filled :]])
        self._head_filled += received
        if self._head_filled < HEADER_BYTES:
            self.heard_at = time.monotonic() if received else self.heard_at
            return False
        self._head_filled = 0
        try:
            self._held = decode_header(self._head, self._run_id, self._frames_begun)
        except FrameError as error:
            raise refused(self.link.rank, self.peer, str(error)) from None
        self._frames_begun = (self._frames_begun + 1) % SEQUENCES
        if self._held.kind not in PROBES:  # which only tell that the peer's link is alive, not that it works
            self.heard_at = time.monotonic()
        self._pace.note_header(self._held.nbytes)
        if self._held.kind == DATA:
            with self._lock:
                self.echoes.heard(self._held, self._pace.came_at)
        return True

    def _begin(self) -> bool:
        """Find a place for the payload; False when it has to wait in the kernel."""
        header = self._held
        assert header is not None
        with self._lock:
            if header.kind != DATA:
                self._arriving = Arrival(header, memoryview(bytearray(header.nbytes)))
            elif self._posted:
                self._posted[0].check(header)
                receiving = self._posted.popleft()
                self._arriving = Arrival(header, receiving.view, receiving)
            elif self._place(header):
                self._arriving = Arrival(header, memoryview(bytearray(header.nbytes)))
                self._early.append(self._arriving)
                self._early_cost += _early_cost(header)
            elif self._broken:
                raise cut_off(self.link.rank, self.peer)
            else:
                self._pace.note_held()
                return False
            self._held = None
        return True

    def _end(self, arrival: Arrival) -> None:
        if arrival.damaged:
            raise refused(self.link.rank, self.peer, "a message that was damaged on the way (crc)")
        with self._lock:
            self._arriving = None
            if arrival.header.kind == DATA:
                self.echoes.came(arrival.header.sequence, self._pace.came_at)
            if arrival.receiving is not None:
                arrival.hand_over()
        if arrival.header.kind in (ABORT, LOST):
            raise told(self.link.rank, self.link.world_size, self.peer, arrival.header.kind, bytes(arrival.view))
        if arrival.header.kind == PING:
            delayed = self.link.meets_payload(self._pace.came_at)
            self._probe(Pong(self, arrival.header.step, self._pace.came_at, delayed))
        if arrival.header.kind == PONG:
            self._pings.hear(arrival.header, self._pace.came_at)
        if arrival.header.kind == GOODBYE:
            with self._lock:
                self.said_goodbye = True
            self.wake_all()

    def _receive(self, room: list[memoryview]) -> int:
        try:
            received, extras, _, _ = self.socket.recvmsg_into(room, STAMP_BYTES)
        except BlockingIOError:
            return 0
        except OSError:
            received = 0
        if received == 0:
            self._broken = True
            raise cut_off(self.link.rank, self.peer)
        self._pace.note_read(extras)
        return received

    # --- ending

    def give_up(self) -> None:
        """Read no more: the stream has ended, or makes no sense from here on."""
        self._given_up = True

    def wake_all(self) -> None:
        """Let every wait look at what has happened."""
        with self._lock:
            arriving = [self._arriving.receiving] if self._arriving and self._arriving.receiving else []
            for transfer in [*self._posted, *self._to_send, *arriving]:
                transfer.wake()

    def left(self, moment: Moment) -> PeerLost:
        return PeerLost(
            f"rank {self.peer} has closed its link, but rank {self.link.rank} still has a message to exchange with it "
            f"{where(moment)}.",
            rank=self.link.rank,
            peer=self.peer,
        )


def _early_cost(header: Header) -> int:
    return header.nbytes + EARLY_FRAME_COST
