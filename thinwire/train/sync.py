"""Synchronizer: carries gradients from backward() to step()."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.collectives import BROADCASTS
from thinwire.exchange import TOLD, build, complete
from thinwire.link.base import Link
from thinwire.link.process import ProcessLink
from thinwire.link.tcp import TcpLink
from thinwire.train.layout import Layout, refuse_sparse_gradients
from thinwire.train.memory import ErrorMemory
from thinwire.types import StepRecord

_STATE_VERSION = 1
_LINKS = {"tcp": TcpLink, "process": ProcessLink}


class Synchronizer:
    """Averages a model's gradients over all ranks, as far as its plan sends them, and keeps the rest for later.

    `attach` uses one under DistributedDataParallel. In a loop of one's own:

        sync = thinwire.Synchronizer(model, exchange="star-topk", ratio=0.01)
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            sync.average_gradients()
            optimizer.step()

    Args:
        model: its parameters and buffers become rank 0's at the start, as under DDP; buffers are left alone after that.
        exchange: dense, topk-allgather, layerwise-topk, ms-topk, star-topk or var-topk.
        ratio: the share of entries to send, in (0, 1]: 0.01 is 1 %, "100x".
        collective: ring, tree, halving or direct; where gradients are reduced also torch, its own all_reduce. Each
            exchange has a default.
        broadcast: how star-topk and var-topk spread indices: tree, or scatter (fewer bytes, more messages).
        values: float32, or float16 for half the bytes of a gathered value; what rounding loses is kept in the error.
        link: tcp (our own connections), process (torch.distributed's), or a `Link`.
        timeout: seconds of silence from a peer after which waiting for it ends in `LinkTimeout`.
        low_pass: ScaleCom's factor for the error memory, in (0, 1]; 1 keeps all of the error.
        scaler: the GradScaler in use, if any, so that errors are kept in unscaled units.
        group: the process group, by default the whole world.

    Attributes:
        plan: what runs at the next step.
        step: how many synchronised steps were made.
        skipped: how many of them were discarded because some rank's gradient was not finite.
        last: the record of the last step, None before the first.
    """

    def __init__(
        self,
        model: nn.Module,
        exchange: str = "topk-allgather",
        *,
        ratio: float | None = None,
        collective: str | None = None,
        broadcast: str = "tree",
        values: str = "float32",
        link: str | Link = "tcp",
        timeout: float = 300.0,
        low_pass: float = 1.0,
        scaler: Any = None,
        group: dist.ProcessGroup | None = None,
        broadcast_parameters: bool = True,
    ) -> None:
        if exchange == "dense" and ratio not in (None, 1):
            warnings.warn(f"ratio={ratio} has no effect: exchange='dense' sends everything.", stacklevel=2)
        default = 1.0 if exchange == "dense" else 0.01
        self.plan = complete(exchange, default if ratio is None else ratio, collective, broadcast, values)
        refuse_sparse_gradients(model)
        self._layout = Layout.of(model.named_parameters())
        self.memory = ErrorMemory(self._layout, low_pass)
        self.exchange = build(self.plan, self._layout.sizes)
        self.step = 0
        self.skipped = 0
        self.last: StepRecord | None = None
        self._scaler = scaler
        self._out = torch.zeros(self._layout.numel + TOLD, dtype=self._layout.dtype, device=self._layout.device)
        self.link = link if isinstance(link, Link) else _open(link, group, timeout)
        if broadcast_parameters:
            _broadcast(self.link, [*model.parameters(), *model.buffers()])

    def average_gradients(self) -> None:
        """Put the mean over all ranks into every trainable parameter's gradient."""
        for parameter in self._layout.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.average({name: p.grad for name, p in self._layout.parameters.items() if p.grad is not None})

    def average(self, grads: Mapping[str, torch.Tensor], hold: bool = False) -> None:
        """Replace gradients, given by parameter name, by their mean. See `ErrorMemory.feed` for `hold`."""
        try:
            self._average(grads, hold)
        except BaseException as error:
            self.link.abort(f"{type(error).__name__}: {error}")
            raise

    def _average(self, grads: Mapping[str, torch.Tensor], hold: bool) -> None:
        link, start, sent_before = self.link, self.link.now(), self.link.sent_bytes
        link.moment = link.moment._replace(step=self.step, plan=str(self.plan))
        scale = self._scaler.get_scale() if self._scaler is not None else 1.0
        fed = self.memory.feed(grads, 1 / scale, hold)
        numbers = (0.0 if fed.finite else 1.0, fed.energy)
        done = self.exchange.run(link, fed, self.plan.ratio, self.step, numbers, self._out)
        energy_sent, ranks_not_finite, energy = done.told.tolist()
        skip = ranks_not_finite > 0
        if skip:
            done.mean.fill_(math.nan)  # as it would be without us; whoever scales the loss then skips the step
        else:
            self.memory.commit(nothing_left=self.exchange.lossless)
        for name, grad in grads.items():
            mean = done.mean[self._layout.slices[name]].view(grad.shape)
            grad.copy_(mean if scale == 1 else mean * scale)
        gain = math.nan if skip else (energy_sent / energy if energy else 1.0)
        self.close_step(link.now() - start, done.compress_seconds, link.sent_bytes - sent_before, gain, skip)

    def close_step(self, seconds: float, compress_seconds: float, sent_bytes: int, gain: float, skip: bool) -> None:
        """Record a step and count it."""
        N = self.link.world_size
        self.last = StepRecord(
            step=self.step,
            plan=self.plan,
            seconds=seconds,
            compress_seconds=compress_seconds,
            sent_bytes=sent_bytes,
            dense_bytes=2 * (N - 1) * self._layout.numel * self._layout.dtype.itemsize // N,
            gain=gain,
            skipped=skip,
        )
        self.step += 1
        self.skipped += skip

    def state_dict(self) -> dict[str, Any]:
        """All that this rank needs to go on as if nothing had happened: numbers, and tensors by parameter name."""
        return {
            "version": _STATE_VERSION,
            "rank": self.link.rank,
            "world_size": self.link.world_size,
            "step": self.step,
            "skipped": self.skipped,
            "error": self.memory.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of this rank. A state that does not fit is refused whole."""
        expected = {"version": _STATE_VERSION, "rank": self.link.rank, "world_size": self.link.world_size}
        for field, ours in expected.items():
            if state.get(field) != ours:
                raise ValueError(
                    f"this state has {field} {state.get(field)!r}, this run has {ours!r}: every rank keeps an error of "
                    "its own, so each must load the state that it saved, in a world of the same size."
                )
        self.memory.load_state_dict(state["error"])
        self.step, self.skipped = int(state["step"]), int(state["skipped"])

    def close(self) -> None:
        """Say goodbye to the other ranks. Nothing can be averaged after."""
        self.link.close()


def _open(name: str, group: dist.ProcessGroup | None, timeout: float) -> Link:
    if name not in _LINKS:
        raise ValueError(f"unknown link {name!r}. Known are: {', '.join(_LINKS)}.")
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "there is no process group. Start the script with torchrun and call "
            "torch.distributed.init_process_group() first."
        )
    return _LINKS[name](group, timeout=timeout)


def _broadcast(link: Link, tensors: list[torch.Tensor]) -> None:
    """Make all tensors rank 0's, in one message for each type."""
    link.moment = link.moment._replace(plan="start")
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        same = [t.detach() for t in tensors if t.dtype == dtype]
        flat = torch.cat([t.reshape(-1) for t in same])
        BROADCASTS["tree"].run(link, flat)
        for tensor, part in zip(same, torch.split(flat, [t.numel() for t in same]), strict=True):
            tensor.copy_(part.view(tensor.shape))
