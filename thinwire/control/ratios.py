"""The ratios that are looked at, and the few of them that are priced."""

from __future__ import annotations

import functools
import math

import numpy as np

from thinwire.compress.values import MOST_SHARE
from thinwire.control.agreement import rounded
from thinwire.control.view import Floats

PRICED = 5  # evenly spread over the decades; between them prices are nearly straight lines


@functools.cache
def two_digit_ratios(low: float, high: float) -> Floats:
    """The numbers of two digits from `low` to `high`, and these two: fine enough to call the ratio continuous.

    >>> two_digit_ratios(0.0097, 0.011).tolist()
    [0.0097, 0.0098, 0.0099, 0.01, 0.011]
    """
    decades = range(math.floor(math.log10(low)), 1)
    between = (float(f"{digits}e{decade - 1}") for decade in decades for digits in range(10, 100))
    return np.array(sorted({low, high} | {ratio for ratio in between if low < ratio < high}))


@functools.cache
def knots(low: float, high: float) -> tuple[float, ...]:
    """The few ratios that are priced; rounded, as NumPy's last bit is not the same on every processor."""
    if low == high:
        return (low,)
    jump = (MOST_SHARE, 1.01 * MOST_SHARE)  # beyond which values take more bits
    inner = {rounded(ratio) for ratio in np.geomspace(low, high, PRICED)}
    return tuple(sorted(inner | {ratio for ratio in jump if low < ratio < high}))
