"""DCD-PSGD: compressed differences (Tang et al. 2018, Algorithm 1)."""

from __future__ import annotations

import torch

from thinwire.compress.quantize import Compressor
from thinwire.gossip.base import Method
from thinwire.gossip.topology import Topology
from thinwire.link.base import Link


class Dcd(Method):
    """Every node applies its own compressed change too, so that replicas equal originals, bit for bit:

        x_{t+1/2} = sum_j W_ij x^_j + u,     z_t = x_{t+1/2} - x_t,
        x_{t+1}   = x_t + C(z_t),            x^_j <- x^_j + C(z_j).

    Line 8 of the algorithm prints C(z_i) in the replicas' update; the text has C(z_j), which is what works.
    """

    name = "dcd"
    needs_fixed_graph = True
    assumes_unbiased = True
    chained = True

    def __init__(self, link: Link, topology: Topology, compressor: Compressor, x: torch.Tensor, seed: int = 0) -> None:
        super().__init__(link, topology, compressor, x, seed)
        self.replicas = {j: x.detach().clone() for j in topology.sources(link.rank)}

    def _mix(self, x: torch.Tensor) -> None:
        z = self.difference(x)
        own, codes = self._say(z)
        torch.add(self.x, own, out=x)
        for j, replica in self.replicas.items():
            replica += self._read(codes, j)

    def difference(self, x: torch.Tensor) -> torch.Tensor:
        """z_t: what DCD's condition on the compressor is about. Good until the next step."""
        z = torch.sub(x, self.x, out=self._work)
        for j, replica in self.replicas.items():
            z.add_(replica, alpha=self.weight(j)).sub_(self.x, alpha=self.weight(j))
        return z

    def tensors(self) -> dict[str, torch.Tensor]:
        return {**super().tensors(), **{f"replica {j}": replica for j, replica in self.replicas.items()}}

    def _adopt(self, models: dict[int, torch.Tensor]) -> None:
        self.replicas = models
