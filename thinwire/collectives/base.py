"""A collective is a schedule: for every rank, rounds of messages. Running it and pricing it read the same schedule.

That is why a price here is exact for any world size and any number of elements: it is the schedule played on the
physical model of the wire (link/wire.py) without data. The closed forms in each file's docstrings are what it comes to
when the pieces are of equal size; a test holds schedule, closed form and virtual clock together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from thinwire.link.base import Link
from thinwire.link.wire import Parcel, Turn, Wire
from thinwire.types import Network


class Piece(NamedTuple):
    """Elements `start` to `stop` of the tensor, to or from `peer`. An empty piece is never sent."""

    peer: int
    start: int
    stop: int


class Round(NamedTuple):
    """The sends of a round start at once and share the way out; the round ends when all its receives are in.

    Receives are waited for in the order listed. Received pieces are added to the tensor in that order (`add`), or
    replace what is there.
    """

    sends: tuple[Piece, ...] = ()
    receives: tuple[Piece, ...] = ()
    add: bool = False


class Collective(ABC):
    """One way of moving a flat tensor between all ranks.

    Attributes:
        name: as errors and frames spell it.
        latencies: how many times alpha a message takes to its first byte.
    """

    name: str
    latencies = 1

    @abstractmethod
    def rounds(self, rank: int, world_size: int, numel: int, root: int = 0) -> Iterator[Round]:
        """What `rank` does, in order. `root` is where a broadcast starts; the others ignore it."""

    def run(self, link: Link, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Run on a flat tensor, in place; return it. Every rank ends with the same bits."""
        link.moment = link.moment._replace(collective=self.name)
        for round in self.rounds(link.rank, link.world_size, tensor.numel(), root):
            _run_round(link, tensor, round)
        return tensor

    def seconds(self, network: Network, numel: int, itemsize: int, world_size: int, root: int = 0) -> float:
        """How long `run` takes from a common start to the last rank's end."""
        return seconds(network, world_size, [Leg(self, numel, itemsize, root)])

    def sent_bytes(self, numel: int, itemsize: int, world_size: int, root: int = 0) -> int:
        """What all ranks together send."""
        return sent_bytes(world_size, [Leg(self, numel, itemsize, root)])


class Leg(NamedTuple):
    """One collective on the way of an exchange, with the size of what it moves."""

    collective: Collective
    numel: int
    itemsize: int
    root: int = 0

    def rounds(self, rank: int, world_size: int) -> Iterator[Round]:
        return self.collective.rounds(rank, world_size, self.numel, self.root)


def _run_round(link: Link, tensor: torch.Tensor, round: Round) -> None:
    pieces = [p for p in round.receives if p.stop > p.start]
    targets = [tensor.new_empty(p.stop - p.start) if round.add else tensor[p.start : p.stop] for p in pieces]
    receives = [link.post(target, p.peer) for target, p in zip(targets, pieces, strict=True)]
    if round.sends:
        link.drain()
    sends = link.send_together([(tensor[p.start : p.stop], p.peer) for p in round.sends if p.stop > p.start])
    for receive, target, p in zip(receives, targets, pieces, strict=True):
        receive.wait()
        if round.add:
            tensor[p.start : p.stop] += target
    for send in sends:
        send.wait()


def sent_bytes(world_size: int, legs: Iterable[Leg]) -> int:
    """What all ranks together send on these legs."""
    return sum(
        (p.stop - p.start) * leg.itemsize
        for leg in legs
        for rank in range(world_size)
        for round in leg.rounds(rank, world_size)
        for p in round.sends
    )


def sent_messages(world_size: int, legs: Iterable[Leg]) -> int:
    """How many messages that takes."""
    return sum(
        p.stop > p.start
        for leg in legs
        for rank in range(world_size)
        for round in leg.rounds(rank, world_size)
        for p in round.sends
    )


def seconds(network: Network, world_size: int, legs: Iterable[Leg]) -> float:
    """How long the legs take, each rank starting the next as soon as it is through with the last."""
    legs = list(legs)
    wire: Wire[int] = Wire(network, world_size)
    players = [_Player(rank, world_size, legs) for rank in range(world_size)]
    for player in players:
        wire.turn(player.rank, 0.0)
    while (event := wire.next()) is not None:
        time, what = event
        if isinstance(what, Turn):
            players[what.rank].go_on(time, wire)
        else:
            players[what.dst].hear(what.message, time, wire)
    return max(player.clock for player in players)


class _Player:
    """One rank of the price: it knows its rounds and what it is still waiting for."""

    def __init__(self, rank: int, world_size: int, legs: list[Leg]) -> None:
        self.rank = rank
        self.clock = 0.0
        self._rounds = ((leg, round) for leg in legs for round in leg.rounds(rank, world_size))
        self._heard: defaultdict[int, deque[float]] = defaultdict(deque)  # by sender: when its messages were in
        self._awaited: deque[int] = deque()  # the senders that this round still needs, in order

    def go_on(self, time: float, wire: Wire[int]) -> None:
        self.clock = time
        for leg, round in self._rounds:
            parcels = []
            for p in round.sends:
                if p.stop > p.start:
                    self.clock += wire.network.overhead
                    parcels.append(Parcel(p.peer, (p.stop - p.start) * leg.itemsize, self.clock, self.rank))
            wire.send_together(self.rank, parcels, leg.collective.latencies)
            self._awaited.extend(p.peer for p in round.receives if p.stop > p.start)
            if not self._round_over(wire.network.overhead):
                return

    def hear(self, src: int, time: float, wire: Wire[int]) -> None:
        self._heard[src].append(time)
        if self._awaited and self._round_over(wire.network.overhead):
            wire.turn(self.rank, self.clock)

    def _round_over(self, overhead: float) -> bool:
        """Take what is there, in order; the clock moves to the last of it."""
        while self._awaited and self._heard[self._awaited[0]]:
            self.clock = max(self.clock, self._heard[self._awaited.popleft()].popleft()) + overhead
        return not self._awaited


def split(numel: int, parts: int) -> list[tuple[int, int]]:
    """Cut `numel` elements into `parts` runs whose sizes differ by at most one, the larger ones first.

    >>> split(5, 3)
    [(0, 2), (2, 4), (4, 5)]
    """
    small, larger = divmod(numel, parts)
    starts = [i * small + min(i, larger) for i in range(parts + 1)]
    return list(zip(starts, starts[1:], strict=False))
