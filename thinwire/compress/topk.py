"""Selectors: which entries are worth their bytes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from thinwire.compress.base import Compensated, Selector, Shortlist, has_kernels, kernels, take_out
from thinwire.types import Sparse

Array = np.ndarray[Any, np.dtype[Any]]

_FEW = 1 << 12  # not worth a sample
_MANY = 1 << 18
_SAMPLE = 1 << 16
_STRIDE = 16  # no two of a sample from one cache line


class TopK(Selector):
    """The k entries of largest magnitude; of equal ones the lowest index, so that every run picks the same."""

    name = "top-k"

    def take(self, fed: Compensated, ratio: float, step: int) -> Sparse:
        return take_largest(fed.x, self.count(fed.x.numel(), ratio), fed.shortlist)


class LayerwiseTopK(Selector):
    """The largest entries of every layer by itself: `sizes` are the layers' numbers of entries, in order."""

    name = "layer-wise top-k"

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes

    def count(self, numel: int, ratio: float) -> int:
        return sum(super(LayerwiseTopK, self).count(size, ratio) for size in self.sizes)

    def take(self, fed: Compensated, ratio: float, step: int) -> Sparse:
        chosen = [
            take_largest(layer, super(LayerwiseTopK, self).count(len(layer), ratio))
            for layer in torch.split(fed.x, list(self.sizes))
        ]
        starts = itertools.accumulate(self.sizes, initial=0)
        indices = [part.indices + start for part, start in zip(chosen, starts, strict=False)]
        return Sparse(torch.cat(indices), torch.cat([part.values for part in chosen]))


class ThresholdTopK(Selector):
    """k entries by a search for their threshold: MSTopk, 25 halvings, made exact in count.

    The search keeps `low` <= the k-th magnitude < `high`. Entries from `high` on are all taken; the rest of the k are
    the first in order among those from `low` on, which after 25 halvings are nearly equal. Reference: Shi et al. 2021,
    Algorithm 1, which fills up with a random run of them instead.
    """

    name = "threshold top-k"

    def __init__(self, halvings: int = 25) -> None:
        self.halvings = halvings

    def take(self, fed: Compensated, ratio: float, step: int) -> Sparse:
        x, k = fed.x, self.count(fed.x.numel(), ratio)
        low, high = 0.0, float("inf")
        top = float(x.abs().max()) if x.numel() else 0.0
        middle = float(x.abs().mean()) if x.numel() else 0.0
        for _ in range(self.halvings):
            if _count_reaching(x, middle) >= k:
                low = middle
            else:
                high = middle
            middle = (low + min(high, top)) / 2
        magnitude = x.abs()
        sure = magnitude >= high
        doubtful = (magnitude >= low) & ~sure
        missing = k - int(sure.sum())
        sure[doubtful.nonzero().squeeze(1)[:missing]] = True
        return take_out(x, sure.nonzero().squeeze(1).to(torch.int32))


class RandomK(Selector):
    """k entries drawn anew at every step; ranks that share the seed draw the same."""

    name = "random-k"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def take(self, fed: Compensated, ratio: float, step: int) -> Sparse:
        numel = fed.x.numel()
        generator = np.random.Generator(np.random.Philox(key=[self.seed, step]))
        chosen = generator.choice(numel, self.count(numel, ratio), replace=False, shuffle=False)
        return take_out(fed.x, torch.from_numpy(np.sort(chosen).astype(np.int32)).to(fed.x.device))


def take_largest(x: torch.Tensor, k: int, shortlist: Shortlist | None = None) -> Sparse:
    """Take the k entries of largest magnitude, ties to the lowest index, out of x, which is flat and finite."""
    assert x.is_contiguous(), "the compiled loops work on contiguous memory"
    if k == x.numel():
        return take_out(x, torch.arange(k, dtype=torch.int32, device=x.device))
    if not has_kernels(x):
        return _take_largest_by_torch(x, k)
    seen = shortlist if shortlist is not None and shortlist.holds(k) else _shortlist(x, k)
    if seen.holds(k):
        indices, values = seen.indices[: seen.count], seen.values[: seen.count]
    else:  # few entries, or many equal ones, or a sample that misled: look at all of them
        indices, values = np.arange(x.numel(), dtype=np.int32), x.numpy()
    bits, ties = _kth_largest(values, k)
    words, taken = _bits_of(values), (shortlist or seen).output(k)
    kernels.pick_out(x.numpy(), words, bits, ties, indices, values, taken.indices.numpy(), taken.values.numpy())
    if shortlist is not None:
        shortlist.aim(k, float(bits.view(values.dtype)))
    return Sparse(taken.indices[:k], taken.values[:k])


def _shortlist(x: torch.Tensor, k: int) -> Shortlist:
    """Note the entries from a threshold on that somewhat more than k will reach, going by a sample."""
    shortlist = Shortlist(x.dtype)
    if x.numel() <= _FEW:
        return shortlist
    shortlist.reserve(k)
    threshold, _ = _around_kth(x.numpy(), k)
    shortlist.count = kernels.note_large(x.numpy(), threshold, shortlist.indices, shortlist.values)
    return shortlist


def _kth_largest(values: Array, k: int) -> tuple[np.unsignedinteger[Any], int]:
    """The bits of the k-th largest magnitude, and how many of the entries equal to it belong to the top k."""
    if len(values) > _MANY:  # most of them are clearly above or below, and need only be counted
        low, high = _around_kth(values, k)
        between = np.empty(len(values) // 8, values.dtype)
        count, above = kernels.note_between(values, low, high, between)
        if above < k <= above + count and count <= len(between):
            values, k = between[:count], k - above
    words = _bits_of(values)
    histogram = np.empty(1 << (16 if len(words) > _MANY else 11), np.int64)
    bits, ties = kernels.kth_largest(words, k, histogram)
    return words.dtype.type(bits), ties


def _bits_of(values: Array) -> Array:
    return values.view(f"u{values.itemsize}")


def _around_kth(values: Array, k: int) -> tuple[np.floating[Any], np.floating[Any]]:
    """Two magnitudes between which the k-th largest almost surely lies, from a sample: four deviations away."""
    sample = np.abs(values[:: max(_STRIDE, len(values) // _SAMPLE)])
    expected = k / len(values) * len(sample)
    spread = 4 * expected**0.5 + 4
    ranks = [min(max(int(expected + way * spread), 0), len(sample) - 1) for way in (1, -1)]
    places = [len(sample) - 1 - rank for rank in ranks]
    ordered = np.partition(sample, places)
    return ordered[places[0]], ordered[places[1]]


def _take_largest_by_torch(x: torch.Tensor, k: int) -> Sparse:
    magnitude = x.abs()
    smallest = torch.topk(magnitude, k, sorted=False).values.min()
    chosen = magnitude > smallest
    ties = (magnitude == smallest).nonzero().squeeze(1)
    chosen[ties[: k - int(chosen.sum())]] = True
    return take_out(x, chosen.nonzero().squeeze(1).to(torch.int32))


def _count_reaching(x: torch.Tensor, threshold: float) -> int:
    if has_kernels(x):
        return int(kernels.count_large(x.numpy(), x.numpy().dtype.type(threshold)))
    return int((x.abs() >= threshold).sum())
