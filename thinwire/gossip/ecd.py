"""ECD-PSGD: compressed extrapolations (Tang et al. 2018, Algorithm 2)."""

from __future__ import annotations

import torch

from thinwire.compress.quantize import Compressor
from thinwire.gossip.base import Method
from thinwire.gossip.topology import Topology
from thinwire.link.base import Link


class Ecd(Method):
    """Estimates of neighbours' models whose error dies out as 1 / t if the compressor's error is bounded:

        x_{t+1} = sum_j W_ij x~_j + u,              own estimate included,
        z_t     = (1 - t/2) x_t + (t/2) x_{t+1},
        x~_j   <- (1 - 2/t) x~_j + (2/t) C(z_j).

    t starts at 2: Algorithm 2 and Eqs. (3)-(4) differ by one in it, and from 2 on the first estimate is C(x_2) itself,
    which meets the bound on its error at once; from 1 it would begin with the factor -1.

    z grows with t, so a compressor whose error is relative to z does not have a bounded one: ECD needs many bits.
    """

    name = "ecd"
    needs_fixed_graph = True
    assumes_unbiased = True
    chained = True

    def __init__(self, link: Link, topology: Topology, compressor: Compressor, x: torch.Tensor, seed: int = 0) -> None:
        super().__init__(link, topology, compressor, x, seed)
        self.estimates = {j: x.detach().clone() for j in (link.rank, *topology.sources(link.rank))}

    def _mix(self, x: torch.Tensor) -> None:
        t, here = self.t + 2, self.link.rank
        x -= self.x
        for j, estimate in self.estimates.items():
            x.add_(estimate, alpha=self.weight(j))
        z = torch.mul(self.x, 1 - t / 2, out=self._work).add_(x, alpha=t / 2)
        own, codes = self._say(z)
        for j, estimate in self.estimates.items():
            estimate.mul_(1 - 2 / t).add_(own if j == here else self._read(codes, j), alpha=2 / t)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {**super().tensors(), **{f"estimate {j}": estimate for j, estimate in self.estimates.items()}}

    def _adopt(self, models: dict[int, torch.Tensor]) -> None:
        self.estimates = {self.link.rank: self.x.clone(), **models}
