"""What every way of exchanging gradients costs on a network, all ratios at once.

A price is the schedule played on the wire, exactly as `Exchange.seconds` plays it (collectives/base.py), but all the
schedules are first laid out flat in arrays and then played by one compiled loop. Laying out is done once for a set of
ratios; a network that has changed costs only the playing.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from thinwire.collectives import BROADCASTS, Leg, sent_bytes, sent_messages
from thinwire.exchange import Exchange, build, collectives_of, complete, values_for
from thinwire.types import Network, Plan, way_in_words

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

LED = ("star-topk", "var-topk")  # one rank's indices are broadcast, so there is a leader
COMMON = ("dense", "topk-allgather", "star-topk")


class Way(NamedTuple):
    """Which exchange, over which collective, with which broadcast of the indices and which type of the values.

    That is a plan without its ratio.
    """

    exchange: str
    collective: str
    broadcast: str = "tree"
    values: str = "float32"

    def __str__(self) -> str:
        """
        >>> print(Way("star-topk", "ring", "scatter"))
        star-topk over ring, scatter broadcast
        """
        return way_in_words(*self)


def way_of(plan: Plan) -> Way:
    return Way(plan.exchange, plan.collective, plan.broadcast, plan.values)


@functools.lru_cache
def ways(
    world_size: int, has_group: bool, exchanges: tuple[str, ...] = COMMON, values: str = "float32"
) -> tuple[Way, ...]:
    """The ways worth pricing, those that are identical at this world size only once.

    Args:
        has_group: torch's own all_reduce can run too.
        exchanges: by name; layerwise-topk and ms-topk cost what topk-allgather does but for rounding, and var-topk more
            than star-topk, so they are left out unless named.
        values: the type of the values where they are gathered.

    >>> [str(way) for way in ways(2, has_group=False)[:3]]
    ['dense over ring', 'dense over tree', 'topk-allgather over ring']
    """
    # Between two ranks the scatter broadcast is the tree's one message cut in two.
    broadcasts = tuple(BROADCASTS) if world_size > 2 else ("tree",)
    found = [
        Way(exchange, collective, broadcast, values_for(exchange, values))
        for exchange in exchanges
        for collective in collectives_of(exchange)
        if collective != "torch" or (has_group and exchange == "dense")
        for broadcast in (broadcasts if exchange in LED else ("tree",))
    ]
    first_of: dict[Any, Way] = {}
    for way in found:
        first_of.setdefault(_shape(way, world_size), way)
    return tuple(first_of.values())


def _shape(way: Way, world_size: int) -> Any:
    """What a way does, but for which elements it moves: equal for ways that cost the same on any network."""
    ratio, numel = 0.5, 1 << 16
    legs = _built(way, ratio, (numel,)).legs(numel, 4, ratio, world_size)
    moves = [
        (leg.collective.latencies, [(p.peer, _even(p.stop - p.start)) for p in side])
        for leg in legs
        for rank in range(world_size)
        for round in leg.rounds(rank, world_size)
        for side in (round.sends, round.receives)
    ]
    return way.exchange, repr(moves)


def _even(size: int) -> int:
    """Pieces that differ by an element are alike."""
    return round(size / 64)


def _built(way: Way, ratio: float, sizes: tuple[int, ...]) -> Exchange:
    return build(complete(way.exchange, ratio, way.collective, way.broadcast, way.values), sizes)


class _Case(NamedTuple):
    """What is exchanged, among how many: all that a schedule depends on besides the way and the ratio."""

    numel: int
    itemsize: int
    world_size: int
    sizes: tuple[int, ...]
    bucket_bytes: int | None = None

    def legs(self, way: Way, ratio: float, leaders: Iterable[int] = (0,)) -> list[list[Leg]]:
        """One sequence of legs for each leader."""
        exchange, numel, itemsize = _built(way, ratio, self.sizes), self.numel, self.itemsize
        if exchange.bucketwise and self.bucket_bytes is not None:
            numel, itemsize = self.bucket_bytes, 1  # entries need not all be of one size
        return [exchange.legs(numel, itemsize, ratio, self.world_size, leader) for leader in leaders]


class Prices:
    """Seconds of every way at every ratio, for one gradient and one number of ranks.

    Where a rank leads, the price is the mean over leaders: ranks lead in turn, and over a tree the leader's place makes
    up to a quarter of the time.

    Args:
        numel: entries of the gradient.
        itemsize: bytes of one.
        world_size: how many ranks.
        ways: what the table has rows for.
        sizes: the layers' numbers of entries; by default there is one layer.
        bucket_bytes: the whole gradient's where it goes in DDP's buckets, whose entries are as the parameters are: half
            precision takes half of what its errors take. None if nothing does.
    """

    def __init__(
        self,
        numel: int,
        itemsize: int,
        world_size: int,
        ways: Sequence[Way],
        sizes: tuple[int, ...] | None = None,
        bucket_bytes: int | None = None,
    ) -> None:
        self.ways = tuple(ways)
        self.numel, self.world_size = numel, world_size
        self._case = _Case(numel, itemsize, world_size, (numel,) if sizes is None else sizes, bucket_bytes)

    def to_json(self) -> dict[str, Any]:
        return {**self._case._asdict(), "ways": [list(way) for way in self.ways]}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Prices:
        choice, bucket_bytes = [Way(*way) for way in state["ways"]], state.get("bucket_bytes")  # earlier runs have none
        return cls(state["numel"], state["itemsize"], state["world_size"], choice, tuple(state["sizes"]), bucket_bytes)

    def of(self, ways: Sequence[Way]) -> Prices:
        """The same gradient's for other ways."""
        return Prices.from_json({**self.to_json(), "ways": ways})

    def seconds(self, way: Way, ratio: float, network: Network) -> float:
        """What `Exchange.seconds` gives, as the mean over leaders."""
        return _seconds(self._case, way, ratio, network)

    def table(self, network: Network, ratios: Sequence[float]) -> Array:
        """Seconds by way, in the order of `ways`, and ratio."""
        return _played(self._case, self.ways, tuple(ratios), network)

    def volume(self, way: Way, ratio: float) -> tuple[int, int]:
        """The messages and the bytes that all ranks together send."""
        (legs,) = self._case.legs(way, ratio)
        return sent_messages(self._case.world_size, legs), sent_bytes(self._case.world_size, legs)

    def messages(self, way: Way) -> int:
        """That the rank which has the most of them sends and receives."""
        return _messages(self._case, way)


def _played(case: _Case, ways: tuple[Way, ...], ratios: tuple[float, ...], network: Network) -> Array:
    layout, plays, cells = _laid_out(case, ways, ratios)
    seconds = layout.play(network)[plays]
    return (np.bincount(cells, seconds) / np.bincount(cells)).reshape(len(ways), len(ratios))


@functools.lru_cache(maxsize=64)  # a step asks twice for the same
def _seconds(case: _Case, way: Way, ratio: float, network: Network) -> float:
    return float(_played(case, (way,), (ratio,), network)[0, 0])


@functools.lru_cache(maxsize=1024)
def _messages(case: _Case, way: Way) -> int:
    (legs,) = case.legs(way, 1.0 if way.exchange == "dense" else 0.01)
    ranks = range(case.world_size)
    rounds = [[round for leg in legs for round in leg.rounds(rank, case.world_size)] for rank in ranks]
    return max(sum(len(round.sends) + len(round.receives) for round in of_rank) for of_rank in rounds)


@functools.lru_cache(maxsize=64)
def _laid_out(case: _Case, ways: tuple[Way, ...], ratios: tuple[float, ...]) -> tuple[_Layout, Array, Array]:
    """What has to be played; the plays, and of each the cell of the table whose mean it is part of."""
    layout, plays, cells = _Layout(case.world_size), [], []
    for cell, (way, ratio) in enumerate(itertools.product(ways, ratios)):
        for legs in case.legs(way, ratio, _leaders(way, case.world_size)):
            plays.append(layout.add(legs))
            cells.append(cell)
    return layout, np.array(plays), np.array(cells)


def _leaders(way: Way, world_size: int) -> Iterable[int]:
    """The leaders whose mean is the price.

    Ring and direct look alike from every rank, but for ties and for pieces that are larger by an entry, so that two
    leaders speak for all, within 1 %; over a tree and by halving every leader has a place of its own, and of more than
    16 an even choice must do, the smaller the more each costs to play.
    """
    if way.exchange not in LED:
        return (0,)
    alike = way.collective in ("ring", "direct", "torch")
    return {0, world_size // 2} if alike else range(0, world_size, -(-world_size // max(2, min(16, 256 // world_size))))


class _Layout:
    """Schedules laid out for the compiled player.

    What a rank does on a leg is a row of steps: sends, and receives to be waited for, in order (that is all that a
    round comes to). Steps of all legs and ranks lie one after the other in three arrays:
        peer     of a send, its receiver; of a receive, unused
        nbytes   of a send; 0 marks a receive
        message  of a receive, the step that sends what it waits for; of a send, how many leave together
    The steps of rank r on leg l begin at starts[l, r] and end at starts[l, r + 1].
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._known: dict[Leg, int] = {}
        self._steps: list[tuple[int, int, int]] = []
        self._starts: list[list[int]] = []
        self._latencies: list[int] = []
        self._plays: dict[tuple[int, ...], int] = {}

    def add(self, legs: list[Leg]) -> int:
        """A sequence of legs to be played; the same again is the same play."""
        numbers = tuple(self._number(leg) for leg in legs)
        return self._plays.setdefault(numbers, len(self._plays))

    def play(self, network: Network) -> Array:
        """The seconds of each sequence of legs."""
        return _compiled()(network.alpha, network.beta, network.overhead, *self._arrays)

    @functools.cached_property
    def _arrays(self) -> tuple[Array, ...]:
        longest = max(map(len, self._plays))
        plays = np.array([[*legs, *[-1] * (longest - len(legs))] for legs in self._plays])
        peer, nbytes, message = np.array(self._steps, dtype=np.int64).reshape(-1, 3).T
        latencies = np.array(self._latencies, dtype=np.float64)
        steps = peer.astype(np.int32), nbytes.astype(np.float64), message.astype(np.int32)
        return plays, np.array(self._starts), latencies, *steps

    def _number(self, leg: Leg) -> int:
        if leg not in self._known:
            self._known[leg] = len(self._known)
            self._lay_out(leg)
        return self._known[leg]

    def _lay_out(self, leg: Leg) -> None:
        under_way: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)  # sends by sender and receiver
        receives: list[tuple[int, int, int]] = []
        starts = [len(self._steps)]
        for rank in range(self._world_size):
            for round in leg.rounds(rank, self._world_size):
                sends = [p for p in round.sends if p.stop > p.start]
                for p in sends:
                    under_way[rank, p.peer].append(len(self._steps))
                    self._steps.append((p.peer, (p.stop - p.start) * leg.itemsize, len(sends)))
                for p in round.receives:
                    if p.stop > p.start:
                        receives.append((len(self._steps), p.peer, rank))
                        self._steps.append((0, 0, 0))
            starts.append(len(self._steps))
        for step, src, dst in receives:
            self._steps[step] = (0, 0, under_way[src, dst].popleft())
        self._starts.append(starts)
        self._latencies.append(leg.collective.latencies)


def _play_all(
    alpha: float,
    beta: float,
    overhead: float,
    plays: Array,
    starts: Array,
    latencies: Array,
    peer: Array,
    nbytes: Array,
    message: Array,
) -> Array:
    """The seconds of each play: the physics of link/wire.py, with the order of messages found without a heap.

    A rank's messages leave in order, so the next of all to arrive is the earliest among the ranks' oldest.
    """
    world_size = starts.shape[1] - 1
    most = 0
    for leg in range(starts.shape[0]):
        for rank in range(world_size):
            most = max(most, starts[leg, rank + 1] - starts[leg, rank])
    most *= plays.shape[1]
    sent = np.empty((world_size, most), np.int32)  # the steps of each rank's messages, in order
    first_byte = np.empty((world_size, most))
    arrived = np.empty(peer.shape[0])  # when a send's message was there whole; -1 before
    last_byte = np.empty(peer.shape[0])  # before which it cannot be
    clock, egress_free, ingress_free = np.empty(world_size), np.empty(world_size), np.empty(world_size)
    coming = np.empty(world_size)  # the first byte of each rank's oldest message under way
    oldest, newest = np.empty(world_size, np.int64), np.empty(world_size, np.int64)
    at, leg_of = np.empty(world_size, np.int64), np.empty(world_size, np.int64)
    seconds = np.empty(plays.shape[0])

    for play in range(plays.shape[0]):
        legs = plays[play]
        for leg in legs:
            if leg >= 0:
                for step in range(starts[leg, 0], starts[leg, world_size]):
                    arrived[step] = -1.0
        for rank in range(world_size):
            clock[rank] = egress_free[rank] = ingress_free[rank] = 0.0
            oldest[rank] = newest[rank] = leg_of[rank] = 0
            at[rank], coming[rank] = starts[legs[0], rank], np.inf
        runs = 0  # at first all ranks in turn, then whoever gets a message
        while True:
            if runs < world_size:
                rank = runs
                runs += 1
            else:
                src, time = -1, np.inf
                for other in range(world_size):
                    if coming[other] < time:
                        src, time = other, coming[other]
                if src < 0:
                    break
                step = sent[src, oldest[src]]
                oldest[src] += 1
                coming[src] = first_byte[src, oldest[src]] if oldest[src] < newest[src] else np.inf
                rank = peer[step]
                ingress_free[rank] = max(time, ingress_free[rank]) + nbytes[step] * beta
                arrived[step] = max(ingress_free[rank], last_byte[step])
            step, now, egress, last = at[rank], clock[rank], egress_free[rank], newest[rank]
            free, together = egress, 0  # when the egress was free for messages that leave together; how many still do
            while True:
                leg = legs[leg_of[rank]]
                if step == starts[leg, rank + 1]:
                    if leg_of[rank] + 1 == legs.shape[0] or legs[leg_of[rank] + 1] < 0:
                        break
                    leg_of[rank] += 1
                    step = starts[legs[leg_of[rank]], rank]
                elif nbytes[step] > 0:
                    now += overhead
                    if together == 0:
                        free, together = egress, message[step]
                    together -= 1
                    start, flight = max(now, free), latencies[leg] * alpha
                    end = start + message[step] * nbytes[step] * beta
                    egress = max(egress, end)
                    first_byte[rank, last] = start + flight
                    last_byte[step] = end + flight
                    sent[rank, last] = step
                    last += 1
                    step += 1
                elif arrived[message[step]] >= 0:
                    now = max(now, arrived[message[step]]) + overhead
                    step += 1
                else:
                    break
            if newest[rank] < last and oldest[rank] == newest[rank]:
                coming[rank] = first_byte[rank, oldest[rank]]
            at[rank], clock[rank], egress_free[rank], newest[rank] = step, now, egress, last
        seconds[play] = clock.max()
    return seconds


@functools.cache
def _compiled() -> Callable[..., Array]:
    """The player, compiled where numba is there and kept on disk where there is a place for it."""
    try:
        from numba import njit
    except ImportError:  # numba follows new Pythons with some delay; it then plays slowly
        return _play_all
    options: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy"}
    try:
        compiled: Callable[..., Array] = njit(cache=True, **options)(_play_all)
    except RuntimeError:
        compiled = njit(**options)(_play_all)
    return compiled
