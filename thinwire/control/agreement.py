"""How ranks that each see a network of their own come to hold one number, without a message for it.

Every rank tells how far its own estimate is from what was agreed so far, within bounds,
    off_r = clip(log(own_r / agreed), -log 4, log 4)  with known_r = 1,   or off_r = known_r = 0 if it has no estimate,
the sums ride on the next exchange, and all ranks move together:
    agreed <- agreed exp(sum off_r / sum known_r).
The bounds make it an estimate in Huber's sense (1964): a rank that is absurdly wrong drags N - 1 others along by a
factor of at most 4^(1 / (N - 1)). A true change by a factor c is followed in log_4 c steps.

The result is rounded to seven digits, since mathematical libraries differ in the last: ranks on different machines then
hold the same bits, and should they ever differ, the next steps bring them together again, as they do with all numbers
that ranks see differently.
"""

from __future__ import annotations

import math

from thinwire.types import Network

MOST = math.log(4.0)
START = Network(alpha=1e-3, beta=8e-9)  # a first number to be far from: 1 ms, 1 Gbit/s
ALPHAS, BETAS = (1e-7, 100.0), (1e-13, 1.0)  # what can be believed


def off(own: float | None, agreed: float | None, start: float, believed: tuple[float, float]) -> tuple[float, float]:
    """How far this rank is off, and whether it knows: what it tells the others."""
    if own is None or not believed[0] <= own <= believed[1]:  # which no NaN does
        return 0.0, 0.0
    if agreed is None:
        return math.log(own / start), 1.0
    return min(MOST, max(-MOST, math.log(own / agreed))), 1.0


def moved(
    agreed: float | None, off_sum: float, known_sum: float, start: float, believed: tuple[float, float]
) -> float | None:
    """Where all ranks go, from the sums of what they told. Sums that cannot be, as from broken ranks, move nobody."""
    if not 1 <= known_sum < math.inf or not math.isfinite(off_sum):
        return agreed
    base, farthest = (start, 100.0) if agreed is None else (agreed, MOST)
    value = base * math.exp(min(farthest, max(-farthest, off_sum / known_sum)))
    return rounded(min(believed[1], max(believed[0], value)))


def rounded(value: float) -> float:
    """To seven digits, so that the last bits of a computation cannot tell two ranks apart."""
    return float(f"{value:.6e}")
