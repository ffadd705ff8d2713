"""A report as its readers meet it: parsed, with the charts that it must have."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from thinwire.report import page

CHARTS = {
    "accuracy-time",
    "accuracy-bytes",
    "loss-time",
    "loss-bytes",
    "network",
    "step-time",
    "parts",
    "calibration",
    "front",
    "bytes",
    "layers",
}
VOID = {"meta", "input", "br"}


class Page(HTMLParser):
    """What a parser finds in a page: elements with their attributes, and the text in each kind of element."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.text.setdefault(self._open[-1], []).append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    @property
    def shape(self) -> Counter[tuple[str, tuple[str, ...]]]:
        return Counter((tag, tuple(sorted(attributes))) for tag, attributes in self.elements)

    @property
    def figures(self) -> set[str]:
        return {str(attributes["id"]) for tag, attributes in self.elements if tag == "figure"}

    @property
    def specs(self) -> list[dict[str, Any]]:
        [written] = [text for text in self.text["script"] if text.startswith("[")]
        found: list[dict[str, Any]] = json.loads(written)
        return found

    def words(self, *tags: str) -> str:
        return " ".join(text for tag in tags for text in self.text.get(tag, []))


def made(folder: Path) -> Page:
    return Page(page.make(folder).html)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rewrite(path: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in change(lines_of(path))))
