"""CHOCO-SGD: any compressor, three vectors per node (Koloskova et al. 2020), and AdaGossip's step for it."""

from __future__ import annotations

import functools

import numpy as np
import torch

from thinwire.compress.quantize import Compressor, Draw, gaussian_alpha
from thinwire.gossip.base import Damped
from thinwire.gossip.topology import Topology
from thinwire.link.base import Link

GAMMAS = (1.0, 0.8, 0.6, 0.45, 0.34, 0.25, 0.18, 0.12, 0.08, 0.05, 0.03, 0.02, 0.01, 0.005, 0.002, 0.001)
_ROUNDING = 1e-9  # of what there was


class Choco(Damped):
    """Every node mixes public copies x^ of the models, which follow the models as fast as the compressor lets them:

        q_i  = Q(x_i - x^_i),    x^_j <- x^_j + q_j,
        x_i <- x_i + u + gamma sum_j w_ij (x^_j - x^_i).

    Instead of all x^_j a node keeps the last sum, its gap g_i <- g_i + sum_j w_ij (q_j - q_i). The mean of the models
    changes by the mean of u only, whatever Q does. The paper keeps s = sum_j w_ij x^_j and takes s - x^_i, which is the
    same in exact numbers; but s and x^ are as large as the models, each rounded for itself, and in float32 their
    difference carries the mean away (by 1 % in 6000 steps). Gaps are small, and those of neighbours are rounded alike.

    Args:
        gamma: the consensus step size, in (0, 1], or "auto" for `tune`.
    """

    name = "choco"
    needs_fixed_graph = True
    says_early = True
    chained = True

    def __init__(
        self,
        link: Link,
        topology: Topology,
        compressor: Compressor,
        x: torch.Tensor,
        seed: int = 0,
        gamma: float | str = "auto",
    ) -> None:
        self._tuned = gamma == "auto"
        super().__init__(
            link, topology, compressor, x, seed, tune(topology, self.prepared(compressor)) if self._tuned else gamma
        )
        self.x_hat = torch.zeros_like(self.x)
        self.g = torch.zeros_like(self.x)

    def recompress(self, compressor: Compressor) -> None:
        super().recompress(compressor)
        if self._tuned:
            self.gamma = tune(self.topology, self.prepared(compressor))

    def restart(self, link: Link, topology: Topology, x: torch.Tensor, t: int) -> None:
        super().restart(link, topology, x, t)
        if self._tuned:
            self.gamma = tune(topology, self.compressor)

    def _mix(self, x: torch.Tensor) -> None:
        q, codes = self._say_early()
        self.x_hat += q
        for j in codes:
            self.g.add_(self._read(codes, j).sub_(q), alpha=self.weight(j))
        self._approach(x, self.g)

    def _outgoing(self) -> torch.Tensor:
        return torch.sub(self.x, self.x_hat, out=self._work)

    def gap(self) -> float:
        """||sum_j w_ij (x^_j - x^_i)||: it grows without end when gamma is too large."""
        return float(torch.linalg.vector_norm(self.g))

    def _approach(self, x: torch.Tensor, gap: torch.Tensor) -> None:
        """Go towards the neighbours; `gap` is sum_j w_ij (x^_j - x^_i)."""
        x.add_(gap, alpha=self.gamma)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {**super().tensors(), "x_hat": self.x_hat, "g": self.g}

    def _adopt(self, models: dict[int, torch.Tensor]) -> None:
        self.x_hat.copy_(self.x)
        self.g.zero_()
        for j, model in models.items():
            self.g.add_(torch.sub(model, self.x, out=self._work), alpha=self.weight(j))


class AdaGossip(Choco):
    """CHOCO with a step size per parameter, gamma / (sqrt(v) + eps), so that one gamma serves while ratios change.

    v <- beta v + (1 - beta) gap^2 is the second moment of the gossip error (Aketi et al. 2024). Parameters that
    neighbours disagree on get the smaller steps. Steps that differ between nodes do not keep the mean exactly.
    """

    name = "adagossip"

    def __init__(
        self,
        link: Link,
        topology: Topology,
        compressor: Compressor,
        x: torch.Tensor,
        seed: int = 0,
        gamma: float | str = 0.001,
        beta: float = 0.999,
        eps: float = 1e-8,
    ) -> None:
        if gamma == "auto":
            raise ValueError("adagossip's gamma is in units of the model, which no run on Gaussian vectors can tell.")
        if not (0 <= beta < 1 and eps > 0):
            raise ValueError(f"beta must be in [0, 1) and eps positive, got {beta=}, {eps=}.")
        super().__init__(link, topology, compressor, x, seed, gamma)
        self.beta, self.eps = beta, eps
        self.v = torch.zeros_like(self.x)

    def _approach(self, x: torch.Tensor, gap: torch.Tensor) -> None:
        self.v.mul_(self.beta).addcmul_(gap, gap, value=1 - self.beta)
        x.addcdiv_(gap, self.v.sqrt().add_(self.eps), value=self.gamma)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {**super().tensors(), "v": self.v}


@functools.lru_cache
def tune(topology: Topology, compressor: Compressor, numel: int = 2048) -> float:
    """The gamma that brings Gaussian vectors closest together, on this graph with this compressor.

    Koloskova et al. tune gamma in the same way, by 1000 steps. What the compressor leaves out is made up for in about
    1 / delta steps, and too large a gamma shows only then: so many times five are made.

    All ranks must find the same without a message, so what is left over is not compared where it is nothing but
    rounding, which may differ from processor to processor.
    """
    n = topology.world_size
    if n == 1:
        return 1.0
    start = torch.from_numpy(np.random.Generator(np.random.Philox(0)).standard_normal((n, numel)))
    W = torch.from_numpy(topology.weights())
    steps = min(max(60, round(5 / (1 - gaussian_alpha(compressor) ** 2))), 1000)
    nothing = _ROUNDING * float(start.norm())
    left = {gamma: max(nothing, _disagreement(start.clone(), W, compressor, gamma, steps)) for gamma in GAMMAS}
    return min(left, key=lambda gamma: (left[gamma], -gamma))


def _disagreement(x: torch.Tensor, W: torch.Tensor, compressor: Compressor, gamma: float, steps: int) -> float:
    """||X - mean|| after so many steps of consensus from x; infinite once it has grown much.

    All rows are compressed as if they were one, which for Gaussian ones is as good, and much quicker.
    """
    x_hat, limit = torch.zeros_like(x), 1e3 * float(x.norm())
    for t in range(steps):
        x_hat += compressor.apply((x - x_hat).view(-1), Draw(0, t, 0)).view(x.shape)
        x += gamma * (W @ x_hat - x_hat)
        if not float(x.norm()) < limit:
            return float("inf")
    return float((x - x.mean(0)).norm())
