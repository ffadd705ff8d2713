"""Compiled loops for numbers of few bits: random rounding, packing, and the way back.

Sixty-four entries are the unit. Their b-bit numbers become b words of 64 bits, word k holding bit k of each ("bit
planes"): for any b that is one vector comparison per word, where packing numbers side by side needs shifts that differ
for every b.

Randomness is Philox-2x32 with 7 rounds (Salmon et al. 2011): a pure function of a key and a counter, so that a step's
rounding can be drawn again in any order, on any machine, after any restart.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from thinwire.compress.kernels import _compiled, _compiled_local
from thinwire.compress.plain_bits import GROUP as GROUP
from thinwire.compress.plain_bits import LANES as LANES
from thinwire.compress.plain_bits import MULTIPLIER, PRIME, WEYL

_U = np.uint64
_U32 = np.uint32
_MULTIPLIER = np.uint64(MULTIPLIER)
_WEYL = np.uint32(WEYL)
_LOW = np.uint64(0xFFFFFFFF)
_PRIME = np.uint64(PRIME)


@intrinsic
def _plane(typing_context: Any, numbers: Any, bit: Any) -> Any:
    """Bit j is bit number `bit` of numbers[j], for j < 64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        element = context.get_value_type(signature.args[0].dtype)
        vector = ir.VectorType(element, GROUP)
        entries = builder.load(builder.bitcast(data, vector.as_pointer()))
        entries.align = signature.args[0].dtype.bitwidth // 8
        shift = _splat(builder, builder.trunc(args[1], element), vector)
        low = builder.trunc(builder.lshr(entries, shift), ir.VectorType(ir.IntType(1), GROUP))
        return builder.bitcast(low, ir.IntType(GROUP))

    return types.uint64(numbers, types.uint64), generate


@intrinsic
def _set_plane(typing_context: Any, numbers: Any, word: Any, bit: Any) -> Any:
    """The inverse: numbers[j] |= (bit j of word) << bit."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        element = context.get_value_type(signature.args[0].dtype)
        vector = ir.VectorType(element, GROUP)
        place = builder.bitcast(data, vector.as_pointer())
        align = signature.args[0].dtype.bitwidth // 8
        entries = builder.load(place)
        entries.align = align
        ones = builder.bitcast(args[1], ir.VectorType(ir.IntType(1), GROUP))
        shift = _splat(builder, builder.trunc(args[2], element), vector)
        spread = builder.shl(builder.zext(ones, vector), shift)
        stored = builder.store(builder.or_(entries, spread), place)
        stored.align = align
        return context.get_dummy_value()

    return types.void(numbers, types.uint64, types.uint64), generate


def _splat(builder: Any, value: Any, vector: Any) -> Any:
    nothing = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None))


@njit(inline="always")
def _philox(low, high, key):
    """Philox-2x32-7: two random words from a counter of two words and a key."""
    for _ in range(7):
        product = _MULTIPLIER * _U(low)
        low, high = _U32(product >> _U(32)) ^ key ^ high, _U32(product & _LOW)
        key = _U32(key + _WEYL)
    return low, high


@_compiled
def philox(low, high, key):
    """As above, for tests against the authors' known answers."""
    return _philox(_U32(low), _U32(high), _U32(key))


@_compiled
def _largest(words, start, stop):
    """The largest magnitude, as its bits: without the sign they are ordered as magnitudes are, and NaN is on top."""
    magnitude = words.dtype.type((_U(1) << _U(words.itemsize * 8 - 1)) - _U(1))
    top = words.dtype.type(0)
    for i in range(start, stop):
        top = max(top, words[i] & magnitude)
    return top


@_compiled_local
def _square_sum(x, start, stop):
    total = 0.0
    for i in range(start, stop):
        total += np.float64(x[i]) * np.float64(x[i])
    return total


@_compiled_local
def _magnitude_sum(x, start, stop):
    total = 0.0
    for i in range(start, stop):
        total += np.float64(abs(x[i]))
    return total


@_compiled
def measure(x, words, block, norm, scale, reach, units):
    """units = scale * norm of each block: 0 the largest magnitude, 1 the mean magnitude, 2 the 2-norm.

    Return whether all of them are finite, and so `reach` times them. `words` are the bits of x.
    """
    finite = True
    one = np.empty(1, words.dtype)
    for b in range(units.shape[0]):
        start, stop = _U(b * block), _U(min((b + 1) * block, x.shape[0]))
        if norm == 0:
            one[0] = _largest(words, start, stop)
            size = np.float64(one.view(x.dtype)[0])
        elif norm == 1:
            size = _magnitude_sum(x, start, stop) / (stop - start)
        else:
            size = np.sqrt(_square_sum(x, start, stop))
        units[b] = np.float32(size * scale)
        finite &= np.isfinite(units[b] * np.float32(reach))
    return finite


@_compiled
def _draw(counter, stream, key, random):
    """Fill 64 random words; groups are numbered by `counter`."""
    for j in range(_U(GROUP // 2)):
        first, second = _philox(_U32(counter * _U(GROUP // 2) + j), stream, key)
        random[j] = first
        random[j + _U(GROUP // 2)] = second


@_compiled
def _round(x, base, size, inverse, centre, top, random, numbers):
    """numbers = floor(x / unit + centre + r) with r uniform in [0, 1): the nearer of two levels the more likely.

    Single precision leaves 16 bits or more to the fraction when there are 8 bits of levels.
    """
    exact = x.dtype.type
    scale, middle, tiny = exact(inverse), exact(centre), exact(2.0**-24)
    for j in range(size):
        t = x[base + j] * scale + middle + exact(np.int32(random[j] >> _U32(8))) * tiny
        numbers[j] = min(max(np.int32(t), np.int32(0)), top)


@_compiled
def _round_finely(x, base, size, inverse, centre, top, random, numbers):
    """The same in double precision, for 16 bits of levels."""
    for j in range(size):
        t = np.float64(x[base + j]) * inverse + centre + np.float64(random[j]) * 2.0**-32
        numbers[j] = min(max(np.int32(t), np.int32(0)), top)


@_compiled
def _pack(numbers, bits, words, at):
    for bit in range(_U(bits)):
        words[at + bit] = _plane(numbers, bit)


@_compiled
def quantize(x, units, bits, centre, top, block, stream, key, words, random, numbers):
    """Random rounding to the levels (q - centre) * unit of each block, q = 0 ... top."""
    at = _U(0)
    for b in range(units.shape[0]):
        start, stop = b * block, min((b + 1) * block, x.shape[0])
        inverse = 1.0 / np.float64(units[b]) if units[b] > 0 else 0.0
        for base in range(start, stop, GROUP):
            size = _U(min(GROUP, stop - base))
            if size < GROUP:
                numbers[:] = 0
            _draw(_U(base // GROUP), stream, key, random)
            if bits > 8:
                _round_finely(x, _U(base), size, inverse, centre, np.int32(top), random, numbers)
            else:
                _round(x, _U(base), size, inverse, centre, np.int32(top), random, numbers)
            _pack(numbers, bits, words, at)
            at += _U(bits)


@_compiled
def signs(x, words, numbers):
    """One bit for every entry: whether it is positive or zero."""
    for base in range(0, x.shape[0], GROUP):
        size = _U(min(GROUP, x.shape[0] - base))
        if size < GROUP:
            numbers[:] = 0
        for j in range(size):
            numbers[j] = x[_U(base) + j] >= 0
        _pack(numbers, 1, words, _U(base // GROUP))


@_compiled
def dequantize(units, words, bits, centre, top, block, out, numbers):
    """out = (q - centre) * unit; return whether the code is one that can have been written."""
    at = _U(0)
    fine = True
    exact = out.dtype.type
    middle = exact(centre)
    most = numbers.dtype.type(0)
    for b in range(units.shape[0]):
        start, stop = b * block, min((b + 1) * block, out.shape[0])
        unit = exact(units[b])
        fine &= np.isfinite(units[b] * np.float32(centre + 1)) and unit >= 0
        for base in range(start, stop, GROUP):
            numbers[:] = 0
            for bit in range(_U(bits)):
                _set_plane(numbers, words[at + bit], bit)
            at += _U(bits)
            for j in range(_U(min(GROUP, stop - base))):
                out[_U(base) + j] = (exact(np.int32(numbers[j])) - middle) * unit
                most = max(most, numbers[j])
    return fine and most <= top


@_compiled
def sample(x, stream, key, blown_up, values):
    """One entry out of each of k runs of nearly equal length, times the length of its run if they are `blown_up`."""
    runs, at = _runs(x.shape[0], values.shape[0])
    for i in range(_U(values.shape[0])):
        place, length, at = _drawn(i, at, runs, stream, key)
        values[i] = x[place] * x.dtype.type(length) if blown_up else x[place]


@_compiled
def unsample(values, stream, key, out):
    """The inverse, as far as there is one: the drawn entries at their places, zeros elsewhere."""
    out[:] = 0
    runs, at = _runs(out.shape[0], values.shape[0])
    for i in range(_U(values.shape[0])):
        place, _, at = _drawn(i, at, runs, stream, key)
        out[place] = values[i]


@njit(inline="always")
def _runs(n, k):
    """Run i goes from i n // k to (i + 1) n // k: n // k entries, and one more whenever the rests add up to k.

    The second part is for the first `_drawn`: where a run starts, the rests so far, and a random word in hand.
    """
    return (_U(n) // _U(k), _U(n) % _U(k), _U(k)), (_U(0), _U(0), _U32(0))


@njit(inline="always")
def _drawn(i, at, runs, stream, key):
    """A place in run i at random, the length of that run, and where the next one is at."""
    start, rest, other = at
    whole, part, k = runs
    word, other = _philox(_U32(i >> _U(1)), stream, key) if i & _U(1) == _U(0) else (other, other)
    rest += part
    length, rest = (whole + _U(1), rest - k) if rest >= k else (whole, rest)
    return start + ((_U(word) * length) >> _U(32)), length, (start + length, rest, other)


@_compiled
def fingerprint(words, seed, lanes):
    """64 bits that change when any of the words or the seed does: not against an adversary, but at memory's speed."""
    for j in range(LANES):
        lanes[j] = seed + _U(j) * _PRIME
    whole = words.shape[0] // LANES * LANES
    for start in range(0, whole, LANES):
        for j in range(_U(LANES)):
            mixed = (lanes[j] ^ words[_U(start) + j]) * _PRIME
            lanes[j] = mixed ^ (mixed >> _U(29))
    for i in range(whole, words.shape[0]):
        mixed = (lanes[0] ^ words[i]) * _PRIME
        lanes[0] = mixed ^ (mixed >> _U(29))
    total = _U(words.shape[0])
    for j in range(LANES):
        total = (total ^ lanes[j]) * _PRIME
        total ^= total >> _U(32)
    return total
