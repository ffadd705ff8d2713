"""A thread link that loses, repeats, swaps, damages or replaces messages, and on which a wait ends in time.

The thread link itself says that nothing will come only when nothing at all is under way. Here a wait sets an alarm on
the virtual clock, so that ranks can give up on one neighbour and listen to another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from thinwire.link.base import Done, Link, Work
from thinwire.link.thread import ThreadLink, ThreadWorld
from thinwire.link.wire import Arrival, Turn, Wire
from thinwire.types import Network

T = TypeVar("T")
TIMEOUT = 0.01
KINDS = ("dropped", "repeated", "swapped")


class _Clock(Wire[Any]):
    """A wire that remembers what time it is, and gives no turn to a rank that has ended."""

    time = 0.0

    def __init__(self, network: Network, world_size: int) -> None:
        super().__init__(network, world_size)
        self.ended: set[int] = set()

    def next(self) -> tuple[float, Turn | Arrival[Any]] | None:
        while (event := super().next()) is not None:
            self.time = max(self.time, event[0])
            if not (isinstance(event[1], Turn) and event[1].rank in self.ended):
                return event
        return None


class FaultyWorld:
    """Ranks whose messages suffer `kinds` of faults, a share of `rate` in all."""

    def __init__(
        self, world_size: int, rate: float, seed: int, kinds: tuple[str, ...] = KINDS, calm: bool = False
    ) -> None:
        """With `calm` faults begin when links are told to misbehave."""
        self.world = ThreadWorld(world_size)
        self.clock = _Clock(Network(alpha=1e-3, beta=0.0), world_size)
        self.world.wire = self.clock
        self.faults: Counter[str] = Counter()
        self.links = [FaultyLink(self, link, rate, seed, kinds) for link in self.world.links]
        if calm:
            for faulty in self.links:
                faulty.calm_down()

    def run(self, program: Callable[[Any], T]) -> list[T]:
        def body(link: ThreadLink) -> T:
            try:
                return program(self.links[link.rank])
            finally:
                self.clock.ended.add(link.rank)

        return self.world.run(body)


class FaultyLink(Link):
    lossy = True

    def __init__(self, world: FaultyWorld, inner: ThreadLink, rate: float, seed: int, kinds: tuple[str, ...]) -> None:
        super().__init__(inner.rank, inner.world_size, TIMEOUT)
        self.world, self.inner = world, inner
        self._rate, self._kinds = rate, kinds
        self._usual_rate = rate
        self._random = np.random.default_rng([seed, inner.rank])
        self._kept: dict[int, torch.Tensor] = {}  # to overtake

    def now(self) -> float:
        return self.inner.now()

    def calm_down(self) -> None:
        """No more faults from here on."""
        self._rate = 0.0

    def misbehave(self) -> None:
        self._rate = self._usual_rate

    def _send(self, tensor: torch.Tensor, dst: int) -> Work:
        self.inner.moment = self.moment
        fault = str(self._random.choice(self._kinds)) if self._random.random() < self._rate else "none"
        self.world.faults[fault] += 1
        if fault == "swapped" and dst not in self._kept:
            self._kept[dst] = tensor.clone()
            return Done()
        if fault != "dropped":
            for _ in range(2 if fault == "repeated" else 1):
                self.inner._send(self._changed(tensor, fault), dst)
        if dst in self._kept:
            self.inner._send(self._kept.pop(dst), dst)
        return Done()

    def _changed(self, tensor: torch.Tensor, fault: str) -> torch.Tensor:
        if fault not in ("damaged", "foreign"):
            return tensor
        changed = tensor.clone()
        changed[-3 if fault == "damaged" else 2] ^= 1  # in the payload, or in what tells runs apart
        return changed

    def _post(self, tensor: torch.Tensor, src: int) -> Work:
        self.inner.moment = self.moment
        return _Timed(self, self.inner._post(tensor, src), src)


class _Timed(Work):
    def __init__(self, link: FaultyLink, receive: Any, src: int) -> None:
        self._link, self._receive, self._src = link, receive, src

    def wait(self) -> None:
        inner, clock, message = self._link.inner, self._link.world.clock, self._receive._message
        deadline = inner.clock + self._link.timeout
        if message.done is None:
            clock.turn(inner.rank, deadline)
        while message.done is None and clock.time < deadline:  # an old alarm may wake us early
            inner.world.block(inner.rank, message)
            message.awaited = False
        if message.done is None:
            inner.clock = max(inner.clock, deadline)
            raise self._link._timed_out(self._src, self._link.moment)
        self._receive.wait()
