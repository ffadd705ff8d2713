"""The fast path on the CPU: loops compiled by numba, over numpy views of torch's memory.

The work is memory-bound, so the point is to touch the gradient once. `compensate` adds the error, sums the energy and
notes the large entries in a single pass; choosing the exact top k among the noted ones is then small work.

Two pieces of LLVM that Python has no word for make the pass fast: `_reaching` compares 64 entries with a threshold and
gives the answers as the bits of one integer, and `_lowest_bit` walks over the ones in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

BLOCK = 64
AHEAD = 64  # entries whose cache lines are under way
_U = np.uint64


def _compiler(**options: Any) -> Any:
    """`njit`, keeping compiled code on disk where there is a place for it: a read-only system may have none."""

    def compile(function: Any) -> Any:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:
            return njit(**options)(function)

    return compile


# Only a sum that stays on this rank may be reordered into vector instructions, or fused with a product: what every
# rank computes for itself must come out the same on every processor.
_compiled = _compiler(nogil=True, boundscheck=False, error_model="numpy")
_compiled_local = _compiler(nogil=True, boundscheck=False, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})


@intrinsic
def _reaching(typing_context: Any, array: Any, start: Any, threshold: Any) -> Any:
    """Bit j tells whether |array[start + j]| >= threshold, for j < 64. NaN does not."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        element = context.get_value_type(signature.args[0].dtype)
        vector = ir.VectorType(element, BLOCK)
        entries = builder.load(builder.bitcast(builder.gep(data, [args[1]]), vector.as_pointer()))
        entries.align = signature.args[0].dtype.bitwidth // 8
        nothing = ir.Constant(vector, ir.Undefined)
        first = builder.insert_element(nothing, args[2], ir.Constant(ir.IntType(32), 0))
        limit = builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(ir.IntType(32), BLOCK), [0] * BLOCK))
        above = builder.fcmp_ordered(">=", entries, limit)
        below = builder.fcmp_ordered("<=", entries, builder.fneg(limit))
        return builder.bitcast(builder.or_(above, below), ir.IntType(BLOCK))

    return types.uint64(array, types.uint64, array.dtype), generate


@intrinsic
def _fetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of array[index], which is to be written soon."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
        place = builder.bitcast(builder.gep(data, [args[1]]), byte)
        builder.call(prefetch, [place, *(ir.Constant(number, value) for value in (1, 3, 1))])  # write, keep, data
        return context.get_dummy_value()

    return types.void(array, types.uint64), generate


@intrinsic
def _lowest_bit(typing_context: Any, word: Any) -> Any:
    """The place of the lowest one in a word that is not zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@intrinsic
def _count_bits(typing_context: Any, word: Any) -> Any:
    """How many ones a word holds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), generate


@_compiled_local
def multiply(x, factor):
    """x *= factor; return the sum of the products, which is finite only if all of them are."""
    total = x.dtype.type(0)
    for i in range(x.shape[0]):
        product = x[i] * factor
        x[i] = product
        total += product
    return total


@_compiled_local
def compensate(error, grad, scale, x, offset, threshold, indices, values, count):
    """x = error + scale * grad; return the sums of x^2 and of (scale * grad)^2, and how many entries are noted by now.

    Entries with |x| >= threshold are noted, as `offset` + their place, behind the `count` that are there already. A
    count larger than the room says that some were lost.
    """
    energy, gradient = 0.0, 0.0
    last = indices.shape[0] - 1
    whole = x.shape[0] // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        base = _U(start)
        partial, partial_gradient = x.dtype.type(0), x.dtype.type(0)
        for j in range(BLOCK):
            g = scale * grad[base + _U(j)]
            v = error[base + _U(j)] + g
            x[base + _U(j)] = v
            partial += v * v
            partial_gradient += g * g
        energy += partial
        gradient += partial_gradient
        hits = _reaching(x, base, threshold)
        while hits != _U(0):
            i = base + _lowest_bit(hits)
            slot = min(count, last)
            indices[slot] = offset + i
            values[slot] = x[i]
            count += 1
            hits &= hits - _U(1)
    for i in range(whole, x.shape[0]):
        g = scale * grad[i]
        x[i] = error[i] + g
        energy += x[i] * x[i]
        gradient += g * g
        if abs(x[i]) >= threshold:
            slot = min(count, last)
            indices[slot] = offset + i
            values[slot] = x[i]
            count += 1
    return energy, gradient, count


@_compiled
def note_large(x, threshold, indices, values):
    """Note the entries with |x| >= threshold, in order; return how many there are, noted or not."""
    count = 0
    last = indices.shape[0] - 1
    whole = x.shape[0] // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        hits = _reaching(x, _U(start), threshold)
        while hits != _U(0):
            i = _U(start) + _lowest_bit(hits)
            slot = min(count, last)
            indices[slot] = i
            values[slot] = x[i]
            count += 1
            hits &= hits - _U(1)
    for i in range(whole, x.shape[0]):
        if abs(x[i]) >= threshold:
            slot = min(count, last)
            indices[slot] = i
            values[slot] = x[i]
            count += 1
    return count


@_compiled
def count_large(x, threshold):
    """How many entries have |x| >= threshold."""
    count = 0
    for i in range(x.shape[0]):
        count += abs(x[i]) >= threshold
    return count


@_compiled
def note_between(x, low, high, values):
    """Note the entries with low <= |x| < high; return how many there are, and how many have |x| >= high."""
    count = 0
    above = 0
    last = values.shape[0] - 1
    whole = x.shape[0] // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        higher = _reaching(x, _U(start), high)
        above += _count_bits(higher)
        hits = _reaching(x, _U(start), low) & ~higher
        while hits != _U(0):
            values[min(count, last)] = x[_U(start) + _lowest_bit(hits)]
            count += 1
            hits &= hits - _U(1)
    for i in range(whole, x.shape[0]):
        if abs(x[i]) >= high:
            above += 1
        elif abs(x[i]) >= low:
            values[min(count, last)] = x[i]
            count += 1
    return count, above


@_compiled
def kth_largest(words, k, histogram):
    """The k-th largest magnitude as its bits, and how many of the entries equal to it belong to the top k.

    `words` are the bits of floats as unsigned integers: without the sign bit they are ordered as the magnitudes are.
    One histogram for the uppermost bits, then one for the next bits among the entries that share the upper ones, and so
    on, as many at a time as the histogram (a power of two) has room for.
    """
    room = 0
    while (2 << room) <= histogram.shape[0]:
        room += 1
    width = words.itemsize * 8 - 1
    magnitude = (_U(1) << _U(width)) - _U(1)
    prefix = _U(0)
    wanted = k
    shift = width
    while shift > 0:
        digits = min(room, shift)
        shift -= digits
        mask = (_U(1) << _U(digits)) - _U(1)
        histogram[:] = 0
        for i in range(words.shape[0]):
            upper = (_U(words[i]) & magnitude) >> _U(shift)
            if upper >> _U(digits) == prefix:
                histogram[upper & mask] += 1
        digit = np.int64(mask)
        while histogram[digit] < wanted:
            wanted -= histogram[digit]
            digit -= 1
        prefix = (prefix << _U(digits)) | _U(digit)
    return prefix, wanted


@_compiled
def pick_out(x, words, bits, ties, indices, values, out_indices, out_values):
    """Move entries with magnitude above `bits`, and the first `ties` of those equal to it, from x to the outputs.

    Bits are compared, as `kth_largest` does, so that the two always agree on how many there are. The outputs need one
    slot more than that: writing first and deciding after has no branch to mispredict.
    """
    magnitude = words.dtype.type((_U(1) << _U(words.itemsize * 8 - 1)) - _U(1))
    nothing = x.dtype.type(0)
    taken = _U(0)
    last = words.shape[0] - 1
    for i in range(words.shape[0]):
        _fetch(x, _U(indices[min(i + AHEAD, last)]))
        word = words[i] & magnitude
        take = word > bits
        if word == bits and ties > 0:
            ties -= 1
            take = True
        index, value = _U(indices[i]), values[i]
        out_indices[taken] = index
        out_values[taken] = value
        x[index] = nothing if take else value
        taken += _U(take)


@_compiled
def take_out(x, indices, values):
    """values = x[indices]; x[indices] = 0, while they are in the cache."""
    for i in range(indices.shape[0]):
        values[i] = x[indices[i]]
        x[indices[i]] = 0


@_compiled
def scatter_add(out, indices, values, scale):
    """out[indices] += scale * values."""
    for i in range(indices.shape[0]):
        out[indices[i]] += scale * values[i]


@_compiled
def encode_elias_fano(indices, low_bits, low, high):
    """Ascending indices as Elias and Fano do: the low bits packed one after the other, the high bits as steps in unary.

    Index number i, with upper part h, sets bit h + i of `high`. Both are little-endian 64-bit words, each kept in a
    register until it is full.
    """
    high[:] = 0
    width = _U(low_bits)
    mask = (_U(1) << width) - _U(1)
    packed, filled, packed_at = _U(0), _U(0), 0
    ones, ones_at = _U(0), _U(0)
    for i in range(indices.shape[0]):
        index = _U(indices[i])
        one = (index >> width) + _U(i)
        if one >> _U(6) != ones_at:
            high[ones_at] = ones
            ones, ones_at = _U(0), one >> _U(6)
        ones |= _U(1) << (one & _U(63))
        packed |= (index & mask) << filled
        filled += width
        if filled >= _U(64):
            low[packed_at] = packed
            packed_at += 1
            filled -= _U(64)
            packed = (index & mask) >> (width - filled) if filled > _U(0) else _U(0)
    high[ones_at] = ones
    if filled > _U(0):
        low[packed_at] = packed


@_compiled
def decode_elias_fano(low, high, low_bits, indices):
    """The inverse; return how many ones `high` holds. Never writes past `indices`, whatever the words say."""
    width = _U(low_bits)
    mask = (_U(1) << width) - _U(1)
    found = 0
    for place in range(high.shape[0]):
        word = high[place]
        while word != _U(0):
            if found < indices.shape[0]:
                bit = _U(found) * width
                start = bit & _U(63)
                rest = low[bit >> _U(6)] >> start if width > _U(0) else _U(0)
                if start + width > _U(64):
                    rest |= low[(bit >> _U(6)) + _U(1)] << (_U(64) - start)
                upper = _U(place * 64) + _lowest_bit(word) - _U(found)
                indices[found] = (upper << width) | (rest & mask)
            found += 1
            word &= word - _U(1)
    return found


@_compiled
def encode_bitmap(indices, words):
    """One bit per entry."""
    words[:] = 0
    for i in range(indices.shape[0]):
        index = _U(indices[i])
        words[index >> _U(6)] |= _U(1) << (index & _U(63))


@_compiled
def decode_bitmap(words, indices):
    """The inverse; return how many ones there are. Never writes past `indices`."""
    found = 0
    for place in range(words.shape[0]):
        word = words[place]
        while word != _U(0):
            if found < indices.shape[0]:
                indices[found] = _U(place * 64) + _lowest_bit(word)
            found += 1
            word &= word - _U(1)
    return found


@_compiled
def extent(values):
    """The smallest, largest and mean magnitude of those that are not 0, all 0 if there are none; and if some are 0."""
    smallest, largest, total, others = np.inf, 0.0, 0.0, 0
    for i in range(values.shape[0]):
        size = np.float64(abs(values[i]))
        if size > 0:
            smallest = min(smallest, size)
            largest = max(largest, size)
            total += size
            others += 1
    if others == 0:
        return 0.0, 0.0, 0.0, True
    return smallest, largest, total / others, others < values.shape[0]


@_compiled
def encode_ladder(values, middles, codes):
    """Four bits each, the lower half of a byte first: 8 if it is negative, plus how many middles it exceeds."""
    for place in range(codes.shape[0]):
        byte = 0
        for i in range(2 * place, min(2 * place + 2, values.shape[0])):
            nibble = 8 if values[i] < 0 else 0
            for j in range(middles.shape[0]):
                nibble += abs(values[i]) > middles[j]
            byte |= nibble << (4 * (i & 1))
        codes[place] = byte


@_compiled
def decode_ladder(codes, signed, values):
    """What each four bits stand for, of the sixteen in `signed`."""
    for i in range(values.shape[0]):
        values[i] = signed[(codes[i >> 1] >> (4 * (i & 1))) & 15]


@_compiled
def ascends(indices, limit):
    """Whether indices are distinct, ascending and in range(limit)."""
    previous = -1
    fine = True
    for i in range(indices.shape[0]):
        fine &= indices[i] > previous
        previous = indices[i]
    return fine and previous < limit


@_compiled
def count_magnitudes(words, shift, lowest, run, stride, bins):
    """Count entries by the upper bits of their magnitudes: the first `run` of every `stride`; return how many.

    `words` are the bits of floats as unsigned integers. Without the sign and shifted by `shift` they number a bin, the
    first of which is `lowest`; what lies outside goes into the first and the last.
    """
    magnitude = (_U(1) << _U(words.itemsize * 8 - 1)) - _U(1)
    first, last = _U(lowest), _U(bins.shape[0] - 1)
    seen = 0
    for start in range(0, words.shape[0], stride):
        end = min(start + run, words.shape[0])
        for i in range(start, end):
            number = max((_U(words[_U(i)]) & magnitude) >> _U(shift), first) - first
            bins[min(number, last)] += 1
        seen += end - start
    return seen


@_compiled
def count_large_magnitudes(x, words, threshold, shift, lowest, bins):
    """Count the entries with |x| >= threshold, all of them, as `count_magnitudes` does."""
    magnitude = (_U(1) << _U(words.itemsize * 8 - 1)) - _U(1)
    first, last = _U(lowest), _U(bins.shape[0] - 1)
    whole = x.shape[0] // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        hits = _reaching(x, _U(start), threshold)
        while hits != _U(0):
            word = words[_U(start) + _lowest_bit(hits)]
            number = max((_U(word) & magnitude) >> _U(shift), first) - first
            bins[min(number, last)] += 1
            hits &= hits - _U(1)
    for i in range(whole, x.shape[0]):
        if abs(x[i]) >= threshold:
            number = max((_U(words[_U(i)]) & magnitude) >> _U(shift), first) - first
            bins[min(number, last)] += 1
