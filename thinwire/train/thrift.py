"""Thrift: how often something may happen that costs computing."""

from __future__ import annotations

import math

from thinwire.link.base import Link


class Thrift:
    """Lets something happen only as often as its computing takes no more than a share of the time."""

    def __init__(self, share: float, longest: float, link: Link) -> None:
        self._share, self._longest, self._link = share, longest, link
        self._next = -math.inf

    def allows(self, ahead: float = 0.0) -> bool:
        """Now, or so many seconds before it would be due, if it is urgent: the next time is then later for it."""
        return self._link.now() >= self._next - ahead

    def __enter__(self) -> None:
        self._start = self._link.processor_seconds()

    def __exit__(self, *_: object) -> None:
        cost = self._link.processor_seconds() - self._start
        # What happened in parts, or before it was allowed, is waited for all the longer.
        now = self._link.now()
        self._next = min(max(self._next, now) + cost / self._share, now + self._longest)
