"""How workers come to do the same things at the same steps.

What depends on a clock or on a signal is agreed upon: each says what it wants after some step, and some steps later,
when everybody's words have arrived, all hear the same.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

AGREE_SECONDS = 0.2  # between two agreements, at least
NOTICEABLE_SECONDS = 0.005


class Clock:
    """Seconds of training, without those in which something else was done."""

    def __init__(self) -> None:
        self._before, self._since = 0.0, time.monotonic()

    def __call__(self) -> float:
        return self._before + time.monotonic() - self._since

    def set(self, seconds: float) -> None:
        self._before, self._since = seconds, time.monotonic()


class Words(NamedTuple):
    """What a worker says to all: numbers that are added up. Only rank 0 says how many steps until the next."""

    interrupted: float = 0.0
    over: float = 0.0
    evaluate: float = 0.0
    not_finite: float = 0.0
    save: float = 0.0
    steps: float = 0.0


class Agreement:
    """Says words, and some steps later hears what all said: meanwhile they are on their way, and nobody waits.

    Attributes:
        seconds: that should lie between saying and hearing: longer than words need on this network.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.seconds = AGREE_SECONDS
        self._said_at = 0.0
        self._due = self._steps = 1  # the step of the next words, and how many lie between two, as rank 0 last said
        self._said: tuple[torch.Tensor, Any] | None = None

    def is_due(self, step: int) -> bool:
        return step >= self._due

    def say(self, words: Words, step: int) -> None:
        numbers = torch.tensor(words, dtype=torch.float64)
        self._said_at = time.monotonic()
        self._said = numbers, dist.all_reduce(numbers, group=self._group, async_op=True)
        self._due = step + self._steps

    def hear(self) -> Words:
        """What all said last; nothing if nobody has."""
        if self._said is None:
            return Words()
        numbers, work = self._said
        start = time.monotonic()
        work.wait()
        now = time.monotonic()
        had_to_wait = now - start > NOTICEABLE_SECONDS
        self.seconds = max(AGREE_SECONDS, 1.5 * (now - self._said_at) if had_to_wait else 0.9 * self.seconds)
        self._said = None
        heard = Words(*numbers.tolist())
        self._steps = max(1, int(heard.steps))
        return heard
