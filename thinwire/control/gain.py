"""GainCurve: which share of the gradient's energy each exchange would send, at any ratio.

Two things are measured. A histogram tells what the largest entries of x = gradient + error hold at the candidate
ratios; K(c) is that share, over all ranks. And the exchange that runs, at ratio c_0, sends the share G_0.

K is right for the next step only: a smaller ratio leaves more error behind, x becomes larger and flatter, and after
some hundred steps far less of it is sent than K promised (mlp on digits: K(0.001) = 0.16 while 0.1 runs, but 0.02 once
0.001 runs). What training feels is the gain that lasts. In the runs of benchmarks/steps_to_accuracy.py it follows

    gain_e(c) = 1 - exp(-A f_e o(c)^s_e),    o(c) = (c / (1 - c)) / (0.1 / 0.9)

for every model and every exchange e, with one number A that depends on the model and the time, and f_e and s_e that do
not: with an error of RMS_ERROR in the logarithm. It goes as c^s where it is small, is 1 at c = 1, continuous and never
falling. A comes from G_0 where something has been sent lately, else from the histogram of gradients without error,
A = -UNDER_ERROR log(1 - K(0.1)).

Where the candidate ratios have been tried out (train/explore.py), A is no longer one number: it is what was found at
each of them, a straight line in log c between two, and constant beyond; times what A by what is sent has become since.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from thinwire.control.agreement import rounded

CANDIDATES = (0.1, 0.033, 0.011, 0.004, 0.001)

_LARGEST = CANDIDATES[0]
_NEWEST_KEPT = 0.3  # the weight of the newest sample in a running value
_NEWEST_MEASURED = 0.05
_FAR_LESS, _NEWEST_FAR_LESS = 0.7, 0.2  # times what was expected is believed sooner: it may be too little to train by
_FORGET = 2 * len(CANDIDATES)  # histograms without a measured gain after which that of old says nothing more
_LEAST, _MOST = 1e-6, 0.999  # gains that a rate can be taken from

# By `python benchmarks/fit_steps.py`: f and s of each exchange.
SHAPES = {
    "topk-allgather": (1.0, 0.91),
    "ms-topk": (1.0, 0.91),
    "layerwise-topk": (0.64, 0.87),
    "star-topk": (0.51, 0.83),
    "var-topk": (0.52, 0.85),
}
RMS_ERROR = 0.1
UNDER_ERROR = 0.65  # 0.5 to 0.8, by model
USUAL_RATE = 1.8  # 0.9 to 2.5, by model


class GainCurve(NamedTuple):
    """See the module. Made of plain numbers that all ranks agreed on; `with_...` give the curve one sample later.

    Attributes:
        kept: K by ratio, smoothed.
        rate: A by what was really sent, smoothed; None if nothing was, or not lately.
        unmeasured: how many samples of K came since the last one of the rate.
        explored: A by ratio where ratios were tried out, the smallest first.
        explored_at: A when they were, by what was sent then.

    >>> curve = GainCurve().with_measured("star-topk", 0.01, 0.1)
    >>> [round(curve.gain("topk-allgather", ratio), 3) for ratio in (0.1, 0.01, 0.001)]
    [0.779, 0.157, 0.021]
    """

    kept: Mapping[float, float] = MappingProxyType({})
    rate: float | None = None
    unmeasured: int = 0
    explored: Mapping[float, float] = MappingProxyType({})
    explored_at: float | None = None

    def with_kept(self, ratio: float, share: float) -> GainCurve:
        """After a histogram told which share of the energy the largest entries of x hold at this ratio."""
        if not 0 < share <= 1:
            return self
        before = self.kept.get(ratio, share)
        kept = {**self.kept, ratio: rounded(before + _NEWEST_KEPT * (share - before))}
        forgotten = self.unmeasured + 1 >= _FORGET
        return self._replace(kept=kept, rate=None if forgotten else self.rate, unmeasured=self.unmeasured + 1)

    def with_measured(self, exchange: str, ratio: float, gain: float, steps: int = 1) -> GainCurve:
        """After an exchange at this ratio sent this share of the energy, for so many steps as far as is known."""
        if exchange not in SHAPES or not 0 < gain <= 1 or not 0 < ratio < 1:
            return self
        rate = _rate_of(exchange, ratio, gain)
        # From what was expected on, slowly: after a change of ratio the error takes its time to follow.
        expected = self._rate_now() if self.kept or self.rate is not None else rate
        weight = _NEWEST_FAR_LESS if rate < _FAR_LESS * expected else _NEWEST_MEASURED
        moved = math.pow(rate / expected, 1 - (1 - weight) ** steps)
        return self._replace(rate=rounded(expected * moved), unmeasured=0)

    def with_explored(self, exchange: str, gains: Mapping[float, float]) -> GainCurve:
        """After each of these ratios was tried out and was found to send so much."""
        found = {ratio: rounded(_rate_of(exchange, ratio, gains[ratio])) for ratio in sorted(gains)}
        if not found and self.explored:  # what was found before still holds, as far as it followed since
            found = {ratio: rounded(self.since_explored() * rate) for ratio, rate in self.explored.items()}
        return self._replace(explored=found, explored_at=rounded(self._rate_now()))

    def since_explored(self) -> float:
        """How many times larger A is, by what is sent, than when ratios were last tried out; infinite if never."""
        return math.inf if self.explored_at is None else self._rate_now() / self.explored_at

    def gain(self, exchange: str, ratio: float) -> float:
        """The share of the energy that this exchange sends at this ratio, once it has run for a while."""
        return self.gains(exchange, (ratio,))[0]

    def gains(self, exchange: str, ratios: tuple[float, ...]) -> list[float]:
        """At each of these ratios."""
        if exchange == "dense":
            return [1.0] * len(ratios)
        # Not by NumPy, whose functions are not the same to the last bit on every processor, as ranks need it.
        shaped = zip(self._rates_at(ratios), _shapes(exchange, ratios), strict=True)
        return [-math.expm1(-rate * shape) for rate, shape in shaped]

    def points(self) -> list[tuple[float, float]]:
        """The candidate ratios and the gain of the exact top-k at each."""
        return [(ratio, self.gain("topk-allgather", ratio)) for ratio in CANDIDATES]

    def to_json(self) -> dict[str, Any]:
        kept = [[ratio, share] for ratio, share in self.kept.items()]
        explored = [[ratio, rate] for ratio, rate in self.explored.items()]
        return {
            "kept": kept,
            "rate": self.rate,
            "unmeasured": self.unmeasured,
            "explored": explored,
            "explored_at": self.explored_at,
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> GainCurve:
        kept = {float(ratio): float(share) for ratio, share in state["kept"]}
        explored = {float(ratio): float(rate) for ratio, rate in state["explored"]}
        rate, explored_at = (None if state[key] is None else float(state[key]) for key in ("rate", "explored_at"))
        return cls(
            kept=kept, rate=rate, unmeasured=int(state["unmeasured"]), explored=explored, explored_at=explored_at
        )

    def _rates_at(self, ratios: tuple[float, ...]) -> Iterable[float]:
        if not self.explored:
            return itertools.repeat(self._rate_now(), len(ratios))
        since = self.since_explored()
        logs, rates = [math.log(known) for known in self.explored], [since * rate for rate in self.explored.values()]
        found: list[float] = np.interp([math.log(ratio) for ratio in ratios], logs, rates).tolist()
        return found

    def _rate_now(self) -> float:
        if self.rate is not None:
            return self.rate
        if _LARGEST in self.kept:
            return -UNDER_ERROR * math.log1p(-min(max(self.kept[_LARGEST], _LEAST), _MOST))
        return USUAL_RATE


def _rate_of(exchange: str, ratio: float, gain: float) -> float:
    return -math.log1p(-min(max(gain, _LEAST), _MOST)) / _shape(exchange, ratio)


def _shape(exchange: str, ratio: float) -> float:
    f, s = SHAPES[exchange]
    return f * math.pow(ratio / (1 - ratio) * (1 - _LARGEST) / _LARGEST, s) if ratio < 1 else math.inf


@functools.lru_cache(maxsize=256)  # decisions ask for the same ratios again and again
def _shapes(exchange: str, ratios: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(_shape(exchange, ratio) for ratio in ratios)
