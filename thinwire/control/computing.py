"""What an exchange costs this rank in computing: choosing, coding, adding up.

A model of passes over memory and of single entries in it, in seconds on one core of the machine of docs/design.md, with
caches that backward() has used in between; the factor by which another machine differs, or one that is shared, is
measured while it runs (control/view.py). With n entries, N ranks, and u the cache lines that hold chosen ones, over n,
    dense           s + n d
    over all-gather n (a + b u) + N (s + n (f + e u))     everyone's entries are found and added by everyone
    STAR, VAR       n (a + b u) + (s + n (f + e u))       one set of entries
    torch           0                                     backward() hides it
    u = (1 - (1 - ratio)^L) / L                           with L entries in a line: few share one, many do
In the lab, 4 and 8 hosts on two cores, 0.2 and 2 million entries, ratios from 0.003 to 0.1, what was measured over what
this says changes with the ratio by a factor of 1.2 to 1.4 for all-gathers, and of 1.3 to 1.7 for STAR
(benchmarks/computing.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.control.prices import LED, Way

DENSE, PASSES, CHOSEN = 2e-9, 1.2e-9, 4e-8  # d, a, b
SET, FOUND, ADDED = 7e-5, 5e-11, 9e-9  # s, f, e
MESSAGE = 2.5e-5  # to send one, or to receive it


def compress_seconds(way: Way, ratios: NDArray[Any], numel: int, world_size: int) -> NDArray[Any]:
    """By ratio."""
    if way.exchange == "dense":
        return np.full(len(ratios), 0.0 if way.collective == "torch" else SET + numel * DENSE)
    sets, lines = 1 if way.exchange in LED else world_size, _lines(ratios)
    return numel * (PASSES + lines * CHOSEN) + sets * (SET + numel * (FOUND + lines * ADDED))


def _lines(ratios: NDArray[Any]) -> NDArray[Any]:
    """Lines of 16 entries in which some are chosen, over all entries.

    Multiplied out, since NumPy's powers are not the same to the last bit on every processor.
    """
    missed = 1 - ratios
    for _ in range(4):
        missed = missed * missed
    lines: NDArray[Any] = (1 - missed) / 16
    return lines
