"""Error feedback: what was not sent is kept and added to the next gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping

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
        self._error = torch.zeros(layout.numel, dtype=layout.dtype, device=layout.device)
        self._x = torch.zeros_like(self._error)
        self._shortlist = Shortlist(layout.dtype)
        self._held: list[slice] = []
        self.empty = True  # the error is zero everywhere

    def feed(self, grads: Mapping[str, torch.Tensor], scale: float = 1.0, hold: bool = False) -> Compensated:
        """x = scale * gradient + error, for all parameters; one without a gradient counts as having a zero one.

        With `hold`, a parameter whose gradient is zero everywhere sends nothing and keeps its error for later: DDP
        drops what comes back for a parameter that no rank used.
        """
        self._held = []
        self._shortlist.count = 0
        energy = 0.0
        for name, where in self._layout.slices.items():
            error, x = self._error[where], self._x[where]
            grad = grads[name].detach().reshape(-1) if name in grads else torch.zeros_like(x)
            if hold and not grad.any():
                self._held.append(where)
                x.zero_()
            else:
                energy += compensate(error, grad, scale, x, where.start, self._shortlist)
        # A sum of squares overflows before its terms do; only then is it worth looking at every one of them.
        finite = math.isfinite(energy) or bool(torch.isfinite(self._x).all())
        return Compensated(x=self._x, energy=energy, finite=finite, shortlist=self._shortlist)

    def commit(self, nothing_left: bool) -> None:
        """The step happened: what the exchange left of x is the new error."""
        for where in self._held:
            self._x[where] = self._error[where]
        if self._low_pass == 1:
            self._error, self._x = self._x, self._error
        else:
            self._error.lerp_(self._x, self._low_pass)
        self.empty = nothing_left and not self._held and self._low_pass == 1

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
        for name, parameter in self._layout.parameters.items():
            if errors[name].shape != parameter.shape:
                raise ValueError(
                    f"error of {name!r} has shape {tuple(errors[name].shape)}, not {tuple(parameter.shape)}."
                )
        for name, where in self._layout.slices.items():
            self._error[where] = errors[name].reshape(-1)
        self.empty = not self._error.any()
