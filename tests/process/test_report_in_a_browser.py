"""The report in a real browser: every chart is drawn, nothing is fetched, nothing breaks, keys and pointer work."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests import recorded
from tests.pages import CHARTS
from tests.process.launch import run_ranks
from tests.process.models import loss_of, make
from tests.unit.test_report_damage import HOSTILE
from tests.unit.test_report_resumed import resumed_run
from thinwire.report import page

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
PATIENCE = 60.0

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here (Debian package chromium)"),
]


class Browser:
    """Chromium without a window, spoken to over two pipes by its DevTools protocol."""

    def __init__(self, profile: Path) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        assert BROWSER is not None
        program = (
            f"import os, sys; os.dup2({theirs_in}, 3); os.dup2({theirs_out}, 4); os.execv(sys.argv[1], sys.argv[1:])"
        )
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        options += ["--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, BROWSER, *options, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._reader, self._writer = ours_in, ours_out
        self._rest, self._number = b"", 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _message(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reader], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser says nothing"
            piece = os.read(self._reader, 1 << 20)
            assert piece, "the browser has gone"
            self._rest += piece
        whole, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(whole)
        return message

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Show a page and come back when its script has ended."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message())

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def key(self, name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> None:
        """The whole page, as tall as it is."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def complaints(self) -> list[Any]:
        """Everything that the page's console says, and every exception."""
        self.ask("1")
        told = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event["params"] for event in self.events if event.get("method") in told]

    def requests(self) -> list[str]:
        """Every address that was asked for."""
        sent = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [*sent, *self.ask("performance.getEntriesByType('resource').map(entry => entry.name)")]

    def close(self) -> None:
        self._session = None
        try:
            self.call("Browser.close")
        except (AssertionError, OSError):
            self._process.kill()
        self._process.wait(PATIENCE)
        os.close(self._reader)
        os.close(self._writer)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def drawn(browser: Browser) -> dict[str, int]:
    """How many shapes each chart that was drawn has."""
    shapes = "figure.querySelectorAll('.plot > svg path, .plot > svg rect').length"
    found: dict[str, int] = browser.ask(
        f"Object.fromEntries([...document.querySelectorAll('figure[data-drawn]')].map(figure => [figure.id, {shapes}]))"
    )
    return found


def assert_fine(browser: Browser, path: Path) -> None:
    assert browser.complaints() == []
    assert browser.requests() == [path.resolve().as_uri()]
    assert browser.ask("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"
    nowhere = "attribute => /NaN|null|undefined/.test(attribute.value)"
    shapes = "[...document.querySelectorAll('.plot > svg *')].filter(shape => [...shape.attributes]"
    assert browser.ask(f"{shapes}.some({nowhere})).length") == 0, "something is drawn at a place that is none"


# --- a real run


def _train(rank: int, path: str) -> None:
    torch.manual_seed(0)
    model = DDP(make("mlp"))
    comm = thinwire.attach(model, records=path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(40):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    comm.close()


def test_the_report_of_a_real_run_is_drawn(browser: Browser, tmp_path: Path) -> None:
    records = tmp_path / "run.jsonl"
    run_ranks(_train, 2, path=str(records))
    path = page.write(records)
    browser.open(path)
    charts = drawn(browser)
    assert charts.keys() == {"network", "step-time", "parts", "calibration", "front", "bytes"}
    assert all(charts.values())
    assert_fine(browser, path)


# --- made-up runs, which have everything


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page.write(recorded.run(tmp_path_factory.mktemp("runs") / "adaptive", steps=800, target=0.9))


@pytest.mark.parametrize("width", [1280, 390, 360])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_chart_is_drawn_and_nothing_is_fetched(browser: Browser, report: Path, width: int, dark: bool) -> None:
    browser.open(report, width=width, dark=dark)
    charts = drawn(browser)
    assert charts.keys() == CHARTS and all(charts.values())
    assert_fine(browser, report)
    background = browser.ask("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) == dark


@pytest.mark.parametrize("width", [1280, 360])
def test_no_two_labels_of_a_chart_overlap(browser: Browser, report: Path, width: int) -> None:
    browser.open(report, width=width)
    overlapping = browser.ask("""[...document.querySelectorAll('.plot > svg')].flatMap(svg => {
        const texts = [...svg.querySelectorAll('text:not(.label)')];
        const boxes = texts.map(text => [text.textContent, text.getBoundingClientRect()]);
        return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([, q]) =>
            p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 3 && q.top < p.bottom - 3
        ).map(([b]) => `${svg.closest('figure').id}: ${a} / ${b}`));
    })""")
    assert overlapping == []


def test_a_run_that_was_resumed_has_a_gap_in_every_line_and_area(browser: Browser, tmp_path: Path) -> None:
    path = page.write(resumed_run(tmp_path))
    browser.open(path)
    starts = "(path => path.getAttribute('d').split('M').length - 1)"
    for chart, kind in (
        ("step-time", ".stroke"),
        ("network", ".stroke.s6"),
        ("parts", ".layer"),
        ("bytes", ".stroke.s0"),
    ):
        shown = browser.ask(f"[...document.querySelectorAll('#{chart} .plot {kind}')].map({starts})")
        assert shown and set(shown) == {2}, chart
    browser.ask("document.querySelector('#parts .plot').focus()")
    for _ in range(120):  # through all of it, the gap too
        browser.key("ArrowRight")
        told = browser.ask("document.querySelector('#parts .tip').textContent")
        if "–" in told:
            break
    assert told.count("–") == 4 and "ms" not in told, told
    assert_fine(browser, path)


def test_a_compare_shows_every_run_and_one_at_a_time(browser: Browser, tmp_path: Path) -> None:
    path = page.write(recorded.compare(tmp_path / "demo", ("ddp", "adaptive", "choco@int8:ring"), steps=120))
    browser.open(path)
    charts = drawn(browser)
    assert len(charts) == browser.ask("document.querySelectorAll('figure').length") and all(charts.values())
    shown = "[...document.querySelectorAll('.run')].filter(run => !run.hidden).map(run => run.id).join()"
    assert browser.ask(shown) == "run-1"  # the one that decides
    browser.ask("document.getElementById('tab-2').click()")
    assert browser.ask(shown) == "run-2"
    browser.ask("document.getElementById('tab-2').focus()")
    browser.key("ArrowLeft")
    assert browser.ask(shown) == "run-1" and browser.ask("document.activeElement.id") == "tab-1"
    assert_fine(browser, path)


def test_values_can_be_read_with_the_keyboard_and_with_the_pointer(browser: Browser, report: Path) -> None:
    browser.open(report)
    browser.ask("document.querySelector('#accuracy-time .plot').focus()")
    for _ in range(3):
        browser.key("ArrowRight")
    tip = "document.querySelector('#accuracy-time .tip')"
    third = browser.ask(f"{tip}.textContent")
    assert "accuracy" in third and "%" in third and not browser.ask(f"{tip}.hidden")
    assert "accuracy" in browser.ask("document.getElementById('live').textContent")
    browser.key("Escape")
    assert browser.ask(f"{tip}.hidden")
    browser.ask("document.querySelector('#network .plot').scrollIntoView({block: 'center', behavior: 'instant'})")
    left, top, width, height = browser.ask(
        "(box => [box.left, box.top, box.width, box.height])"
        "(document.querySelector('#network .plot').getBoundingClientRect())"
    )
    browser.point(left + width / 2, top + height / 3)
    told = browser.ask("document.querySelector('#network .tip').textContent")
    assert all(
        word in told for word in ("latency, truth", "rate per host, measured", "exchange", "collective", "ratio")
    )
    # The charts of the same time show the same moment.
    assert browser.ask("document.querySelector('#step-time .cursor').getAttribute('visibility')") == "visible"


def test_each_decision_can_be_chosen(browser: Browser, report: Path) -> None:
    browser.open(report)
    slider, reason = "document.querySelector('#front input')", "document.querySelector('#front .reason').textContent"
    first = browser.ask(reason)
    browser.ask(f"{slider}.focus()")
    browser.key("End")
    last = browser.ask(reason)
    assert "because" in first and "because" in last and first != last
    assert browser.ask(f"{slider}.value === {slider}.max")
    browser.ask("document.querySelector('#front .chooser button').click()")
    assert browser.ask(reason) != last
    assert browser.complaints() == []


def test_light_and_dark_can_be_chosen_and_series_hidden(browser: Browser, report: Path) -> None:
    browser.open(report)
    before = browser.ask("getComputedStyle(document.body).backgroundColor")
    browser.ask("document.getElementById('theme').click()")
    assert browser.ask("getComputedStyle(document.body).backgroundColor") != before
    lines = "document.querySelectorAll('#loss-time .stroke').length"
    shown = browser.ask(lines)
    browser.ask("document.querySelector('#loss-time .legend button').click()")
    assert browser.ask(lines) < shown
    assert browser.ask("document.querySelector('#loss-time .legend button').getAttribute('aria-pressed')") == "false"


def test_it_prints_on_a_few_pages(browser: Browser, report: Path) -> None:
    browser.open(report, dark=True)
    printed = base64.b64decode(browser.call("Page.printToPDF", printBackground=True)["data"])
    assert printed.startswith(b"%PDF") and 2 <= printed.count(b"/Type /Page\n") + printed.count(b"/Type /Page ") <= 8
    assert browser.complaints() == []


def test_hostile_names_add_no_element_and_no_attribute_and_run_nothing(browser: Browser, tmp_path: Path) -> None:
    census = """JSON.stringify([...document.querySelectorAll('*')].map(element =>
        [element.tagName, element.getAttributeNames().sort().join()].join(' ')).sort())"""
    found = []
    for kind in ("hostile", "harmless"):
        hostile = kind == "hostile"
        names = (
            iter(HOSTILE * 20)
            if hostile
            else iter([f"{i:03}" + "a" * (len(s) - 3) for i, s in enumerate(HOSTILE)] * 20)
        )
        known: dict[str, str] = {}

        def rename(word: str, names: Iterator[str] = names, known: dict[str, str] = known) -> str:
            if word not in known or len(known) < 200:
                known[word if word not in known else f"{word}{len(known)}"] = next(names)
            return next(reversed(known.values()))

        path = page.write(recorded.run(tmp_path / kind, steps=60, rename=rename))
        browser.open(path)
        browser.ask("document.querySelectorAll('details').forEach(part => { part.open = true; })")
        assert_fine(browser, path)
        assert browser.ask("document.title").endswith("thinwire")
        found.append(json.loads(browser.ask(census)))
    # Labels that fit in one do not in the other: texts of charts aside, all is the same.
    assert [e for e in found[0] if not e.startswith("text ")] == [e for e in found[1] if not e.startswith("text ")]
    assert {e for e in found[0] if e.startswith("text ")} <= {e for e in found[1] if e.startswith("text ")} | {
        "text class,text-anchor,x,y",
        "text class,x,y",
    }
