"""Explorer: finds what each candidate ratio keeps of the gradient by trying it out, and then undoes it.

This is how Tyagi & Swany (2023) find their gains: "each candidate ratio is run for 10 iterations from a checkpoint".
`Adaptive` knows the gains without it, from one pass over the magnitudes; this is for those who want the paper's way, or
want to see how well the other does.
"""

from __future__ import annotations

import copy
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from thinwire.train.sync import Synchronizer

ITERATIONS = 10
SELDOM = 10  # real steps, at least, for each that was tried out and undone


class Explorer:
    """Runs the steps of a training loop, and tries out ratios between two of them when the controller asks for it.

        comm = thinwire.attach(model, thinwire.Adaptive(objective="knee", explore="restore"))

        def step(batch):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            return loss

        explorer = thinwire.Explorer(comm, model, optimizer, step)
        for batch in batches:
            loss = explorer.step(batch)

    Ratios are tried out on the last batches that were trained on, so the position in the data never moves. Parameters,
    buffers, gradients, optimizer, error and random numbers are kept in memory and put back: the run goes on with the
    same bits as one that never explored, as long as it goes on with the same plan.

    What was tried out costs as much as real steps do, so ratios are not tried out again before there were ten times as
    many of these: 500, of five ratios and ten iterations. That is counted anew where a run is resumed.

    Args:
        comm: what `attach` gave, or a Synchronizer.
        model: what `step` trains.
        optimizer: what `step` steps.
        step: one whole step of training on a batch, the same on all ranks. What it returns is passed on.
        also: whatever else `step` changes, with a state_dict: a scheduler, a GradScaler.
        iterations: for how many steps each ratio is tried.
    """

    def __init__(
        self,
        comm: Synchronizer,
        model: nn.Module,
        optimizer: Optimizer,
        step: Callable[[Any], Any],
        *,
        also: Iterable[Any] = (),
        iterations: int = ITERATIONS,
    ) -> None:
        if iterations < 1:
            raise ValueError(f"iterations must be at least 1, got {iterations}.")
        if not isinstance(comm, Synchronizer):
            raise TypeError(f"comm must be what attach gave, or a Synchronizer, got {type(comm).__name__}.")
        if not callable(step):
            raise TypeError(f"step must be a function that trains on a batch, got {type(step).__name__}.")
        if comm.controller is None or comm.controller.explore != "restore":
            raise ValueError(
                'only a run that asks for it tries ratios out: attach(model, thinwire.Adaptive(explore="restore")).'
            )
        _refuse_another_model(comm, model)
        self._comm, self._model, self._step = comm, model, step
        self._controller = comm.controller
        self._kept_alike = [optimizer, *also]
        for each in self._kept_alike:
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise TypeError(f"{type(each).__name__} has no state_dict, so it could not be put back.")
        self._batches: deque[Any] = deque(maxlen=iterations)
        self._distance = SELDOM * iterations * len(self._controller.to_explore(comm.plan)[1])
        self._since = 0  # real steps since ratios were tried out last, or else since this one began

    def step(self, batch: Any) -> Any:
        """Train on a batch; then try out ratios if it is time to."""
        result = self._step(batch)
        self._batches.append(batch)
        self._since += 1
        if self._is_due:
            self.explore()
        return result

    @property
    def _is_due(self) -> bool:
        """Alike on all ranks: each has made the same steps."""
        if len(self._batches) != self._batches.maxlen or not self._comm.wants_exploring:
            return False
        # A first time is for free. After it the plan changes, and the gain with it, however little the gradient does.
        return self._since >= self._distance or not self._comm.has_explored

    def explore(self) -> dict[float, float]:
        """Try out every candidate ratio on the last batches, now. Gives the mean gain at each, which is then used.

        Call it on all ranks, or on none.
        """
        if not self._batches:
            raise RuntimeError("there is no batch yet to try ratios out on: train on some first.")
        exchange, ratios = self._controller.to_explore(self._comm.plan)
        put_back = self._remember()
        gains = {}
        for ratio in ratios:
            found = []
            try:
                with self._comm.trying(exchange, ratio):
                    for batch in self._batches:
                        self._step(batch)
                        assert self._comm.last is not None
                        found.append(self._comm.last.gain)
            finally:
                put_back()
            finite = [gain for gain in found if gain == gain]  # a step that was not finite was skipped
            if finite:
                gains[ratio] = statistics.fmean(finite)
        self._since = 0
        self._comm.explored(exchange, gains)  # that there was nothing to find, too, or it would be tried at every step
        return gains

    def _remember(self) -> Callable[[], None]:
        """Keep all that a step changes; gives what puts it back, as often as wanted."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        places = [(module._buffers, dict(module._buffers)) for module in self._model.modules()]
        values = [tensor.detach().clone() for tensor in tensors]
        grads = [None if tensor.grad is None else tensor.grad.clone() for tensor in tensors]
        put_back_states = [_remember_state(each) for each in self._kept_alike]
        memory = self._comm.memory
        error, empty = memory.state_dict(), memory.empty
        numbers = _random_state()

        def put_back() -> None:
            for buffers, before in places:  # some models assign new ones
                buffers.update(before)
            with torch.no_grad():
                for tensor, value, grad in zip(tensors, values, grads, strict=True):
                    tensor.copy_(value)
                    _put_back_grad(tensor, grad)
            for put_back_state in put_back_states:
                put_back_state()
            memory.load_state_dict(error)
            memory.empty = empty  # all ranks put theirs back, so what was known of all still holds
            _set_random_state(numbers)

        return put_back


def _refuse_another_model(comm: Synchronizer, model: nn.Module) -> None:
    """What is not put back would keep the steps that were only tried out. The model may hold more than is averaged."""
    kept = {id(parameter) for parameter in model.parameters()}
    for name, parameter in comm.averaged.items():
        if id(parameter) not in kept:
            raise ValueError(
                f"parameter {name!r} is averaged, but is none of this model's, so what is tried out on it would never "
                "be undone. Give the model that comm was made for, as it is or wrapped."
            )


def _remember_state(each: Any) -> Callable[[], None]:
    """Keep what an optimizer, or whatever else has a state_dict, has become; gives what puts it back."""
    owners = list(each.state) if isinstance(each, Optimizer) else []
    before = copy.deepcopy((each.state_dict(), [each.state[owner] for owner in owners]))  # at once: they share tensors

    def put_back() -> None:
        state, own = copy.deepcopy(before)
        each.load_state_dict(state)
        if isinstance(each, Optimizer):  # which casts its state to its parameters' type, and would lose bits by that
            each.state.clear()
            each.state.update(zip(owners, own, strict=True))

    return put_back


def _put_back_grad(tensor: torch.Tensor, grad: torch.Tensor | None) -> None:
    """In place where there is one: under DDP it may be a view of a bucket."""
    if grad is None:
        tensor.grad = None
    elif tensor.grad is None:
        tensor.grad = grad.clone()
    else:
        tensor.grad.copy_(grad)


def _random_state() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def _set_random_state(state: tuple[Any, ...]) -> None:
    python, numpy, processor, cuda = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(processor)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
