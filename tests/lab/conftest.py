"""Real namespaces, real packets. Where none can be made these tests are skipped, and say why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.leftovers import networks, relays_and_launchers
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


@pytest.fixture
def quiet() -> Iterator[None]:
    """No lab but the test's own, and no new network left after it."""
    before = networks()
    assert relays_and_launchers() == []
    yield
    assert networks() - before == set()
