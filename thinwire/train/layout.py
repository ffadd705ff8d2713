"""Where each parameter lies in the one flat gradient."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Layout:
    """Parameters in the order of their names' registration, which no bucket rebuild changes."""

    parameters: dict[str, nn.Parameter]
    slices: dict[str, slice]

    @classmethod
    def of(cls, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Layout:
        """Lay out the trainable ones; refuse what cannot be exchanged, by name."""
        parameters = {plain_name(name): p for name, p in named_parameters if p.requires_grad}
        if not parameters:
            raise ValueError("the model has no trainable parameters, so there is no gradient to exchange.")
        for name, p in parameters.items():
            if not p.is_floating_point():
                raise ValueError(
                    f"parameter {name!r} is {p.dtype}; only real floating-point gradients can be exchanged."
                )
        devices = {p.device for p in parameters.values()}
        if len(devices) > 1:
            raise ValueError(f"parameters lie on several devices ({', '.join(map(str, devices))}); one is supported.")
        slices, end = {}, 0
        for name, p in parameters.items():
            slices[name] = slice(end, end + p.numel())
            end += p.numel()
        if end >= 1 << 31:
            raise ValueError(f"the model has {end} trainable entries; indices are sent for fewer than 2^31.")
        return cls(parameters, slices)

    def counts(self, indices: torch.Tensor) -> list[int]:
        """How many of these entries of the flat gradient, given in ascending order, each parameter has."""
        ends = torch.tensor([where.stop for where in self.slices.values()], dtype=indices.dtype, device=indices.device)
        before = torch.searchsorted(indices, ends)  # an entry at the end of one is in the next
        return torch.diff(before, prepend=before.new_zeros(1)).tolist()

    def describe(self) -> str:
        """The names, shapes and types: the same on two ranks whose gradients can be averaged."""
        return "; ".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in self.parameters.items())

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(p.numel() for p in self.parameters.values())

    @property
    def nbytes(self) -> int:
        """Of the gradients in their own types."""
        return sum(p.numel() * p.element_size() for p in self.parameters.values())

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """What errors are kept in: half-precision gradients get single-precision errors."""
        wide = any(p.dtype == torch.float64 for p in self.parameters.values())
        return torch.float64 if wide else torch.float32


def plain_name(name: str) -> str:
    """A parameter's name whether or not torch.compile has wrapped its module, so that states fit both."""
    return name.replace("_orig_mod.", "")


def names_of(model: nn.Module, names: Collection[str]) -> frozenset[str]:
    """The names by which `named_parameters` gives these parameters. It knows a shared one by its first name alone."""
    if isinstance(names, str):
        raise TypeError(f"ignore must be names of parameters, as in ignore=[{names!r}], got a single str.")
    every = {plain_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    asked = {plain_name(name) for name in names}
    if unknown := sorted(asked - every.keys()):
        raise ValueError(f"the model has no parameters {', '.join(map(repr, unknown))}, which are to be ignored.")
    found = {id(every[name]) for name in asked}
    return frozenset(plain_name(name) for name, p in model.named_parameters() if id(p) in found)


def refuse_ddp(model: nn.Module) -> None:
    if isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel):  # torch.compile may have wrapped it too
        raise TypeError(
            "this model is wrapped in DistributedDataParallel, which averages already: use thinwire.attach(model)."
        )


def refuse_sparse_gradients(model: nn.Module) -> None:
    """Raise for a layer that would give a sparse gradient, by the name of its weight."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ValueError(
                f"parameter {f'{name}.weight'.lstrip('.')!r} has sparse gradients, which cannot be exchanged. "
                "Build the layer with sparse=False."
            )
