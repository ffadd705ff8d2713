"""What all pairs of ranks measured, by direction, and words for some of the ways between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from thinwire.jobs.doctor.pair import Seen

Pair = tuple[int, int]
Matrix = list[list[float | None]]


class Paths:
    """What all pairs of some ranks measured; directions are (from, to).

    Args:
        ranks: in the order of the matrices' rows.
        seen: by rank and peer.
    """

    def __init__(self, ranks: Sequence[int], seen: Mapping[Pair, Seen]) -> None:
        self.ranks = tuple(ranks)
        self.pairs = [(i, j) for i in ranks for j in ranks if i < j]
        self.directions = [(i, j) for i in ranks for j in ranks if i != j]
        self._seen = seen
        self.rate = self._known(lambda i, j: self._of(j, i).rate)
        self.moved = self._known(lambda i, j: self._of(j, i).moved)
        self.lost = self._known(lambda i, j: self._of(j, i).lost)
        self.packet = self._known(lambda i, j: self._of(i, j).packet)
        self.known_packet = self._known(lambda i, j: self._of(i, j).known)
        self.round_trip = {p: s for p in self.pairs if (s := self._of(*p).round_trip) is not None}
        self.ahead = {p: s for p in self.pairs if (s := self._of(*p).ahead) is not None}

    def latency(self, i: int, j: int) -> float | None:
        """Half the round trip."""
        trip = self.round_trip.get((min(i, j), max(i, j)))
        return None if trip is None else trip / 2

    def failures(self) -> dict[Pair, str]:
        """Why pairs came to no end, in the words of whoever has any."""
        told = {(i, j): self._of(i, j).failure or self._of(j, i).failure for i, j in self.pairs}
        return {pair: text for pair, text in told.items() if text}

    def matrix(self, value: Callable[[int, int], float | None], scale: float) -> Matrix:
        """A row for each rank that sends, None where nothing is known."""

        def cell(i: int, j: int) -> float | None:
            found = None if i == j else value(i, j)
            return None if found is None else round(found * scale, 4)

        return [[cell(i, j) for j in self.ranks] for i in self.ranks]

    def _known(self, value: Callable[[int, int], float | None]) -> dict[Pair, float]:
        return {pair: found for pair in self.directions if (found := value(*pair)) is not None}

    def _of(self, rank: int, peer: int) -> Seen:
        return self._seen.get((rank, peer), Seen(peer=peer))


def way(src: int, dst: int) -> str:
    return f"rank {src} -> rank {dst}"


def ways(pairs: Iterable[Pair]) -> str:
    return ", ".join(way(*pair) for pair in sorted(pairs))


def where(pairs: Iterable[Pair], paths: Paths) -> str:
    """Some ways in as few words as possible.

    >>> paths = Paths([0, 1, 2], {})
    >>> where([(0, 1), (1, 0), (2, 0), (0, 2)], paths), where([(1, 2)], paths), where(paths.directions, paths)
    ('every way to and from rank 0', 'the way rank 1 -> rank 2', 'every way')
    """
    some = set(pairs)
    if some == set(paths.directions):
        return "every way"
    for rank in paths.ranks:
        if some == {pair for pair in paths.directions if rank in pair}:
            return f"every way to and from rank {rank}"
    return f"the way {ways(some)}" if len(some) == 1 else f"each of the ways {ways(some)}"
