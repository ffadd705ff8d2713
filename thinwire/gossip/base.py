"""What the methods of decentralised training share: a model per node, one message per neighbour and step, a price."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from typing import Any

import torch

from thinwire.compress.quantize import Compressor, Draw, is_finite
from thinwire.errors import LinkError
from thinwire.gossip.mail import HEADER_BYTES, Mail
from thinwire.gossip.topology import Topology
from thinwire.link.base import Link
from thinwire.link.wire import Parcel, Turn, Wire
from thinwire.types import Moment, Network


class Method(ABC):
    """One published way of mixing models.

    What the papers call -gamma grad F is whatever the optimizer did: u = x after it - x before it.

    Args:
        link: to the other nodes.
        topology: who mixes with whom.
        compressor: what is done to what is sent.
        x: this node's model, flat; the same on all nodes.
        seed: of all randomness, the same on all nodes.

    Attributes:
        x: x_t, the model before the optimizer's step.
        t: how many steps were made.
        skipped: how many of the optimizer's steps were taken back because they gave something not finite.
        needs_fixed_graph: whether neighbours must stay the same, because something is kept about each.
        assumes_unbiased: whether the theory asks for an unbiased compressor.
        says_early: whether what a node sends is known before its gradient, so that both can go on at once.
        overlap: whether they do: a step ends by sending the next one's message. It has the same bits either way.
    """

    name: str
    needs_fixed_graph = False
    assumes_unbiased = False
    says_early = False
    chained = False
    overlap = False

    def __init__(self, link: Link, topology: Topology, compressor: Compressor, x: torch.Tensor, seed: int = 0) -> None:
        if self.needs_fixed_graph and not topology.static:
            raise ValueError(
                f"{self.name} keeps a replica of every neighbour, so neighbours must not change, as they do on "
                f"{topology.name}. Use dpsgd or deepsqueeze there."
            )
        self.compressor = self.prepared(compressor)
        self._following: Compressor | None = None
        self.seed = seed
        self.t = 0
        self.skipped = 0
        self.x = x.detach().clone()
        self._decoded = torch.empty_like(self.x)
        self._work = torch.empty_like(self.x)
        self._settle(link, topology)

    @classmethod
    def prepared(cls, compressor: Compressor) -> Compressor:
        """The compressor as this method uses it."""
        return compressor

    def _settle(self, link: Link, topology: Topology) -> None:
        self.link = link
        self.topology = topology
        self._started = False
        self.mail = Mail(link, topology, self._plan, self._payload_bytes, self.chained)

    @property
    def _plan(self) -> str:
        return f"{self.name} {self.compressor} on {self.topology.name}"

    @property
    def _payload_bytes(self) -> int:
        return self.compressor.nbytes(self.x.numel(), self.x.dtype)

    def recompress(self, compressor: Compressor) -> None:
        """Use another compressor from the next message on. Collective: all nodes change between the same two steps."""
        self._following = self.prepared(compressor)
        if not self._started:
            self._follow()

    def _follow(self) -> None:
        if self._following is not None:
            self.compressor, self._following = self._following, None
            self.mail.change(self._plan, self._payload_bytes)

    # --- a step

    def step(self, x: torch.Tensor) -> None:
        """x, which holds x_t + u, becomes x_{t+1}. Collective: every node makes the same number of steps."""
        self._take_back_unless_finite(x)
        self._mix(x)
        self._advance(x)
        self._follow()
        if self.overlap:
            self._start(self._outgoing())

    def keep(self, x: torch.Tensor) -> None:
        """A step without mixing: x_{t+1} = x_t + u."""
        self._take_back_unless_finite(x)
        self._advance(x)

    def _take_back_unless_finite(self, x: torch.Tensor) -> None:
        """So that u = 0: nothing that is not finite reaches a neighbour."""
        if not is_finite(x):
            x.copy_(self.x)
            self.skipped += 1

    def _advance(self, x: torch.Tensor) -> None:
        self.x.copy_(x)
        self.t += 1

    @abstractmethod
    def _mix(self, x: torch.Tensor) -> None:
        """x_t + u becomes x_{t+1}, by one `_say`."""

    def weight(self, j: int) -> float:
        """W_ij at this step; i is this node."""
        return float(self.topology.weights(self.t)[self.link.rank, j])

    def _say(self, z: torch.Tensor) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Send C(z) to all neighbours; return our own C(z), decoded into the working space, and their codes.

        Until it has returned nothing may change that outlives the step: a step that fails has left no trace.
        """
        self._start(z)
        return self._finish()

    def _say_early(self) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """The same for what is known before the gradient, which may be under way already."""
        if not self._started:
            self._start(self._outgoing())
        return self._finish()

    def _outgoing(self) -> torch.Tensor:
        """What is sent at this step, where it is known before the gradient."""
        raise NotImplementedError

    def _start(self, z: torch.Tensor) -> None:
        if not self.compressor.encode(z, self.mail.room(self.t), Draw(self.seed, self.t, self.link.rank)):
            raise FloatingPointError(f"{self.name} has diverged: what it would send at step {self.t} is not finite.")
        self.mail.start(self.t)
        self._started = True

    def _finish(self) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        codes = self.mail.finish()
        self._started = False
        self.compressor.decode(self.mail.room(self.t), self._work)
        return self._work, codes

    def _read(self, codes: dict[int, torch.Tensor], j: int) -> torch.Tensor:
        """C(z_j), good until the next call."""
        try:
            self.compressor.decode(codes[j], self._decoded)
        except ValueError as error:
            raise LinkError(f"rank {j} sent what cannot be: {error}", rank=self.link.rank, peer=j) from error
        return self._decoded

    # --- state

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that is needed to go on, by name: flat, and not copied."""
        return {"x": self.x}

    def numbers(self) -> dict[str, Any]:
        return {"t": self.t, "skipped": self.skipped, "said": self.mail.state()}

    def load(self, tensors: dict[str, torch.Tensor], numbers: dict[str, Any]) -> None:
        if self._started:
            raise RuntimeError("a message of the run so far is under way; load the state before the first step.")
        for name, ours in self.tensors().items():
            ours.copy_(tensors[name])
        self.t, self.skipped = numbers["t"], numbers["skipped"]
        self.mail.load_state(numbers["said"])

    def restart(self, link: Link, topology: Topology, x: torch.Tensor, t: int) -> None:
        """Go on from `x` at step `t` among other nodes: every node keeps its model, and tells its neighbours whole."""
        mail = self.mail
        self._settle(link, topology)
        self.mail.inherit(mail)
        self.x.copy_(x)
        self.t = t
        self._adopt(exchange_whole(link, topology, self.x))

    def meet(self, x: torch.Tensor) -> None:
        """Go on from `x`, which is the same on all nodes, so that nothing need be sent. Collective."""
        if self._started:
            self._finish()  # it told neighbours of a model that is no more
        self.x.copy_(x)
        self._adopt({j: self.x.clone() for j in self.topology.sources(self.link.rank, self.t)})

    def _adopt(self, models: dict[int, torch.Tensor]) -> None:  # noqa: B027 (some keep nothing about neighbours)
        """Make what is kept about neighbours true, given their models."""

    # --- the price

    @classmethod
    def message_bytes(cls, compressor: Compressor, numel: int, dtype: torch.dtype = torch.float32) -> int:
        return HEADER_BYTES + cls.prepared(compressor).nbytes(numel, dtype)

    @classmethod
    def seconds(
        cls,
        network: Network,
        topology: Topology,
        compressor: Compressor,
        numel: int,
        dtype: torch.dtype = torch.float32,
        steps: int = 1,
    ) -> float:
        """What `steps` steps cost on the wire, from a common start to the last node's end.

        alpha + d b beta for a graph in which every node has d neighbours, where a message has b bytes.
        """
        return play(network, topology, cls.message_bytes(compressor, numel, dtype), steps)


class Damped(Method):
    """A method that goes only a share gamma of the way to its neighbours, and in return takes any compressor.

    The compressor has to be a contraction, so an unbiased one is shrunk (`Compressor.contraction`).

    Args:
        gamma: the consensus step size, in (0, 1].
    """

    gamma: float

    def __init__(
        self, link: Link, topology: Topology, compressor: Compressor, x: torch.Tensor, seed: int, gamma: float | str
    ) -> None:
        super().__init__(link, topology, compressor, x, seed)
        if isinstance(gamma, str) or not 0 < gamma <= 1:
            raise ValueError(f"gamma must be in (0, 1], or for choco 'auto', got {gamma!r}.")
        self.gamma = float(gamma)

    @classmethod
    def prepared(cls, compressor: Compressor) -> Compressor:
        return compressor.contraction()


def exchange_whole(link: Link, topology: Topology, x: torch.Tensor) -> dict[int, torch.Tensor]:
    """Every neighbour's tensor, uncompressed."""
    link.moment = Moment(0, "gossip", "whole models")
    models = {peer: torch.empty_like(x) for peer in topology.sources(link.rank)}
    receives = [link.post(model, peer) for peer, model in models.items()]
    sends = link.send_together([(x, peer) for peer in topology.destinations(link.rank)])
    for work in (*receives, *sends):
        work.wait()
    return models


def play(network: Network, topology: Topology, nbytes: int, steps: int) -> float:
    """The steps' messages on the wire's physics, without data: each node begins a step when its last one is through."""
    wire: Wire[tuple[int, int]] = Wire(network, topology.world_size)
    nodes = [_Node(rank, topology, nbytes, steps) for rank in range(topology.world_size)]
    for node in nodes:
        wire.turn(node.rank, 0.0)
    while (event := wire.next()) is not None:
        time, what = event
        if isinstance(what, Turn):
            nodes[what.rank].go_on(wire)
        else:
            src, dst = what.message
            nodes[dst].hear(src, time, wire)
    return max(node.clock for node in nodes)


class _Node:
    """One node of the price: it knows what it sends, and what it is still waiting for."""

    def __init__(self, rank: int, topology: Topology, nbytes: int, steps: int) -> None:
        self.rank = rank
        self.clock = 0.0
        self._topology, self._nbytes = topology, nbytes
        self._steps = iter(range(steps))
        self._heard: defaultdict[int, deque[float]] = defaultdict(deque)  # by sender: when its messages were in
        self._awaited: list[int] = []

    def go_on(self, wire: Wire[tuple[int, int]]) -> None:
        for step in self._steps:
            parcels = []
            for dst in self._topology.destinations(self.rank, step):
                self.clock += wire.network.overhead
                parcels.append(Parcel(dst, self._nbytes, self.clock, (self.rank, dst)))
            wire.send_together(self.rank, parcels)
            self._awaited = self._topology.sources(self.rank, step)
            if not self._through(wire.network):
                return

    def hear(self, src: int, time: float, wire: Wire[tuple[int, int]]) -> None:
        self._heard[src].append(time)
        if self._awaited and self._through(wire.network):
            wire.turn(self.rank, self.clock)

    def _through(self, network: Network) -> bool:
        """Once all is there: it was taken up in order."""
        if not all(self._heard[src] for src in self._awaited):
            return False
        for src in self._awaited:
            self.clock = max(self.clock, self._heard[src].popleft()) + network.overhead
        self._awaited = []
        return True
