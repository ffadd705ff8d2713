"""Ranks are threads in one process, on a virtual clock.

One rank runs at a time, and the next to run is always the one with the earliest clock, so a run is deterministic and a
second of network costs nothing. A wait that nothing can ever end is seen at once and raises `LinkTimeout`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from thinwire.link.base import Done, Link, Reading, Stretch, Work, check_message
from thinwire.link.wire import Arrival, Parcel, Turn, Wire
from thinwire.types import Moment, Network

T = TypeVar("T")

_MUCH = 1_000_000  # bytes


@dataclass(eq=False)
class _Message:
    """One send and the receive that takes it; either may come first."""

    data: torch.Tensor | None = None
    moment: Moment = Moment()
    done: float | None = None  # when its last byte was there
    awaited: bool = False  # its receiver is blocked on it


@dataclass
class _Channel:
    """From one rank to another, in order. At most one of the two queues holds anything."""

    sent: deque[_Message] = field(default_factory=deque)
    posted: deque[_Message] = field(default_factory=deque)

    def for_send(self) -> _Message:
        return self.posted.popleft() if self.posted else _appended(self.sent)

    def for_post(self) -> _Message:
        return self.sent.popleft() if self.sent else _appended(self.posted)


def _appended(queue: deque[_Message]) -> _Message:
    queue.append(_Message())
    return queue[-1]


class ThreadWorld:
    """N ranks and the wire between them.

    >>> def program(link):
    ...     piece = torch.tensor([float(link.rank)])
    ...     if link.rank == 0:
    ...         link.send(piece, 1).wait()
    ...     else:
    ...         link.post(piece, 0).wait()
    ...     return piece.item(), link.now()
    >>> ThreadWorld(2, Network(alpha=0.25, beta=0.0)).run(program)
    [(0.0, 0.0), (0.0, 0.25)]
    """

    def __init__(self, world_size: int, network: Network | None = None, timeout: float = 1e6) -> None:
        self.links = [ThreadLink(self, rank, world_size, timeout) for rank in range(world_size)]
        self.wire: Wire[_Message] = Wire(network or Network(alpha=0.0, beta=0.0), world_size)
        self._channels = [[_Channel() for _ in range(world_size)] for _ in range(world_size)]
        self._turns = [threading.Semaphore(0) for _ in range(world_size)]
        self._blocked: dict[int, _Message] = {}
        self._quiet = threading.Event()

    def run(self, program: Callable[[ThreadLink], T]) -> list[T]:
        """Run `program` on every rank; return what each returned, or raise what the first rank to fail raised."""
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def body(link: ThreadLink) -> None:
            self._turns[link.rank].acquire()
            try:
                results[link.rank] = program(link)
            except BaseException as error:
                errors.append(error)
            self._pass_turn()

        self._quiet.clear()
        threads = [threading.Thread(target=body, args=(link,), daemon=True) for link in self.links]
        for link, thread in zip(self.links, threads, strict=True):
            thread.start()
            self.wire.turn(link.rank, link.clock)
        self._pass_turn()
        self._quiet.wait()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[link.rank] for link in self.links]

    def channel(self, src: int, dst: int) -> _Channel:
        return self._channels[src][dst]

    def block(self, rank: int, message: _Message) -> None:
        """Give the turn away until the message is there, or until nothing can bring it any more."""
        message.awaited = True
        self._blocked[rank] = message
        self._pass_turn()
        self._turns[rank].acquire()
        del self._blocked[rank]

    def _pass_turn(self) -> None:
        while (event := self.wire.next()) is not None:
            time, what = event
            if isinstance(what, Turn):
                self._turns[what.rank].release()
                return
            self._deliver(what, time)
        if self._blocked:  # nothing is under way: this wait would never end, and must be told so
            self._turns[min(self._blocked)].release()
        else:
            self._quiet.set()

    def _deliver(self, arrival: Arrival[_Message], time: float) -> None:
        arrival.message.done = time
        if arrival.message.awaited:
            self.wire.turn(arrival.dst, max(time, self.links[arrival.dst].clock))


class ThreadLink(Link):
    """One of a `ThreadWorld`'s ranks."""

    def __init__(self, world: ThreadWorld, rank: int, world_size: int, timeout: float) -> None:
        super().__init__(rank, world_size, timeout)
        self.world = world
        self.clock = 0.0

    def now(self) -> float:
        return self.clock

    def processor_seconds(self) -> float:
        return self.clock

    def compute(self, seconds: float) -> None:
        """Let this rank's clock run on, as if it had been busy."""
        self.clock += seconds

    def read_out(self) -> Reading:
        """A virtual wire needs no guessing: it is what it is. One without latency or limits has nothing to notice."""
        network = self.world.wire.network
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        return Reading(
            tuple((peer, 2 * network.alpha) for peer in peers if network.alpha > 0),
            (Stretch(_MUCH, _MUCH * network.beta),) if network.beta > 0 and peers else (),
        )

    def _send_together(self, messages: Sequence[tuple[torch.Tensor, int]]) -> list[Work]:
        self.world.wire.send_together(self.rank, [self._parcel(tensor, dst) for tensor, dst in messages])
        return [Done() for _ in messages]

    def _send(self, tensor: torch.Tensor, dst: int) -> Work:
        return self._send_together([(tensor, dst)])[0]

    def _parcel(self, tensor: torch.Tensor, dst: int) -> Parcel[_Message]:
        message = self.world.channel(self.rank, dst).for_send()
        message.data, message.moment = tensor.detach().clone(), self.moment
        self.clock += self.world.wire.network.overhead
        return Parcel(dst, tensor.nbytes, self.clock, message)

    def _post(self, tensor: torch.Tensor, src: int) -> Work:
        return _Receive(self, tensor, src, self.moment, self.world.channel(src, self.rank).for_post())


class _Receive(Work):
    def __init__(self, link: ThreadLink, tensor: torch.Tensor, src: int, moment: Moment, message: _Message) -> None:
        self._link, self._tensor, self._src, self._moment, self._message = link, tensor, src, moment, message

    def wait(self) -> None:
        link, message = self._link, self._message
        if message.done is None:
            link.world.block(link.rank, message)
        if message.done is None or message.done > link.clock + link.timeout:
            link.clock += link.timeout
            raise link._timed_out(self._src, self._moment)
        link.clock = max(link.clock, message.done) + link.world.wire.network.overhead
        assert message.data is not None
        check_message(
            link, self._src, self._moment, self._tensor, message.moment, message.data.dtype, message.data.nbytes
        )
        self._tensor.copy_(message.data.view_as(self._tensor))
