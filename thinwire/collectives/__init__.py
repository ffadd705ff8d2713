"""Moving one flat tensor between all ranks: each file says how it is run and, from the same schedule, what it costs."""

from __future__ import annotations

from thinwire.collectives.base import Collective, Leg, seconds, sent_bytes, sent_messages
from thinwire.collectives.direct import DirectAllGather, DirectAllReduce, ScatterBroadcast
from thinwire.collectives.halving import DoublingAllGather, HalvingAllReduce
from thinwire.collectives.ring import RingAllGather, RingAllReduce
from thinwire.collectives.tree import TreeAllGather, TreeAllReduce, TreeBroadcast

ALL_REDUCES: dict[str, Collective] = {
    "ring": RingAllReduce(),
    "tree": TreeAllReduce(),
    "halving": HalvingAllReduce(),
    "direct": DirectAllReduce(),
}
ALL_GATHERS: dict[str, Collective] = {
    "ring": RingAllGather(),
    "tree": TreeAllGather(),
    "halving": DoublingAllGather(),
    "direct": DirectAllGather(),
}
BROADCASTS: dict[str, Collective] = {"tree": TreeBroadcast(), "scatter": ScatterBroadcast()}

__all__ = ["ALL_GATHERS", "ALL_REDUCES", "BROADCASTS", "Collective", "Leg", "seconds", "sent_bytes", "sent_messages"]
