"""How ranks that each see a network of their own come to hold one number, without a message for it.

Every rank tells how far its own estimate is from what was agreed so far, on a scale that ends at S,
    off_r = g(log(own_r / agreed)),  g(d) = d / (1 + |d| / S),  known_r = 1,   or off_r = known_r = 0 if it has none,
the sums ride on the next exchange, and all ranks move together:
    agreed <- agreed exp(g^-1(sum off_r / sum known_r)).
If all see the same number, that is where they are after one step, however far it is. The scale makes it an estimate in
Huber's sense (1964): a rank that is absurdly wrong drags N - 1 others along by a factor of at most exp(S / (N - 2)),
1.6 for one of four and 1.17 for one of eight. Where fewer than half of the ranks know, those that are missing to a half
count as if they had seen what was agreed: then one alone moves the others by a factor of at most exp(2 S / (N - 2)),
2.5 for one of four, as often as it says so. Two ranks believe each other.

The result is rounded to seven digits, since mathematical libraries differ in the last: ranks on different machines then
hold the same bits.
"""

from __future__ import annotations

import math

from thinwire.types import Network

S = math.log(4.0) * 2 / 3
FARTHEST = 20.0  # that a step can go: from 1 to e^20
START = Network(alpha=1e-3, beta=8e-9)  # a first number to be far from: 1 ms, 1 Gbit/s
ALPHAS, BETAS = (1e-7, 100.0), (1e-13, 1.0)  # what can be believed


def off(own: float | None, agreed: float | None, start: float, believed: tuple[float, float]) -> tuple[float, float]:
    """How far this rank is off, and whether it knows: what it tells the others."""
    if own is None or not believed[0] <= own <= believed[1]:  # which no NaN does
        return 0.0, 0.0
    if agreed is None:
        return math.log(own / start), 1.0
    return _told(math.log(own / agreed)), 1.0


def moved(
    agreed: float | None, off_sum: float, known_sum: float, ranks: int, start: float, believed: tuple[float, float]
) -> float | None:
    """Where all ranks go, from the sums of what they told. Sums that cannot be, as from broken ranks, move nobody."""
    if not 1 <= known_sum < math.inf or not math.isfinite(off_sum):
        return agreed
    distance = off_sum / known_sum if agreed is None else _heard(off_sum / max(known_sum, ranks / 2))
    value = (start if agreed is None else agreed) * math.exp(min(FARTHEST, max(-FARTHEST, distance)))
    return rounded(min(believed[1], max(believed[0], value)))


def _told(distance: float) -> float:
    """g."""
    return distance / (1 + abs(distance) / S)


def _heard(mean: float) -> float:
    """g^-1; what lies beyond the scale is far."""
    left = 1 - abs(mean) / S
    return mean / left if left > abs(mean) / FARTHEST else math.copysign(FARTHEST, mean)


def rounded(value: float) -> float:
    """To seven digits, so that the last bits of a computation cannot tell two ranks apart."""
    return float(f"{value:.6e}")
