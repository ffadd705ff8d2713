"""Real namespaces, real packets. Where none can be made these tests are skipped, and say why."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.lab import registry
from thinwire.lab.errors import LabUnavailable
from thinwire.lab.lab import Lab


@pytest.fixture(scope="session")
def lab_reason() -> str:
    """Why there can be no lab here; nothing if there can."""
    try:
        with Lab(1):
            return ""
    except LabUnavailable as error:
        return str(error).splitlines()[0]


@pytest.fixture(autouse=True)
def needs_a_lab(lab_reason: str) -> None:
    if lab_reason:
        pytest.skip(f"no lab here: {lab_reason}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A registry of our own, so that what is left can be counted."""
    monkeypatch.setenv(registry.FOLDER_VARIABLE, str(tmp_path / "labs"))
    return tmp_path / "labs"
