"""Labs for tests, in one line each."""

from __future__ import annotations

from typing import Any

from thinwire.lab.lab import Lab
from thinwire.lab.network import Change
from thinwire.lab.schedule import Schedule
from thinwire.lab.settings import read_values


def lab(hosts: int = 2, *, mtu: int | None = None, **words: Any) -> Lab:
    """A lab whose network stays as it is until a test changes it."""
    return Lab(hosts, Schedule(name="test", changes=(Change(values=read_values(words)),)), mtu=mtu)
