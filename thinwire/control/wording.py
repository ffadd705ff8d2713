"""What has changed, as people say it."""

from __future__ import annotations


def rate_of(beta: float) -> str:
    """Seconds per byte as people say it.

    >>> rate_of(8e-8), rate_of(1e-9)
    ('100 Mbit/s', '8 Gbit/s')
    """
    mbit = 8e-6 / beta
    return f"{mbit:.3g} Mbit/s" if mbit < 1000 else f"{mbit / 1000:.3g} Gbit/s"


def short(seconds: float) -> str:
    """
    >>> short(0.0049), short(2.0)
    ('4.9 ms', '2 s')
    """
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def course_of_latency(before: float, now: float) -> str:
    return f"latency went from {short(before)} to {short(now)}"


def course_of_step(before: float | None, now: float) -> str:
    """
    >>> course_of_step(0.1, 2.0), course_of_step(None, 0.0049)
    ('a step went from 100 ms to 2 s', 'a step was measured: 4.9 ms')
    """
    return (
        f"a step was measured: {short(now)}" if before is None else f"a step went from {short(before)} to {short(now)}"
    )
