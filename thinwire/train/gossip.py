"""Gossip: decentralised training, in which optimizer.step() mixes the model with its neighbours'."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from thinwire.collectives import ALL_GATHERS, ALL_REDUCES
from thinwire.compress.quantize import Compressor
from thinwire.compress.quantize import build as compressor_of
from thinwire.errors import LinkError, PeerLost, RemoteError, ThinwireWarning
from thinwire.gossip import METHODS, Method
from thinwire.gossip.base import Damped
from thinwire.gossip.topology import Array, Edges, Topology
from thinwire.gossip.topology import build as topology_of
from thinwire.link.base import Link
from thinwire.link.tcp import TcpLink
from thinwire.train.caution import Caution, warn_of_bias
from thinwire.train.layout import Layout
from thinwire.train.rehearsal import rehearse_compressor
from thinwire.train.start import agree, begin_records, open_link, spread
from thinwire.types import Moment

_STATE_VERSION = 3


@dataclass(frozen=True, kw_only=True)
class GossipRecord:
    """One mixing step as this node saw it.

    Args:
        step: the number of steps before this one.
        seconds: from the optimizer's step to the mixed model.
        sent_bytes: payload bytes this node sent.
        dense_bytes: what it would have sent uncompressed.
        skipped: the optimizer's step gave something not finite and was taken back.
        resynchronised: messages that were missing or damaged in this step and were sent again.
        step_seconds: from the end of the last mixing to the end of this one, NaN for the first.
    """

    step: int
    seconds: float
    sent_bytes: int
    dense_bytes: int
    skipped: bool
    resynchronised: int
    step_seconds: float = math.nan


class Gossip:
    """Trains without an all-to-all exchange: every node keeps a model and mixes it with its neighbours', compressed.

        gossip = thinwire.Gossip(model, optimizer, method="dcd", topology="ring", compressor="int8")
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()                # the optimizer's own step, then mixing
        with gossip.average():              # the exact mean of all nodes' models, and each its own again after
            evaluate(model)

    Every node must make the same number of steps. A GradScaler that leaves out a step on one node only would leave its
    neighbours waiting: with one, pass `mix_on_step=False` and call `mix()` in every iteration.

    Args:
        model: its parameters and buffers become rank 0's at the start; buffers are each node's own after that.
        optimizer: any; what it does to the parameters is what the papers call -gamma grad.
        method: dpsgd, naive, dcd, ecd, choco, adagossip or deepsqueeze.
        topology: a name, a list of edges, or a Topology (thinwire.gossip.topology.build).
        compressor: a name as in thinwire.compress.quantize.build: int8, sign, topk:0.01 ...
        weights: the mixing matrix W; None for Metropolis-Hastings weights.
        gamma: the consensus step size of choco (also "auto", the default), adagossip and deepsqueeze.
        seed: of all randomness and random graphs, the same on all nodes.
        link: tcp, process, or a `Link`.
        timeout: seconds of silence from a neighbour after which waiting for it ends.
        group: the process group, by default the whole world.
        overlap: send the next step's message at the end of a step, so that it travels while the gradient is computed.
            The bits are the same. For methods whose message does not depend on it: dpsgd, naive, choco, adagossip.
        on_failure: "raise", or "continue" to go on without a node that is lost (with link="tcp").
        mix_on_step: False if `mix()` is called by hand.
        ignore: names of parameters that are not mixed.
        broadcast_parameters: False if the nodes' models are known to be equal at the start.
        records: a file for one JSON line per step, and per message, node or step that went wrong, written by rank 0
            about itself (thinwire/records.py).

    Attributes:
        step: how many mixing steps were made.
        skipped: how many of the optimizer's steps were taken back because they gave something not finite.
        members: the ranks of the group that take part, some fewer after a loss.
        compressor: what is done to what is sent.
        alpha: ||z - C(z)|| / ||z|| as dcd last measured it on its own differences, None for other methods.
        last: the record of the last step, None before the first.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        method: str = "dcd",
        *,
        topology: str | Edges | Topology = "ring",
        compressor: str | Compressor = "int8",
        weights: Array | None = None,
        gamma: float | str | None = None,
        seed: int = 0,
        link: str | Link = "tcp",
        timeout: float = 300.0,
        group: dist.ProcessGroup | None = None,
        overlap: bool = False,
        on_failure: str = "raise",
        mix_on_step: bool = True,
        ignore: Collection[str] = (),
        broadcast_parameters: bool = True,
        records: Path | str | None = None,
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}. Known are: {', '.join(METHODS)}.")
        if on_failure not in ("raise", "continue"):
            raise ValueError(f"on_failure must be 'raise' or 'continue', got {on_failure!r}.")
        if on_failure == "continue" and not (link == "tcp" or isinstance(link, TcpLink)):
            raise ValueError(f"on_failure='continue' needs link='tcp', which alone can connect anew, got {link!r}.")
        _check_names(model, ignore)
        kind, self.compressor = METHODS[method], _compressor(compressor)
        warn_of_bias(kind, self.compressor)
        if overlap and not kind.says_early:
            raise ValueError(f"what {method} sends depends on the gradient, so that they cannot overlap.")
        options = {} if gamma is None else {"gamma": gamma}
        if options and not issubclass(kind, Damped):
            raise ValueError(f"{method} has no consensus step size; gamma is for choco, adagossip and deepsqueeze.")
        self._model = model
        self._layout = Layout.of((name, p) for name, p in model.named_parameters() if name not in ignore)
        self._on_failure = on_failure
        self._timeout = timeout
        self.link = open_link(link, group, timeout)
        graph = topology_of(topology, self.link.world_size, weights=weights, seed=seed)
        self.members = list(range(self.link.world_size))
        self.alpha: float | None = None
        self._group = self.link.group
        self._meeting: _Meeting | None = None
        self._mean: torch.Tensor | None = None
        self.last: GossipRecord | None = None
        self._plan = f"{method}, {graph.name}, gamma {gamma}, seed {seed}"
        self.records = begin_records(self.link, records, method=method, gossip=self._plan)
        W = "; ".join(matrix.tobytes().hex() for matrix in graph.matrices)
        facts = {"plan": self._plan, "compressor": repr(self.compressor), "model": self._layout.describe()}
        agree(self.link, {**facts, "mixing matrix": W})
        if broadcast_parameters:
            spread(self.link, [*model.parameters(), *model.buffers()])
        rehearse_compressor(self.compressor, self._layout.dtype)
        self.method: Method = kind(self.link, graph, self.compressor, self._flat(), seed, **options)
        self.method.overlap = overlap
        self._ended = math.nan
        self._caution = Caution(optimizer)
        self._hook = optimizer.register_step_post_hook(lambda *_: self.mix()) if mix_on_step else None

    @property
    def step(self) -> int:
        return self.method.t

    @property
    def skipped(self) -> int:
        return self.method.skipped

    @property
    def topology(self) -> Topology:
        return self.method.topology

    @cached_property
    def _x(self) -> torch.Tensor:
        return torch.empty(self._layout.numel, dtype=self._layout.dtype)

    # --- a step

    def mix(self) -> None:
        """What `optimizer.step()` ends with. Call on all nodes."""
        link, start, sent, skipped = self.link, self.link.now(), self.link.sent_bytes, self.skipped
        mended = self.method.mail.counts["resynchronised"]
        self._settle_on_the_mean()
        self._read_update()
        try:
            if self._meeting is None:
                measured = self._caution.alpha_of(self.method, self._x, self.link.rank)
                self.alpha = self.alpha if measured is None else measured
                self.method.step(self._x)
                self._caution.look_at_gap(self.method)
            else:
                self._step_alone(self._meeting)
        except (PeerLost, RemoteError) as error:
            if self._on_failure != "continue":
                raise
            self._go_on_without(error)
        except BaseException as error:
            self.link.abort(f"{type(error).__name__}: {error}")
            raise
        self._write(self.method.x)
        neighbours = len(self.topology.destinations(self.link.rank, self.step - 1))
        now = self.link.now()
        self.last = GossipRecord(
            step=self.step - 1,
            seconds=now - start,
            sent_bytes=self.link.sent_bytes - (sent if link is self.link else 0),
            dense_bytes=neighbours * self._layout.nbytes,
            skipped=self.skipped > skipped,
            resynchronised=self.method.mail.counts["resynchronised"] - mended,
            step_seconds=now - self._ended,
        )
        self._ended = now
        self._record_step(self.last)
        self._caution.look_at_skips(self.last.skipped, self.last.step, self.link.rank)

    def recompress(self, compressor: str | Compressor) -> None:
        """Compress otherwise from the next message on. Call on all nodes, between the same two steps.

        For a network that has changed. adagossip is made for it; choco's gamma is chosen anew if it is "auto".
        """
        self.compressor = _compressor(compressor)
        warn_of_bias(type(self.method), self.compressor)
        rehearse_compressor(self.compressor, self._layout.dtype)
        self.method.recompress(self.compressor)

    def _record_step(self, last: GossipRecord) -> None:
        if self.records is None:
            return
        for event in self.method.mail.new_events():
            self.records.write("edge", **event._asdict())
        plan = {"exchange": self.method.name, "collective": self.topology.name, "ratio": str(self.compressor)}
        self.records.write("step", **asdict(last), plan=plan)

    def _read_update(self) -> None:
        """x = x_t + u. Parameters in half precision hold a rounded x_t, and u is what the optimizer did to that."""
        torch.cat([p.detach().reshape(-1).to(self._x) for p in self._layout.parameters.values()], out=self._x)
        if any(p.dtype != self._layout.dtype for p in self._layout.parameters.values()):
            for name, where in self._layout.slices.items():
                exact = self.method.x[where]
                rounded = exact.to(self._layout.parameters[name].dtype).to(exact.dtype)
                self._x[where] += exact - rounded

    def _write(self, x: torch.Tensor) -> None:
        with torch.no_grad():
            for name, where in self._layout.slices.items():
                p = self._layout.parameters[name]
                p.copy_(x[where].view(p.shape))

    def _flat(self) -> torch.Tensor:
        return torch.cat(
            [p.detach().reshape(-1).to("cpu", self._layout.dtype) for p in self._layout.parameters.values()]
        )

    # --- looking at all nodes at once

    def consensus(self) -> float:
        """How far the nodes are from their mean: sqrt(mean_i ||x_i - mean||^2) / ||mean||. Call on all nodes."""
        mean, link = self._flat(), self.link
        link.moment = Moment(self.step, "consensus")
        ALL_REDUCES["ring"].run(link, mean.div_(link.world_size))
        away = torch.linalg.vector_norm((self._flat() - mean).double()).square().view(1)
        ALL_REDUCES["tree"].run(link, away.div_(link.world_size))
        distance = float(away.sqrt() / torch.linalg.vector_norm(mean.double()).clamp_min(1e-300))
        if self.records is not None:
            self.records.write("consensus", step=self.step, distance=distance)
        return distance

    def average(self) -> Averaged:
        """Make the parameters the exact mean over all nodes, and so floating-point buffers. Call on all nodes.

        As a context manager it gives every node its own back at the end. Without, training goes on from the mean, and
        the next state_dict has it.
        """
        self._settle_on_the_mean()
        buffers = [b for b in self._model.buffers() if b.is_floating_point()]
        tensors = [p.detach() for p in self._layout.parameters.values()] + buffers
        own = [tensor.clone() for tensor in tensors]
        if tensors:
            flat = torch.cat([t.reshape(-1).to("cpu", self._layout.dtype) for t in tensors])
            self.link.moment = Moment(self.step, "average")
            ALL_REDUCES["ring"].run(self.link, flat.div_(self.link.world_size))
            for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
                tensor.copy_(part.view(tensor.shape))
            self._mean = flat[: self._layout.numel]
        return Averaged(self, tensors, own)

    def _settle_on_the_mean(self) -> None:
        """After an average that was meant to stay: all nodes have the same model, and know it of each other."""
        if self._mean is not None:
            mean, self._mean = self._mean, None
            self.method.meet(mean)

    # --- resuming

    def state_dict(self) -> dict[str, Any]:
        """All that this node needs to go on as if nothing had happened: numbers, and tensors by parameter name."""
        self._settle_on_the_mean()
        numbers = self.method.numbers()
        return {
            "version": _STATE_VERSION,
            "rank": self.link.rank,
            "world_size": self.link.world_size,
            "plan": self._plan,
            "mixing matrix": self.topology.digest,
            "compressor": str(self.compressor),
            "step": numbers["t"],
            "skipped": numbers["skipped"],
            "said": {who: f"{digest:016x}" for who, digest in numbers["said"].items()},
            "tensors": {role: self._by_name(flat) for role, flat in self.method.tensors().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of this node, parameters included. A state that does not fit is refused whole."""
        expected = {
            "version": _STATE_VERSION,
            "rank": self.link.rank,
            "world_size": self.link.world_size,
            "plan": self._plan,
        }
        for field, ours in expected.items():
            if state.get(field) != ours:
                raise ValueError(
                    f"this state has {field} {state.get(field)!r}, this run has {ours!r}: every node keeps a model and "
                    "replicas of its own, so each must load the state that it saved, in a run of the same settings."
                )
        W = self.topology.digest
        if state.get("mixing matrix", W) != W:
            raise ValueError(
                f"this state was saved with another mixing matrix W (digest {state['mixing matrix']}, here {W}): give "
                "the same topology and weights as then."
            )
        tensors = {role: self._from_names(role, state["tensors"].get(role)) for role in self.method.tensors()}
        said = {who: int(digest, 16) for who, digest in state["said"].items()}
        if state["compressor"] != str(self.compressor):  # it was changed on the way
            self.recompress(state["compressor"])
        self.method.load(tensors, {"t": int(state["step"]), "skipped": int(state["skipped"]), "said": said})
        self._mean = None
        self._write(self.method.x)

    def _by_name(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            name: flat[where].clone().view(self._layout.parameters[name].shape)
            for name, where in self._layout.slices.items()
        }

    def _from_names(self, role: str, tensors: object) -> torch.Tensor:
        if not isinstance(tensors, Mapping) or tensors.keys() != self._layout.slices.keys():
            raise ValueError(f"{role!r} in this state does not have the parameters of this model.")
        for name, p in self._layout.parameters.items():
            if tensors[name].shape != p.shape or not torch.isfinite(tensors[name]).all():
                raise ValueError(f"{role!r} of {name!r} in this state has another shape, or is not finite.")
        return torch.cat([tensors[name].reshape(-1).to(self._layout.dtype) for name in self._layout.slices])

    # --- losing a node

    def _go_on_without(self, error: LinkError) -> None:
        """Connect with those that are left, and mix by the W that all of them build alike.

        Nodes far from the lost one are a few steps ahead. The others make those steps alone, so that all have made as
        many, and then all tell their neighbours their models: every model is kept as it is, and their sum changes by
        their own updates only.
        """
        if not isinstance(self.link, TcpLink):
            raise error
        topology, name = self.topology.without([error.peer]), self.members.pop(error.peer)
        self.link.close()
        ranks = [
            member if self._group is None else dist.get_global_rank(self._group, member) for member in self.members
        ]
        self.link = TcpLink(dist.new_group(ranks, use_local_synchronization=True), timeout=self._timeout)
        steps = torch.zeros(self.link.world_size, dtype=torch.int64)
        steps[self.link.rank] = self.step + 1
        self.link.moment = Moment(0, "after a loss")
        ALL_GATHERS["direct"].run(self.link, steps)
        warnings.warn(
            f"rank {name} was lost ({error}); {len(self.members)} nodes go on from step {int(steps.max())} as "
            f"{topology.name} with spectral gap {topology.spectral_gap:.3g}.",
            ThinwireWarning,
            stacklevel=4,
        )
        if self.records is not None:
            members, gap = self.members, topology.spectral_gap
            self.records.write("lost", step=self.step, peer=name, members=members, spectral_gap=gap)
        self._read_update()  # the failed step may have changed it
        self._step_alone(_Meeting(topology, int(steps.max())))

    def _step_alone(self, meeting: _Meeting) -> None:
        """Keep the optimizer's step unmixed; mix again from the meeting on."""
        self.method.keep(self._x)
        self._meeting = meeting if self.step < meeting.step else None
        if self._meeting is None:
            self.method.restart(self.link, meeting.topology, self._x, self.step)

    def pause(self) -> None:
        """What happens until the next step is no step's time: a test, a checkpoint. Call on all ranks."""
        self._ended = math.nan

    def close(self) -> None:
        """Say goodbye to the neighbours. Nothing can be mixed after."""
        if self._hook is not None:
            self._hook.remove()
        self.link.close()
        if self.records is not None:
            self.records.close()


class _Meeting(NamedTuple):
    """When those that are left mix again, and how."""

    topology: Topology
    step: int


class Averaged:
    """Parameters that are the mean of all nodes'; as a context manager, only until it ends."""

    def __init__(self, gossip: Gossip, tensors: list[torch.Tensor], own: list[torch.Tensor]) -> None:
        self._gossip, self._tensors, self._own = gossip, tensors, own

    def __enter__(self) -> None:
        self._gossip._mean = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for tensor, own in zip(self._tensors, self._own, strict=True):
            tensor.copy_(own)
        self._gossip._mean = None


def _compressor(spec: str | Compressor) -> Compressor:
    if not isinstance(spec, str | Compressor):
        raise ValueError(f"a compressor is a name, as in 'int8', or a Compressor, got {spec!r}.")
    return compressor_of(spec)


def _check_names(model: nn.Module, ignore: Collection[str]) -> None:
    unknown = sorted(set(ignore) - {name for name, _ in model.named_parameters()})
    if unknown:
        raise ValueError(f"ignore names what is no parameter of this model: {', '.join(map(repr, unknown))}.")
