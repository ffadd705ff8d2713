"""D-PSGD: mixing without compression (Lian et al. 2017)."""

from __future__ import annotations

import torch

from thinwire.compress.quantize import Compressor, Exact
from thinwire.gossip.base import Method


class Dpsgd(Method):
    """X_{t+1} = X_t W - gamma G(X_t)."""

    name = "dpsgd"
    says_early = True

    @classmethod
    def prepared(cls, compressor: Compressor) -> Compressor:
        return Exact()

    def _mix(self, x: torch.Tensor) -> None:
        x -= self.x
        own, codes = self._say_early()
        x.add_(own, alpha=self.weight(self.link.rank))
        for j in codes:
            x.add_(self._read(codes, j), alpha=self.weight(j))

    def _outgoing(self) -> torch.Tensor:
        return self.x
