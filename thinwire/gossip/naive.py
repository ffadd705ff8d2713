"""The obvious way to compress, which does not converge: kept as the warning."""

from __future__ import annotations

from thinwire.compress.quantize import Compressor
from thinwire.gossip.dpsgd import Dpsgd


class Naive(Dpsgd):
    """X_{t+1} = C(X_t) W - gamma G(X_t): D-PSGD with the models compressed as they are exchanged.

    The noise of C is proportional to the model, not to its changes, so it never dies out: the loss stalls at a floor
    that depends on the bits (Tang et al. 2018 begin with it).
    """

    name = "naive"
    assumes_unbiased = True

    @classmethod
    def prepared(cls, compressor: Compressor) -> Compressor:
        return compressor
