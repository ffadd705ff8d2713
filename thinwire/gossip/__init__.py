"""Decentralised training: every node has a model of its own and mixes it with its neighbours'. A file per method."""

from __future__ import annotations

from thinwire.gossip.base import Method
from thinwire.gossip.choco import AdaGossip, Choco
from thinwire.gossip.dcd import Dcd
from thinwire.gossip.deepsqueeze import DeepSqueeze
from thinwire.gossip.dpsgd import Dpsgd
from thinwire.gossip.ecd import Ecd
from thinwire.gossip.naive import Naive

__all__ = ["METHODS", "Method"]

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (Dpsgd, Naive, Dcd, Ecd, Choco, AdaGossip, DeepSqueeze)
}
