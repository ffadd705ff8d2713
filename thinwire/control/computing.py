"""What an exchange costs this rank in computing: choosing, coding, adding up.

A model of passes over memory, in seconds per entry on the machine of docs/design.md, whose processors and caches the
hosts of a lab share; the factor by which another machine differs is measured while it runs (control/view.py).
    dense           n d
    over all-gather n (a + b ratio) + N (s + n (f + e ratio))     everyone's entries are found and added by everyone
    STAR, VAR       n (a + b ratio) + (s + n (f + e ratio))       one set of entries
    torch           0                                             backward() hides it
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.control.prices import LED, Way

DENSE, PASSES, CHOSEN = 2.5e-9, 2.8e-9, 2.0e-8  # d, a, b
SET, FOUND, ADDED = 2e-4, 2e-10, 7e-9  # s, f, e
MESSAGE = 5e-5  # to send one, or to receive it


def compress_seconds(way: Way, ratios: NDArray[Any], numel: int, world_size: int) -> NDArray[Any]:
    """By ratio."""
    if way.exchange == "dense":
        return np.full(len(ratios), 0.0 if way.collective == "torch" else numel * DENSE)
    sets = 1 if way.exchange in LED else world_size
    return numel * (PASSES + ratios * CHOSEN) + sets * (SET + numel * (FOUND + ratios * ADDED))
