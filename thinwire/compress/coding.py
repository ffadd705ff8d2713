"""What goes on the wire: indices in the smallest of four codings, values as they are or rounded (values.py).

Which coding is smallest follows from how many entries there are and how many are sent, so nothing has to announce it,
and every message has a size that both ends know beforehand. Sizes are whole 64-bit words.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from thinwire.compress.base import kernels
from thinwire.compress.values import value_code
from thinwire.types import Sparse


class IndexCode(ABC):
    """k ascending indices below n, as bytes."""

    name: str

    @abstractmethod
    def nbytes(self, n: int, k: int) -> int:
        """The size, from n and k alone."""

    @abstractmethod
    def encode(self, indices: torch.Tensor, n: int, out: torch.Tensor) -> None:
        """Write int32 indices into `out`, a uint8 tensor of `nbytes(n, k)`."""

    @abstractmethod
    def decode(self, code: torch.Tensor, n: int, k: int) -> torch.Tensor:
        """The inverse. What was not written by `encode` gives something other than k ascending indices below n."""


class Everything(IndexCode):
    """All of them: nothing to say."""

    name = "everything"

    def nbytes(self, n: int, k: int) -> int:
        return 0

    def encode(self, indices: torch.Tensor, n: int, out: torch.Tensor) -> None:
        pass

    def decode(self, code: torch.Tensor, n: int, k: int) -> torch.Tensor:
        return torch.arange(k, dtype=torch.int32, device=code.device)


class Int32(IndexCode):
    """Four bytes each."""

    name = "int32"

    def nbytes(self, n: int, k: int) -> int:
        return 8 * _words(32 * k)

    def encode(self, indices: torch.Tensor, n: int, out: torch.Tensor) -> None:
        out.view(torch.int32)[: indices.numel()] = indices
        out.view(torch.int32)[indices.numel() :] = 0

    def decode(self, code: torch.Tensor, n: int, k: int) -> torch.Tensor:
        return code.view(torch.int32)[:k].clone()


class Bitmap(IndexCode):
    """One bit for every entry."""

    name = "bitmap"

    def nbytes(self, n: int, k: int) -> int:
        return 8 * _words(n)

    def encode(self, indices: torch.Tensor, n: int, out: torch.Tensor) -> None:
        _set_bits(indices, out)

    def decode(self, code: torch.Tensor, n: int, k: int) -> torch.Tensor:
        return _ones(code, k)


class EliasFano(IndexCode):
    """About 2 + log2(n/k) bits each, within 12 % of the entropy log2(n choose k) where it is used.

    The lowest floor(log2(n/k)) bits of every index are packed one after the other; the rest, which ascends by small
    steps, is written in unary: k ones among at most n / 2^low zeros. References: Elias 1974, Fano 1971.
    """

    name = "elias-fano"

    def nbytes(self, n: int, k: int) -> int:
        low, high = self._parts(n, k)
        return 8 * (low + high)

    def encode(self, indices: torch.Tensor, n: int, out: torch.Tensor) -> None:
        low_bits = self._low_bits(n, indices.numel())
        low, high = self._sections(out, n, indices.numel())
        if kernels is not None and out.device.type == "cpu":
            kernels.encode_elias_fano(indices.numpy(), low_bits, low.numpy().view("u8"), high.numpy().view("u8"))
            return
        upper = (indices.long() >> low_bits) + torch.arange(indices.numel(), device=indices.device)
        _set_bits(upper, high)
        shifts = torch.arange(low_bits, device=indices.device)
        low.copy_(_pack(((indices.long()[:, None] >> shifts) & 1).flatten(), low.numel()))

    def decode(self, code: torch.Tensor, n: int, k: int) -> torch.Tensor:
        low_bits = self._low_bits(n, k)
        low, high = self._sections(code, n, k)
        if kernels is not None and code.device.type == "cpu":
            indices = torch.full((k,), -1, dtype=torch.int32)
            words = low.numpy().view("u8"), high.numpy().view("u8")
            found = kernels.decode_elias_fano(*words, low_bits, indices.numpy())
            return indices if found == k else indices[:0]
        upper = _ones(high, k).long()
        if upper.numel() != k:
            return upper[:0].to(torch.int32)
        upper -= torch.arange(k, device=code.device)
        shifts = torch.arange(low_bits, device=code.device)
        rest = (_unpack(low)[: k * low_bits].view(k, low_bits) << shifts).sum(1)
        return ((upper << low_bits) | rest).to(torch.int32)

    def _low_bits(self, n: int, k: int) -> int:
        return max(0, (n // k).bit_length() - 1)

    def _parts(self, n: int, k: int) -> tuple[int, int]:
        low_bits = self._low_bits(n, k)
        return _words(k * low_bits), _words(k + (n >> low_bits) + 1)

    def _sections(self, code: torch.Tensor, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = self._parts(n, k)
        return code[: 8 * low], code[8 * low : 8 * (low + high)]


_CODES = (Everything(), Int32(), Bitmap(), EliasFano())


def code_for(n: int, k: int) -> IndexCode:
    """The smallest coding of k of n indices.

    >>> [code_for(1000, k).name for k in (1, 10, 600, 1000)]
    ['int32', 'elias-fano', 'bitmap', 'everything']
    """
    everything, *others = _CODES
    return everything if k == n else min(others, key=lambda code: code.nbytes(n, k))


class Coding:
    """How the chosen entries of a tensor of n entries become one message, [indices | values], and back.

    Args:
        n: entries of the whole tensor.
        k: entries that are sent.
        dtype: of the tensor.
        values: "float32" sends values as they are. The others round them, and what that loses stays in the error:
            "float16" to 11 bits, but what is below 3e-8 is nothing; "bfloat16" to 8 bits; "log4" to one of eight
            magnitudes (values.py).
    """

    def __init__(self, n: int, k: int, dtype: torch.dtype, values: str = "float32") -> None:
        self.n, self.k = n, k
        self.code, self._values = code_for(n, k), value_code(values, dtype, n, k)
        self.rounds = self._values.rounds
        self.index_bytes = self.code.nbytes(n, k)
        self.nbytes = self.index_bytes + self._values.nbytes(k)

    def encode(self, entries: Sparse, out: torch.Tensor) -> None:
        """Write into `out`, a uint8 tensor of `nbytes`."""
        self.encode_indices(entries.indices, out[: self.index_bytes])
        self._values.encode(entries.values, out[self.index_bytes :])

    def decode(self, message: torch.Tensor) -> Sparse:
        indices = self.decode_indices(message[: self.index_bytes])
        return Sparse(indices, self.decode_values(message))

    def decode_values(self, message: torch.Tensor) -> torch.Tensor:
        return self._values.decode(message[self.index_bytes :], self.k)

    def encode_indices(self, indices: torch.Tensor, out: torch.Tensor) -> None:
        self.code.encode(indices, self.n, out)

    def decode_indices(self, code: torch.Tensor) -> torch.Tensor:
        """Raises ValueError unless they are k ascending indices below n: a faulty peer must not write out of bounds."""
        indices = self.code.decode(code, self.n, self.k)
        if indices.numel() != self.k or not _ascends(indices, self.n):
            raise ValueError(f"the {self.code.name} code received is not {self.k} ascending indices below {self.n}.")
        return indices


def _words(bits: int) -> int:
    return -(-bits // 64)


def _ascends(indices: torch.Tensor, n: int) -> bool:
    if kernels is not None and indices.device.type == "cpu":
        return bool(kernels.ascends(indices.numpy(), n))
    if indices.numel() == 0:
        return True
    steps_up = bool((indices[1:] > indices[:-1]).all())
    return steps_up and int(indices[0]) >= 0 and int(indices[-1]) < n


def _set_bits(places: torch.Tensor, out: torch.Tensor) -> None:
    """Set these bits of `out` and clear the others."""
    if kernels is not None and out.device.type == "cpu":
        kernels.encode_bitmap(places.numpy(), out.numpy().view("u8"))
        return
    bits = torch.zeros(8 * out.numel(), dtype=torch.uint8, device=out.device)
    bits[places.long()] = 1
    out.copy_(_pack(bits, out.numel()))


def _ones(code: torch.Tensor, k: int) -> torch.Tensor:
    """The places of the k ones; something of another length when there are not k."""
    if kernels is not None and code.device.type == "cpu":
        indices = torch.full((k,), -1, dtype=torch.int32)
        return indices if kernels.decode_bitmap(code.numpy().view("u8"), indices.numpy()) == k else indices[:0]
    return _unpack(code).nonzero().squeeze(1).to(torch.int32)


def _pack(bits: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Bits, lowest first, as bytes."""
    padded = torch.zeros(8 * nbytes, dtype=torch.uint8, device=bits.device)
    padded[: bits.numel()] = bits
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)
    return (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def _unpack(code: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(8, device=code.device)
    return ((code.long()[:, None] >> shifts) & 1).flatten()
