"""Synchronizer: carries gradients from backward() to step()."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.collectives import ALL_GATHERS, BROADCASTS
from thinwire.errors import PlanMismatch
from thinwire.exchange import TOLD, Stopwatch, build, complete
from thinwire.link.base import Link
from thinwire.link.process import ProcessLink
from thinwire.link.tcp import TcpLink
from thinwire.train.layout import Layout, refuse_sparse_gradients
from thinwire.train.memory import ErrorMemory
from thinwire.types import Moment, Plan, StepRecord, Told

_STATE_VERSION = 1
_STEPS_COMPARED = 16
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
        timeout: seconds of silence from a peer after which waiting for it ends in `LinkTimeout`. Torch's own all_reduce
            has the process group's timeout instead.
        low_pass: ScaleCom's factor for the error memory, in (0, 1]; 1 keeps all of the error.
        scaler: the GradScaler in use, if any, so that errors are kept in unscaled units. Average before `unscale_`.
        group: the process group, by default the whole world.
        ignore: names of parameters that are not to be averaged.
        broadcast_parameters: False if the ranks' models are known to be equal at the start.

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
        ignore: Collection[str] = (),
        broadcast_parameters: bool = True,
    ) -> None:
        if exchange == "dense" and ratio not in (None, 1):
            warnings.warn(f"ratio={ratio} has no effect: exchange='dense' sends everything.", stacklevel=2)
        if scaler is not None and not hasattr(scaler, "get_scale"):
            raise TypeError(f"scaler must be a GradScaler, got {type(scaler).__name__}.")
        default = 1.0 if exchange == "dense" else 0.01
        self._plan = complete(exchange, default if ratio is None else ratio, collective, broadcast, values)
        refuse_sparse_gradients(model)
        self._model = model
        self._layout = Layout.of((name, p) for name, p in model.named_parameters() if name not in ignore)
        self.memory = ErrorMemory(self._layout, low_pass)
        self.exchange = build(self._plan, self._layout.sizes)
        self.step = 0
        self.skipped = 0
        self.last: StepRecord | None = None
        self._scaler = scaler
        self.link = link if isinstance(link, Link) else _open(link, group, timeout)
        options = f"low_pass={low_pass!r}, {'a' if scaler else 'no'} scaler"
        _agree(self.link, {"plan": str(self._plan), "model": self._layout.describe(), "options": options})
        if broadcast_parameters:
            _broadcast(self.link, [*model.parameters(), *model.buffers()])

    @property
    def plan(self) -> Plan:
        return self._plan

    @cached_property
    def _out(self) -> torch.Tensor:
        return torch.zeros(self._layout.numel + TOLD, dtype=self._layout.dtype, device=self._layout.device)

    def average_gradients(self) -> None:
        """Put the mean over all ranks into every trainable parameter's gradient."""
        trainable = {id(p) for p in self._model.parameters() if p.requires_grad}
        if trainable != {id(p) for p in self._layout.parameters.values()}:
            raise RuntimeError(
                "other parameters are trainable now than when this Synchronizer was built; build a new one."
            )
        for parameter in self._layout.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.average({name: p.grad for name, p in self._layout.parameters.items() if p.grad is not None})

    def average(self, grads: Mapping[str, torch.Tensor], hold: Collection[str] = ()) -> None:
        """Replace the gradients of all parameters, given by name, by their mean. Those in `hold` keep their error."""
        if grads.keys() != self._layout.slices.keys():
            raise ValueError(f"gradients do not fit the model: {sorted(grads.keys() ^ self._layout.slices.keys())}.")
        for name, grad in grads.items():
            if grad.is_sparse:
                raise ValueError(f"the gradient of {name!r} is sparse, which cannot be exchanged.")
        try:
            self._average(grads, hold)
        except BaseException as error:
            self.link.abort(f"{type(error).__name__}: {error}")
            raise

    def _average(self, grads: Mapping[str, torch.Tensor], hold: Collection[str]) -> None:
        link, watch, start, sent_before = self.link, Stopwatch(), self.link.now(), self.link.sent_bytes
        link.moment = Moment(self.step, str(self._plan))
        scale = self._scaler.get_scale() if self._scaler is not None else 1.0
        with watch:
            fed = self.memory.feed(grads, 1 / scale, hold)
        told = Told(energy=fed.energy, not_finite=not fed.finite, holding=self.memory.holding)
        done = self.exchange.run(link, fed, self._plan.ratio, self.step, told, self._out)
        skip = done.told.not_finite > 0
        with watch:
            if skip:
                done.mean.fill_(math.nan)  # as it would be without us; whoever scales the loss then skips the step
            else:
                self.memory.commit(nothing_left=self.exchange.lossless and done.told.holding == 0)
            for name, grad in grads.items():
                self._hand_over(done.mean[self._layout.slices[name]], scale, name, grad)
        gain = math.nan if skip else _gain(done.told)
        seconds, computed = link.now() - start, watch.seconds + done.compress_seconds
        self.close_step(seconds, computed, link.sent_bytes - sent_before, gain, skip)

    def _hand_over(self, mean: torch.Tensor, scale: float, name: str, grad: torch.Tensor) -> None:
        """Write the mean into the gradient; what a narrower type cannot hold is kept in every rank's error."""
        if grad.dtype == torch.float16:
            limit = torch.finfo(torch.float16).max / scale
            kept = mean.clamp(-limit, limit)
            if not torch.equal(kept, mean) and not mean.isnan().any():
                self.memory.put_back(self._layout.slices[name], mean - kept)
                mean = kept
        grad.copy_((mean if scale == 1 else mean * scale).view(grad.shape))

    def close_step(self, seconds: float, compress_seconds: float, sent_bytes: int, gain: float, skip: bool) -> None:
        """Record a step and count it."""
        N = self.link.world_size
        self.last = StepRecord(
            step=self.step,
            plan=self._plan,
            seconds=seconds,
            compress_seconds=compress_seconds,
            sent_bytes=sent_bytes,
            dense_bytes=2 * (N - 1) * self._layout.nbytes // N,
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
        counts = {name: state.get(name) for name in ("step", "skipped")}
        if not all(isinstance(count, int) and count >= 0 for count in counts.values()):
            raise ValueError(f"this state's counts are not whole numbers: {counts}.")
        if not isinstance(state.get("error"), Mapping):
            raise ValueError("this state has no errors by parameter name.")
        self.memory.load_state_dict(state["error"])
        self.step, self.skipped = state["step"], state["skipped"]

    def common_step(self, steps: Collection[int]) -> int | None:
        """The newest step that is among every rank's `steps`, as `Checkpoint.steps` gives them; None if there is none.

        Ranks may have been killed between two saves, so each one's newest need not be there on all. Call on all ranks.
        """
        newest = sorted(steps)[-_STEPS_COMPARED:]
        everyones = torch.full((self.link.world_size, _STEPS_COMPARED), -1, dtype=torch.int64)
        everyones[self.link.rank, : len(newest)] = torch.tensor(newest, dtype=torch.int64)
        self.link.moment = Moment(self.step, "resume")
        ALL_GATHERS["direct"].run(self.link, everyones.view(-1))
        return max(set.intersection(*(set(row) - {-1} for row in everyones.tolist())), default=None)

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


def _gain(told: Told) -> float:
    """Energy sent over energy available. Sums of float32 may come out a little above 1, or beyond its range."""
    if told.energy == 0:
        return 1.0
    return min(1.0, told.energy_sent / told.energy) if math.isfinite(told.energy) else math.nan


def _agree(link: Link, facts: dict[str, str]) -> None:
    """Refuse to start unless every rank has the same facts."""
    link.moment = Moment(plan="start")
    digests = torch.zeros(link.world_size, len(facts), 32, dtype=torch.uint8)
    for i, fact in enumerate(facts.values()):
        digests[link.rank, i] = torch.tensor(list(hashlib.sha256(fact.encode()).digest()))
    ALL_GATHERS["direct"].run(link, digests.view(-1))
    for rank in range(link.world_size):
        for i, (name, fact) in enumerate(facts.items()):
            if not torch.equal(digests[rank, i], digests[link.rank, i]):
                raise PlanMismatch(
                    f"rank {rank} has another {name} than rank {link.rank}, whose {name} is: {fact[:500]}.",
                    rank=link.rank,
                    peer=rank,
                )


def _broadcast(link: Link, tensors: list[torch.Tensor]) -> None:
    """Make all tensors rank 0's, in one message for each type."""
    link.moment = Moment(plan="start")
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        same = [t.detach() for t in tensors if t.dtype == dtype]
        flat = torch.cat([t.reshape(-1) for t in same])
        BROADCASTS["tree"].run(link, flat)
        for tensor, part in zip(same, torch.split(flat, [t.numel() for t in same]), strict=True):
            tensor.copy_(part.view(tensor.shape))
