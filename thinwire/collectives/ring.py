"""The ring: everyone talks to its right-hand neighbour only. The fewest bytes, the most latencies."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.collectives.base import Collective, Piece, Round, split


class RingAllReduce(Collective):
    r"""Each piece travels the ring twice: once collecting the sum, once spreading it.

    2(N-1) alpha + 2 (N-1)/N M beta. Reference: Tyagi & Swany 2023, cost of Ring-AR; Patarasuk & Yuan 2009.
    """

    name = "ring all-reduce"

    def rounds(self, rank: int, world_size: int, numel: int, root: int = 0) -> Iterator[Round]:
        pieces = split(numel, world_size)
        for add in (True, False):
            for i in range(world_size - 1):
                # While adding, rank r starts with piece r and ends with the whole sum of piece r + 1.
                leaving = (rank - i + (not add)) % world_size
                yield _pass_on(rank, world_size, pieces[leaving], pieces[(leaving - 1) % world_size], add)


class RingAllGather(Collective):
    """Each rank's piece travels once around: (N-1) alpha + (N-1) m beta for pieces of m bytes."""

    name = "ring all-gather"

    def rounds(self, rank: int, world_size: int, numel: int, root: int = 0) -> Iterator[Round]:
        pieces = split(numel, world_size)
        for i in range(world_size - 1):
            leaving = (rank - i) % world_size
            yield _pass_on(rank, world_size, pieces[leaving], pieces[(leaving - 1) % world_size], add=False)


def _pass_on(rank: int, world_size: int, leaving: tuple[int, int], coming: tuple[int, int], add: bool) -> Round:
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    return Round(sends=(Piece(right, *leaving),), receives=(Piece(left, *coming),), add=add)
