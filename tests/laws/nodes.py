"""A small problem that differs from node to node, and every method of decentralised training set up to solve it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from thinwire.compress.quantize import build
from thinwire.gossip import METHODS, Method
from thinwire.gossip.topology import Topology

NUMEL = 70
LR = 0.05
SEED = 3
# For each method a compressor that it can live with for 200 steps, and what else it takes.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "dpsgd": ("none", {}),
    "naive": ("int8", {}),
    "dcd": ("int8", {}),
    "ecd": ("int16", {}),
    "choco": ("sign", {"gamma": 0.3}),
    # gamma / eps below 1: beyond, rounding grows from step to step where neighbours agree.
    "adagossip": ("topk:0.1", {"gamma": 0.01, "beta": 0.9, "eps": 0.1}),
    "deepsqueeze": ("int4", {"gamma": 0.4}),
}
every_method = pytest.mark.parametrize("name", METHODS)


class Problem:
    """f_i(x) = sum_k a_ik (x_k - b_ik)^2 / 2, strongly convex, another one at every node."""

    def __init__(self, nodes: int, numel: int = NUMEL) -> None:
        generator = np.random.default_rng(nodes)
        self.a = generator.uniform(0.5, 1.5, (numel, nodes))
        self.b = generator.standard_normal((numel, nodes))
        self.start = generator.standard_normal(numel)

    def update(self, x: np.ndarray, node: int) -> np.ndarray:
        """-gamma grad f_i."""
        return -LR * (self.a[:, node] * (x - self.b[:, node]))

    def first(self) -> torch.Tensor:
        return torch.from_numpy(self.start.copy())

    def descend(self, x: torch.Tensor, node: int) -> torch.Tensor:
        """x += update, in place."""
        return x.add_(torch.from_numpy(self.update(x.numpy(), node)))


def make(link: Any, name: str, topology: Topology, x: np.ndarray) -> Method:
    compressor, options = SETTINGS[name]
    return METHODS[name](link, topology, build(compressor), torch.from_numpy(x.copy()), SEED, **options)
