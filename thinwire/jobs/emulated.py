"""Where there can be no lab: our own connections, slowed down by a schedule of latency and rate."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from thinwire.lab.network import Change, Conditions
from thinwire.lab.schedule import Schedule
from thinwire.lab.truth import Truth
from thinwire.link.base import Link, Reading, Stretch
from thinwire.link.shaped import ShapedLink
from thinwire.types import Network

LEAST_LATENCY = 1e-4  # seconds: what a message between two processes takes anyway
MOST_RATE = 1e9  # bytes per second: what they can send each other at most
STRETCH_SECONDS = 0.02

log = logging.getLogger("thinwire")


class EmulatedLink(ShapedLink):
    """A shaped link that follows a schedule. It tells what it does to messages as if it had measured it.

    Only what we send over it is slowed down, so it has no process group: torch's own all_reduce would be as fast as
    ever.

    Args:
        truth: a file for what the network is when, on rank 0, as the lab writes it.
    """

    def __init__(self, link: Link, schedule: Schedule, truth: Path | None = None) -> None:
        self._conditions = Conditions(link.world_size, schedule.site or None)
        self._changes = _timeline(schedule)
        self._next = next(self._changes, None)
        self._truth = Truth(truth, "a", log.warning) if truth is not None and link.rank == 0 else None
        self._start = time.monotonic()
        super().__init__(link, Network(alpha=0.0, beta=0.0))
        self.group = None
        self.follow()

    def follow(self) -> None:
        """Let everything come true that was due by now. Call now and then."""
        elapsed, changed = time.monotonic() - self._start, False
        while self._next is not None and self._next.at <= elapsed:
            self._conditions.apply(self._next)
            if self._truth is not None:
                self._truth.write(self._next, self._next.at, time.time(), self._conditions)
            self._next, changed = next(self._changes, None), True
        if changed:
            self.network = self._here()

    def read_out(self) -> Reading:
        alpha, beta = max(self.network.alpha, LEAST_LATENCY), max(self.network.beta, 1 / MOST_RATE)
        others = (peer for peer in range(self.world_size) if peer != self.rank)
        stretch = Stretch(max(1, int(STRETCH_SECONDS / beta)), STRETCH_SECONDS)
        return Reading(tuple((peer, 2 * alpha) for peer in others), (stretch,))

    def close(self) -> None:
        super().close()
        if self._truth is not None:
            self._truth.close()

    def _here(self) -> Network:
        """As this rank sees it: the mean over the ways to all others."""
        ways = [(self.rank, other) for other in range(self.world_size) if other != self.rank]
        if not ways:
            return Network(alpha=0.0, beta=0.0)
        alpha = sum(self._conditions.routes[src][dst].latency for src, dst in ways) / len(ways)
        beta = sum(1 / self._conditions.rate(src, dst) for src, dst in ways) / len(ways)
        return Network(alpha=alpha, beta=beta)


def _timeline(schedule: Schedule) -> Iterator[Change]:
    """The changes in order of time, again and again if they repeat."""
    begin = 0.0
    while True:
        yield from (replace(change, at=begin + change.at) for change in schedule.changes)
        begin += schedule.repeat
        if not schedule.repeat:
            return
