"""What a node that gossips warns of: too coarse a compressor, neighbours that drift apart, steps that are lost."""

from __future__ import annotations

import math
import warnings

import torch

from thinwire.compress.quantize import Compressor, Draw, alpha
from thinwire.errors import ThinwireWarning
from thinwire.gossip import Method
from thinwire.gossip.choco import Choco
from thinwire.gossip.dcd import Dcd

_STEPS_BETWEEN_LOOKS = 100
_GROWTH = 1.25  # of the gap between neighbours from look to look
_GAP = 0.1  # of the model
_SKIPS_IN_A_ROW = 5  # after which it is no accident


def warn_of_bias(kind: type[Method], compressor: Compressor) -> None:
    if kind.assumes_unbiased and not compressor.unbiased:
        warnings.warn(
            f"{compressor} is biased, and the theory of {kind.name} covers unbiased compressors only. It may work all "
            "the same; choco takes any compressor.",
            ThinwireWarning,
            stacklevel=3,
        )


class Caution:
    """Looks at one node while it trains. To be called by what the user's optimizer calls, whose line is then shown."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._gap = math.inf
        self._skips_in_a_row = 0
        self._told_of_skips = False

    def alpha_of(self, method: Method, x: torch.Tensor, rank: int) -> float | None:
        """DCD's condition on the compressor, on this run's own differences, after 0, 1, 3, 7, 15 ... steps."""
        t, topology = method.t, method.topology
        if not isinstance(method, Dcd) or (t + 1) & t or not torch.isfinite(x).all():
            return None
        found, allowed = alpha(method.compressor, method.difference(x), Draw(method.seed, t, rank)), topology.dcd_alpha
        if found >= allowed:
            warnings.warn(
                f"dcd with {method.compressor} may not converge: at step {t} its error is {found:.3g} of what it "
                f"sends, and {topology.name} with {topology.world_size} nodes (rho {topology.rho:.3f}, "
                f"mu {topology.mu:.3f}) allows less than {allowed:.3g}. Use more bits, a graph with a larger "
                "spectral gap, or choco.",
                ThinwireWarning,
                stacklevel=4,
            )
        return found

    def look_at_gap(self, method: Method) -> None:
        """Choco's gamma, every hundred steps: with too large a one neighbours drift apart, faster and faster."""
        if not isinstance(method, Choco) or method.t % _STEPS_BETWEEN_LOOKS:
            return
        gap, size = method.gap(), float(torch.linalg.vector_norm(method.x))
        growth, self._gap = gap / self._gap if self._gap > 0 else 0.0, gap
        if growth > _GROWTH and gap > _GAP * size:
            warnings.warn(
                f"neighbours drift apart: at step {method.t} they are {gap / size:.3g} times the size of the model "
                f"away, {growth:.3g} times as far as {_STEPS_BETWEEN_LOOKS} steps ago. {method.name}'s gamma of "
                f"{method.gamma:g} may be too large for {method.compressor} on {method.topology.name}.",
                ThinwireWarning,
                stacklevel=4,
            )

    def look_at_skips(self, skipped: bool, step: int, rank: int) -> None:
        """The first is worth a word. Several in a row do not end by themselves if the optimizer remembers the first."""
        self._skips_in_a_row = self._skips_in_a_row + 1 if skipped else 0
        if skipped and not self._told_of_skips:
            self._told_of_skips = True
            warnings.warn(
                f"the optimizer's step {step} gave something not finite on rank {rank} and was taken back; `skipped` "
                "counts such steps.",
                ThinwireWarning,
                stacklevel=4,
            )
        if self._skips_in_a_row == _SKIPS_IN_A_ROW:
            warnings.warn(
                f"rank {rank} does not learn: the optimizer's last {_SKIPS_IN_A_ROW} steps gave something not finite "
                f"and were taken back. {_likely_cause(self._optimizer)}",
                ThinwireWarning,
                stacklevel=4,
            )


def _likely_cause(optimizer: torch.optim.Optimizer) -> str:
    spoilt = {
        name
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and not torch.isfinite(value).all()
    }
    if not spoilt:
        return "The optimizer's state is finite, so look at the gradients and the learning rate."
    return (
        f"The likely cause is the optimizer's state, which is not finite ({', '.join(sorted(spoilt))}) since the first "
        "of them and spoils all that follow: clear it, and check gradients before optimizer.step()."
    )
