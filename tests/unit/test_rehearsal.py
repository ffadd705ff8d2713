"""Before the first step everything that numba compiles has been compiled."""

from __future__ import annotations

import pytest

from thinwire.control import prices
from thinwire.train.rehearsal import rehearse


def test_what_prices_a_plan_has_been_compiled_before_the_first_step_of_any_plan() -> None:
    pytest.importorskip("numba")
    rehearse(compresses=False)
    assert prices._compiled().signatures  # type: ignore[attr-defined]
