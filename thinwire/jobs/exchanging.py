"""How the workers' models are kept together, one class for each kind of method, all alike to the training loop."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from thinwire.jobs.emulated import EmulatedLink
from thinwire.jobs.job import TRUTH, Job
from thinwire.jobs.method import Method
from thinwire.link.base import Link
from thinwire.link.tcp import TcpLink
from thinwire.records import Records
from thinwire.train.ddp import attach
from thinwire.train.gossip import Gossip
from thinwire.train.sync import Synchronizer

POWERSGD_RANK, POWERSGD_FROM = 2, 10
ONE_BUCKET_MB = 1000  # PowerSGD compresses matrices bucket by bucket


class Exchanging(ABC):
    """One way of exchanging, at work.

    Attributes:
        model: what the training loop calls.
        records: where rank 0 writes; None on the others.
        sent_bytes: payload that this rank has sent to train with.
        dense_bytes: what it would have sent uncompressed.
    """

    model: nn.Module
    records: Records | None

    def __init__(self) -> None:
        self.sent_bytes = self.dense_bytes = 0

    @abstractmethod
    def after_step(self) -> None:
        """Count a step that the optimizer has made, and record it where nobody else does."""

    @property
    def control_seconds(self) -> float:
        """What measuring and deciding have cost this rank so far."""
        return 0.0

    @abstractmethod
    def pause(self) -> None:
        """What happens until the next step is no step's time. Call on all workers."""

    @contextmanager
    def looking(self, module: nn.Module, group: dist.ProcessGroup | None) -> Iterator[float | None]:
        """While this is open the module is what to test: with everybody's part in it. Call on all workers.

        Gives how far apart the workers' models are, if they may differ.
        """
        buffers = [b for b in module.buffers() if b.is_floating_point()]
        own = [b.clone() for b in buffers]
        if buffers:
            mean = torch.cat([b.reshape(-1).float() for b in buffers])
            dist.all_reduce(mean.div_(dist.get_world_size()), group=group)
            for buffer, part in zip(buffers, torch.split(mean, [b.numel() for b in buffers]), strict=True):
                buffer.copy_(part.view(buffer.shape))
        yield None
        for buffer, kept in zip(buffers, own, strict=True):
            buffer.copy_(kept)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of this rank."""

    @abstractmethod
    def close(self) -> None:
        """Say goodbye."""


def begin(job: Job, module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, records: Path) -> Exchanging:
    """What the job's method asks for. Call on all workers."""
    method = Method.parse(job.method)
    if method.kind == "ddp":
        return Plain(method, module, records, spread=job.own)
    link: str | Link = "tcp"
    if job.link == "shaped":
        link = EmulatedLink(TcpLink(timeout=job.timeout), job.schedule(), folder / TRUTH)
    if method.kind == "gossip":
        return Gossiping(job, method, module, optimizer, link, records)
    return Attached(job, method, module, link, records)


def _wrapped(module: nn.Module, spread: bool, **options: Any) -> DistributedDataParallel:
    """Buffers stay each worker's own: to send them around at every step would cost more than the gradient does.

    Args:
        spread: whether the workers' parameters may differ at first, and must become rank 0's.
    """
    return DistributedDataParallel(module, forward_sync_buffers=False, init_sync=spread, **options)


class Attached(Exchanging):
    """One of our exchanges under DistributedDataParallel, fixed or adaptive."""

    def __init__(self, job: Job, method: Method, module: nn.Module, link: str | Link, records: Path) -> None:
        super().__init__()
        self.model = _wrapped(module, spread=job.own)
        plan: dict[str, Any] = {"exchange": method.name, "ratio": method.ratio, "collective": method.collective}
        if method.kind == "adaptive":
            from thinwire.control.adaptive import Adaptive

            plan = {"exchange": Adaptive(objective=job.objective, ratios=job.ratios)}
        elif method.name == "dense" and link != "tcp":
            plan["collective"] = method.collective or "ring"  # torch's own would not be shaped
        self._comm: Synchronizer = attach(self.model, **plan, link=link, timeout=job.timeout, records=records)
        self.records = self._comm.records

    def after_step(self) -> None:
        last = self._comm.last
        assert last is not None, "a step has been made"
        self.sent_bytes += last.sent_bytes
        self.dense_bytes += last.dense_bytes
        _follow(self._comm.link)

    @property
    def control_seconds(self) -> float:
        return self._comm.control_seconds

    def pause(self) -> None:
        self._comm.pause()

    def state_dict(self) -> dict[str, Any]:
        return self._comm.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._comm.load_state_dict(state)

    def close(self) -> None:
        self._comm.close()


class Gossiping(Exchanging):
    """Decentralised training: every worker has a model of its own."""

    def __init__(
        self,
        job: Job,
        method: Method,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        link: str | Link,
        records: Path,
    ) -> None:
        super().__init__()
        assert method.topology is not None and method.compressor is not None
        self.model = module
        self._gossip = Gossip(
            module,
            optimizer,
            method.name,
            topology=method.topology,
            compressor=method.compressor,
            seed=job.seed,
            link=link,
            timeout=job.timeout,
            broadcast_parameters=job.own,
            records=records,
        )
        self.records = self._gossip.records

    def after_step(self) -> None:
        last = self._gossip.last
        assert last is not None, "a step has been made"
        self.sent_bytes += last.sent_bytes
        self.dense_bytes += last.dense_bytes
        _follow(self._gossip.link)

    def pause(self) -> None:
        self._gossip.pause()

    @contextmanager
    def looking(self, module: nn.Module, group: dist.ProcessGroup | None) -> Iterator[float | None]:
        """The mean of all models, and sqrt(mean_i ||x_i - mean||^2) / ||mean||."""
        own = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
        with self._gossip.average():
            mean = nn.utils.parameters_to_vector(module.parameters()).detach()
            away = (own - mean).double().square().sum() / dist.get_world_size()
            dist.all_reduce(away, group=group)
            yield float(away.sqrt() / mean.double().norm().clamp_min(1e-300))

    def state_dict(self) -> dict[str, Any]:
        return self._gossip.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._gossip.load_state_dict(state)

    def close(self) -> None:
        self._gossip.close()


def _follow(link: Link) -> None:
    if isinstance(link, EmulatedLink):
        link.follow()


class Plain(Exchanging):
    """DistributedDataParallel as it is, or with one of its own hooks.

    What it sends is worked out, not measured: a ring all-reduce of what the hook makes of the gradient. `seconds` of
    its steps is the time in which this rank did not compute. PowerSGD begins anew when a run goes on: its errors belong
    to buckets, which are others then.
    """

    def __init__(self, method: Method, module: nn.Module, records: Path, spread: bool) -> None:
        super().__init__()
        options = {"bucket_cap_mb": ONE_BUCKET_MB} if method.name == "ddp-powersgd" else {}
        self.model = model = _wrapped(module, spread, **options)
        self._name, self._world_size = method.name, dist.get_world_size()
        self._numel = sum(p.numel() for p in module.parameters() if p.requires_grad)
        self._nbytes = sum(p.nbytes for p in module.parameters() if p.requires_grad)
        self._power: powerSGD_hook.PowerSGDState | None = None
        if method.name == "ddp-fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif method.name == "ddp-powersgd":
            self._power = powerSGD_hook.PowerSGDState(None, POWERSGD_RANK, POWERSGD_FROM)
            model.register_comm_hook(self._power, powerSGD_hook.powerSGD_hook)
        self.records = Records(records, method=method.text) if dist.get_rank() == 0 else None
        self._step, self._numel_so_far = 0, 0
        self._last_end, self._last_busy = math.nan, 0.0

    def after_step(self) -> None:
        now, busy = time.monotonic(), time.thread_time()
        ratio = self._ratio()
        dense = 2 * (self._world_size - 1) * self._nbytes // self._world_size
        whole, computed = now - self._last_end, busy - self._last_busy
        self.sent_bytes += int(dense * ratio)
        self.dense_bytes += dense
        if self.records is not None:
            self.records.write(
                "step",
                step=self._step,
                plan={"exchange": self._name, "collective": "torch", "ratio": ratio},
                seconds=max(0.0, whole - computed),
                compress_seconds=0.0,
                sent_bytes=int(dense * ratio),
                dense_bytes=dense,
                gain=None,
                skipped=False,
                step_seconds=whole,
                predicted_seconds=None,
            )
        self._step += 1
        self._last_end, self._last_busy = now, busy

    def _ratio(self) -> float:
        """What of the gradient's bytes is sent."""
        if self._name == "ddp-fp16":
            return 0.5
        if self._power is None:
            return 1.0
        so_far = int(self._power.total_numel_after_compression)
        since, self._numel_so_far = so_far - self._numel_so_far, so_far
        return since / self._numel if since else 1.0

    def pause(self) -> None:
        self._last_end = math.nan

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step = int(state["step"])

    def close(self) -> None:
        if self.records is not None:
            self.records.close()
