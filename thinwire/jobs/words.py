"""Plans and numbers as a person reads them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from thinwire.jobs.job import Job
from thinwire.lab.units import format_rate, format_seconds

BARS = "▁▂▃▄▅▆▇█"


def in_words(plan: Mapping[str, Any]) -> str:
    """A plan as its record has it.

    >>> in_words({"exchange": "star-topk", "collective": "ring", "ratio": 0.01})
    'star-topk over ring at 0.01 (100x)'
    >>> in_words({"exchange": "choco", "collective": "torus", "ratio": "int8"}), in_words({"exchange": "ddp"})
    ('choco over torus, int8', 'ddp')
    """
    words = str(plan.get("exchange", ""))
    if plan.get("collective"):
        words += f" over {plan['collective']}"
    if plan.get("broadcast", "tree") not in (None, "tree"):
        words += f", {plan['broadcast']} broadcast"
    if plan.get("values", "float32") not in (None, "float32"):
        words += f", {plan['values']} values"
    ratio = plan.get("ratio")
    if isinstance(ratio, str):
        return f"{words}, {ratio}"
    return words if ratio is None or ratio == 1 else f"{words} at {ratio:.3g} ({_three_digits(1 / ratio):g}x)"


def clock(seconds: float) -> str:
    """
    >>> clock(42.4), clock(3725)
    ('0:42', '1:02:05')
    """
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def in_bytes(number: float) -> str:
    """
    >>> in_bytes(0), in_bytes(1300), in_bytes(82e6)
    ('0 bytes', '1.3 kB', '82 MB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} bytes"


def sparkline(values: Iterable[float], width: int) -> str:
    """The course of some numbers in one line of text.

    >>> sparkline([3, 2, 1, 0], 4), sparkline([1, 1, 1, 1, 5, 5], 3), sparkline([], 4)
    ('█▆▃▁', '▁▁█', '')
    """
    listed = list(values)
    if not listed:
        return ""
    parts = min(width, len(listed))
    edges = [len(listed) * part // parts for part in range(parts + 1)]
    means = [statistics.fmean(listed[low:high]) for low, high in zip(edges, edges[1:], strict=False)]
    low, span = min(means), max(means) - min(means)
    return "".join(BARS[round((mean - low) / span * (len(BARS) - 1)) if span else 0] for mean in means)


def wire(latency: float, rate: float | None) -> str:
    return f"{duration(latency)}, {'unlimited' if rate is None else format_rate(_three_digits(rate * 8) / 8)}"


def duration(seconds: float) -> str:
    return format_seconds(_three_digits(seconds))


def _three_digits(value: float) -> float:
    """More would flicker."""
    return float(f"{value:.3g}")


def title_of(job: Job) -> str:
    """
    >>> title_of(Job(task="digits", hosts=2, method="ddp"))
    'digits, ddp, 2 hosts'
    """
    network = f" on {job.network}" if job.network else ""
    return f"{job.task}, {job.method}, {job.hosts} hosts{network}"
