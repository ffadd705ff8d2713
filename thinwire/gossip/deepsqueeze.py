"""DeepSqueeze: error feedback instead of replicas, so that the graph may change every step (Tang et al. 2019)."""

from __future__ import annotations

import torch

from thinwire.compress.quantize import Compressor
from thinwire.gossip.base import Damped
from thinwire.gossip.topology import Topology
from thinwire.link.base import Link


class DeepSqueeze(Damped):
    """What the compressor left out of a node's model is added to what it compresses next:

        v_i = x_i + u + e_i,    e_i <- v_i - C(v_i),
        x_i <- x_i + u + gamma (sum_j w_ij C(v_j) - C(v_i)).

    Nothing is kept about neighbours.
    """

    name = "deepsqueeze"

    def __init__(
        self,
        link: Link,
        topology: Topology,
        compressor: Compressor,
        x: torch.Tensor,
        seed: int = 0,
        gamma: float | str = 0.5,
    ) -> None:
        super().__init__(link, topology, compressor, x, seed, gamma)
        self.error = torch.zeros_like(self.x)

    def _mix(self, x: torch.Tensor) -> None:
        v = torch.add(x, self.error, out=self._decoded)
        own, codes = self._say(v)
        torch.sub(v, own, out=self.error)
        x.add_(own, alpha=self.gamma * (self.weight(self.link.rank) - 1))
        for j in codes:
            x.add_(self._read(codes, j), alpha=self.gamma * self.weight(j))

    def meet(self, x: torch.Tensor) -> None:
        super().meet(x)
        self.error.zero_()

    def tensors(self) -> dict[str, torch.Tensor]:
        return {**super().tensors(), "error": self.error}
