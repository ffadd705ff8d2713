"""Frames to and from one peer, over one non-blocking socket.

Only the link's I/O thread reads. Anybody may send or post; a lock per connection keeps frames whole and in order.

A frame whose receive is posted is read straight into its tensor. A frame that comes early is kept, within bounds;
beyond them it stays in the kernel, TCP holds the sender back, and reading goes on when its receive is posted.
"""

from __future__ import annotations

import socket
import threading
import time
import zlib
from collections import deque
from typing import TYPE_CHECKING

import torch

from thinwire.errors import LinkError, PeerLost, RemoteError
from thinwire.link.base import where
from thinwire.link.frames import (
    ABORT,
    DATA,
    GOODBYE,
    HEADER_BYTES,
    LOST,
    FrameError,
    Header,
    decode_header,
    decode_reason,
    digest,
    dtype_code,
    encode_header,
)
from thinwire.link.transfer import Receiving, Sending, bytes_of, on_host
from thinwire.types import Moment

if TYPE_CHECKING:
    from thinwire.link.tcp import TcpLink

MAX_EARLY_BYTES = 64 * 2**20  # kept for one peer before its receives are posted
EARLY_FRAME_COST = 1024  # what an early frame counts on top of its payload, so that empty ones are bounded too
SEND_BYTES = 2**20  # at most this much per system call, so that the lock is never held for long


class _Arrival:
    """A frame whose payload is coming, or has come and waits for its receive."""

    def __init__(self, header: Header, view: memoryview, receiving: Receiving | None = None) -> None:
        self.header, self.view, self.receiving = header, view, receiving
        self.filled = 0
        self.crc = 0

    @property
    def whole(self) -> bool:
        return self.filled == len(self.view)

    def hand_over(self) -> None:
        """Give an early payload to the receive that has claimed it."""
        assert self.receiving is not None
        if self.view is not self.receiving.view:
            self.receiving.view[:] = self.view
        self.receiving.finish()


class Connection:
    """One peer's frames. Errors are raised as `LinkError`s; what they mean for the link is the link's business."""

    def __init__(self, link: TcpLink, peer: int, sock: socket.socket, run_id: bytes) -> None:
        self.link, self.peer, self.socket = link, peer, sock
        self.heard_at = self.accepted_at = time.monotonic()
        self.said_goodbye = False  # by the peer
        self._run_id = run_id
        self._lock = threading.Lock()
        self._broken = False  # sending failed: nothing more can leave
        self._given_up = False  # reading failed: nothing more can be understood
        self._to_send: deque[Sending] = deque()
        self._frames_sent = 0
        self._posted: deque[Receiving] = deque()
        self._early: deque[_Arrival] = deque()  # not claimed by a receive yet, the oldest first
        self._early_cost = 0
        self._head = bytearray(HEADER_BYTES)
        self._head_filled = 0
        self._frames_begun = 0
        self._held: Header | None = None  # a frame too large to keep that waits for its receive
        self._arriving: _Arrival | None = None

    # --- sending

    def send(self, kind: int, payload: memoryview, sending: Sending, code: int = 0) -> None:
        """Queue a frame, and let as much leave as the kernel takes now. Never blocks."""
        crc = zlib.crc32(payload)
        with self._lock:
            if self.said_goodbye:
                sending.wake()
                return
            moment = sending.moment
            header = Header(
                kind,
                code,
                self._run_id,
                self._frames_sent,
                moment.step,
                digest(moment.plan),
                digest(moment.collective),
                len(payload),
                crc,
            )
            self._frames_sent += 1
            sending.views = [memoryview(encode_header(header)), payload]
            self._to_send.append(sending)
            if len(self._to_send) == 1:
                self._send_some()

    def send_tensor(self, tensor: torch.Tensor, moment: Moment) -> Sending:
        host = on_host(tensor)
        if host is not tensor:
            host.copy_(tensor)
        sending = Sending(self, host, moment)
        self.send(DATA, bytes_of(host), sending, dtype_code(tensor.dtype))
        return sending

    def farewell(self, kind: int, text: bytes, moment: Moment) -> Sending:
        """Say goodbye, or say why we go."""
        sending = Sending(self, torch.empty(0), moment)
        self.send(kind, memoryview(text), sending)
        return sending

    def flush(self) -> None:
        """Go on sending what is queued. For the I/O thread, when the socket takes more."""
        with self._lock:
            self._send_some()

    def _send_some(self) -> None:
        """Until nothing is left or the kernel takes no more; at most one large piece, so that others get a turn."""
        room = SEND_BYTES
        while self._to_send and room > 0 and not self._broken:
            sending = self._to_send[0]
            try:
                sent = self.socket.sendmsg([view[:room] for view in sending.views])
            except BlockingIOError:
                return
            except OSError:
                # Whether the peer has died or said goodbye stands in what it sent last: the reader finds out.
                self._broken = True
                return
            room -= sent
            self.accepted_at = time.monotonic()
            sending.advance(sent)
            if not sending.views:
                self._to_send.popleft()
                sending.finish()

    @property
    def wants_to_send(self) -> bool:
        return bool(self._to_send) and not (self._broken or self.said_goodbye)

    def drop_unsent(self) -> None:
        """Forget the frames of which nothing has left yet."""
        with self._lock:
            while self._to_send and not self._to_send[-1].started:
                self._to_send.pop().wake()
                self._frames_sent -= 1

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

    def _claim(self, arrival: _Arrival, receiving: Receiving) -> None:
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
        if not arrival.whole:
            received = self._receive(arrival.view[arrival.filled :])
            arrival.crc = zlib.crc32(arrival.view[arrival.filled : arrival.filled + received], arrival.crc)
            arrival.filled += received
        if arrival.whole:
            self._end(arrival)

    def _read_header(self) -> bool:
        self._head_filled += self._receive(memoryview(self._head)[self._head_filled :])
        if self._head_filled < HEADER_BYTES:
            return False
        self._head_filled = 0
        try:
            self._held = decode_header(self._head, self._run_id, self._frames_begun)
        except FrameError as error:
            raise self._error(str(error)) from None
        self._frames_begun += 1
        return True

    def _begin(self) -> bool:
        """Find a place for the payload; False when it has to wait in the kernel."""
        header = self._held
        assert header is not None
        with self._lock:
            if header.kind != DATA:
                self._arriving = _Arrival(header, memoryview(bytearray(header.nbytes)))
            elif self._posted:
                self._posted[0].check(header)
                receiving = self._posted.popleft()
                self._arriving = _Arrival(header, receiving.view, receiving)
            elif self._place(header):
                self._arriving = _Arrival(header, memoryview(bytearray(header.nbytes)))
                self._early.append(self._arriving)
                self._early_cost += _early_cost(header)
            elif self._broken:
                raise self._lost()
            else:
                return False
            self._held = None
        return True

    def _end(self, arrival: _Arrival) -> None:
        if arrival.crc != arrival.header.payload_crc:
            raise self._error("a message that was damaged on the way (crc)")
        with self._lock:
            self._arriving = None
            if arrival.receiving is not None:
                arrival.hand_over()
        if arrival.header.kind in (ABORT, LOST):
            raise self._told(arrival.header.kind, bytes(arrival.view))
        if arrival.header.kind == GOODBYE:
            with self._lock:
                self.said_goodbye = True
            self.wake_all()

    def _receive(self, room: memoryview) -> int:
        try:
            received = self.socket.recv_into(room)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost() from error
        if received == 0:
            raise self._lost()
        self.heard_at = time.monotonic()
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

    def _lost(self) -> PeerLost:
        return lost(self.link.rank, self.peer, f"its connection to rank {self.link.rank} ended without a goodbye")

    def _told(self, kind: int, raw: bytes) -> LinkError:
        """The failure that the peer reports: its own, or one that it has heard of before us."""
        try:
            origin, text = decode_reason(raw)
        except FrameError as error:
            return self._error(str(error))
        if origin >= self.link.world_size or origin == self.link.rank:  # if it has lost us, we have lost it
            origin = self.peer
        return lost(self.link.rank, origin, text) if kind == LOST else failed(self.link.rank, origin, text)

    def _error(self, what: str) -> LinkError:
        text = f"rank {self.peer} sent rank {self.link.rank} {what}"
        return LinkError(text, rank=self.link.rank, peer=self.peer)


def lost(rank: int, peer: int, reason: str) -> PeerLost:
    return PeerLost(f"rank {rank} lost rank {peer}: {reason}", rank=rank, peer=peer)


def failed(rank: int, peer: int, reason: str) -> RemoteError:
    return RemoteError(f"rank {peer} failed: {reason}", rank=rank, peer=peer)


def _early_cost(header: Header) -> int:
    return header.nbytes + EARLY_FRAME_COST
