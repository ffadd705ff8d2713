"""What a chart is: numbers in the unit they are shown in, few enough to draw, and a table of the same.

page.js draws them. A kind of chart that it knows: "panes" (lines, stacks and lanes over one common axis), "front" (the
candidates of each decision) and "bars".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.report.runs import Floats
from thinwire.report.words import BYTES, ONE, SECONDS, Unit, digits, fitting

BUCKETS = 400  # of a line with more than twice as many points: the median of each, between its least and its largest
ROWS = 30  # of the table under a chart
DIGITS = 5

Gaps = Sequence[tuple[float, float]]  # from where to where on an axis there is nothing, and lines are interrupted


@dataclass(frozen=True, kw_only=True)
class Axis:
    """`low` and `high` are the least that it spans."""

    label: str
    unit: Unit = ONE
    log: bool = False
    low: float | None = None
    high: float | None = None

    @property
    def title(self) -> str:
        return f"{self.label} ({self.unit.name})" if self.unit.name else self.label

    def to_json(self) -> dict[str, Any]:
        spans = {"low": self.low, "high": self.high}
        return {"title": self.title, "unit": self.unit.name, "log": self.log} | {
            key: value for key, value in spans.items() if value is not None
        }


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points in base units.

    Args:
        style: line, step (holds until the next point) or dots.
        colour: the number of a colour of the page.
        dash: the number of a pattern, 0 for none.
        thick: drawn broad and pale, to lie under others.
        low, high: what lies around the line.
    """

    name: str
    x: Floats
    y: Floats
    colour: int
    style: str = "line"
    dash: int = 0
    thick: bool = False
    low: Floats | None = None
    high: Floats | None = None

    def to_json(self, x: Unit, y: Unit) -> dict[str, Any]:
        spec: dict[str, Any] = {"name": self.name, "colour": self.colour, "style": self.style}
        spec |= {"dash": self.dash} if self.dash else {}
        spec |= {"thick": True} if self.thick else {}
        spec |= {"x": short(self.x / x.size), "y": short(self.y / y.size)}
        if self.low is not None and self.high is not None:
            spec |= {"low": short(self.low / y.size), "high": short(self.high / y.size)}
        return spec


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A band of coloured stretches: from `starts[i]` to `ends[i]` it was `names[which[i]]`."""

    label: str
    names: tuple[str, ...]
    colours: tuple[int, ...]
    starts: Floats
    ends: Floats
    which: tuple[int, ...]

    def to_json(self, x: Unit) -> dict[str, Any]:
        return {
            "kind": "lane",
            "title": self.label,
            "names": self.names,
            "colours": self.colours,
            "starts": short(self.starts / x.size),
            "ends": short(self.ends / x.size),
            "which": self.which,
        }


@dataclass(frozen=True, kw_only=True)
class Pane:
    """Series over one vertical axis; `kind` is lines or stack."""

    y: Axis
    series: tuple[Series, ...]
    kind: str = "lines"
    height: int = 240

    def to_json(self, x: Unit) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "y": self.y.to_json(),
            "height": self.height,
            "series": [series.to_json(x, self.y.unit) for series in self.series],
        }


class Table(NamedTuple):
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure of the page.

    Args:
        name: what it is called in the page, of our own choosing.
        note: a sentence on how to read it.
        wide: whether it takes the whole width.
        spec: what page.js draws it from.
    """

    name: str
    title: str
    note: str = ""
    wide: bool = False
    spec: dict[str, Any]
    table: Table


@dataclass(frozen=True, kw_only=True)
class Section:
    """Charts that belong together; a string in place of one says why it is left out."""

    name: str
    title: str
    items: list[Chart | str]


def panes(
    name: str,
    title: str,
    x: Axis,
    *rows: Pane | Lane,
    note: str = "",
    wide: bool = False,
    group: str = "",
) -> Chart:
    """Panes over one horizontal axis. Charts of one `group` show the same moment when one of them is pointed at."""
    spec = {"kind": "panes", "x": x.to_json(), "group": group, "panes": [row.to_json(x.unit) for row in rows]}
    return Chart(name=name, title=title, note=note, wide=wide, spec=spec, table=_table(x, rows))


def _table(x: Axis, rows: Sequence[Pane | Lane]) -> Table:
    """The same numbers at a few places of the horizontal axis, the last before each where there is none at it."""
    series = [(row, one) for row in rows if isinstance(row, Pane) for one in row.series]
    lanes = [row for row in rows if isinstance(row, Lane)]
    places = np.unique(np.concatenate([known(one.x, one.y)[0] for _, one in series] or [np.zeros(0)]))
    places = (
        places[np.unique(np.linspace(0, len(places) - 1, min(ROWS, len(places))).astype(int))]
        if len(places)
        else places
    )
    header = (x.title, *(_heading(row, one, len(rows)) for row, one in series), *(lane.label for lane in lanes))
    written = [
        (
            digits(place / x.unit.size, 4),
            *(_value_at(one, place, row.y.unit) for row, one in series),
            *(_name_at(lane, place) for lane in lanes),
        )
        for place in places
    ]
    return Table(header, written)


def _heading(pane: Pane, series: Series, panes: int) -> str:
    unit = f" ({pane.y.unit.name})" if pane.y.unit.name else ""
    return f"{series.name}{unit}" if panes == 1 else f"{pane.y.label}, {series.name}{unit}"


def _value_at(series: Series, place: float, unit: Unit) -> str:
    i = int(np.searchsorted(series.x, place, side="right")) - 1
    return digits(float(series.y[i]) / unit.size, 4) if i >= 0 and math.isfinite(series.y[i]) else "–"


def _name_at(lane: Lane, place: float) -> str:
    i = int(np.searchsorted(lane.starts, place, side="right")) - 1
    in_a_gap = 0 <= i < len(lane.which) - 1 and place > lane.ends[i]
    return lane.names[lane.which[i]] if 0 <= i < len(lane.which) and not in_a_gap else "–"


# --- axes that many charts have


def time_axis(label: str, seconds: float, low: float = 0.0) -> Axis:
    unit = fitting(SECONDS, seconds, least=5)
    return Axis(label=label, unit=unit, low=low / unit.size)


def bytes_axis(label: str, largest: float) -> Axis:
    return Axis(label=label, unit=fitting(BYTES, largest), low=0.0)


# --- few enough to draw


def known(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """The points of which both numbers are known."""
    both = np.isfinite(x) & np.isfinite(y)
    return x[both], y[both]


def summarised(
    name: str, colour: int, x: Floats, y: Floats, dash: int = 0, buckets: int = BUCKETS, gaps: Gaps = ()
) -> Series:
    """A line through all points if they are few, else through the median of each bucket, between its extremes."""
    x, y = known(x, y)
    if len(x) <= 2 * buckets:
        return broken(Series(name=name, colour=colour, dash=dash, x=x, y=y), gaps)
    groups = _bucketed(x, buckets, gaps)
    drawn = Series(
        name=name,
        colour=colour,
        dash=dash,
        x=np.array([np.median(x[group]) for group in groups]),
        y=np.array([np.median(y[group]) for group in groups]),
        low=np.array([y[group].min() for group in groups]),
        high=np.array([y[group].max() for group in groups]),
    )
    return broken(drawn, gaps)


def averaged(x: Floats, columns: Sequence[Floats], buckets: int, gaps: Gaps = ()) -> tuple[Floats, list[Floats]]:
    """The mean of each bucket, so that what is stacked still adds up; NaN in each gap."""
    complete = np.isfinite(x) & np.all([np.isfinite(column) for column in columns], axis=0)
    x, columns = x[complete], [column[complete] for column in columns]
    if len(x) > buckets:
        groups = _bucketed(x, buckets, gaps)
        x, *columns = (np.array([column[group].mean() for group in groups]) for column in (x, *columns))
    places, met = _met(x, gaps)
    return np.insert(x, places, met.mean(axis=1)), [np.insert(column, places, np.nan) for column in columns]


def held(name: str, colour: int, x: Floats, y: Floats, end: float, thick: bool = False, gaps: Gaps = ()) -> Series:
    """A line of what holds from each `x` until the next, or until a gap; the last until `end`."""
    x, y = known(x, y)
    changes = np.append(True, np.diff(y) != 0)[: len(x)]
    changes[_met(x, gaps)[0]] = True
    x, y = thinned(x[changes], y[changes], gaps=gaps)
    places, met = _met(x, gaps)
    x, y = np.insert(x, places, met[:, 0]), np.insert(y, places, y[places - 1])
    x, y = np.append(x, max(end, x[-1])), np.append(y, y[-1])
    return broken(Series(name=name, colour=colour, style="step", thick=thick, x=x, y=y), gaps)


def broken(series: Series, gaps: Gaps) -> Series:
    """The same line, which ends before each gap and begins again after it."""
    places, met = _met(series.x, gaps)
    x, y = np.insert(series.x, places, met.mean(axis=1)), np.insert(series.y, places, np.nan)
    if series.low is None or series.high is None:
        return replace(series, x=x, y=y)
    low, high = (np.insert(around, places, np.nan) for around in (series.low, series.high))
    return replace(series, x=x, y=y, low=low, high=high)


def _met(x: Floats, gaps: Gaps) -> tuple[NDArray[np.int64], Floats]:
    """The gaps with points on both sides, and for each the place of the first point after it."""
    ends = np.array(gaps, np.float64).reshape(-1, 2)
    places = np.searchsorted(x, ends[:, 1]).astype(np.int64)
    inside = (places > 0) & (places < len(x))
    return places[inside], ends[inside]


def thinned(x: Floats, y: Floats, buckets: int = BUCKETS, gaps: Gaps = ()) -> tuple[Floats, Floats]:
    """The first, least, largest and last point of each bucket, in order."""
    if len(x) <= 4 * buckets:
        return x, y
    kept: set[int] = set()
    for group in _bucketed(x, buckets, gaps):
        first, held = group.start, np.nan_to_num(y[group])
        kept |= {first, first + int(held.argmin()), first + int(held.argmax()), group.stop - 1}
    chosen = sorted(kept)
    return x[chosen], y[chosen]


def _bucketed(x: Floats, buckets: int, gaps: Gaps = ()) -> list[slice]:
    """Stretches of equal width of an ascending axis, none across a gap, without the empty ones."""
    edges = np.sort([*np.linspace(x[0], x[-1], buckets + 1)[1:-1], *(over for _, over in gaps)])
    bounds = [0, *np.searchsorted(x, edges).tolist(), len(x)]
    return [slice(start, end) for start, end in zip(bounds, bounds[1:], strict=False) if end > start]


def short(values: Floats) -> list[float | int | None]:
    """With as many digits as can be seen, and null for what is not known.

    >>> short(np.array([1.0, 0.123456789, np.nan]))
    [1, 0.12346, None]
    """
    return [_short(value) for value in values.tolist()]


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
