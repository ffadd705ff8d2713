"""Link: a rank's view of the wire.

Nothing blocks before `Work.wait()`: a ring of ranks that all send before they receive would otherwise wait for ever.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from thinwire.errors import LinkTimeout, PlanMismatch
from thinwire.types import Moment

# The longest that anything blocks in one piece. A signal that comes between Python's last look for signals and the
# moment at which a lock begins to block is not seen before the lock returns, so a long wait could swallow Ctrl-C.
LOOK_UP_SECONDS = 0.5


class Work(ABC):
    """A send or a receive under way."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the tensor may be used again (send) or holds the message (receive).

        Raises a `LinkError` that names the peer, the step and the collective when that cannot happen.
        """


class Done(Work):
    """Work that is finished already."""

    def wait(self) -> None:
        pass


class Stretch(NamedTuple):
    """A while in which bytes came in without a pause: so many in so many seconds."""

    nbytes: int
    seconds: float


class Reading(NamedTuple):
    """What a link noticed of the network since it was last read out.

    Attributes:
        round_trips: a peer and the seconds that a message of nothing took there and back; peer -1 is one unknown.
        stretches: of everything that came in, from all peers together, since they share the way in.
        probe_bytes: sent for the sake of measuring alone.
        delayed: round trips that met payload on their way, and may have had to wait behind it.
        echoes: a peer, the seconds that a message took there and the beginning of another back, and the bytes of both.
            As many may have been on their way to and from every other peer at the same time.
    """

    round_trips: tuple[tuple[int, float], ...] = ()
    stretches: tuple[Stretch, ...] = ()
    probe_bytes: int = 0
    delayed: tuple[tuple[int, float], ...] = ()
    echoes: tuple[tuple[int, float, int], ...] = ()


class Link(ABC):
    """One rank among `world_size`, able to send to and receive from any other.

    Messages between two ranks arrive in the order they were sent and fill receives in the order they were posted.

    Attributes:
        timeout: seconds of silence from a peer after which a wait gives up.
        moment: the step, plan and collective that the next messages belong to.
        sent_bytes: payload bytes handed to `send` so far.
        sent_messages: messages handed to `send` so far. Each costs `header_bytes` on top of its payload.
        native_bytes: those of `sent_bytes` that went over torch's own connections instead.
        group: the process group that the ranks came from, if they did.
    """

    header_bytes = 0
    lossy = False  # a message may be lost, come twice, or out of order; none of ours is
    group: dist.ProcessGroup | None = None

    def __init__(self, rank: int, world_size: int, timeout: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self.moment = Moment()
        self.sent_bytes = 0
        self.sent_messages = 0
        self.native_bytes = 0

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        """Start sending a contiguous tensor. Leave it alone until the work was waited on."""
        return self.send_together([(tensor, dst)])[0]

    def send_together(self, messages: Sequence[tuple[torch.Tensor, int]]) -> list[Work]:
        """Start sending several tensors, each to a rank of its own. They share the way out of this host evenly."""
        for tensor, dst in messages:
            self._check(tensor, dst)
            self.sent_bytes += tensor.nbytes
            self.sent_messages += 1
        return self._send_together(messages)

    def drain(self) -> None:  # noqa: B027 (one that sends in order need not wait)
        """Let what was sent before leave this host, so that it need not share the way with what comes next."""

    def post(self, tensor: torch.Tensor, src: int) -> Work:
        """Receive the next message from `src` into a contiguous tensor; may be called long before it is sent."""
        self._check(tensor, src)
        return self._post(tensor, src)

    @abstractmethod
    def now(self) -> float:
        """Seconds on this rank's clock, which never runs backwards and is never compared with another rank's."""

    def processor_seconds(self) -> float:
        """What this thread has computed so far, on a clock that stands still while others have the processor."""
        return time.thread_time()

    def probe(self, peers: Iterable[int], at_once: bool = True) -> None:  # noqa: B027 (one that cannot need not say so)
        """Ask each peer for a sign of life, to see how long it takes. Never waits: the next `read_out`s will tell.

        With `at_once=False` it may take a while, or, when there was no message for long, until the next one; but it
        costs the caller nothing.
        """

    def read_out(self) -> Reading:
        """What was noticed of the network since the last call."""
        return Reading()

    def close(self) -> None:  # noqa: B027 (a link with nothing to close need not say so)
        """Leave in peace. Closing twice is fine."""

    def abort(self, reason: str) -> None:  # noqa: B027
        """Tell the other ranks that this one failed and why, where the wire can carry that; never raises."""

    def _send_together(self, messages: Sequence[tuple[torch.Tensor, int]]) -> list[Work]:
        return [self._send(tensor, dst) for tensor, dst in messages]

    @abstractmethod
    def _send(self, tensor: torch.Tensor, dst: int) -> Work: ...

    @abstractmethod
    def _post(self, tensor: torch.Tensor, src: int) -> Work: ...

    def _check(self, tensor: torch.Tensor, peer: int) -> None:
        if not 0 <= peer < self.world_size or peer == self.rank:
            raise ValueError(f"rank {self.rank} of {self.world_size} cannot exchange a message with rank {peer}.")
        if not tensor.is_contiguous():
            raise ValueError(
                f"a message must be contiguous, got shape {tuple(tensor.shape)}, stride {tensor.stride()}."
            )

    def _timed_out(self, peer: int, moment: Moment) -> LinkTimeout:
        return LinkTimeout(
            f"rank {self.rank} heard nothing from rank {peer} for {self.timeout:g} s {where(moment)}.",
            rank=self.rank,
            peer=peer,
        )


def check_timeout(timeout: float) -> None:
    """Refuse what is not a time to wait, before a link does anything else."""
    if not timeout > 0:  # which is also how one asks for a number that is not one
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}.")


def where(moment: Moment) -> str:
    """The words in which every error says when it happened."""
    return f"at step {moment.step} ({moment.collective or 'no collective'}, plan {moment.plan or 'none'})"


def check_message(
    link: Link, src: int, expected: Moment, tensor: torch.Tensor, moment: Moment, dtype: torch.dtype, nbytes: int
) -> None:
    """Refuse a message that is not the one this rank expects, before a byte of it is used."""
    facts = {
        "plan": (expected.plan, moment.plan),
        "step": (expected.step, moment.step),
        "collective": (expected.collective, moment.collective),
        "dtype": (tensor.dtype, dtype),
        "size in bytes": (tensor.nbytes, nbytes),
    }
    for field, (ours, theirs) in facts.items():
        if ours != theirs:
            raise PlanMismatch(
                f"rank {src} sent rank {link.rank} a message with {field} {theirs!r} where rank {link.rank} expects "
                f"{ours!r} {where(expected)}.",
                rank=link.rank,
                peer=src,
            )
