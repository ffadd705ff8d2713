"""The parts of the page that are text and tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from thinwire.report import cite, compare, words
from thinwire.report.charts import Table
from thinwire.report.markup import Markup, join, tag
from thinwire.report.reading import text
from thinwire.report.runs import Comparison, Run

_LONG = 12  # letters, from which on a headline is set smaller
_WORDY = 16  # letters, from which on a cell is text and may wrap


def brand() -> Markup:
    wire = tag("line", x1=4, y1=7, x2=40, y2=7)
    ends = [tag("circle", cx=x, cy=7, r=4) for x in (4, 40)]
    return tag("div", tag("svg", wire, *ends, viewBox="0 0 44 14", aria_hidden="true"), "thinwire", class_="brand")


def without_script() -> Markup:
    return tag("p", "Charts need JavaScript. The numbers are in the table under each.", class_="absent")


def hero(run: Run) -> Markup:
    ended = run.how_it_ended or ("unfinished" if run.settings else "")  # only a job says at its end that it is over
    known = ended if ended in ("done", "interrupted", "failed", "unfinished") else ""
    facts = [run.method, *(run.settings.get(key, "") for key in ("task", "model"))]
    facts += [words.count(run.hosts, "host")] if run.hosts else []
    facts += [words.count(run.parameters, "parameter")] if run.parameters else []
    facts += [f"network {run.settings['network']}"] if run.settings.get("network") else []
    facts += [f"resumed {_often(len(run.gaps))}"] if run.gaps else []
    return tag(
        "div",
        tag("h1", run.name),
        tag(
            "p",
            tag("span", ended, class_=f"pill {known}".strip()) if ended else "",
            " · ".join(filter(None, facts)),
            class_="sub",
        ),
        tag("p", run.message, class_="sub") if run.message else "",
        tag("pre", "\n".join(run.log), tabindex=0) if run.log else "",
        tiles(run),
        class_="hero",
    )


def _often(times: int) -> str:
    """
    >>> _often(1), _often(2), _often(3)
    ('once', 'twice', '3 times')
    """
    return {1: "once", 2: "twice"}.get(times, f"{times} times")


def tiles(run: Run) -> Markup:
    shown = [_tile(*tile) for tile in _headline(run)]
    return tag("dl", *shown, class_="tiles") if shown else Markup("")


def _tile(label: str, value: str, small: str = "") -> Markup:
    long = "long" if len(value) > _LONG else None
    return tag("div", tag("dt", label), tag("dd", value, tag("small", small) if small else "", class_=long))


def _headline(run: Run) -> Iterable[tuple[str, ...]]:
    """The few numbers that say how it went."""
    known = [e.quality for e in run.evaluations if math.isfinite(e.quality)]
    if known:
        best = max(known) if run.quality == "accuracy" else min(known)
        yield (
            run.quality,
            compare.shown_quality(run.quality, known[-1]),
            f"best {compare.shown_quality(run.quality, best)}",
        )
    if run.num_steps:
        beside = run.untrained_seconds
        yield (
            "training time",
            words.seconds(run.trained_seconds),
            f"evaluating, saving {words.seconds(beside)}" if beside > 0 else "",
        )
        measured = run.columns["step_seconds"][np.isfinite(run.columns["step_seconds"])]
        step = f"median {words.seconds(float(np.median(measured)))}" if len(measured) else ""
        yield "steps", f"{run.num_steps:,}", step
    sent, dense = float(run.sent_at(np.array([math.inf]))[0]), float(np.nansum(run.columns["dense_bytes"]))
    if sent > 0:
        yield (
            "sent by rank 0",
            words.nbytes(sent),
            f"{words.times(dense / sent)} less than dense" if dense > sent else "",
        )
    if run.decisions:
        changes = sum(d.plan != d.before for d in run.decisions)
        yield "changes of plan", f"{changes:,}", f"in {words.count(len(run.decisions), 'decision')}"


def comparison_hero(comparison: Comparison, found: compare.Result) -> Markup:
    best = min((row for row in found.rows if math.isfinite(row.seconds)), key=lambda row: row.seconds, default=None)
    hosts = next((run.hosts for run in comparison.runs if run.hosts), None)
    settings = comparison.runs[0].settings
    facts = [f"{len(found.rows)} methods", settings.get("task", ""), settings.get("model", "")]
    facts += [words.count(hosts, "host")] if hosts else []
    facts += [f"network {settings['network']}"] if settings.get("network") else []
    shown = []
    if best is not None:
        goal = compare.shown_quality(found.quality, found.target)
        shown.append(_tile(f"fastest to {goal}", best.method, f"after {words.seconds(best.seconds)} of training"))
        if math.isfinite(best.speed_up) and best.method != found.baseline:
            shown.append(_tile("speed-up", compare.speedup(best), f"over {found.baseline}"))
    sending = [row for row in found.rows if row.sent_bytes > 0]
    if sending:
        least = min(sending, key=lambda row: row.sent_bytes)
        shown.append(_tile("least sent", words.nbytes(least.sent_bytes), f"by {least.method}"))
    return tag(
        "div",
        tag("h1", comparison.name),
        tag("p", tag("span", "compare", class_="pill"), " · ".join(filter(None, facts)), class_="sub"),
        tag("dl", *shown, class_="tiles") if shown else "",
        class_="hero",
    )


def result_table(found: compare.Result) -> Markup:
    shown = compare.table(found)
    finite = [row.seconds for row in found.rows if math.isfinite(row.seconds)]
    best = [bool(finite) and len(found.rows) > 1 and row.seconds == min(finite) for row in found.rows]
    rows = [
        tag(
            "tr",
            *(tag("td", cell, data_label=name) for name, cell in zip(shown.header, cells, strict=True)),
            class_="best" if is_best else None,
        )
        for cells, is_best in zip(shown.rows, best, strict=True)
    ]
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in shown.header)))
    if not math.isfinite(found.target):
        how = "There is no target: some run was never evaluated."
    elif found.chosen:
        how = "Time is training time, without evaluating."
    else:
        how = "No target was set: taken is the best that every run reached. Time is training time, without evaluating."
    return join(
        tag("div", tag("table", head, tag("tbody", *rows), class_="result"), class_="scroll", tabindex=0),
        tag("p", how, class_="absent"),
    )


def notes(notes: Sequence[str]) -> Markup:
    if not notes:
        return Markup("")
    return tag("ul", *(tag("li", note) for note in dict.fromkeys(notes)), class_="notes", aria_label="What is missing")


def again(runs: Sequence[Run], folder: Path) -> Markup:
    """Everything that is needed to run it again."""
    first = runs[0]
    commands = list(dict.fromkeys(command for run in runs for command in run.commands if command))
    seeds = ", ".join(dict.fromkeys(run.seed for run in runs if run.seed))
    what = {
        "started": _moment(first.started),
        "seed": seeds,
        "hosts": str(first.hosts or ""),
        "folder": text(folder.resolve().name),
    }
    differing = {key for run in runs for key, value in run.settings.items() if first.settings.get(key) != value}
    settings = {key: value for key, value in first.settings.items() if key not in differing and key not in what}
    groups = {"Run": what, "Settings": settings, "Versions": first.facts.get("versions", {})}
    groups["Hardware"] = first.facts.get("machine", {})
    cards = [
        tag("div", tag("h3", name), _facts(facts), class_="card")
        for name, facts in groups.items()
        if any(facts.values())
    ]
    command = [tag("pre", command, tabindex=0) for command in commands] or [
        tag("p", "The command was not recorded.", class_="note")
    ]
    title = "Commands, of the first start and of those after it" if any(run.gaps for run in runs) else "Command"
    return tag(
        "section",
        tag("h2", "To run it again"),
        tag("div", tag("div", tag("h3", title), *command, class_="card wide"), class_="charts"),
        tag("div", *cards, class_="facts spaced"),
        id="again",
    )


def _moment(iso: str) -> str:
    """
    >>> _moment("2026-11-16T02:36:13+00:00"), _moment("yesterday")
    ('2026-11-16 02:36:13 UTC', 'yesterday')
    """
    try:
        return f"{datetime.fromisoformat(iso).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError):
        return iso


def _facts(facts: dict[str, str]) -> Markup:
    shown = [_fact(key, value) for key, value in facts.items() if value]
    return tag("dl", *(join(tag("dt", key), tag("dd", value)) for key, value in shown))


def _fact(key: str, value: str) -> tuple[str, str]:
    """
    >>> _fact("memory_bytes", "25274793984"), _fact("lr", "0.1")
    (('memory', '25.3 GB'), ('lr', '0.1'))
    """
    name, _, unit = key.rpartition("_")
    return (name, words.nbytes(float(value))) if unit == "bytes" and value.isdecimal() else (key, value)


def citing(loaded: Run | Comparison) -> Markup:
    return tag(
        "section",
        tag("h2", "To cite it"),
        tag(
            "div",
            tag("details", tag("summary", "BibTeX of the methods used"), tag("pre", cite.bibtex(loaded), tabindex=0)),
            class_="card",
        ),
        id="cite",
    )


def table(table: Table) -> Markup:
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in table.header)))
    rows = [
        tag("tr", *(tag("td", cell, class_="words" if _is_wordy(cell) else None) for cell in row)) for row in table.rows
    ]
    return tag("table", head, tag("tbody", *rows))


def _is_wordy(cell: str) -> bool:
    return len(cell) > _WORDY
