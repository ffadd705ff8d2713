"""Messages under way on a `TcpLink`: whose memory they use, what they were meant to be, and how one waits for them."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import torch

from thinwire.link.base import LOOK_UP_SECONDS, Work, check_message
from thinwire.link.frames import Header, digest, dtype_code, name_of
from thinwire.types import Moment

if TYPE_CHECKING:
    from thinwire.link.connection import Connection


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's own memory, whatever its dtype (numpy has no bfloat16). Each call below costs a microsecond."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dim() != 1:
        tensor = tensor.reshape(-1)
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
                raise link._timed_out(self.connection.peer, self.moment)
            self._bell.acquire(timeout=min(link.timeout - silent, LOOK_UP_SECONDS))
        link.raise_failure(self.moment)
        if not self.whole:
            raise self.connection.left(self.moment)

    def _last_byte(self) -> float:
        raise NotImplementedError


class Sending(Transfer):
    """A frame that leaves, and the bytes of it that are still here."""

    views: list[memoryview]
    started = False

    def advance(self, sent: int) -> None:
        """Drop the bytes that the kernel has taken."""
        self.started = True
        while self.views and sent >= len(self.views[0]):
            sent -= len(self.views.pop(0))
        if sent:
            self.views[0] = self.views[0][sent:]

    def _last_byte(self) -> float:
        return self.connection.accepted_at


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
