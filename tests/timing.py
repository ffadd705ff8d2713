"""Tests of how long something takes, on a machine that others use too."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec

TIMES = 3

P = ParamSpec("P")


def timing(test: Callable[P, None]) -> Callable[P, None]:
    """Take a measurement that misses its bar again, in all three times at most.

    A machine that stands still for a moment makes anything late, once. What is really too slow, or too early, misses
    every time. Each miss is shown among the warnings of the run.
    """

    @functools.wraps(test)
    def measured(*args: P.args, **kwargs: P.kwargs) -> None:
        for _ in range(TIMES - 1):
            try:
                return test(*args, **kwargs)
            except AssertionError as missed:
                with warnings.catch_warnings():
                    warnings.simplefilter("default")  # elsewhere a warning is an error
                    warnings.warn(f"{test.__name__} missed, and is measured again: {missed}", stacklevel=2)
        return test(*args, **kwargs)

    return measured
