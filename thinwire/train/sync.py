"""Synchronizer: carries gradients from backward() to step()."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.control.adaptive import Adaptive
from thinwire.control.decision import Decision
from thinwire.control.explain import explain
from thinwire.control.prices import Way, way_of
from thinwire.errors import LinkTimeout, PlanMismatch, ThinwireWarning
from thinwire.exchange import TOLD, Exchange, Stopwatch, build, complete, values_for
from thinwire.link.base import Link
from thinwire.train.choice import chosen, described, prices_for
from thinwire.train.layout import Layout, names_of, plain_name, refuse_ddp, refuse_sparse_gradients
from thinwire.train.memory import ErrorMemory
from thinwire.train.pilot import Pilot
from thinwire.train.rehearsal import rehearse
from thinwire.train.resuming import VERSION, Saved, newest_common
from thinwire.train.start import agree, begin_records, open_link, spread
from thinwire.types import Moment, Network, Plan, StepRecord, Told

_STEPS_UNEXPLORED = 100
_SENT_SECONDS = 1.0  # between two records of what was sent of each parameter, at least


class Synchronizer:
    """Averages a model's gradients over all ranks, as far as its plan sends them, and keeps the rest for later.

    `attach` uses one under DistributedDataParallel. In a loop of one's own:

        sync = thinwire.Synchronizer(model)
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            sync.average_gradients()
            optimizer.step()

    Args:
        model: its parameters and buffers become rank 0's at the start, as under DDP; buffers are left alone after that.
        exchange: adaptive (the default): measure the network and choose, and choose again when something changes; how
            can be set by an `Adaptive` in its place. Or one for good: dense, topk-allgather, layerwise-topk, ms-topk,
            star-topk or var-topk.
        ratio: of a fixed exchange, the share of entries to send, in (0, 1]: 0.01 is 1 %, "100x".
        collective: of a fixed exchange, ring, tree, halving or direct; where gradients are reduced also torch, its own
            all_reduce. Each exchange has a default.
        broadcast: how a fixed star-topk or var-topk spreads indices: tree, or scatter (fewer bytes, more messages).
        values: how a fixed exchange sends gathered values: float32, the default, as they are; float16 or bfloat16 in
            half of the bytes; log4 in an eighth, up to a ratio of 0.1. What rounding loses is kept in the error. For
            adaptive it is a setting of `Adaptive`.
        link: tcp (our own connections), process (torch.distributed's), or a `Link`.
        timeout: seconds of silence from a peer after which waiting for it ends in `LinkTimeout`. Torch's own all_reduce
            has the process group's timeout instead.
        low_pass: ScaleCom's factor for the error memory, in (0, 1]; 1 keeps all of the error.
        scaler: the GradScaler in use, if any, so that errors are kept in unscaled units. Average before `unscale_`.
        group: the process group, by default the whole world.
        ignore: names of parameters that are not to be averaged, as `model.named_parameters()` gives them.
        broadcast_parameters: False if the ranks' models are known to be equal at the start.
        in_buckets: True if the gradient comes in DDP's buckets, which torch's own all_reduce carries as they are.
        records: a file for one JSON line per step and per decision, written by rank 0 (thinwire/records.py).

    Attributes:
        plan: what runs at the next step.
        step: how many synchronised steps were made.
        skipped: how many of them were discarded because some rank's gradient was not finite.
        last: the record of the last step, None before the first.
        told_bytes: what this rank has sent of numbers beside torch's own all_reduce. They are in no other count.
        records: where rank 0 writes; None on the others, or where nothing is recorded.
    """

    def __init__(
        self,
        model: nn.Module,
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
        group: dist.ProcessGroup | None = None,
        ignore: Collection[str] = (),
        broadcast_parameters: bool = True,
        in_buckets: bool = False,
        records: Path | str | None = None,
    ) -> None:
        controller, plan = chosen(exchange, ratio, collective, broadcast, values)
        if scaler is not None and not hasattr(scaler, "get_scale"):
            raise TypeError(f"scaler must be a GradScaler, got {type(scaler).__name__}.")
        refuse_ddp(model)
        refuse_sparse_gradients(model)
        self._model = model
        self._ignore = names_of(model, ignore)
        self._layout = Layout.of(self._trainable())
        self.memory = ErrorMemory(self._layout, low_pass)
        self.step = 0
        self.skipped = 0
        self.last: StepRecord | None = None
        self.told_bytes = 0
        self._is_resumed = False  # and ranks have not agreed yet that they all are, at the same step
        self._scaler = scaler
        self._sent_noted = -math.inf
        self._overlap = (0.0, 1.0)  # see note_overlap
        self._explored_by: float = _STEPS_UNEXPLORED  # the step; infinity once something was, or it was said
        self._exchanges: dict[Way, Exchange] = {}
        # Before there is a link, on which the others would wait for the one that compiles longest.
        may_run = ((plan.exchange,), plan.values) if controller is None else (controller.exchanges, controller.values)
        rehearse(*may_run, self._layout.dtype)
        self.link = open_link(link, group, timeout)
        if controller is not None and self.link.group is None:
            plan = complete("dense", 1.0, "ring")  # torch's own all_reduce needs a process group
        prices = prices_for(self._layout, self.link, controller, in_buckets)
        self.records = begin_records(self.link, records, **described(prices, controller))
        self._steering = Stopwatch(self.link)
        self._pilot = Pilot(self.link, prices, controller, plan, self.records)
        options = f"low_pass={low_pass!r}, {'a' if scaler else 'no'} scaler"
        rule = str(plan) if controller is None else repr(controller)
        agree(self.link, {"plan": rule, "model": self._layout.describe(), "options": options})
        if broadcast_parameters:
            spread(self.link, [*model.parameters(), *model.buffers()])
        self._pilot.survey()
        if controller is not None and self.link.world_size > 1 and self._knows_nothing:
            # From the line that makes a Synchronizer; where attach does, it is one further out.
            warnings.warn(_nothing_measured(self.link, plan), ThinwireWarning, stacklevel=3 if in_buckets else 2)

    @property
    def plan(self) -> Plan:
        return self._pilot.plan

    @property
    def averaged(self) -> Mapping[str, nn.Parameter]:
        """The parameters whose gradients are averaged, by name."""
        return self._layout.parameters

    @property
    def exchange(self) -> Exchange:
        """What runs the present plan. One that comes back finds what it had learned of the gradient."""
        plan = self.plan
        way = way_of(plan)
        if way not in self._exchanges:
            self._exchanges[way] = build(plan, self._layout.sizes)
        return self._exchanges[way]

    @property
    def decision(self) -> Decision | None:
        """The last one of this run, with all that was seen and considered; None before it, or where a plan is fixed."""
        return self._pilot.decision

    @property
    def network(self) -> Network | None:
        """Latency and seconds per byte as all ranks agree on them; None before anything was measured."""
        return self._pilot.view.network

    @property
    def _knows_nothing(self) -> bool:
        """Not even one of latency and rate: a link that can measure knows the latency at least after its survey."""
        return self._pilot.view.alpha is None and self._pilot.view.beta is None

    @property
    def control_seconds(self) -> float:
        """What measuring and deciding have cost this rank so far."""
        return self._steering.seconds

    def explain(self) -> None:
        """Print what runs, since when and why, and what else was considered."""
        pilot = self._pilot
        trust = pilot.monitor.alpha().confidence, pilot.monitor.beta().confidence
        objective = None if pilot.controller is None else pilot.controller.objective
        print(explain(pilot.decision, pilot.standing, pilot.view, self.last, objective, trust))

    @cached_property
    def _out(self) -> torch.Tensor:
        return torch.zeros(self._layout.numel + TOLD, dtype=self._layout.dtype, device=self._layout.device)

    def average_gradients(self) -> None:
        """Put the mean over all ranks into the gradient of every trainable parameter that is not ignored."""
        if {id(p) for _, p in self._trainable()} != {id(p) for p in self._layout.parameters.values()}:
            raise RuntimeError(
                "other parameters are trainable now than when this Synchronizer was built; build a new one."
            )
        for parameter in self._layout.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.average({name: p.grad for name, p in self._layout.parameters.items() if p.grad is not None})

    def _trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        named = self._model.named_parameters()
        return ((name, p) for name, p in named if p.requires_grad and plain_name(name) not in self._ignore)

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

    def agree_after_resuming(self) -> None:
        """At the first step after a state was loaded: ranks that go on from different ones are refused by name.

        Our own messages say which step they are of, but torch's do not.
        """
        if self._is_resumed:
            self._is_resumed = False
            facts = {"step": str(self.step), "state": json.dumps(self._pilot.agreed())}
            try:
                agree(self.link, facts, Moment(plan="resume"))  # without a step, which may be what differs
            except (LinkTimeout, PlanMismatch) as error:
                text = f"{error} Rank {error.rank} has loaded a state to resume at step {self.step}, and so must all."
                raise type(error)(text, rank=error.rank, peer=error.peer) from error

    def _average(self, grads: Mapping[str, torch.Tensor], hold: Collection[str]) -> None:
        self.agree_after_resuming()
        link, pilot, exchange = self.link, self._pilot, self.exchange
        watch, start, sent_before = Stopwatch(link), link.now(), link.sent_bytes
        link.moment = Moment(self.step, str(pilot.plan))
        scale = self._scaler.get_scale() if self._scaler is not None else 1.0
        with watch:
            fed = self.memory.feed(grads, 1 / scale, hold)
            holding = exchange.lossless and self.memory.holding  # which matters to no other
        told = Told(energy=fed.energy, gradient=fed.gradient, not_finite=not fed.finite, holding=holding)
        with watch, self._steering:
            if fed.finite and pilot.looks_at(self.step):
                pilot.look(self.step, fed.x)
            told = pilot.tell(self.step, told)
        done = exchange.run(link, fed, pilot.plan.ratio, self.step, told, self._out)
        skip = done.told.not_finite > 0
        with watch:
            if skip:
                done.mean.fill_(math.nan)  # as it would be without us; whoever scales the loss then skips the step
            else:
                self.memory.commit(nothing_left=exchange.lossless and done.told.holding == 0)
            for name, grad in grads.items():
                self._hand_over(done.mean[self._layout.slices[name]], scale, name, grad)
        gain = math.nan if skip else _gain(done.told)
        seconds, computed = link.now() - start, watch.seconds + done.compress_seconds
        self.close_step(seconds, computed, link.sent_bytes - sent_before, gain, skip)
        with self._steering:
            if self.records is not None and done.sent is not None and not skip:
                self._note_sent(done.sent)
            pilot.measure()
        if pilot.listens(done.told):
            self.hear(done.told)

    def _note_sent(self, indices: torch.Tensor) -> None:
        """Now and then, write down how many entries of each parameter the last step sent."""
        if self.link.now() >= self._sent_noted + _SENT_SECONDS:
            self._sent_noted = self.link.now()
            assert self.records is not None
            self.records.write("sent", step=self.step - 1, entries=self._layout.counts(indices))

    def _hand_over(self, mean: torch.Tensor, scale: float, name: str, grad: torch.Tensor) -> None:
        """Write the mean into the gradient; what a narrower type cannot hold is kept in every rank's error."""
        if grad.dtype == torch.float16:
            limit = torch.finfo(torch.float16).max / scale
            kept = mean.clamp(-limit, limit)
            if not torch.equal(kept, mean) and not mean.isnan().any():
                self.memory.put_back(self._layout.slices[name], mean - kept)
                mean = kept
        grad.copy_((mean if scale == 1 else mean * scale).view(grad.shape))

    def close_step(
        self,
        seconds: float,
        compress_seconds: float,
        sent_bytes: int,
        gain: float,
        skip: bool,
        waited: float | None = None,
    ) -> None:
        """Record a step and count it. `waited` is what of `seconds` backward() did not hide, by default all."""
        N, standing = self.link.world_size, self._pilot.standing
        waited = seconds if waited is None else waited
        with self._steering:
            step_seconds = self._pilot.note_step(waited, compress_seconds, *self._overlap)
        self.last = StepRecord(
            step=self.step,
            plan=standing.plan,
            seconds=seconds,
            compress_seconds=compress_seconds,
            sent_bytes=sent_bytes,
            dense_bytes=2 * (N - 1) * self._layout.nbytes // N,
            gain=gain,
            skipped=skip,
            step_seconds=step_seconds,
            predicted_seconds=math.nan if standing.expected_seconds is None else standing.expected_seconds,
        )
        self.step += 1
        self.skipped += skip
        if self.records is not None:
            network = self.network
            seen = {} if network is None else {"alpha": network.alpha, "beta": network.beta}
            self.records.write("step", **(vars(self.last) | {"plan": asdict(self.last.plan)}), **seen)

    def note_overlap(self, seconds: float, last_share: float) -> None:
        """Of the gradient that is to be averaged, the first part was there so long before the last, a share of it."""
        self._overlap = seconds, last_share

    def look(self, bucket: torch.Tensor) -> None:
        """Now and then, see how the energy of a part of the gradient is spread."""
        if self._pilot.looks_at(self.step):
            with self._steering:
                self._pilot.look(self.step, bucket)

    def tell_by_torch(self) -> None:
        """For steps that carry no numbers of ours: now and then send some beside them, and do not wait for it."""
        if self._pilot.tells_by_torch(self.step):
            with self._steering:
                self._pilot.tell_by_torch(self.step, self._layout.device)
            self.told_bytes += 2 * (self.link.world_size - 1) * TOLD * torch.float32.itemsize // self.link.world_size

    def ask_before_telling(self) -> None:
        """After a step that carried no numbers, have the network measured if the next one tells some."""
        if self._pilot.tells_by_torch(self.step):
            with self._steering:
                self._pilot.ask_before_telling()

    def hear_by_torch(self) -> None:
        """Take in what came of it, at the beginning of the next step on all ranks."""
        told = self._pilot.heard_by_torch()
        if told is not None:
            self.hear(told)

    def hear(self, told: Told) -> None:
        """Take in what all ranks told of the last step they told of: from the next step on another plan may run."""
        with self._steering:
            self._pilot.hear(told, self.step)
        # Not every step brings word, so it may be later.
        is_missed = self.network is not None and self.wants_exploring and not self.has_explored
        if self.step >= self._explored_by and is_missed:
            self._explored_by = math.inf
            warnings.warn(
                'Adaptive(explore="restore") needs a thinwire.Explorer to run the steps, and none has tried anything '
                "out so far. The gains are those of the histogram.",
                ThinwireWarning,
                stacklevel=2,
            )

    def pause(self) -> None:
        """What happens until the next step is no step's time: a test, a checkpoint. Call on the ranks that make it."""
        self._pilot.pause()

    @property
    def controller(self) -> Adaptive | None:
        """What decides; None where the plan is fixed."""
        return self._pilot.controller

    @property
    def wants_exploring(self) -> bool:
        """Whether an `Explorer` should try out ratios now; the same on all ranks."""
        return self._pilot.wants_exploring

    @property
    def has_explored(self) -> bool:
        """Whether ratios were tried out before, in this run or in the one that it goes on from."""
        return self._pilot.view.gains.explored_at is not None

    @contextmanager
    def trying(self, exchange: str, ratio: float) -> Iterator[None]:
        """Run the steps within by another plan, without counting, recording or learning from them.

        It is the plan in force but for its ratio; of another exchange, one over the collective that is its default.
        The error is not put back: whoever tries something out keeps a copy of all that it changes.
        """
        pilot, records, counts = self._pilot, self.records, (self.step, self.skipped, self.last)
        self._pilot = Pilot(self.link, pilot.prices, None, self._at(exchange, ratio))
        self.records = None
        try:
            yield
        finally:
            self._pilot, self.records = pilot, records
            self.step, self.skipped, self.last = counts

    def _at(self, exchange: str, ratio: float) -> Plan:
        """What `trying` runs."""
        if exchange == self.plan.exchange:
            return replace(self.plan, ratio=ratio)
        values = "float32" if self.controller is None else values_for(exchange, self.controller.values)
        return complete(exchange, ratio, values=values)

    def explored(self, exchange: str, gains: Mapping[float, float]) -> None:
        """Take in the gain that this exchange was found to have at each ratio. Call on all ranks with equal numbers."""
        self._explored_by = math.inf
        self._pilot.explored(exchange, gains)

    def state_dict(self) -> dict[str, Any]:
        """All that this rank needs to go on as if nothing had happened: numbers, and tensors by parameter name."""
        return {
            "version": VERSION,
            "rank": self.link.rank,
            "world_size": self.link.world_size,
            "step": self.step,
            "skipped": self.skipped,
            "error": self.memory.state_dict(),
            "pilot": self._pilot.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of this rank, on all ranks from the same step. One that does not fit is refused whole."""
        saved = Saved.read(state, self.link)
        self.memory.load_state_dict(saved.error)
        self._pilot.resume(saved.course)
        self.step, self.skipped = saved.step, saved.skipped
        self._explored_by = self.step + _STEPS_UNEXPLORED
        self._is_resumed = True

    def common_step(self, steps: Collection[int]) -> int | None:
        """The newest step that is among every rank's `steps`, as `Checkpoint.steps` gives them; None if there is none.

        Ranks may have been killed between two saves, so each one's newest need not be there on all. Call on all ranks.
        """
        self.link.moment = Moment(self.step, "resume")
        return newest_common(self.link, steps)

    def close(self) -> None:
        """Say goodbye to the other ranks. Nothing can be averaged after."""
        self.link.close()
        if self.records is not None:
            self.records.close()


def _nothing_measured(link: Link, plan: Plan) -> str:
    return (
        f"{type(link).__name__} has measured nothing of the network, so adaptive has nothing to go by: it stays with "
        f"{plan} for as long as that is so. Use a link that can, or name an exchange."
    )


def _gain(told: Told) -> float:
    """Energy sent over energy available. Sums of float32 may come out a little above 1, or beyond its range."""
    if told.energy == 0:
        return 1.0
    return min(1.0, told.energy_sent / told.energy) if math.isfinite(told.energy) else math.nan
