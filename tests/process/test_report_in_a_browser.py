"""The report in a real browser: every chart is drawn, nothing is fetched, nothing breaks, keys and pointer work."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests import recorded
from tests.browser import Browser, assert_fine, drawn, needs_browser, opened
from tests.pages import CHARTS
from tests.process.launch import run_ranks
from tests.process.models import loss_of, make
from tests.unit.test_report_damage import HOSTILE
from tests.unit.test_report_resumed import resumed_run
from thinwire.report import page

pytestmark = [pytest.mark.process, needs_browser]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with opened(tmp_path_factory.mktemp("profile")) as found:
        yield found


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
