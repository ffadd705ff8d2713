"""The drop-in: one communication hook under DistributedDataParallel.

DDP hands over the gradient in buckets, in one fixed order, and changes their layout after the first steps. The hook
keeps them until the last one is there, since the best entries can only be chosen among all, and then runs one exchange,
in the thread that called it. Nothing is ever sent from a future's callback.
"""

import math
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives.native import TorchAllReduce
from thinwire.compress.base import multiply
from thinwire.control.adaptive import Adaptive
from thinwire.errors import ThinwireWarning
from thinwire.link.base import Link
from thinwire.train.layout import plain_name, refuse_sparse_gradients
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
    if getattr(model, "skip_all_reduce_unused_params", False):
        raise ValueError(
            "DDP(skip_all_reduce_unused_params=True) leaves out buckets that no rank has used, without a word to its "
            "hook, which would wait for them. Wrap the module without it."
        )
    refuse_sparse_gradients(model.module)  # of which DDP has a bucket each, without memory that could be looked at
    averaged = _averaged_by(model)
    with _thawed(averaged.values()):
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
            ignore=dict(model.module.named_parameters()).keys() - averaged.keys(),
            broadcast_parameters=False,
            in_buckets=True,
            records=records,
        )
        model.register_comm_hook(_Courier(comm, model, averaged), _hook)
    _attached.add(model)
    return comm


def _averaged_by(model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """The parameters that DDP has in its buckets, by name.

    These were trainable when it wrapped the model. It ignores others by name, but none of the outermost module's own.
    Only its buckets tell, and only with memory as large as they are, which is freed at once.
    """
    try:
        buckets = model.reducer._get_zeros_like_grad_buckets()
    except RuntimeError as error:
        raise ValueError(
            "DDP has buckets for sparse gradients, of a layer that was frozen since. Build it with sparse=False, or "
            "freeze it before the module is wrapped."
        ) from error
    in_buckets = {id(p) for bucket in buckets for p in bucket.parameters()}
    found = {name: p for name, p in model.module.named_parameters() if id(p) in in_buckets}
    if len(found) < len(in_buckets):
        raise ValueError(
            f"{len(in_buckets) - len(found)} of the parameters that DDP averages are no longer the module's: they were "
            "replaced or removed after it was wrapped. Wrap it anew."
        )
    return found


@contextmanager
def _thawed(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """With all of them trainable: DDP goes on averaging what was frozen after it had wrapped it, or may be later."""
    frozen = [p for p in parameters if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _hook(state: "_Courier", bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.take(bucket)


class _Courier:
    """Between DDP's buckets and the synchronizer."""

    def __init__(self, comm: Synchronizer, model: DistributedDataParallel, averaged: dict[str, nn.Parameter]) -> None:
        self._comm = comm
        self._model = weakref.ref(model)  # DDP holds us where the garbage collector cannot see it
        self._names = {id(p): plain_name(name) for name, p in averaged.items()}
        self._strides = {id(p): p.stride() for p in averaged.values()}
        self._waiting: list[tuple[GradBucket, torch.futures.Future[torch.Tensor]]] = []
        self._missing: set[int] = set()  # those of them that have not come yet in this backward
        self._passing = _Passing(comm)
        self._held_up = False  # a step that could pass, by an error that has to be sent with it
        # DDP throws away what comes back for a parameter that no rank used, so its error must not be sent then.
        self._may_hold = model.find_unused_parameters or model.static_graph
        self._used: set[str] = set()
        self._has_warned = False
        if self._may_hold:
            mark_used = weakref.WeakMethod(self._mark_used)  # or the parameters would keep us when DDP is gone
            for parameter in averaged.values():
                register: Callable[..., Any] = parameter.register_post_accumulate_grad_hook
                weakref.finalize(self, register(lambda p: (mark := mark_used()) and mark(p)).remove)

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
        self._missing, self._waiting = set(self._names), []  # an earlier backward may have failed half-way
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
        unused = grads.keys() - self._used if self._may_hold else set()
        left = None if self._has_warned else self._left_in(unused, grads)
        self._comm.average(grads, hold=unused)
        if left is not None:
            self._warn_of_what_is_left(left)
        self._used.clear()
        for bucket, future in self._waiting:
            future.set_result(bucket.buffer())
        self._waiting = []

    def _left_in(self, unused: Collection[str], grads: Mapping[str, torch.Tensor]) -> str | None:
        """A parameter that is not used, but has a gradient that is not zero, if there is one: an earlier step's.

        DDP would average it again; we cannot tell it from no gradient.
        """
        for bucket, _ in self._waiting:
            for parameter in bucket.parameters():
                name = self._names[id(parameter)]
                if name in unused and parameter.grad is not None and grads[name].numel():
                    least, most = grads[name].aminmax()  # seven times as fast as any()
                    if least != 0 or most != 0:
                        return name
        return None

    def _warn_of_what_is_left(self, name: str) -> None:
        self._has_warned = True
        warnings.warn(
            f"the gradient of {name!r} is left from an earlier step, and this rank does not use the parameter in this "
            "one: it counts as zero where another rank does, and with gradient_as_bucket_view in any case. Zero "
            "gradients after every synchronised backward(), and accumulate under model.no_sync().",
            ThinwireWarning,
            stacklevel=2,
        )

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
            if _is_within_backward():
                Variable._execution_engine.queue_callback(self._finish)
            else:
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


def _is_within_backward() -> bool:
    """Whether DDP calls us while gradients arrive, and does not wait before backward() is over.

    In a static graph's first step it is a callback of the engine's that calls us, and waits; on a rank that has joined
    there is no backward(). Either may be within another backward(), as under torch.utils.checkpoint.
    """
    node = torch._C._current_autograd_node()
    return node is not None and node.name().endswith("AccumulateGrad")


def _future_of(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    return torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
