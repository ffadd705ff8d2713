"""Direct: everyone sends to everyone at once. The fewest latencies, few bytes, but N (N-1) flows that may collide."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.collectives.base import Collective, Piece, Round, split


class DirectAllReduce(Collective):
    """Every rank adds up one piece and hands the sum to all: 2 alpha + 2 (N-1)/N M beta.

    The owner adds the others' pieces in the order of their distance, whatever order they come in.
    """

    name = "direct all-reduce"

    def rounds(self, rank: int, world_size: int, numel: int, root: int = 0) -> Iterator[Round]:
        pieces = split(numel, world_size)
        own = pieces[rank]
        yield Round(
            sends=tuple(Piece(peer, *pieces[peer]) for peer in _after(rank, world_size)),
            receives=tuple(Piece(peer, *own) for peer in _before(rank, world_size)),
            add=True,
        )
        yield _to_all(rank, world_size, pieces)


class DirectAllGather(Collective):
    """Every rank sends its piece to all the others: alpha + (N-1) m beta for pieces of m bytes."""

    name = "direct all-gather"

    def rounds(self, rank: int, world_size: int, numel: int, root: int = 0) -> Iterator[Round]:
        yield _to_all(rank, world_size, split(numel, world_size))


class ScatterBroadcast(Collective):
    """The root sends every rank a piece, and every rank sends its piece to all: 2 alpha + 2 (N-1)/N M beta.

    The scatter + all-gather broadcast of van de Geijn, with both halves direct.
    """

    name = "scatter broadcast"

    def rounds(self, rank: int, world_size: int, numel: int, root: int = 0) -> Iterator[Round]:
        pieces = split(numel, world_size)
        if rank == root:
            yield Round(sends=tuple(Piece(peer, *pieces[peer]) for peer in _after(root, world_size)))
            yield Round(sends=tuple(Piece(peer, *pieces[root]) for peer in _after(root, world_size)))
            return
        yield Round(receives=(Piece(root, *pieces[rank]),))
        others = [peer for peer in _after(rank, world_size) if peer != root]
        yield Round(
            sends=tuple(Piece(peer, *pieces[rank]) for peer in others),
            receives=tuple(Piece(peer, *pieces[peer]) for peer in _before(rank, world_size)),
        )


def _to_all(rank: int, world_size: int, pieces: list[tuple[int, int]]) -> Round:
    return Round(
        sends=tuple(Piece(peer, *pieces[rank]) for peer in _after(rank, world_size)),
        receives=tuple(Piece(peer, *pieces[peer]) for peer in _before(rank, world_size)),
    )


def _after(rank: int, world_size: int) -> list[int]:
    """The other ranks, nearest on the right first: in each slot of time every ingress then has one sender."""
    return [(rank + i) % world_size for i in range(1, world_size)]


def _before(rank: int, world_size: int) -> list[int]:
    return [(rank - i) % world_size for i in range(1, world_size)]
