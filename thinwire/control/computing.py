"""What an exchange costs this rank in computing: choosing, coding, adding up.

A model of passes over memory, in nanoseconds per entry on the machine of docs/design.md; the factor by which another
machine differs is measured while it runs (control/view.py). An entry that is added to a large array misses the cache,
all the more where hosts share it: ADDED is that of four hosts on two cores.
    dense           n d
    over all-gather n (a + b ratio + N e ratio)     everyone's entries are decoded and added by everyone
    STAR, VAR       n (a + b ratio + e ratio)       one set of entries
    torch           0                               backward() hides it
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.control.prices import LED, Way

DENSE, PASSES, CHOSEN, ADDED = 2.5e-9, 2.8e-9, 2.0e-8, 2e-8


def compress_seconds(way: Way, ratios: NDArray[Any], numel: int, world_size: int) -> NDArray[Any]:
    """By ratio."""
    if way.exchange == "dense":
        return np.full(len(ratios), 0.0 if way.collective == "torch" else numel * DENSE)
    sets = 1 if way.exchange in LED else world_size
    return numel * (PASSES + ratios * (CHOSEN + sets * ADDED))
