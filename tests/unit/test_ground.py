"""Where workers run: what a place lacks is said before anybody is started there."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import NoReturn

import pytest

from thinwire.jobs import digits, start
from thinwire.jobs.ground import OnLoopback
from thinwire.jobs.job import Job

ANOTHER = "choose another --port, or none for one that is free."


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.EADDRINUSE, f"port 80 is in use: {ANOTHER}"),
        (errno.EACCES, f"port 80 cannot be opened (Permission denied): {ANOTHER}"),
        (errno.EADDRNOTAVAIL, f"port 80 cannot be opened (Cannot assign requested address): {ANOTHER}"),
    ],
)
def test_a_port_that_cannot_be_had_is_told_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    def refuse(address: tuple[str, int]) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(ValueError) as told:
        OnLoopback(Job(port=80))
    assert str(told.value) == says


def test_digits_without_scikit_learn_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert digits.find().is_file()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"not installed: pip install 'thinwire\[demo\]'\.$"):
        start.refuse_early(Job(task="digits"))
    start.refuse_early(Job(task="chars", text=str(Path(__file__))))
