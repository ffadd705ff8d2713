"""What a lab refuses when it runs, and how: soon, and in one line. What it refuses to read is in the unit tests."""

from __future__ import annotations

import time

import pytest

from tests.lab.networks import lab
from thinwire.lab import check
from thinwire.lab.errors import LabError
from thinwire.lab.lab import Lab

pytestmark = pytest.mark.lab


def test_a_lab_that_cannot_begin_says_so_at_once() -> None:
    begin = time.monotonic()
    with pytest.raises(LabError, match="cannot be written"), Lab(1, truth="/nowhere/truth"):
        pass
    assert time.monotonic() - begin < 3  # it used to wait 5 s for a process that was not dying


def test_a_check_through_a_partition_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with lab(2, latency="1ms") as two:
        monkeypatch.setattr(check, "round_trips", lambda *_, **__: [])
        with pytest.raises(LabError, match="no ping"):
            check.measure(two)
