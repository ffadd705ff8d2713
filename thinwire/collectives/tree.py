"""The binomial tree: few latencies, but whole tensors on every edge."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.collectives.base import Collective, Piece, Round


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
