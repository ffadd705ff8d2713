"""Numbers as a reader wants them: in the unit that fits, with as many digits as mean something."""

from __future__ import annotations

import math
from typing import NamedTuple


class Unit(NamedTuple):
    """What a number in base units is divided by to be shown, and what is written behind it."""

    name: str
    size: float


SECONDS = (Unit("h", 3600.0), Unit("min", 60.0), Unit("s", 1.0))
BYTES = (Unit("TB", 1e12), Unit("GB", 1e9), Unit("MB", 1e6), Unit("kB", 1e3), Unit("B", 1.0))
MILLISECONDS, MEGABITS, PERCENT, ONE = Unit("ms", 1e-3), Unit("Mbit/s", 125e3), Unit("%", 0.01), Unit("", 1.0)


def fitting(units: tuple[Unit, ...], largest: float, least: float = 1.0) -> Unit:
    """The largest unit of which there are at least `least`.

    >>> fitting(SECONDS, 90, least=5).name, fitting(SECONDS, 900, least=5).name, fitting(BYTES, 2.5e7).name
    ('s', 'min', 'MB')
    """
    return next((unit for unit in units if largest >= least * unit.size), units[-1])


def digits(value: float, count: int = 3) -> str:
    """
    >>> digits(0.012345), digits(12.345), digits(12345.6), digits(2.0), digits(float("nan")), digits(4e-7)
    ('0.0123', '12.3', '12,346', '2', 'not known', '4e-07')
    """
    if not math.isfinite(value):
        return "not known"
    if abs(value) >= 10**count:
        return f"{value:,.0f}"
    return f"{value:.{count}g}"


def seconds(value: float) -> str:
    """
    >>> seconds(0.0123), seconds(12.3), seconds(125), seconds(7384)
    ('12.3 ms', '12.3 s', '2 min 05 s', '2 h 03 min')
    """
    if not math.isfinite(value):
        return "not known"
    if value < 1:
        return f"{digits(value * 1e3)} ms"
    if value < 59.95:
        return f"{digits(value)} s"
    if value < 3600:
        return f"{value // 60:.0f} min {value % 60 // 1:02.0f} s"
    return f"{value // 3600:.0f} h {value % 3600 // 60:02.0f} min"


def nbytes(value: float) -> str:
    """
    >>> nbytes(0), nbytes(1234), nbytes(5.6e9)
    ('0 B', '1.23 kB', '5.6 GB')
    """
    if not math.isfinite(value):
        return "not known"
    unit = fitting(BYTES, value)
    return f"{digits(value / unit.size)} {unit.name}"


def rate(bytes_per_second: float) -> str:
    """
    >>> rate(125e3), rate(125e6)
    ('1 Mbit/s', '1 Gbit/s')
    """
    if not math.isfinite(bytes_per_second):
        return "not known"
    mbit = bytes_per_second / MEGABITS.size
    return f"{digits(mbit)} Mbit/s" if mbit < 1000 else f"{digits(mbit / 1000)} Gbit/s"


def share(value: float, precision: int = 3) -> str:
    """
    >>> share(0.98765), share(0.5), share(0.00012), share(0.0898, 2)
    ('98.8 %', '50 %', '0.012 %', '9 %')
    """
    return f"{digits(value * 100, precision)} %" if math.isfinite(value) else "not known"


def times(value: float) -> str:
    """
    >>> times(2.345), times(123.4)
    ('2.35×', '123×')
    """
    return f"{digits(value)}×" if math.isfinite(value) else "not known"


def count(number: int, noun: str) -> str:
    """
    >>> count(1, "step"), count(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
