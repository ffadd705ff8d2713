"""Any link, slowed down: messages leave no faster than a rate allows and arrive no sooner than a latency allows.

For machines on which no lab can be made. Only messages of this link are shaped, not the process group's own traffic,
and only on the sending side: a message of b bytes starts when those before it have left, holds the egress for b beta,
and is given to the wrapped link alpha + b beta after its start. Several senders that meet at one receiver do not slow
each other down here, as they would in the lab.

It measures nothing: what the wrapped link sees of acknowledgements and deliveries is of the network without the delay.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

import torch

from thinwire.errors import LinkError
from thinwire.link.base import LOOK_UP_SECONDS, Link, Work
from thinwire.types import Moment, Network


@dataclass(eq=False)
class _Message:
    """A send that waits for its time."""

    tensor: torch.Tensor
    dst: int
    moment: Moment
    due: float
    released: threading.Event = field(default_factory=threading.Event)
    work: Work | None = None
    error: LinkError | None = None


class ShapedLink(Link):
    """A link over another one, with the latency and rate of `network`.

    `network` may be changed at any time, for the messages that are sent after that. Messages keep their order.

    Args:
        link: what carries the messages; it must run on real time, and is closed with this one.
        network: `alpha` and `beta` of the wire to be.
    """

    def __init__(self, link: Link, network: Network) -> None:
        super().__init__(link.rank, link.world_size, link.timeout)
        self.network = network
        self.header_bytes = link.header_bytes
        self.group = link.group
        self._link = link
        self._using_link = threading.Lock()  # its `moment` belongs to the call that follows
        self._waiting: deque[_Message] = deque()
        self._changed = threading.Condition()
        self._egress_free = self._last_due = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._release_in_time, name="thinwire-shaped", daemon=True)
        self._thread.start()

    def now(self) -> float:
        return self._link.now()

    def close(self) -> None:
        """Send what still waits, then close the wrapped link."""
        self._stop()
        self._link.close()

    def abort(self, reason: str) -> None:
        """Drop what still waits and tell the others at once."""
        with self._changed:
            self._waiting.clear()
        self._stop()
        self._link.abort(reason)

    def _send(self, tensor: torch.Tensor, dst: int) -> Work:
        with self._changed:
            if self._closed:
                raise RuntimeError("this link is closed.")
            seconds = (tensor.nbytes + self.header_bytes) * self.network.beta
            start = max(time.monotonic(), self._egress_free)
            self._egress_free = start + seconds
            self._last_due = max(self._last_due, start + self.network.alpha + seconds)
            message = _Message(tensor, dst, self.moment, self._last_due)
            self._waiting.append(message)
            self._changed.notify()
        return _Send(self, message)

    def _post(self, tensor: torch.Tensor, src: int) -> Work:
        with self._using_link:
            self._link.moment = self.moment
            return self._link.post(tensor, src)

    def _stop(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    # --- in the thread

    def _release_in_time(self) -> None:
        while (message := self._next_due()) is not None:
            self._release(message)

    def _next_due(self) -> _Message | None:
        """The first message, when its time has come; None when the link is closed and nothing waits."""
        with self._changed:
            while not self._closed or self._waiting:
                left = self._waiting[0].due - time.monotonic() if self._waiting else None
                if left is not None and left <= 0:
                    return self._waiting.popleft()
                self._changed.wait(left)
        return None

    def _release(self, message: _Message) -> None:
        try:
            with self._using_link:
                self._link.moment = message.moment
                message.work = self._link.send(message.tensor, message.dst)
        except LinkError as error:
            message.error = error
        message.released.set()


class _Send(Work):
    def __init__(self, link: ShapedLink, message: _Message) -> None:
        self._link, self._message = link, message

    def wait(self) -> None:
        message = self._message
        while not message.released.wait(LOOK_UP_SECONDS):
            if not self._link._thread.is_alive() and not message.released.is_set():
                raise RuntimeError("this link was closed before the message was sent.")
        if message.error is not None:
            raise message.error
        assert message.work is not None
        message.work.wait()
