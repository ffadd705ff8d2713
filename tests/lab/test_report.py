"""The reports of real trainings in the lab, in a real browser: whole, and without a word in the console."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser, assert_fine, drawn, needs_browser, opened
from tests.pages import CHARTS
from tests.process.runs import done, last_json

pytestmark = [pytest.mark.lab, needs_browser]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with opened(tmp_path / "profile") as found:
        yield found


def reported(*words: str) -> Path:
    """The report that a command leaves."""
    code, text, err = done(*words, "--json")
    assert code == 0, err
    return Path(last_json(text)["report"])


def within(browser: Browser, chart: str, what: str, told: str) -> list[str]:
    """Something of each element of a chart, from the back to the front."""
    found: list[str] = browser.ask(
        f"[...document.getElementById('{chart}').querySelectorAll('{what}')].map(part => part.{told})"
    )
    return found


def shapes(browser: Browser, chart: str) -> list[str]:
    """The classes of what is drawn."""
    return within(browser, chart, ".plot > svg [class]", "getAttribute('class')")


def legend(browser: Browser, chart: str) -> list[str]:
    return within(browser, chart, ".legend .key", "textContent")


def test_a_training_on_a_changing_network_has_a_report_with_every_chart(
    browser: Browser, tmp_path: Path, folder: Path
) -> None:
    network = ["--network", "unpredictable", "--scale", "10", "--speed", "20"]
    often = ["--steps", "120", "--evaluate-every", "0.3", "--target", "0.5"]
    path = reported("train", "digits", "--hosts", "3", *network, *often, "--name", "run", "--out", str(tmp_path))
    browser.open(path)
    charts = drawn(browser)
    assert charts.keys() == CHARTS and all(charts.values())
    assert browser.ask("document.querySelectorAll('figure').length") == len(CHARTS)
    assert_fine(browser, path)
    lines = [kind for kind in shapes(browser, "network") if kind.startswith("stroke")]
    # Of latency and rate the truth, and upon it what was measured; then the ratio.
    assert ["thick" in kind for kind in lines] == [True, False, True, False, False]
    assert {"truth", "measured", "ratio"} <= set(legend(browser, "network"))
    assert sum(kind.startswith("stretch") for kind in shapes(browser, "network")) >= 2  # the exchange, the collective
    assert legend(browser, "step-time") == ["measured", "predicted"]
    assert legend(browser, "parts") == ["compute", "compress", "exchange"]
    assert legend(browser, "layers") == ["sent", "dense"]
    assert legend(browser, "accuracy-time")[-1] == "target" and len(legend(browser, "loss-time")) == 2
    assert "because" in browser.ask("document.querySelector('#front .reason').textContent")
    assert {"frontier", "ring"} <= set(shapes(browser, "front"))


def test_a_comparison_with_gossip_has_a_table_and_the_distance_of_its_hosts(
    browser: Browser, tmp_path: Path, folder: Path
) -> None:
    words = ["--hosts", "3", "--latency", "2ms", "--rate", "50mbit", "--steps", "40", "--evaluate-every", "0.2"]
    methods = ["--methods", "adaptive,dcd@int8:ring", "--name", "both", "--out", str(tmp_path)]
    path = reported("compare", "digits", *words, *methods)
    browser.open(path)
    charts = drawn(browser)
    assert len(charts) == browser.ask("document.querySelectorAll('figure').length") and all(charts.values())
    of_run = {f"0-{chart}" for chart in CHARTS}
    together = {"all-quality-time", "all-quality-bytes", "all-loss-time", "all-loss-bytes"}
    assert of_run | together | {"1-consensus", "1-network", "1-layers"} <= charts.keys()
    assert_fine(browser, path)
    rows: list[list[str]] = browser.ask(
        "[...document.querySelectorAll('.result tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    told: list[dict[str, Any]] = json.loads((path.parent / "compare.json").read_text())["rows"]
    assert [row[0] for row in rows] == [row["method"] for row in told] == ["adaptive", "dcd@int8:ring"]
    assert [row[5] for row in rows] == ["40", "40"] and [row[-1] for row in rows] == ["done", "done"]
    browser.ask("document.getElementById('tab-1').click()")
    assert legend(browser, "1-consensus") == ["distance"]
    assert "No target was set" in browser.ask("document.body.textContent")
