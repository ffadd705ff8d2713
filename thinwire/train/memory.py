"""Error feedback: what was not sent is kept and added to the next gradient."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import cached_property

import torch

from thinwire.compress.base import Compensated, Shortlist, compensate
from thinwire.train.layout import Layout


class ErrorMemory:
    """One flat error per rank, in unscaled units, starting at zero.

    A step is a transaction: `feed` makes x = gradient + error beside the error, an exchange takes what it sends out of
    x, and only `commit` makes what is left the new error. A step that is not committed has left no trace.

    Args:
        low_pass: the factor of ScaleCom's filtered memory, m <- (1 - low_pass) m + low_pass (what is left), where it is
            called beta (Chen et al. 2020). 1 is plain error feedback.
    """

    def __init__(self, layout: Layout, low_pass: float = 1.0) -> None:
        if not 0 < low_pass <= 1:
            raise ValueError(f"low_pass must be in (0, 1], got {low_pass=}. Plain error feedback is low_pass=1.0.")
        self._layout = layout
        self._low_pass = low_pass
        self._shortlist = Shortlist(layout.dtype)
        self._held: list[slice] = []
        self.empty = True  # here and on every other rank

    @cached_property
    def _error(self) -> torch.Tensor:
        """Allocated when it is first needed: a dense exchange never does."""
        return torch.zeros(self._layout.numel, dtype=self._layout.dtype, device=self._layout.device)

    @cached_property
    def _x(self) -> torch.Tensor:
        return torch.zeros_like(self._error)

    def feed(self, grads: Mapping[str, torch.Tensor], scale: float = 1.0, hold: Collection[str] = ()) -> Compensated:
        """x = scale * gradient + error, for all parameters. Those in `hold` send nothing and keep their error."""
        self._held = [where for name, where in self._layout.slices.items() if name in hold]
        self._shortlist.count = 0
        energy, gradient = 0.0, 0.0
        for name, where in self._layout.slices.items():
            error, x = self._error[where], self._x[where]
            if name in hold:
                x.zero_()
            else:
                flat = grads[name].detach().reshape(-1)
                of_x, of_gradient = compensate(error, flat, scale, x, where.start, self._shortlist)
                energy, gradient = energy + of_x, gradient + of_gradient
        # A sum of squares overflows before its terms do; only then is it worth looking at every one of them.
        finite = math.isfinite(energy) or bool(torch.isfinite(self._x).all())
        return Compensated(x=self._x, energy=energy, finite=finite, gradient=gradient, shortlist=self._shortlist)

    @property
    def holding(self) -> bool:
        """Whether the last `feed` held any error back."""
        return any(bool(self._error[where].any()) for where in self._held)

    def commit(self, nothing_left: bool) -> None:
        """The step happened: what the exchange left of x is the new error, nothing if it says so for all ranks."""
        for where in self._held:
            self._x[where] = self._error[where]
        if self._low_pass == 1:
            self._error, self._x = self._x, self._error
        else:
            self._error.lerp_(self._x, self._low_pass)
        self.empty = nothing_left and self._low_pass == 1

    def put_back(self, where: slice, rest: torch.Tensor) -> None:
        """Keep what could not be handed on after all."""
        self._error[where] += rest
        self.empty = False

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The error of every parameter by its name, in its shape."""
        return {
            name: self._error[where].clone().view(self._layout.parameters[name].shape)
            for name, where in self._layout.slices.items()
        }

    def load_state_dict(self, errors: Mapping[str, torch.Tensor]) -> None:
        """Take over errors; refuse any that do not fit, before the first is taken."""
        missing, unknown = self._layout.slices.keys() - errors.keys(), errors.keys() - self._layout.slices.keys()
        if missing or unknown:
            raise ValueError(f"errors do not fit the model: missing {sorted(missing)}, unknown {sorted(unknown)}.")
        taken = {name: self._fitting(name, errors[name]) for name in self._layout.slices}
        for name, where in self._layout.slices.items():
            self._error[where] = taken[name]
        # Even if it is zero here: the others load theirs, and all must go on the same way.
        self.empty = False

    def _fitting(self, name: str, error: object) -> torch.Tensor:
        shape = self._layout.parameters[name].shape
        if not isinstance(error, torch.Tensor) or error.shape != shape:
            found = f"shape {tuple(error.shape)}" if isinstance(error, torch.Tensor) else f"type {type(error).__name__}"
            raise ValueError(f"error of {name!r} has {found}, not shape {tuple(shape)}.")
        flat = error.detach().to(self._layout.device, self._layout.dtype).reshape(-1)
        if not torch.isfinite(flat).all():
            raise ValueError(f"error of {name!r} is not finite.")
        return flat
