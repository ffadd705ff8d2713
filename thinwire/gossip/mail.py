"""One message to every neighbour per round and one from each: in order, whole, and once, or noticed in that round.

Methods with replicas hold at each end of an edge what the other end has said so far. One lost change would make the two
differ for ever, silently. So a message carries its round and two digests of all that its sender has said: before this
message and with it. What is missing, damaged or foreign is asked for again at once, and the round goes on when it is
there: the run has the same bits as one without faults. Without faults that costs 32 bytes and no message.
"""

from __future__ import annotations

import zlib
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch

from thinwire.compress.quantize import fingerprint
from thinwire.errors import LinkError, LinkTimeout
from thinwire.gossip.topology import Topology
from thinwire.link.base import Link, Work
from thinwire.types import Moment

HEADER_BYTES = 32
PATIENCE = 10  # timeouts in a row, each followed by asking again, before a peer is given up on a link with losses
_KEPT = 1000  # events
_MAGIC = 0x54574731
_STEP, _AGAIN = 1, 2
_LOW = (1 << 48) - 1


class Event(NamedTuple):
    """Something on an edge that should not have been: `what` is lost, repeated, damaged or foreign."""

    step: int
    peer: int
    what: str


class _Header(NamedTuple):
    """Four words. `tag` tells runs with other settings apart; digests are of what the sender has said to everyone."""

    tag: int
    kind: int
    step: int
    before: int
    after: int

    @classmethod
    def of(cls, message: torch.Tensor) -> _Header:
        tag, place, before, after = message[:HEADER_BYTES].numpy().view(np.uint64).tolist()
        return cls(tag, place >> 48, place & _LOW, before, after)

    def write(self, message: torch.Tensor) -> None:
        words = [self.tag, self.kind << 48 | self.step, self.before, self.after]
        message[:HEADER_BYTES].numpy().view(np.uint64)[:] = np.array(words, np.uint64)


class _Edge:
    """What this rank knows of one neighbour's messages.

    Attributes:
        said: the digest of all that the neighbour has said and we have taken in.
        pending: a receive under way and where it goes.
        early: the neighbour's next message, which came before this round's.
        taken: this round's message.
        silent: timeouts in a row.
    """

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.said = 0
        self.pending: tuple[Work, torch.Tensor] | None = None
        self.early: torch.Tensor | None = None
        self.taken: torch.Tensor | None = None
        self.silent = 0
        self.mended = False
        self._spare: list[torch.Tensor] = []

    def buffer(self, nbytes: int) -> torch.Tensor:
        return self._spare.pop() if self._spare else torch.empty(nbytes, dtype=torch.uint8)

    def give_back(self, buffer: torch.Tensor) -> None:
        self._spare.append(buffer)

    def throw_away(self) -> None:
        """All buffers: the next messages have another size."""
        self.taken = None
        self._spare = []


class _UnderWay(NamedTuple):
    edges: list[_Edge]
    sends: list[Work]


class Mail:
    """A rank's messages to and from its neighbours.

    Args:
        plan: what all ranks must agree on, in words.
        payload_bytes: of every message, a multiple of 8.
        chained: whether what was said earlier matters: methods with replicas.

    Attributes:
        counts: how often something was lost, repeated, damaged or foreign, asked again, and resynchronised.
        events: the last of them.
    """

    def __init__(self, link: Link, topology: Topology, plan: str, payload_bytes: int, chained: bool) -> None:
        self.link = link
        self.topology = topology
        self._lossy = link.lossy
        self.counts: Counter[str] = Counter()
        self.events: list[Event] = []
        self._new: list[Event] = []
        self._chained = chained
        self._edges: dict[int, _Edge] = {}
        self._said = 0
        self._said_before = 0
        self._under_way: _UnderWay | None = None
        self._settle(plan, payload_bytes)
        self._step = 0

    def _settle(self, plan: str, payload_bytes: int) -> None:
        assert payload_bytes % 8 == 0, "digests are of whole words"
        self._plan = plan
        self._tag = _MAGIC << 32 | zlib.crc32(plan.encode())
        self._nbytes = HEADER_BYTES + payload_bytes
        # Of this round and of the last: a neighbour is at most one round behind.
        self._messages = [torch.zeros(self._nbytes, dtype=torch.uint8) for _ in range(2)]

    def change(self, plan: str, payload_bytes: int) -> None:
        """Go on with messages of another size. What was said so far stays said."""
        assert self._under_way is None, "a message of the old size is under way"
        if self._lossy:
            raise ValueError("on a link with losses a neighbour may still ask for a message of the old size.")
        for edge in self._edges.values():
            edge.throw_away()
        self._settle(plan, payload_bytes)

    @property
    def message_bytes(self) -> int:
        return self._nbytes

    def room(self, step: int) -> torch.Tensor:
        """Where the payload of this rank's message of `step` goes, before `start`."""
        return self._messages[step % 2][HEADER_BYTES:]

    def start(self, step: int) -> None:
        """Post all receives of this step, and send its message to all destinations."""
        self._step = step
        link, here = self.link, self.link.rank
        edges = [self._edge(peer) for peer in self.topology.sources(here, step)]
        # A link that loses messages must not refuse the one after: steps are told apart here, where it can be mended.
        link.moment = Moment(0 if self._lossy else step, self._plan, "gossip")
        for edge in edges:
            self._begin(edge)
        message = self._seal(step)
        sends = link.send_together([(message, peer) for peer in self.topology.destinations(here, step)])
        self._under_way = _UnderWay(edges, sends)

    def finish(self) -> dict[int, torch.Tensor]:
        """Wait for what was started; return all sources' payloads, good until the next start."""
        assert self._under_way is not None, "nothing was started"
        edges, sends = self._under_way
        stalled = False
        while any(edge.taken is None for edge in edges):
            # Once something is missing, neighbours whose message is in may ask us for ours too.
            for edge in edges if stalled else [edge for edge in edges if edge.taken is None]:
                stalled |= not self._hear(edge)
        for send in sends:
            send.wait()
        self._under_way = None
        return {edge.peer: edge.taken[HEADER_BYTES:] for edge in edges if edge.taken is not None}

    def _edge(self, peer: int) -> _Edge:
        return self._edges.setdefault(peer, _Edge(peer))

    def _begin(self, edge: _Edge) -> None:
        if edge.taken is not None:
            edge.give_back(edge.taken)
        edge.taken, edge.mended, edge.silent = None, False, 0
        if edge.early is not None:
            message, edge.early = edge.early, None
            self._judge(edge, message)
        if edge.taken is None:
            self._post(edge)

    def _post(self, edge: _Edge) -> None:
        if edge.pending is None:
            buffer = edge.buffer(self._nbytes)
            edge.pending = self.link.post(buffer, edge.peer), buffer

    def _seal(self, step: int) -> torch.Tensor:
        message = self._messages[step % 2]
        self._said_before, after = self._said, self._digest(message, self._said)
        _Header(self._tag, _STEP, step, self._said, after).write(message)
        self._said = after if self._chained else 0
        return message

    def _digest(self, message: torch.Tensor, before: int) -> int:
        return fingerprint(message[HEADER_BYTES:], before)

    # --- hearing

    def _hear(self, edge: _Edge) -> bool:
        """Take in one message of a neighbour; False if none came in time."""
        self._post(edge)
        assert edge.pending is not None
        work, buffer = edge.pending
        try:
            work.wait()
        except LinkTimeout:
            edge.silent += 1
            if edge.silent >= (PATIENCE if self._lossy else 1):
                raise
            if edge.taken is None:
                self._ask_again(edge, "lost")
            return False
        edge.pending, edge.silent = None, 0
        self._judge(edge, buffer)
        return True

    def _judge(self, edge: _Edge, message: torch.Tensor) -> None:
        """What to do with a message, by its header."""
        header = _Header.of(message)
        late = header.step - self._step
        if header.tag != self._tag or header.kind not in (_STEP, _AGAIN) or (header.kind == _STEP and late > 1):
            self._note(edge, "foreign")
        elif header.kind == _AGAIN:
            self._say_again(edge, header.step)
        elif late == 1 and edge.early is None:
            edge.early = message
            if edge.taken is None:
                self._ask_again(edge, "lost")
            return
        elif late != 0 or edge.taken is not None:
            self._note(edge, "repeated")
        elif self._accepts(edge, header, message):
            edge.taken = message
            return
        edge.give_back(message)

    def _accepts(self, edge: _Edge, header: _Header, message: torch.Tensor) -> bool:
        if self._digest(message, header.before) != header.after:
            self._ask_again(edge, "damaged")
            return False
        if header.before != edge.said:
            raise LinkError(
                f"rank {edge.peer} has said other things than rank {self.link.rank} has heard by step {self._step}: "
                "their replicas differ. Did both resume from the same step?",
                rank=self.link.rank,
                peer=edge.peer,
            )
        edge.said = header.after if self._chained else 0
        if edge.mended:
            self.counts["resynchronised"] += 1
        return True

    def _ask_again(self, edge: _Edge, why: str) -> None:
        self._note(edge, why)
        edge.mended = True
        if edge.peer not in self.topology.destinations(self.link.rank, self._step):
            raise LinkError(
                f"rank {self.link.rank} misses the message of rank {edge.peer} at step {self._step} ({why}), and "
                "cannot ask for it: on this graph it sends nothing that way.",
                rank=self.link.rank,
                peer=edge.peer,
            )
        question = edge.buffer(self._nbytes)
        question.zero_()
        _Header(self._tag, _AGAIN, self._step, 0, 0).write(question)
        self.counts["asked again"] += 1
        self.link.send(question, edge.peer).wait()
        edge.give_back(question)

    def _say_again(self, edge: _Edge, step: int) -> None:
        """What a neighbour has not got yet is this step's message or the last one's; of the next it need not ask."""
        if step in (self._step, self._step - 1):
            self.link.send(self._messages[step % 2], edge.peer).wait()

    def _note(self, edge: _Edge, what: str) -> None:
        self.counts[what] += 1
        event = Event(self._step, edge.peer, what)
        self.events = [*self.events[1 - _KEPT :], event]
        self._new = [*self._new[1 - _KEPT :], event]

    def inherit(self, other: Mail) -> None:
        """Go on counting where another ended."""
        self.counts, self.events, self._new = other.counts, other.events, other._new

    def new_events(self) -> list[Event]:
        """Those since the last call."""
        new, self._new = self._new, []
        return new

    # --- resuming

    def state(self) -> dict[str, int]:
        """The digests, by who said it: a whole number for this rank ("self") and for each neighbour.

        A message that is under way is not in them: whoever goes on from here says it again.
        """
        said = self._said if self._under_way is None else self._said_before
        return {"self": said, **{str(edge.peer): edge.said for edge in self._edges.values()}}

    def load_state(self, state: dict[str, int]) -> None:
        self._said = state["self"]
        for peer, said in state.items():
            if peer != "self":
                self._edge(int(peer)).said = said
