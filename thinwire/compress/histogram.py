"""How much of a tensor's energy its largest entries hold, at every ratio at once, without choosing any."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch

from thinwire.compress.base import has_kernels, kernels

Array = np.ndarray[Any, np.dtype[Any]]

_BINS = 1 << 15
_FINITE = 0x7F80  # bins; in the others are infinities and NaN
_SAMPLE = 1 << 20
_RUN = 256  # entries read in one go: shorter runs would wait for memory
_TAIL = 1 / 32  # of all entries: the largest, which are counted one by one


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """The entries of a tensor by magnitude, 128 bins to the octave: a bin is a number of bfloat16 and what follows it.

    That is fine enough to know energies from counts alone. A bin from a to b, taken as evenly filled, has the mean
    square (a^2 + ab + b^2) / 3, within 0.8 % of the truth however it is filled; of a bin that is cut, the upper part
    is taken in the same way. Magnitudes below 2^-133 count as zero.

    Attributes:
        counts: how many entries each bin holds; an estimate where only a sample was counted.
        numel: how many entries the tensor has.
        not_finite: how many of them are not finite numbers of float32. They are in no bin. Of a large tensor's NaN
            only those in the sample are seen; whoever added up its squares knows of all.

    >>> Histogram.of(torch.tensor([3.0, 0.0, -4.0, 0.0])).energy_at([0.25, 1.0]).round(2).tolist()
    [16.13, 25.17]
    """

    counts: Array
    numel: int
    not_finite: int

    @classmethod
    def of(cls, x: torch.Tensor) -> Histogram:
        """Count a flat tensor, which is read once, fast.

        Of a large one most entries are judged by a sample of about 10^6, in runs that are evenly spread. Only the
        largest thirty-second, where few entries may hold much of the energy, is counted whole.
        """
        counts = _count(x.detach()) if has_kernels(x) else _count_by_torch(x.detach())
        return cls(counts=counts[:_FINITE], numel=x.numel(), not_finite=round(counts[_FINITE:].sum()))

    def __add__(self, other: Histogram) -> Histogram:
        """Of both tensors as if they were one."""
        return Histogram(
            counts=self.counts + other.counts,
            numel=self.numel + other.numel,
            not_finite=self.not_finite + other.not_finite,
        )

    @cached_property
    def energies(self) -> Array:
        """The sum of squares in each bin."""
        result: Array = self.counts * _mean_squares()
        return result

    @cached_property
    def energy(self) -> float:
        """The sum of all squares."""
        return float(self.energies.sum())

    def energy_at(self, ratios: Iterable[float]) -> Array:
        """The sum of squares of what a top-k takes at each ratio: ratio * numel entries, rounded down, at least one."""
        bins = np.flatnonzero(self.counts)[::-1]
        counts, energies = (np.append(0.0, np.cumsum(of[bins])) for of in (self.counts, self.energies))
        wanted = [max(1, int(ratio * self.numel * (1 + 1e-12))) for ratio in ratios]
        return np.array([self._energy_of(k, bins, counts, energies) for k in wanted])

    def _energy_of(self, wanted: int, bins: Array, counts: Array, energies: Array) -> float:
        """The energy of so many entries, given the bins from above with the counts and energies above each."""
        whole = int(np.searchsorted(counts, wanted, side="right")) - 1
        if whole >= len(bins):
            return self.energy
        taken = wanted - counts[whole]
        low, high = (float(edges[bins[whole]]) for edges in _edges())
        lowest = high - (high - low) * taken / self.counts[bins[whole]]
        return min(float(energies[whole] + taken * _mean_square(lowest, high)), self.energy)


def _count(x: torch.Tensor) -> Array:
    values = x.numpy()
    words, shift, lowest = _words(values)
    # An odd number of runs apart, so that rows of a power of two do not always show the same columns.
    stride = _RUN * (x.numel() // _SAMPLE // 2 * 2 + 1)
    sampled, tail = np.zeros(_BINS, np.int32), np.zeros(_BINS, np.int32)
    seen = kernels.count_magnitudes(words, shift, lowest, _RUN, stride, sampled)
    if seen == x.numel():
        return sampled.astype(np.float64)
    first = _first_of_tail(sampled, seen)
    kernels.count_large_magnitudes(values, words, values.dtype.type(_edges()[0][first]), shift, lowest, tail)
    tail[_FINITE:] = np.maximum(tail[_FINITE:], sampled[_FINITE:])  # NaN reaches no threshold
    body = sampled[:first] * ((x.numel() - int(tail.sum())) / max(1, int(sampled[:first].sum())))
    return np.concatenate((body, tail[first:].astype(np.float64)))


def _first_of_tail(sampled: Array, seen: int) -> int:
    """The bin from which on there are _TAIL of the entries, or the next one, if very many are equal."""
    above = np.cumsum(sampled[::-1])
    bins = int(np.searchsorted(above, _TAIL * seen))
    first = _BINS - 1 - bins + int(above[bins] > 2 * _TAIL * seen)
    return min(max(first, 1), _FINITE - 1)


def _count_by_torch(x: torch.Tensor) -> Array:
    bins = (x.float().view(torch.int32) & 0x7FFFFFFF) >> 16
    counts: Array = torch.bincount(bins, minlength=_BINS).double().cpu().numpy()
    return counts


def _words(values: Array) -> tuple[Array, int, int]:
    """Entries as unsigned integers, how far to shift them for the number of a bin, and which is the first."""
    if values.dtype == np.float32:
        return values.view(np.uint32), 16, 0
    return values.view(np.uint64), 45, (1023 - 127) << 7  # the exponents that float32 has


def _mean_square(low: Any, high: Any) -> Any:
    """Of numbers spread evenly from `low` to `high`."""
    return (low * low + low * high + high * high) / 3


@cache
def _mean_squares() -> Array:
    """Of each bin."""
    result: Array = _mean_square(*_edges())
    return result


@cache
def _edges() -> tuple[Array, Array]:
    """From where to where each bin reaches. The first is for zeros."""
    edges = (np.arange(_FINITE + 1, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
    edges[-1] = 2.0**128
    low, high = edges[:-1], edges[1:].copy()
    high[0] = 0.0
    return low, high
