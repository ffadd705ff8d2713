"""The loops of `bits` in numpy, for a Python that numba does not know yet: the same codes, some thirty times slower.

Sums of many entries (mean magnitude, 2-norm) may differ in their last bits: only the sender works them out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

GROUP = 64  # entries whose bits make up whole words
LANES = 8  # of a fingerprint, which go on at once
MULTIPLIER = 0xD256D193
WEYL = 0x9E3779B9
PRIME = 0x9E3779B97F4A7C15
_LOW = 0xFFFFFFFF
_MASK = (1 << 64) - 1
_AT_ONCE = 1 << 12  # groups


def philox(low: Any, high: Any, key: Any) -> tuple[Any, Any]:
    """Philox-2x32-7: two random words from a counter of two words and a key."""
    low, high, key = np.uint64(low), np.uint64(high), int(key)
    for _ in range(7):
        product = np.uint64(MULTIPLIER) * low
        low, high = (product >> np.uint64(32)) ^ np.uint64(key) ^ high, product & np.uint64(_LOW)
        key = (key + WEYL) & _LOW
    return np.uint32(low), np.uint32(high)


def measure(x: Array, words: Array, block: int, norm: int, scale: float, reach: float, units: Array) -> bool:
    """units = scale * norm of each block: 0 the largest magnitude, 1 the mean magnitude, 2 the 2-norm."""
    starts = np.arange(0, len(x), block)
    with np.errstate(over="ignore", invalid="ignore"):
        if norm == 0:
            size = np.maximum.reduceat(np.abs(x), starts).astype(np.float64)
        elif norm == 1:
            size = np.add.reduceat(np.abs(x), starts, dtype=np.float64) / np.diff([*starts, len(x)])
        else:
            size = np.sqrt(np.add.reduceat(np.square(x, dtype=np.float64), starts))
        units[:] = size * scale
        return bool(np.isfinite(units * np.float32(reach)).all())


def quantize(
    x: Array,
    units: Array,
    bits: int,
    centre: float,
    top: int,
    block: int,
    stream: Any,
    key: Any,
    words: Array,
    random: Array,
    numbers: Array,
) -> None:
    """Random rounding to the levels (q - centre) * unit of each block, q = 0 ... top."""
    inverse = np.divide(1.0, units, out=np.zeros(len(units)), where=units > 0, dtype=np.float64)
    for first, start, stop in _chunks(len(x)):
        here = x[start:stop]
        each = inverse[np.arange(start, stop) // block]
        drawn = _drawn(first, -(-(stop - start) // GROUP), stream, key)[: stop - start]
        with np.errstate(over="ignore", invalid="ignore"):
            if bits > 8:
                t = here.astype(np.float64) * each + centre + drawn * 2.0**-32
            else:
                exact = x.dtype.type
                fraction = (drawn >> np.uint32(8)).astype(np.int32).astype(x.dtype) * exact(2.0**-24)
                t = here * each.astype(x.dtype) + exact(centre) + fraction
            _pack(np.clip(t.astype(np.int32), 0, top), bits, first, words)


def signs(x: Array, words: Array, numbers: Array) -> None:
    """One bit for every entry: whether it is positive or zero."""
    for first, start, stop in _chunks(len(x)):
        _pack((x[start:stop] >= 0).astype(np.int32), 1, first, words)


def dequantize(
    units: Array, words: Array, bits: int, centre: float, top: int, block: int, out: Array, numbers: Array
) -> bool:
    """out = (q - centre) * unit; return whether the code is one that can have been written."""
    with np.errstate(over="ignore", invalid="ignore"):
        fine = bool((np.isfinite(units * np.float32(centre + 1)) & (units >= 0)).all())
        for first, start, stop in _chunks(len(out)):
            levels = _unpack(words, bits, first, stop - start)
            each = units[np.arange(start, stop) // block].astype(out.dtype)
            out[start:stop] = (levels.astype(out.dtype) - out.dtype.type(centre)) * each
            fine &= int(levels.max(initial=0)) <= top
    return fine


def sample(x: Array, stream: Any, key: Any, blown_up: bool, values: Array) -> None:
    """One entry out of each of k runs of nearly equal length, times the length of its run if they are `blown_up`."""
    places, lengths = _places(len(x), len(values), stream, key)
    values[:] = x[places]
    if blown_up:
        with np.errstate(over="ignore"):
            values *= lengths.astype(x.dtype)


def unsample(values: Array, stream: Any, key: Any, out: Array) -> None:
    """The drawn entries at their places, zeros elsewhere."""
    out[:] = 0
    out[_places(len(out), len(values), stream, key)[0]] = values


def fingerprint(words: Array, seed: Any, lanes: Array) -> int:
    """64 bits that change when any of the words or the seed does: not against an adversary."""
    prime, shift = np.uint64(PRIME), np.uint64(29)
    lanes[:] = np.arange(LANES, dtype=np.uint64) * prime + np.uint64(seed)
    whole = len(words) // LANES * LANES
    for row in words[:whole].reshape(-1, LANES):
        lanes ^= row
        lanes *= prime
        lanes ^= lanes >> shift
    for word in words[whole:].tolist():
        mixed = (int(lanes[0]) ^ word) * PRIME & _MASK
        lanes[0] = mixed ^ (mixed >> 29)
    total = len(words)
    for lane in lanes.tolist():
        total = (total ^ lane) * PRIME & _MASK
        total ^= total >> 32
    return total


def _chunks(numel: int) -> Iterator[tuple[int, int, int]]:
    """The number of a chunk's first group, and which entries it has."""
    for first in range(0, -(-numel // GROUP), _AT_ONCE):
        yield first, first * GROUP, min((first + _AT_ONCE) * GROUP, numel)


def _drawn(first: int, groups: int, stream: Any, key: Any) -> Array:
    """The random words of these groups, 64 for each."""
    half = GROUP // 2
    counters = np.arange(first * half, (first + groups) * half, dtype=np.uint64) & np.uint64(_LOW)
    low, high = philox(counters, stream, key)
    return np.concatenate([low.reshape(-1, half), high.reshape(-1, half)], axis=1).reshape(-1)


def _pack(numbers: Array, bits: int, first: int, words: Array) -> None:
    groups = -(-len(numbers) // GROUP)
    padded = np.zeros(groups * GROUP, np.int32)
    padded[: len(numbers)] = numbers
    planes = (padded.reshape(groups, 1, GROUP) >> np.arange(bits)[None, :, None]) & 1
    packed = np.packbits(planes.astype(np.uint8), axis=2, bitorder="little")
    words[first * bits : (first + groups) * bits] = packed.reshape(-1).view(np.uint64)


def _unpack(words: Array, bits: int, first: int, count: int) -> Array:
    groups = -(-count // GROUP)
    packed = words[first * bits : (first + groups) * bits].view(np.uint8).reshape(groups, bits, GROUP // 8)
    planes = np.unpackbits(packed, axis=2, bitorder="little").astype(np.int32)
    numbers: Array = (planes << np.arange(bits)[None, :, None]).sum(1).reshape(-1)[:count]
    return numbers


def _places(numel: int, k: int, stream: Any, key: Any) -> tuple[Array, Array]:
    """Which entry of each run is drawn, and how long the run is."""
    ends = np.arange(k + 1) * numel // k
    lengths = np.diff(ends)
    pairs = philox(np.arange(-(-k // 2), dtype=np.uint64), stream, key)
    drawn = np.stack(pairs, axis=1).reshape(-1)[:k].astype(np.uint64)
    picks = (drawn * lengths.astype(np.uint64)) >> np.uint64(32)
    return ends[:-1] + picks.astype(np.int64), lengths
