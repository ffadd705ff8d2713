"""How the values of chosen entries go on the wire: as they are, as shorter floats, or as four bits.

Whatever a code loses stays in the error, to be sent later, so what counts is how many entries the bytes pay for. At a
ratio of 0.01 an index takes some nine bits: with values as they are an entry takes 41, by `log4` 13. What that costs in
steps is in docs/how-it-decides.md.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from thinwire.compress.base import has_kernels, kernels

LEVELS = 8  # magnitudes of log4: with the sign they are four bits
DUST = 1 / 16  # of the mean magnitude: what is smaller is next to nothing, and does not set them far apart
MOST_SHARE = 0.1  # of all entries: where more are sent they are of all sizes, and eight magnitudes are too few
_MOST = 1023.0  # the largest power of two that a float knows


class ValueCode(ABC):
    """k values of one type, as bytes.

    Attributes:
        rounds: whether some values come back as others.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.rounds = True

    @abstractmethod
    def nbytes(self, k: int) -> int:
        """The size, from k alone."""

    @abstractmethod
    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write values into `out`, a uint8 tensor of `nbytes(k)`."""

    @abstractmethod
    def decode(self, code: torch.Tensor, k: int) -> torch.Tensor:
        """The inverse, but for rounding."""


class Floats(ValueCode):
    """Floats of some type. What would overflow becomes the largest finite one."""

    def __init__(self, dtype: torch.dtype, sent: torch.dtype) -> None:
        super().__init__(dtype)
        self._sent = sent
        self.rounds = sent != dtype

    def nbytes(self, k: int) -> int:
        return _whole_words(k * self._sent.itemsize)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        if self.rounds:
            limit = torch.finfo(self._sent).max
            values = values.clamp(-limit, limit)
        out.view(self._sent)[: values.numel()] = values
        out.view(self._sent)[values.numel() :] = 0

    def decode(self, code: torch.Tensor, k: int) -> torch.Tensor:
        return code.view(self._sent)[:k].to(self.dtype)


class Ladder(ValueCode):
    """A sign, and the nearest of eight magnitudes that go from the smallest of the values to the largest.

    From each to the next it is the same factor b = (largest / smallest)^(1/7), so a value changes by (b - 1) / (b + 1)
    of itself at most: by a third where the largest is 100 times the smallest. If some values are 0 that is a magnitude
    too, and the factor is of one rung less. What is smaller than DUST times the mean becomes that or 0, if nearer.

    The magnitudes are sent along, [magnitudes | four bits each], so that no two processors need to agree on a power.
    """

    def nbytes(self, k: int) -> int:
        return LEVELS * self.dtype.itemsize + _whole_words(-(-k // 2))

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        ladder, codes = self._sections(out)
        magnitudes = torch.tensor(_magnitudes(*_extent(values)), dtype=self.dtype, device=values.device)
        ladder.copy_(magnitudes)
        middles = magnitudes[:-1] / 2 + magnitudes[1:] / 2
        if kernels is not None and has_kernels(values):
            kernels.encode_ladder(values.numpy(), middles.numpy(), codes.numpy())
            return
        nibbles = torch.zeros(2 * codes.numel(), dtype=torch.uint8, device=values.device)
        signs = torch.where(values < 0, LEVELS, 0)
        nibbles[: values.numel()] = torch.bucketize(values.abs(), middles) + signs
        codes.copy_(nibbles[::2] | nibbles[1::2] << 4)

    def decode(self, code: torch.Tensor, k: int) -> torch.Tensor:
        ladder, codes = self._sections(code)
        signed = torch.cat([ladder, -ladder])
        if kernels is not None and has_kernels(ladder):
            values = torch.empty(k, dtype=self.dtype)
            kernels.decode_ladder(codes.numpy(), signed.numpy(), values.numpy())
            return values
        return signed[torch.stack([codes & 15, codes >> 4], dim=1).flatten()[:k].long()]

    def _sections(self, code: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = LEVELS * self.dtype.itemsize
        return code[:size].view(self.dtype), code[size:]


def _extent(values: torch.Tensor) -> tuple[float, float, float, bool]:
    """The smallest, largest and mean magnitude of those that are not 0, all 0 if there are none; and if some are 0."""
    if kernels is not None and has_kernels(values):
        smallest, largest, mean, has_zeros = kernels.extent(values.numpy())
        return float(smallest), float(largest), float(mean), bool(has_zeros)
    sizes = values.abs().double()
    others = sizes[sizes > 0]
    if not others.numel():
        return 0.0, 0.0, 0.0, True
    mean = others.cumsum(0)[-1] / others.numel()  # in the order in which the kernel adds
    return float(others.min()), float(others.max()), float(mean), others.numel() < sizes.numel()


def _magnitudes(smallest: float, largest: float, mean: float, has_zeros: bool) -> list[float]:
    """Eight, ascending by one factor, and the ends exactly; 0 is the first of them if some values are.

    >>> _magnitudes(1.0, 128.0, 10.0, False)
    [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
    """
    if not 0 < smallest <= largest < math.inf:  # there is nothing else, or nothing that will be used
        return [0.0] * LEVELS
    foot = DUST * min(mean, largest)  # the mean of the largest numbers there are may be infinite
    if smallest < foot:
        smallest, has_zeros = foot, True
    steps = LEVELS - 2 if has_zeros else LEVELS - 1
    low, high = math.log2(smallest), math.log2(largest)
    powers = [2 ** min(low + (high - low) * i / steps, _MOST) for i in range(1, steps)]
    between = [min(max(power, smallest), largest) for power in powers]
    return [0.0] * has_zeros + [smallest, *between, largest]


_CODES: dict[str, Callable[[torch.dtype], ValueCode]] = {
    "float32": lambda dtype: Floats(dtype, dtype),
    "float16": lambda dtype: Floats(dtype, torch.float16),
    "bfloat16": lambda dtype: Floats(dtype, torch.bfloat16),
    "log4": Ladder,
}
VALUES = tuple(_CODES)


def value_code(name: str, dtype: torch.dtype, n: int, k: int) -> ValueCode:
    """The code of that name for k values of n, of this type. "float32" sends them as they are, whatever they are.

    Where "log4" would be too coarse, or no smaller, it is "bfloat16".
    """
    code = _CODES[name](dtype)
    if name != "log4":
        return code
    half = _CODES["bfloat16"](dtype)
    return half if k > MOST_SHARE * n or half.nbytes(k) <= code.nbytes(k) else code


def _whole_words(nbytes: int) -> int:
    return -(-nbytes // 8) * 8
