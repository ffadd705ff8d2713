"""Text to seconds, bytes per second and shares, and back. The only place of the lab that knows other units."""

from __future__ import annotations

import math
import re
from decimal import Decimal

# Decimal, so that 9ms is the number that one writes as 0.009.
SECONDS = {"us": Decimal("1e-6"), "ms": Decimal("1e-3"), "s": Decimal(1), "min": Decimal(60), "h": Decimal(3600)}
# Bits as networks count them: powers of ten. A rate in bytes would be read wrong by half of all readers.
BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
UNLIMITED = "unlimited"

_NUMBER = re.compile(r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)\s*([a-z/%]*)\s*", re.IGNORECASE)


def seconds(text: str) -> float:
    """
    >>> seconds("5ms"), seconds("0.5 s"), seconds("2min")
    (0.005, 0.5, 120.0)
    """
    number, unit = _split(text, "a time", "5ms")
    if unit not in SECONDS:
        raise ValueError(f"{text!r} is not a time: write it with one of {', '.join(SECONDS)}, like 5ms.")
    return float(number * SECONDS[unit])


def rate(text: str) -> float:
    """Bytes per second.

    >>> rate("100mbit"), rate("1 Gbit/s"), rate("unlimited")
    (12500000.0, 125000000.0, inf)
    """
    if text.strip().lower() == UNLIMITED:
        return math.inf
    number, unit = _split(text, "a rate", "100mbit")
    unit = unit.removesuffix("/s")
    if unit not in BITS or number == 0:
        raise ValueError(
            f"{text!r} is not a rate: write a number above 0 with one of {', '.join(BITS)}, like 100mbit, or "
            f"{UNLIMITED}. To stop all packets use a partition."
        )
    return float(number * BITS[unit] / 8)


def share(text: str) -> float:
    """
    >>> share("1%"), share("0.05")
    (0.01, 0.05)
    """
    number, unit = _split(text, "a share", "1%")
    value = float(number / 100 if unit == "%" else number)
    if unit not in ("", "%") or value > 1:
        raise ValueError(f"{text!r} is not a share: write it as 1% or 0.01, at most 100%.")
    return value


def format_seconds(value: float) -> str:
    """
    >>> format_seconds(0.0005), format_seconds(0.05), format_seconds(90)
    ('0.5 ms', '50 ms', '90 s')
    """
    return f"{value * 1e3:.4g} ms" if value < 1 else f"{value:.4g} s"


def format_rate(value: float) -> str:
    """
    >>> format_rate(125e6), format_rate(1.25e6), format_rate(math.inf)
    ('1 Gbit/s', '10 Mbit/s', 'unlimited')
    """
    if math.isinf(value):
        return UNLIMITED
    for name, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if value * 8 >= size:
            return f"{value * 8 / size:.4g} {name}"
    return f"{value * 8:.4g} bit/s"


def _split(text: str, what: str, example: str) -> tuple[Decimal, str]:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not {what}: write it like {example}.")
    return Decimal(match[1]), match[2].lower()
