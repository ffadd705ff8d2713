"""Recursive halving and doubling: the ring's bytes at the tree's number of latencies, between ever nearer partners."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.collectives.base import Collective, Piece, Round, split


class HalvingAllReduce(Collective):
    """Halve the tensor with a partner until one piece is left, then double it back.

    2 log2 N alpha + 2 (N-1)/N M beta when N is a power of two. Otherwise the N - P ranks beyond the largest power of
    two P first give their tensor to a partner and get the sum back at the end: two more whole messages.
    Reference: Thakur, Rabenseifner & Gropp 2005.
    """

    name = "halving all-reduce"

    def rounds(self, rank: int, world_size: int, numel: int, root: int = 0) -> Iterator[Round]:
        power = 1 << (world_size.bit_length() - 1)
        if rank >= power:
            yield Round(sends=(Piece(rank - power, 0, numel),))
            yield Round(receives=(Piece(rank - power, 0, numel),))
            return
        has_guest = rank + power < world_size
        if has_guest:
            yield Round(receives=(Piece(rank + power, 0, numel),), add=True)
        yield from _halve_and_double(rank, power, numel)
        if has_guest:
            yield Round(sends=(Piece(rank + power, 0, numel),))


def _halve_and_double(rank: int, power: int, numel: int) -> Iterator[Round]:
    pieces = split(numel, power)
    lowest, highest = 0, power  # the pieces that are still this rank's business
    halvings = []
    distance = power // 2
    while distance:
        middle = lowest + distance
        upper = bool(rank & distance)
        kept, given = ((middle, highest), (lowest, middle)) if upper else ((lowest, middle), (middle, highest))
        mine, theirs = Piece(rank ^ distance, *_span(pieces, kept)), Piece(rank ^ distance, *_span(pieces, given))
        halvings.append(Round(sends=(theirs,), receives=(mine,), add=True))
        lowest, highest = kept
        distance //= 2
    yield from halvings
    for round in reversed(halvings):
        yield Round(sends=round.receives, receives=round.sends)


class DoublingAllGather(Collective):
    """The second half of halving: what a rank holds doubles in every round.

    log2 N alpha + (N-1) m beta for pieces of m bytes.

    With N a power of two partners swap (recursive doubling); otherwise each rank hands its run of pieces to the left
    (Bruck), ceil(log2 N) alpha. Reference: Thakur, Rabenseifner & Gropp 2005; Tyagi & Swany 2023,
    Allgather.
    """

    name = "doubling all-gather"

    def rounds(self, rank: int, world_size: int, numel: int, root: int = 0) -> Iterator[Round]:
        pieces = split(numel, world_size)
        if world_size & (world_size - 1) == 0:
            yield from _double(rank, world_size, pieces)
        else:
            yield from _bruck(rank, world_size, pieces)


def _double(rank: int, world_size: int, pieces: list[tuple[int, int]]) -> Iterator[Round]:
    distance = 1
    while distance < world_size:
        partner, first = rank ^ distance, rank // distance * distance
        theirs = partner // distance * distance
        yield Round(
            sends=(Piece(partner, *_span(pieces, (first, first + distance))),),
            receives=(Piece(partner, *_span(pieces, (theirs, theirs + distance))),),
        )
        distance *= 2


def _bruck(rank: int, world_size: int, pieces: list[tuple[int, int]]) -> Iterator[Round]:
    held = 1  # this rank holds pieces rank, rank + 1, ..., rank + held - 1, around the end
    while held < world_size:
        count = min(held, world_size - held)
        left, right = (rank - held) % world_size, (rank + held) % world_size
        yield Round(
            sends=tuple(Piece(left, *span) for span in _wrapped(pieces, rank, count)),
            receives=tuple(Piece(right, *span) for span in _wrapped(pieces, right, count)),
        )
        held += count


def _wrapped(pieces: list[tuple[int, int]], first: int, count: int) -> list[tuple[int, int]]:
    """The elements of `count` pieces from `first` on, in two runs where they go around the end."""
    end = first + count
    if end <= len(pieces):
        return [_span(pieces, (first, end))]
    return [_span(pieces, (first, len(pieces))), _span(pieces, (0, end - len(pieces)))]


def _span(pieces: list[tuple[int, int]], run: tuple[int, int]) -> tuple[int, int]:
    """The elements of a run of neighbouring pieces."""
    return pieces[run[0]][0], pieces[run[1] - 1][1]
