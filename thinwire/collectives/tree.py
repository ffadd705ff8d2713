"""The binomial tree: few latencies, but whole tensors on every edge."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.collectives.base import Collective, Piece, Round, split


class TreeBroadcast(Collective):
    r"""The root's subtree of 2^i ranks doubles in every round.

    ceil(log2 N) (alpha + M beta) when N is a power of two. Reference: Tyagi & Swany 2023, cost of Broadcast.

    For other N it is no more: a rank sends to the larger subtree first.
    """

    name = "tree broadcast"

    def rounds(self, rank: int, world_size: int, numel: int, root: int = 0) -> Iterator[Round]:
        place = (rank - root) % world_size  # ranks are numbered from the root
        span = 1 << (world_size - 1).bit_length()
        while span > 1:
            half = span // 2
            if place % span == 0 and place + half < world_size:
                yield Round(sends=(Piece((rank + half) % world_size, 0, numel),))
            elif place % span == half:
                yield Round(receives=(Piece((rank - half) % world_size, 0, numel),))
            span = half


class TreeReduce(Collective):
    """The broadcast backwards: the root ends with the sum, the others with parts of it."""

    name = "tree reduce"

    def rounds(self, rank: int, world_size: int, numel: int, root: int = 0) -> Iterator[Round]:
        for round in reversed(list(TreeBroadcast().rounds(rank, world_size, numel, root))):
            yield Round(sends=round.receives, receives=round.sends, add=True)


class TreeAllReduce(Collective):
    """Reduce to rank 0, then broadcast: 2 log2 N (alpha + M beta) when N is a power of two.

    Reference: Tyagi & Swany 2023, cost of Tree-AR.
    """

    name = "tree all-reduce"

    def rounds(self, rank: int, world_size: int, numel: int, root: int = 0) -> Iterator[Round]:
        yield from TreeReduce().rounds(rank, world_size, numel)
        yield from TreeBroadcast().rounds(rank, world_size, numel)


class TreeAllGather(Collective):
    """Every subtree's pieces go up to rank 0 in one message, and all of them come down: few latencies, many bytes.

    2 log2 N alpha + (N-1 + N log2 N) m beta for pieces of m bytes, when N is a power of two.
    """

    name = "tree all-gather"

    def rounds(self, rank: int, world_size: int, numel: int, root: int = 0) -> Iterator[Round]:
        pieces = split(numel, world_size)
        held = 1  # this rank holds the pieces rank, ..., rank + held - 1
        while held < world_size:
            if rank % (2 * held):
                yield Round(sends=(Piece(rank - held, *_run(pieces, rank, held)),))
                break
            if rank + held < world_size:
                yield Round(receives=(Piece(rank + held, *_run(pieces, rank + held, held)),))
            held *= 2
        yield from TreeBroadcast().rounds(rank, world_size, numel)


def _run(pieces: list[tuple[int, int]], first: int, count: int) -> tuple[int, int]:
    """The elements of up to `count` neighbouring pieces."""
    return pieces[first][0], pieces[min(first + count, len(pieces)) - 1][1]
