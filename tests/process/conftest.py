"""What tests of whole processes have in common."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where runs have their folders, not made yet."""
    return tmp_path / "runs"
