"""What compression works on, and the contract of a selector."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from thinwire.types import Sparse

try:
    from thinwire.compress import kernels as kernels
except ImportError:  # numba follows new Pythons with some delay; everything here then runs on torch alone
    kernels = None  # type: ignore[assignment]


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether the compiled loops can work on this tensor; otherwise torch's own operators do."""
    return kernels is not None and tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)


class Shortlist:
    """Entries seen to be large while x was made, so that choosing the largest k need not read x again.

    It notes what reaches a threshold, guessed from the last two steps. If the k largest are not all in it, or it ran
    over, it is of no use in that step and nothing else follows: what is chosen never depends on it.
    """

    _MARGIN = 0.95  # the guess is that far below the expected threshold
    _ROOM = 4  # times k

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._smallest = float("inf")
        self.threshold = float("inf")
        self.count = 0
        self._chosen = Sparse(torch.empty(0), torch.empty(0))
        self._allocate(1)

    def aim(self, k: int, smallest: float) -> None:
        """Prepare for a step that will want `k` entries, when the smallest of them was `smallest` this time."""
        drift = min(max(smallest / self._smallest, 0.5), 2.0) if self._smallest < float("inf") else 1.0
        self._smallest = smallest if smallest > 0 else float("inf")
        self.threshold = self._smallest * drift**0.5 * self._MARGIN  # half-way: growth slows down
        self.reserve(k)

    def reserve(self, k: int) -> None:
        """Make room for somewhat more than `k` entries."""
        room = self._ROOM * k + 1024
        if not room <= len(self.indices) <= 4 * room:
            self._allocate(room)

    def holds(self, k: int) -> bool:
        """Whether it surely contains the `k` largest."""
        return k <= self.count <= len(self.indices)

    def output(self, k: int) -> Sparse:
        """Buffers for `k` chosen entries and one more, good until the next call: fresh ones would cost page faults."""
        if self._chosen.indices.numel() != k + 1:
            self._chosen = Sparse(torch.empty(k + 1, dtype=torch.int32), torch.empty(k + 1, dtype=self._dtype))
        return self._chosen

    def _allocate(self, room: int) -> None:
        self.indices = np.empty(room, np.int32)
        self.values = torch.empty(room, dtype=self._dtype).numpy()


@dataclass(frozen=True, kw_only=True)
class Compensated:
    """The error-fed gradient g_e of a rank: what an exchange is given.

    Attributes:
        x: gradient + error, flat. What is sent is taken out of it, so that what is left is the new error.
        energy: the sum of its squares.
        gradient: that of the gradient alone.
        finite: whether every entry is finite. When not, entries may be chosen at will: the step will be discarded.
        shortlist: its large entries, if they were noted on the way.
    """

    x: torch.Tensor
    energy: float
    finite: bool
    gradient: float = 0.0
    shortlist: Shortlist | None = None

    @classmethod
    def of(cls, x: torch.Tensor) -> Compensated:
        """Take a tensor as it is, with no error to add."""
        energy = float(torch.dot(x.double(), x.double()))
        return cls(x=x, energy=energy, finite=bool(torch.isfinite(x).all()), gradient=energy)


class Selector(ABC):
    """Chooses which entries of a flat tensor are sent. How many depends on sizes alone, so no rank need be told."""

    name: str

    def count(self, numel: int, ratio: float) -> int:
        """How many of `numel` entries are sent: ratio * numel, rounded down, but at least one."""
        return min(numel, max(1, int(ratio * numel * (1 + 1e-12))))  # 0.29 * 100 is a little less than 29

    @abstractmethod
    def take(self, fed: Compensated, ratio: float, step: int) -> Sparse:
        """Take exactly `count(...)` entries out of x, leaving zeros. Indices are int32."""


def take_entries(selector: Selector, fed: Compensated, ratio: float, step: int) -> Sparse:
    """The selector's choice; of a gradient that is not finite just the first entries, since no order is left in it."""
    if fed.finite:
        return selector.take(fed, ratio, step)
    k = selector.count(fed.x.numel(), ratio)
    return take_out(fed.x, torch.arange(k, dtype=torch.int32, device=fed.x.device))


def take_out(x: torch.Tensor, indices: torch.Tensor) -> Sparse:
    """Take the entries at these indices out of x, leaving zeros."""
    if has_kernels(x):
        values = torch.empty(indices.numel(), dtype=x.dtype)
        kernels.take_out(x.numpy(), indices.numpy(), values.numpy())
    else:
        values = torch.index_select(x, 0, indices)
        x.index_fill_(0, indices.long(), 0.0)
    return Sparse(indices, values)


def add_entries(x: torch.Tensor, entries: Sparse, scale: float) -> None:
    """x[indices] += scale * values."""
    if has_kernels(x):
        exact = x.numpy().dtype.type
        kernels.scatter_add(x.numpy(), entries.indices.numpy(), entries.values.numpy(), exact(scale))
    else:
        x.index_add_(0, entries.indices, entries.values, alpha=scale)


def multiply(x: torch.Tensor, factor: float) -> bool:
    """x *= factor, flat, with the bits of x.mul_(factor). Says whether all of x is finite, in the same pass."""
    if has_kernels(x):
        entries = x.numpy()
        total = float(kernels.multiply(entries, entries.dtype.type(factor)))
    else:
        total = float(x.mul_(factor).sum())
    # A sum may overflow where no term of it does; only then is it worth looking at every one of them.
    return math.isfinite(total) or bool(torch.isfinite(x).all())


def compensate(
    error: torch.Tensor, grad: torch.Tensor, scale: float, x: torch.Tensor, offset: int, shortlist: Shortlist
) -> tuple[float, float]:
    """x = error + scale * grad, all flat; note large entries in the shortlist; return the energies of x and of grad."""
    if not has_kernels(x):
        exact_grad = grad.to(x.dtype)
        torch.add(error, exact_grad, alpha=scale, out=x)
        return float(torch.dot(x, x)), scale * scale * float(torch.dot(exact_grad, exact_grad))
    exact = x.numpy().dtype.type
    energy, gradient, shortlist.count = kernels.compensate(
        error.numpy(),
        grad.to(x.dtype).numpy(),
        exact(scale),
        x.numpy(),
        offset,
        exact(min(shortlist.threshold, float(np.finfo(exact).max))),
        shortlist.indices,
        shortlist.values,
        shortlist.count,
    )
    return float(energy), float(gradient)
