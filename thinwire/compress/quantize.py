"""Compressors of a whole tensor into one message of a known size: what decentralised training sends to neighbours.

Unlike a `Selector`, a compressor takes nothing out of x: it writes C(x) as bytes, and whoever holds the bytes reads the
same C(x), bit for bit, on any machine. Randomness is a pure function of (seed, step, rank).
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from thinwire.compress.base import Compensated
from thinwire.compress.coding import Coding
from thinwire.compress.topk import TopK

try:
    from thinwire.compress import bits as loops
except ImportError:  # numba follows new Pythons with some delay; codes are the same without it
    from thinwire.compress import plain_bits as loops  # type: ignore[no-redef]

Array = np.ndarray[Any, np.dtype[Any]]
BITS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
BLOCK = 1024
_NORMS = {"max": 0, "mean": 1, "l2": 2}
_MASK = (1 << 64) - 1
_SAMPLE = 1 << 16  # entries of a Gaussian vector that stands for all


class Draw(NamedTuple):
    """What the randomness of one message is a function of."""

    seed: int
    step: int
    rank: int

    @property
    def key(self) -> int:
        """64 bits, well mixed (the finalizer of SplitMix64, Steele et al. 2014)."""
        state = 0
        for part in self:
            state = ((state ^ part) + 0x9E3779B97F4A7C15) & _MASK
            state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
            state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
            state ^= state >> 31
        return state


class Compressor(ABC):
    """C(x) as bytes.

    Attributes:
        name: as a user spells it.
        unbiased: whether E[C(x)] = x, which DCD and ECD assume.
    """

    name: str
    unbiased: bool

    @abstractmethod
    def nbytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """The size of a message, a multiple of 8, from the size of the tensor alone."""

    @abstractmethod
    def encode(self, x: torch.Tensor, out: torch.Tensor, draw: Draw) -> bool:
        """Write C(x) into `out`, a uint8 tensor of `nbytes`. False if x is not finite: `out` is then of no use."""

    @abstractmethod
    def decode(self, code: torch.Tensor, out: torch.Tensor) -> None:
        """out = C(x). Raises ValueError for bytes that are no code, or that stand for something not finite."""

    def contraction(self) -> Compressor:
        """The same with E||C(x) - x||^2 <= (1 - delta) ||x||^2 for some delta > 0, which CHOCO assumes.

        An unbiased C with E||C(x) - x||^2 = omega ||x||^2 becomes C / (1 + omega), with delta = 1 / (1 + omega)
        (Koloskova et al. 2020); a biased one is one already.
        """
        return self

    def apply(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        """C(x), by way of its bytes."""
        code = torch.empty(self.nbytes(x.numel(), x.dtype), dtype=torch.uint8)
        if not self.encode(x, code, draw):
            raise ValueError("x is not finite.")
        out = torch.empty_like(x)
        self.decode(code, out)
        return out

    def __str__(self) -> str:
        return self.name


def alpha(compressor: Compressor, x: torch.Tensor, draw: Draw) -> float:
    """||x - C(x)|| / ||x|| of this draw: DCD's alpha (Tang et al. 2018, Theorem 1); CHOCO's delta is 1 - alpha^2."""
    size = float(torch.linalg.vector_norm(x.double()))
    return float(torch.linalg.vector_norm((x - compressor.apply(x, draw)).double())) / size if size > 0 else 0.0


def gaussian_alpha(compressor: Compressor) -> float:
    """The same for a Gaussian vector, always the same one."""
    x = torch.from_numpy(np.random.Generator(np.random.Philox(0)).standard_normal(_SAMPLE).astype(np.float32))
    return alpha(compressor, x, Draw(0, 0, 0))


# --- nothing left out


@dataclass(frozen=True)
class Exact(Compressor):
    """No compression: C(x) = x."""

    name = "none"
    unbiased = True

    def nbytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        return _whole_words(numel * dtype.itemsize)

    def encode(self, x: torch.Tensor, out: torch.Tensor, draw: Draw) -> bool:
        out.view(x.dtype)[: x.numel()] = x
        out.view(x.dtype)[x.numel() :] = 0
        return is_finite(x)

    def decode(self, code: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(code.view(out.dtype)[: out.numel()])
        _refuse_unless(is_finite(out), "a value that is not finite")


# --- few bits


@dataclass(frozen=True)
class Quantizer(Compressor):
    """Random rounding to 2^bits levels from -s to s, where s is the block's largest magnitude or its 2-norm: unbiased.

    Tang et al. 2018 round at random to the two nearest levels and leave the granularity of the scale open: here every
    block of 1024 entries has one of its own, in float32.

    Args:
        bits: on the wire, 1 to 8, or 16.
        norm: max or l2.
        block: entries that share a scale, a multiple of 64.
        shrink: what every level is multiplied by: 1 is unbiased.
    """

    bits: int = 8
    norm: str = "max"
    block: int = BLOCK
    shrink: float = 1.0

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits must be 1 to 8, or 16, got {self.bits}. For no compression use 'none'.")
        if self.norm not in ("max", "l2"):
            raise ValueError(f"norm must be max or l2, got {self.norm!r}.")
        if self.block <= 0 or self.block % loops.GROUP:
            raise ValueError(f"block must be a multiple of {loops.GROUP}, got {self.block}.")

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"int{self.bits}" + ("" if self.norm == "max" else f"-{self.norm}") + self._shrunk

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.shrink == 1

    @property
    def top(self) -> int:
        """The highest level's number; the lowest is 0."""
        return (1 << self.bits) - 1

    @property
    def _shrunk(self) -> str:
        return "" if self.unbiased else f"*{self.shrink:.3g}"

    def nbytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        return self._unit_bytes(numel) + 8 * self.bits * -(-numel // loops.GROUP)

    def contraction(self) -> Compressor:
        return dataclasses.replace(self, shrink=1 / (1 + gaussian_alpha(self) ** 2)) if self.unbiased else self

    def encode(self, x: torch.Tensor, out: torch.Tensor, draw: Draw) -> bool:
        entries, (units, words) = _array(x), self._parts(out, x.numel())
        finite = self._measure(entries, units, self.norm, 2 / self.top)
        if finite:
            self._round(entries, units, words, draw.key)
            if self.shrink != 1:  # rounded in the true unit, read in the shrunk one
                units *= np.float32(self.shrink)
        return finite

    def decode(self, code: torch.Tensor, out: torch.Tensor) -> None:
        (units, words), entries = self._parts(code, out.numel()), _array(out)
        fine = loops.dequantize(units, words, self.bits, self.top / 2, self.top, self.block, entries, self._numbers)
        _refuse_unless(bool(fine), "a scale or a level that cannot be")
        _write_back(entries, out)

    def _measure(self, x: Array, units: Array, norm: str, scale: float) -> bool:
        words, reach = x.view(f"u{x.itemsize}"), self.top / 2 + 1
        return bool(loops.measure(x, words, self.block, _NORMS[norm], scale, reach, units))

    def _round(self, x: Array, units: Array, words: Array, key: int) -> None:
        random = np.empty(loops.GROUP, np.uint32)
        levels = self.bits, self.top / 2, self.top
        loops.quantize(x, units, *levels, self.block, *_halves(key), words, random, self._numbers)

    @property
    def _numbers(self) -> Array:
        return np.zeros(loops.GROUP, np.uint8 if self.bits <= 8 else np.uint16)

    def _unit_bytes(self, numel: int) -> int:
        return _whole_words(4 * -(-numel // self.block))

    def _parts(self, code: torch.Tensor, numel: int) -> tuple[Array, Array]:
        """[scales | levels], the scales padded with zeros to a whole word."""
        end, blocks = self._unit_bytes(numel), -(-numel // self.block)
        scales = code[:end].numpy().view(np.float32)
        scales[blocks:] = 0
        return scales[:blocks], code[end:].numpy().view(np.uint64)


@dataclass(frozen=True)
class Qsgd(Quantizer):
    """QSGD: sign and one of s = 2^(bits-1) - 1 levels of the 2-norm, so that zero stays zero (Alistarh et al. 2017).

    The sign is one of the bits, as everything that is sent has to be.
    """

    norm: str = "l2"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits < 2:
            raise ValueError("QSGD needs a bit for the sign and one for the level: bits must be at least 2.")

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"qsgd{self.bits}" + self._shrunk

    @property
    def top(self) -> int:
        return (1 << self.bits) - 2


@dataclass(frozen=True)
class Sign(Quantizer):
    """The sign times the block's mean magnitude: one bit, biased (Koloskova et al. 2020 have one scale per layer)."""

    bits: int = 1
    name = "sign"
    unbiased = False

    def encode(self, x: torch.Tensor, out: torch.Tensor, draw: Draw) -> bool:
        entries, (units, words) = _array(x), self._parts(out, x.numel())
        loops.signs(entries, words, self._numbers)
        return self._measure(entries, units, "mean", 2.0)


# --- few entries


@dataclass(frozen=True)
class RandomSparse(Compressor):
    """One entry out of every run of 1 / ratio, drawn at random, times the length of its run: unbiased.

    Tang et al. 2018 keep each entry with probability p on its own. Then the size of a message is random; with one entry
    from each of k runs it is fixed, every entry has the same chance, and the key is sent instead of k indices.

    Args:
        ratio: the share of entries that is sent.
        as_they_are: without blowing them up, which is random-k: biased, and a contraction.
    """

    ratio: float
    as_they_are: bool = False

    def __post_init__(self) -> None:
        _check_ratio(self.ratio)

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{'randk' if self.as_they_are else 'random'}:{self.ratio:g}"

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return not self.as_they_are

    def nbytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        return 8 + _whole_words(_count(self.ratio, numel) * dtype.itemsize)

    def contraction(self) -> Compressor:
        return RandomSparse(self.ratio, as_they_are=True)  # 1 + omega is 1 / ratio: what the entries are blown up by

    def encode(self, x: torch.Tensor, out: torch.Tensor, draw: Draw) -> bool:
        out[:8].numpy().view(np.uint64)[0] = draw.key
        key, values = self._parts(out, x.numel(), x.dtype)
        loops.sample(_array(x), *key, not self.as_they_are, values)
        return is_finite(x) and bool(np.isfinite(values).all())  # the drawn ones may be blown up

    def decode(self, code: torch.Tensor, out: torch.Tensor) -> None:
        key, values = self._parts(code, out.numel(), out.dtype)
        entries = _array(out)
        loops.unsample(values, *key, entries)
        _refuse_unless(bool(np.isfinite(values).all()), "a value that is not finite")
        _write_back(entries, out)

    def _parts(self, code: torch.Tensor, numel: int, dtype: torch.dtype) -> tuple[tuple[np.uint32, np.uint32], Array]:
        values = code[8:].view(dtype).numpy()
        k = _count(self.ratio, numel)
        values[k:] = 0
        return _halves(int(code[:8].numpy().view(np.uint64)[0])), values[:k]


@dataclass(frozen=True)
class Largest(Compressor):
    """The entries of largest magnitude as they are, with their indices, and zeros elsewhere: top-k. Biased."""

    ratio: float
    unbiased = False

    def __post_init__(self) -> None:
        _check_ratio(self.ratio)

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"topk:{self.ratio:g}"

    def nbytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        return self._coding(numel, dtype).nbytes

    def encode(self, x: torch.Tensor, out: torch.Tensor, draw: Draw) -> bool:
        finite = is_finite(x)
        fed = Compensated(x=x.clone() if finite else torch.zeros_like(x), energy=0.0, finite=True)
        self._coding(x.numel(), x.dtype).encode(TopK().take(fed, self.ratio, draw.step), out)
        return finite

    def decode(self, code: torch.Tensor, out: torch.Tensor) -> None:
        entries = self._coding(out.numel(), out.dtype).decode(code)
        _refuse_unless(is_finite(entries.values), "a value that is not finite")
        out.zero_()[entries.indices.long()] = entries.values

    def _coding(self, numel: int, dtype: torch.dtype) -> Coding:
        return Coding(numel, _count(self.ratio, numel), dtype)


# --- names


def build(spec: str | Compressor) -> Compressor:
    """A compressor from its name.

    none, int1 to int8, int16 (random rounding, largest magnitude as scale), int8-l2 (2-norm as scale), qsgd2 to qsgd8,
    qsgd16, sign, random:0.1 (unbiased), topk:0.01, randk:0.01.

    >>> build("int4").nbytes(1 << 20) / (1 << 20) * 8
    4.03125
    """
    if isinstance(spec, Compressor):
        return spec
    name, _, given = spec.partition(":")
    if name == "none":
        return Exact()
    if name == "sign":
        return Sign()
    if name in ("random", "randk"):
        return RandomSparse(_ratio(spec, given), as_they_are=name == "randk")
    if name == "topk":
        return Largest(_ratio(spec, given))
    if name.startswith("qsgd") and name[4:].isdigit():
        return Qsgd(int(name[4:]))
    if name.startswith("int"):
        digits, _, norm = name[3:].partition("-")
        if digits.isdigit():
            return Quantizer(int(digits), norm or "max")
    raise ValueError(
        f"unknown compressor {spec!r}. Known are: none, int1 to int8, int16, the same with -l2, qsgd2 to qsgd8, "
        "qsgd16, sign, random:RATIO, topk:RATIO, randk:RATIO."
    )


def fingerprint(code: torch.Tensor, seed: int) -> int:
    """64 bits that change when any bit of a code or of the seed does."""
    return int(loops.fingerprint(code.numpy().view(np.uint64), np.uint64(seed), np.empty(loops.LANES, np.uint64)))


def is_finite(x: torch.Tensor) -> bool:
    """Whether every entry is. A sum is quick and overflows rarely; only then is it worth looking at every entry."""
    return math.isfinite(float(x.sum())) or bool(torch.isfinite(x).all())


def _ratio(spec: str, given: str) -> float:
    try:
        return float(given)
    except ValueError:
        raise ValueError(f"{spec!r} needs a ratio, as in {spec.partition(':')[0]}:0.01.") from None


def _check_ratio(ratio: float) -> None:
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio must be in (0, 1], got {ratio}. For no compression use 'none'.")


def _count(ratio: float, numel: int) -> int:
    return TopK().count(numel, ratio)


def _halves(key: int) -> tuple[np.uint32, np.uint32]:
    return np.uint32(key >> 32), np.uint32(key & 0xFFFFFFFF)


def _whole_words(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


def _array(x: torch.Tensor) -> Array:
    """Its memory; a copy of it where it is not the processor's."""
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"only float32 and float64 can be compressed, got {x.dtype}.")
    array: Array = x.detach().cpu().numpy()
    return array


def _write_back(entries: Array, out: torch.Tensor) -> None:
    if out.device.type != "cpu":
        out.copy_(torch.from_numpy(entries))


def _refuse_unless(fine: bool, what: str) -> None:
    if not fine:
        raise ValueError(f"the code received holds {what}.")
