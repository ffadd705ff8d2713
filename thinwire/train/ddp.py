"""The drop-in: one communication hook under DistributedDataParallel.

DDP hands over the gradient in buckets, in one fixed order, and changes their layout after the first steps. The hook
keeps them until the last one is there, since the best entries can only be chosen among all, and then runs one exchange,
in the thread that called it. Nothing is ever sent from a future's callback.
"""

import math
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.autograd import Variable
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives.native import TorchAllReduce
from thinwire.compress.base import multiply
from thinwire.control.adaptive import Adaptive
from thinwire.link.base import Link
from thinwire.train.layout import plain_name
from thinwire.train.sync import Synchronizer

_attached: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def attach(
    model: DistributedDataParallel,
    exchange: str | Adaptive = "adaptive",
    *,
    ratio: float | None = None,
    collective: str | None = None,
    broadcast: str = "tree",
    values: str | None = None,
    link: str | Link = "tcp",
    timeout: float = 300.0,
    low_pass: float = 1.0,
    scaler: Any = None,
    records: Path | str | None = None,
) -> Synchronizer:
    """Exchange a DDP model's gradients as the network allows. The training loop stays as it is.

        model = DistributedDataParallel(model)
        comm = thinwire.attach(model)
        ...
        comm.explain()

    See `Synchronizer` for the arguments and for what comes back. A plan of exchange="dense", collective="torch" is
    DDP's own exchange, bit for bit, and it is what runs where compression does not pay.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"attach needs a model wrapped in DistributedDataParallel, got {type(model).__name__}. "
            "For a loop without DDP use thinwire.Synchronizer."
        )
    if model in _attached:
        raise RuntimeError("thinwire is attached to this model already; DDP takes one communication hook for good.")
    if model._comm_hooks:
        raise RuntimeError("this model has a communication hook already, and DDP takes only one. Wrap the module anew.")
    comm = Synchronizer(
        model.module,
        exchange,
        ratio=ratio,
        collective=collective,
        broadcast=broadcast,
        values=values,
        link=link,
        timeout=timeout,
        low_pass=low_pass,
        scaler=scaler,
        group=model.process_group,
        ignore=model.parameters_to_ignore,
        broadcast_parameters=False,
        in_buckets=True,
        records=records,
    )
    model.register_comm_hook(_Courier(comm, model), _hook)
    _attached.add(model)
    return comm


def _hook(state: "_Courier", bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.take(bucket)


class _Courier:
    """Between DDP's buckets and the synchronizer."""

    def __init__(self, comm: Synchronizer, model: DistributedDataParallel) -> None:
        self._comm = comm
        self._model = weakref.ref(model)  # DDP holds us where the garbage collector cannot see it
        self._names = {id(p): plain_name(name) for name, p in model.module.named_parameters()}
        self._strides = {id(p): p.stride() for p in model.module.parameters()}
        self._waiting: list[tuple[GradBucket, torch.futures.Future[torch.Tensor]]] = []
        named = model.module.named_parameters()
        self._expected = {id(p) for name, p in named if p.requires_grad and name not in model.parameters_to_ignore}
        self._missing: set[int] = set()  # those of them that have not come yet in this backward
        self._passing = _Passing(comm)
        self._held_up = False  # a step that could pass, by an error that has to be sent with it
        # DDP throws away what comes back for a parameter that no rank used, so its error must not be sent then.
        self._may_hold = model.find_unused_parameters or model.static_graph
        self._used: set[str] = set()
        if self._may_hold:
            for parameter in (p for p in model.module.parameters() if id(p) in self._names and p.requires_grad):
                parameter.register_post_accumulate_grad_hook(self._mark_used)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model (an average of its weights, say) has no hook, and so no courier."""
        return type(None), ()

    def take(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        brought = {id(p) for p in bucket.parameters()}
        if not brought <= self._missing:
            self._begin()
        self._missing -= brought
        # In its first step DDP's static graph says of no bucket that it is the last.
        all_there = bucket.is_last() or not self._missing
        buffer = bucket.buffer()
        if buffer.is_sparse:
            names = ", ".join(repr(self._names[id(p)]) for p in bucket.parameters())
            raise ValueError(f"the gradient of {names} is sparse, which cannot be exchanged.")
        self._note_part(buffer.nbytes, all_there)
        if self._passes:
            self._used.clear()
            return self._passing.take(buffer, all_there)
        future = _future_of(buffer)
        self._waiting.append((bucket, future))
        if all_there:
            self._exchange()
        return future

    def _begin(self) -> None:
        model = self._model()
        if model is not None and not getattr(model, "_divide_by_initial_world_size", True):
            raise ValueError("Join(divide_by_initial_world_size=False) is not supported; the default, True, is.")
        self._comm.agree_after_resuming()
        self._comm.hear_by_torch()
        self._missing, self._waiting = set(self._expected), []  # an earlier backward may have failed half-way
        self._first_at, self._nbytes = self._comm.link.now(), 0
        self._passes = self._comm.exchange.bucketwise and self._comm.memory.empty
        self._passing.begin()
        held_up = self._comm.exchange.bucketwise and not self._passes
        if held_up and not self._held_up:
            self._comm.pause()  # it may be this step alone that waits, for an error that is left: not what dense takes
        self._held_up = held_up

    def _note_part(self, nbytes: int, all_there: bool) -> None:
        self._nbytes += nbytes
        if all_there:
            overlap = self._comm.link.now() - self._first_at, nbytes / max(1, self._nbytes)
            self._comm.note_overlap(*((0.0, 1.0) if self._held_up else overlap))

    def _exchange(self) -> None:
        grads = {
            self._names[id(parameter)]: self._view(parameter, grad)
            for bucket, _ in self._waiting
            for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True)
        }
        self._comm.average(grads, hold=grads.keys() - self._used if self._may_hold else ())
        self._used.clear()
        for bucket, future in self._waiting:
            future.set_result(bucket.buffer())
        self._waiting = []

    def _view(self, parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """The gradient entry by entry as the parameter has them: DDP lays channels-last ones out in that order."""
        if parameter.stride() != self._strides[id(parameter)]:
            raise RuntimeError(
                f"parameter {self._names[id(parameter)]!r} has changed its memory format. Convert the model before it "
                "is wrapped in DistributedDataParallel."
            )
        if parameter.is_contiguous() or not _is_dense(parameter):
            return grad
        return grad.as_strided(parameter.shape, parameter.stride(), grad.storage_offset())

    def _mark_used(self, parameter: torch.Tensor) -> None:
        self._used.add(self._names[id(parameter)])


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its entries fill one stretch of memory without gaps or overlaps, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class _Passing:
    """A dense step over torch's own all_reduce: each bucket goes as soon as it is there, exactly as DDP sends it.

    They are waited for when backward() is over, just before DDP itself would: a callback in Python would have to be
    woken up in another thread for every bucket.
    """

    def __init__(self, comm: Synchronizer) -> None:
        self._comm = comm
        self._native = TorchAllReduce()
        self._under_way: list[tuple[torch.Tensor, Any, torch.futures.Future[torch.Tensor]]] = []

    def begin(self) -> None:
        link = self._comm.link
        self._start, self._sent_before, self._under_way = link.now(), link.sent_bytes, []

    def take(self, buffer: torch.Tensor, all_there: bool) -> torch.futures.Future[torch.Tensor]:
        link = self._comm.link
        self._comm.look(buffer)
        self._native.count(link, buffer)
        # DDP multiplies by the inverse where others divide; with 3 ranks the bits differ.
        if not multiply(buffer, 1 / link.world_size):
            buffer[0] = math.nan  # tells all ranks: a mean of finite numbers is finite, so no one need look at it
        # What dist.all_reduce calls in the end: its own checks take longer than all of ours.
        assert link.group is not None  # or there were no plan that passes
        future = _future_of(buffer)
        self._under_way.append((buffer, link.group.allreduce([buffer]), future))
        if all_there:
            self._comm.tell_by_torch()
            if torch._C._current_autograd_node() is not None:
                Variable._execution_engine.queue_callback(self._finish)
            else:  # backward() is over, as in a static graph's first step, or there is none on a rank that has joined
                self._finish()
        return future

    def _finish(self) -> None:
        """Wait for all buckets, give them back, and close the step."""
        link, finite = self._comm.link, True
        taken_at = link.now()
        for buffer, work, future in self._under_way:
            work.wait()
            finite &= not buffer.numel() or math.isfinite(buffer[0].item())
            future.set_result(buffer)
        self._under_way = []
        now, sent_bytes, gain = link.now(), link.sent_bytes - self._sent_before, 1.0 if finite else math.nan
        self._comm.close_step(now - self._start, 0.0, sent_bytes, gain, not finite, now - taken_at)
        self._comm.ask_before_telling()


def _future_of(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    return torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
