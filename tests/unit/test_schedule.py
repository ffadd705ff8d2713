"""How often a network may change."""

from __future__ import annotations

import re

import pytest

from thinwire.lab import profiles


def test_a_network_that_would_change_more_often_than_anybody_could_follow_is_refused() -> None:
    lte, c2 = profiles.schedule("lte", 2), profiles.schedule("c2", 2)
    assert lte.faster(900).repeat == pytest.approx(1 / 3)  # 300 changes, again and again
    assert len(c2.faster(1e300).changes) == 11  # once
    for speed, times in ((1100, "1.1e+03"), (1e300, "1e+300")):
        with pytest.raises(ValueError, match=f"would change {re.escape(times)} times a second, and 1000 is the most"):
            lte.faster(speed)
