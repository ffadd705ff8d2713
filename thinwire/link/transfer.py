"""Messages under way on a `TcpLink`: whose memory they use, what they were meant to be, and how one waits for them."""

from __future__ import annotations

import threading
import time
import zlib
from typing import TYPE_CHECKING

import torch

from thinwire.errors import LinkTimeout
from thinwire.link.base import LOOK_UP_SECONDS, Work, check_message, where
from thinwire.link.frames import (
    DATA,
    FRAME_BYTES,
    HEADER_BYTES,
    NEVER,
    PING,
    PONG,
    Header,
    digest,
    dtype_code,
    encode_delayed,
    encode_header,
    encode_held,
    encode_trailer,
    name_of,
)
from thinwire.types import Moment

if TYPE_CHECKING:
    from thinwire.link.connection import Connection


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous tensor's own memory, whatever its dtype (numpy has no bfloat16). Each call costs a microsecond."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dim() != 1 or tensor.stride(0) != 1:  # one element is contiguous, whatever its stride
        tensor = tensor.as_strided((tensor.numel(),), (1,))
    if tensor.dtype != torch.uint8:
        tensor = tensor.view(torch.uint8)
    return tensor.numpy().data


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or room for it in pinned memory if it lives on a GPU. The GPU path is untested."""
    if tensor.is_cpu:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


class Transfer(Work):
    """A message on its way, in either direction. It is woken when it is whole, or when it never will be."""

    def __init__(self, connection: Connection, tensor: torch.Tensor, moment: Moment) -> None:
        self.connection, self.tensor, self.moment = connection, tensor, moment
        self.whole = False
        self._woken = False
        self._bell = threading.Lock()  # rung by releasing it; an Event would cost more than the rest of this object
        self._bell.acquire()

    def wake(self) -> None:
        self._woken = True
        try:
            self._bell.release()
        except RuntimeError:
            pass  # woken before

    def finish(self) -> None:
        self.whole = True
        self.wake()

    def wait(self) -> None:
        """The deadline moves with every byte: slow is not dead. After a timeout one may wait again."""
        link, start = self.connection.link, time.monotonic()
        while not self._woken and link.failure is None:
            silent = time.monotonic() - max(start, self._last_byte())
            if silent >= link.timeout:
                raise self._timed_out()
            self._bell.acquire(timeout=min(link.timeout - silent, LOOK_UP_SECONDS))
        link.raise_failure(self.moment)
        if not self.whole:
            raise self.connection.left(self.moment)

    def _last_byte(self) -> float:
        raise NotImplementedError

    def _timed_out(self) -> LinkTimeout:
        raise NotImplementedError


class Sending(Transfer):
    """A frame that leaves.

    How far it has come is told by `taken` alone: the bytes that the kernel has taken, call by call. Ctrl-C may end the
    caller's thread between any two steps here, so everything else either follows from `taken` or can be done again.
    """

    sequence: int
    left_at = 0.0  # its last piece, read just before, so that no round trip seems shorter than it was
    _header: bytes | None = None
    _summed = (0, 0)  # so many bytes of the payload have this crc

    def __init__(
        self, connection: Connection, tensor: torch.Tensor, moment: Moment, kind: int, payload: memoryview, code: int
    ) -> None:
        super().__init__(connection, tensor, moment)
        self.kind, self._payload, self._code = kind, payload, code
        self.taken: list[int] = []

    @property
    def started(self) -> bool:
        return any(self.taken)

    @property
    def nbytes(self) -> int:
        return len(self._payload)

    @property
    def gone(self) -> bool:
        return sum(self.taken) == FRAME_BYTES + len(self._payload)

    def begin(self, run_id: bytes, sequence: int) -> None:
        """It is this frame's turn. Before that it has no number, and can be dropped without leaving a gap.

        As long as nothing of it has left, what it says of times is said anew.
        """
        if self.started:
            return
        self.sequence = sequence
        self._header = encode_header(self._describe(run_id, sequence))

    def _describe(self, run_id: bytes, sequence: int) -> Header:
        step, plan, collective = self.moment
        names = digest(plan), digest(collective)
        lay, after = self.connection.echoes.newest() if self.kind == DATA else (NEVER, 0)
        return Header(self.kind, self._code, run_id, sequence, step, *names, self.nbytes, lay, after)

    def next_pieces(self, room: int) -> list[bytes | memoryview]:
        """What is to leave next: at most `room` bytes of the payload, and what goes before and after them."""
        assert self._header is not None
        sent, size = sum(self.taken), len(self._payload)
        self.taken = [sent]
        first = max(sent - HEADER_BYTES, 0)
        last = min(first + room, size)
        pieces: list[bytes | memoryview] = [self._header[sent:], self._payload[first:last]]
        crc = self._crc(last)
        if last == size:
            pieces.append(encode_trailer(crc)[max(first - size, 0) :])
        return pieces

    def _crc(self, size: int) -> int:
        """Of the first `size` bytes. Every byte is read once, by whoever is about to send it."""
        done, crc = self._summed
        if done < size:
            crc = zlib.crc32(self._payload[done:size], crc)
            self._summed = (size, crc)
        return crc

    def _last_byte(self) -> float:
        return self.connection.accepted_at

    def _timed_out(self) -> LinkTimeout:
        link, peer = self.connection.link, self.connection.peer
        return LinkTimeout(
            f"rank {peer} took no byte from rank {link.rank} for {link.timeout:g} s {where(self.moment)}.",
            rank=link.rank,
            peer=peer,
        )


class Ping(Sending):
    """A question whose answer tells how long a round trip takes. Nobody waits for it."""

    def __init__(self, connection: Connection, token: int, delayed: bool) -> None:
        super().__init__(connection, torch.empty(0), Moment(token), PING, memoryview(b""), 0)
        self.delayed = delayed

    def _describe(self, run_id: bytes, sequence: int) -> Header:
        return Header(PING, 0, run_id, sequence, self.moment.step, bytes(8), bytes(8), 0)


class Pong(Sending):
    """The answer to a ping, with its token and the time for which it lay here."""

    def __init__(self, connection: Connection, token: int, came_at: float, delayed: bool) -> None:
        super().__init__(connection, torch.empty(0), Moment(token), PONG, memoryview(b""), 0)
        self._came_at, self._delayed = came_at, delayed

    def _describe(self, run_id: bytes, sequence: int) -> Header:
        held = encode_held(time.monotonic() - self._came_at)
        return Header(PONG, 0, run_id, sequence, self.moment.step, held, encode_delayed(self._delayed), 0)


class Receiving(Transfer):
    """A posted receive."""

    def __init__(self, connection: Connection, tensor: torch.Tensor, moment: Moment) -> None:
        super().__init__(connection, tensor, moment)
        self._host = on_host(tensor)
        self.view = bytes_of(self._host)

    def wait(self) -> None:
        super().wait()
        if self._host is not self.tensor:
            self.tensor.copy_(self._host)

    def check(self, header: Header) -> None:
        """Refuse a frame that is not the one this receive was posted for."""
        step, plan, collective = self.moment
        ours = (step, digest(plan), digest(collective), dtype_code(self.tensor.dtype), len(self.view))
        if ours == (header.step, header.plan, header.collective, header.dtype_code, header.nbytes):
            return
        theirs = Moment(header.step, name_of(header.plan), name_of(header.collective))
        link = self.connection.link
        check_message(link, self.connection.peer, self.moment, self.tensor, theirs, header.dtype, header.nbytes)

    def _last_byte(self) -> float:
        return self.connection.heard_at

    def _timed_out(self) -> LinkTimeout:
        return self.connection.link._timed_out(self.connection.peer, self.moment)
