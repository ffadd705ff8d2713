"""Changes over time: schedules, and traces that were measured."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from thinwire.lab import units
from thinwire.lab.network import RATES, Change, Conditions, Value
from thinwire.lab.settings import describe, read_values

MOST_CHANGES = 1000  # a second; those of one moment count once


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Changes in the order of time.

    Attributes:
        changes: those at 0 are there before the first packet.
        repeat: seconds after which everything begins again; 0 for never.
        site: the site of each host.
        notes: what was done to it, in words that are printed.
    """

    name: str
    changes: tuple[Change, ...]
    repeat: float = 0.0
    site: tuple[int, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        """Refuse one that would keep the relay so busy with changing the network that it carries no packets."""
        moments = len({change.at for change in self.changes})
        lasts = self.repeat or max(1.0, max((change.at for change in self.changes), default=0.0))
        if moments > MOST_CHANGES * lasts:
            raise ValueError(
                f"the network would change {moments / lasts:.3g} times a second, and {MOST_CHANGES} is the most: "
                "let its schedule run more slowly."
            )

    def scaled(self, factor: float) -> Schedule:
        """Divide all rates, so that a small model on a small machine has a large one's ratio of sums to bytes."""
        if factor == 1:
            return self
        if not 0 < factor < math.inf:
            raise ValueError(f"the scale must be a number above 0, got {factor}.")

        def divided(values: Mapping[str, Value]) -> dict[str, Value]:
            return {key: float(value) / factor if key in RATES else value for key, value in values.items()}

        before = _span(self.rates())
        scaled = self._with(lambda change: replace(change, values=divided(change.values)))
        return scaled.noting(f"rates divided by {factor:g}: {before} became {_span(scaled.rates())}")

    def faster(self, factor: float) -> Schedule:
        """Let everything happen `factor` times sooner."""
        if factor == 1:
            return self
        if not 0 < factor < math.inf:
            raise ValueError(f"the speed must be a number above 0, got {factor}.")
        faster = replace(self._with(lambda change: replace(change, at=change.at / factor)), repeat=self.repeat / factor)
        return faster.noting(f"time runs {factor:g} times as fast")

    def pinned(self, values: Mapping[str, Value]) -> Schedule:
        """Hold these values for all hosts and pairs, whatever the schedule says about them."""
        if not values:
            return self

        def rest(change: Change) -> Change:
            return replace(change, values={key: value for key, value in change.values.items() if key not in values})

        kept = [change for change in map(rest, self.changes) if change.values]
        pinned = replace(self, changes=(Change(values=dict(values), cause="override"), *kept))
        return pinned.noting(f"{describe(values)} throughout")

    def noting(self, note: str) -> Schedule:
        return replace(self, notes=(*self.notes, note))

    def rates(self) -> list[float]:
        """Every rate that occurs."""
        return [float(change.values[key]) for change in self.changes for key in RATES if key in change.values]

    def peak(self, hosts: int) -> float:
        """The most bytes per second that the relay may ever have to carry."""
        conditions = Conditions(hosts, self.site or None)
        peak = 0.0
        for _, together in groupby(self.changes, key=lambda change: change.at):
            for change in together:
                conditions.apply(change)
            peak = max(peak, conditions.peak())
        return peak or math.inf

    def _with(self, function: Callable[[Change], Change]) -> Schedule:
        return replace(self, changes=tuple(map(function, self.changes)))


def _span(rates: list[float]) -> str:
    low, high = min(rates, default=math.inf), max(rates, default=math.inf)
    return units.format_rate(low) if low == high else f"{units.format_rate(low)} to {units.format_rate(high)}"


def read_trace(path: Path, cause: str = "trace") -> list[Change]:
    """A CSV file with a header: `time` in seconds, and any of `rate` in Mbit/s and `latency` in ms.

    Cells may also carry their own units (`20ms`, `5mbit`).
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # as spreadsheets write it
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
    names = [name.strip() for name in reader.fieldnames or []]
    unknown = [name for name in names if name not in TRACE_COLUMNS]
    if "time" not in names or unknown:
        wrong = f"has no column {unknown[0]!r}" if unknown else "needs a column 'time'"
        raise ValueError(f"{path}:1: a trace {wrong}. Columns are {', '.join(TRACE_COLUMNS)}.")
    changes: list[Change] = []
    for row in reader:
        try:
            change = _traced(row, cause)
        except ValueError as error:
            raise ValueError(f"{path}:{reader.line_num}: {error}") from error
        if changes and change.at < changes[-1].at:
            raise ValueError(f"{path}:{reader.line_num}: time runs backwards, from {changes[-1].at} to {change.at}.")
        changes.append(change)
    if not changes:
        raise ValueError(f"{path}: a trace needs at least one row below its header.")
    return changes


TRACE_COLUMNS = {"time": "s", "rate": "mbit", "up": "mbit", "down": "mbit", "latency": "ms", "jitter": "ms", "loss": ""}


def _traced(row: Mapping[str | None, Any], cause: str) -> Change:
    if None in row:
        raise ValueError("this row has more cells than the header.")
    written = {str(key).strip(): cell.strip() for key, cell in row.items() if cell and cell.strip()}
    cells = {key: cell if cell[-1].isalpha() else cell + TRACE_COLUMNS[key] for key, cell in written.items()}
    if "time" not in cells:
        raise ValueError("this row has no time.")
    return Change(at=units.seconds(cells.pop("time")), values=read_values(cells), cause=cause)
