"""One HTML file that needs nothing else: no script, style, font or picture from anywhere."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.records import plain
from thinwire.report import compare, figures, parts
from thinwire.report.charts import Chart, Section
from thinwire.report.folders import load
from thinwire.report.markup import Markup, join, tag
from thinwire.report.runs import Comparison, Run

NAME = "report.html"
_HERE = Path(__file__).parent


class Made(NamedTuple):
    """A report, what was wrong with what it was made from, and the figures of a compare."""

    html: str
    notes: list[str]
    compare: dict[str, Any] | None


def write(folder: Path) -> Path:
    """Make the report of a run's folder, a compare's folder or a file of records, beside the records."""
    return save(make(folder), folder)


def make(folder: Path) -> Made:
    loaded = load(Path(folder))
    page = _Page()
    if isinstance(loaded, Comparison):
        found = compare.result(loaded)
        return Made(page.of_comparison(loaded, found), loaded.notes, plain(found.to_json()))
    return Made(page.of_run(loaded), loaded.notes, None)


def save(made: Made, folder: Path) -> Path:
    """Write a report where it belongs, whole or not at all: one that is there stays until the new one is complete."""
    folder = Path(folder)
    path = folder / NAME if folder.is_dir() else folder.with_suffix(".html")
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(made.html)
        Path(beside).chmod(0o644)
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
    return path


class _Page:
    """A page that is being made. Charts are numbered in the order in which they are added."""

    def __init__(self) -> None:
        self._specs: list[dict[str, Any]] = []

    def of_run(self, run: Run) -> str:
        body = join(
            parts.hero(run),
            parts.notes(run.notes),
            self._run(run, ""),
            parts.again([run], run.folder),
            parts.citing(run),
        )
        return self._whole(run.name, body)

    def of_comparison(self, comparison: Comparison, found: compare.Result) -> str:
        curves = compare.section(comparison, found)
        body = join(
            parts.comparison_hero(comparison, found),
            parts.notes(comparison.notes),
            tag("h2", "Result"),
            tag("div", parts.result_table(found), class_="card"),
            self._section(curves, ""),
            tag("h2", "Each run"),
            self._tabs(comparison.runs),
            parts.again(comparison.runs, comparison.folder),
            parts.citing(comparison),
        )
        return self._whole(comparison.name, body)

    def _tabs(self, runs: Sequence[Run]) -> Markup:
        names = _names(runs)
        first = next((i for i, run in enumerate(runs) if run.decisions), 0)
        tabs = [
            tag(
                "button",
                name,
                type="button",
                role="tab",
                id=f"tab-{i}",
                aria_controls=f"run-{i}",
                data_first=i == first,
            )
            for i, name in enumerate(names)
        ]
        panels = [
            tag(
                "div",
                tag("h2", name, class_="unseen"),
                parts.tiles(run),
                self._run(run, f"{i}-"),
                id=f"run-{i}",
                class_="run",
                role="tabpanel",
                aria_labelledby=f"tab-{i}",
            )
            for i, (name, run) in enumerate(zip(names, runs, strict=True))
        ]
        return join(tag("div", *tabs, class_="tabs", role="tablist", aria_label="Runs"), *panels)

    def _run(self, run: Run, prefix: str) -> Markup:
        made = figures.sections(run)
        drawn = [section for section in made if any(isinstance(item, Chart) for item in section.items)]
        links = [tag("a", section.title, href=f"#{prefix}{section.name}") for section in drawn]
        links += [tag("a", "To run it again", href="#again")] if links else []
        without = [item for section in made if section not in drawn for item in section.items if isinstance(item, str)]
        return join(
            tag("nav", *links, class_="jump", aria_label="Sections") if links else "",
            *(self._section(section, prefix) for section in drawn),
            tag("h2", "Left out") if any(without) else "",
            tag("ul", *(tag("li", word) for word in without if word), class_="left-out") if any(without) else "",
        )

    def _section(self, section: Section, prefix: str) -> Markup:
        shown = _in_rows([item for item in section.items if isinstance(item, Chart)])
        absent = [item for item in section.items if isinstance(item, str) and item]
        return tag(
            "section",
            tag("h2", section.title),
            tag("div", *(self._figure(chart, prefix) for chart in shown), class_="charts") if shown else "",
            *(tag("p", word, class_="absent") for word in absent),
            id=f"{prefix}{section.name}",
        )

    def _figure(self, chart: Chart, prefix: str) -> Markup:
        number = len(self._specs)
        self._specs.append(chart.spec)
        return tag(
            "figure",
            tag("figcaption", tag("h3", chart.title), tag("p", chart.note, class_="note") if chart.note else ""),
            tag("div", class_="legend"),
            tag(
                "div",
                class_="plot",
                tabindex=0,
                role="group",
                aria_label=f"Chart: {chart.title}. The left and right arrow keys read its values; a table follows.",
            ),
            tag("details", tag("summary", "Table"), tag("div", parts.table(chart.table), class_="scroll", tabindex=0)),
            id=f"{prefix}{chart.name}",
            class_="card wide" if chart.wide else "card",
            data_chart=number,
        )

    def _whole(self, title: str, body: Markup) -> str:
        style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
        policy = (
            f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; "
            "form-action 'none'"
        )
        head = tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("meta", name="referrer", content="no-referrer"),
            tag("title", f"{title} – thinwire"),
            tag("style", Markup(style)),
        )
        page = tag(
            "body",
            tag("a", "Skip to the report", class_="skip", href="#main"),
            tag("header", parts.brand(), tag("button", "Dark", id="theme", type="button", hidden=True), class_="top"),
            tag("main", tag("noscript", parts.without_script()), body, id="main"),
            tag(
                "footer", "Made by thinwire from the run’s own records. Nothing on this page was fetched from anywhere."
            ),
            tag("div", id="live", class_="unseen", aria_live="polite"),
            tag("script", Markup(_in_script(self._specs)), type="application/json", id="data"),
            tag("script", Markup(script)),
        )
        return f"<!doctype html>\n{tag('html', head, page, lang='en')}\n"


def _in_rows(charts: Sequence[Chart]) -> list[Chart]:
    """Two narrow charts beside each other; one that is left alone becomes wide."""
    rows, alone = list[Chart](), False
    for chart in charts:
        if chart.wide and alone:
            rows[-1] = replace(rows[-1], wide=True)
        alone = not chart.wide and not alone
        rows.append(chart)
    return [*rows[:-1], replace(rows[-1], wide=True)] if alone else rows


def _names(runs: Sequence[Run]) -> list[str]:
    """What a run is called among others: its method, and its seed where that does not say it."""
    methods = [run.method or run.name for run in runs]
    return [
        f"{method}, seed {run.seed}" if methods.count(method) > 1 and run.seed else method
        for method, run in zip(methods, runs, strict=True)
    ]


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _in_script(specs: list[dict[str, Any]]) -> str:
    """JSON that no HTML parser takes for anything else, whatever names it holds."""
    written = json.dumps(specs, separators=(",", ":"), allow_nan=False)
    return written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
