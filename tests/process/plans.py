"""The plans that process tests go through: every exchange, the sparse ones at one ratio."""

from __future__ import annotations

from typing import Any

from thinwire.exchange import NAMES

SPARSE = [name for name in NAMES if name != "dense"]


def plan(name: str) -> dict[str, Any]:
    """What `attach` and `Synchronizer` are to be told for an exchange of that name."""
    return {"exchange": name, "ratio": None if name == "dense" else 0.05}
