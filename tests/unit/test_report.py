"""The report: from the records of a run to one page that is whole, honest about what is missing, and safe to open."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from tests import recorded
from tests.timing import timing
from thinwire.cli import report as cli
from thinwire.exchange import NAMES
from thinwire.gossip import METHODS
from thinwire.report import charts, cite, compare, folders, page
from thinwire.report.reading import ReportError
from thinwire.report.runs import Comparison, Run

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


# --- what a report shows


def test_a_run_has_every_chart_with_a_table_and_a_name_for_those_who_cannot_see_it(tmp_path: Path) -> None:
    found = made(recorded.run(tmp_path / "run"))
    assert found.figures == CHARTS
    assert len(found.specs) == len(CHARTS)
    assert found.shape["details", ()] >= len(CHARTS) and found.shape["table", ()] == len(CHARTS)
    labels = [a["aria-label"] for tag, a in found.elements if tag == "div" and a.get("class") == "plot"]
    assert len(set(labels)) == len(CHARTS)


def test_a_gossip_run_shows_its_consensus_and_leaves_out_what_it_has_not(tmp_path: Path) -> None:
    found = made(recorded.run(tmp_path / "run", method="choco@int8:ring"))
    assert "consensus" in found.figures and not found.figures & {"front", "parts", "calibration"}
    assert "none was made" in found.words("li") and "does not record them" in found.words("p")
    [timeline] = [spec for spec in found.specs if [p["kind"] for p in spec.get("panes", [])][-1:] == ["lane"]]
    lanes = {pane["title"]: pane["names"] for pane in timeline["panes"] if pane["kind"] == "lane"}
    assert lanes == {"exchange": ["choco"], "collective": ["ring"], "compressor": ["int8"]}


def test_the_network_and_the_plan_share_their_time(tmp_path: Path) -> None:
    folder = recorded.run(tmp_path / "run")
    [spec] = [spec for spec in made(folder).specs if any(pane["kind"] == "lane" for pane in spec.get("panes", []))]
    latency, rate, exchange, collective, ratio = spec["panes"]
    truth, measured = latency["series"]
    assert (truth["name"], measured["name"]) == ("truth", "measured")
    assert truth["y"][:4] == [0.3, 2, 20, 60]  # ms
    assert rate["series"][0]["y"][:4] == [4000, 100, 20, 4.8]  # Mbit/s
    assert latency["y"]["title"] == "latency, one way (ms)" and rate["y"]["title"] == "rate per host (Mbit/s)"
    assert exchange["starts"][1:] == exchange["ends"][:-1] and len(exchange["names"]) > 1
    assert len(collective["which"]) > 1 and len(set(ratio["series"][0]["y"])) > 1
    # The lab began half a second before the run. When it changes, so does what was measured, and then.
    began, ended = truth["x"][2:4]
    during = [y for x, y in zip(measured["x"], measured["y"], strict=True) if began + 1 < x < ended - 1]
    assert 15 < min(during) and max(during) < 30


def test_a_decision_shows_its_candidates_its_front_and_its_reason(tmp_path: Path) -> None:
    folder = recorded.run(tmp_path / "run")
    decisions = [line for line in lines_of(folder / "records.jsonl") if line["kind"] == "decision"]
    [spec] = [spec for spec in made(folder).specs if spec["kind"] == "front"]
    assert len(spec["decisions"]) == len(decisions) > 3
    for shown, decision in zip(spec["decisions"], decisions, strict=True):
        assert shown["why"] == decision["trigger"]
        points = list(zip(shown["x"], shown["y"], strict=True))
        assert len(points) == len(decision["candidates"])
        chosen = spec["names"][shown["name"][shown["chosen"]]]
        assert chosen.startswith(decision["plan"]["exchange"]) and decision["plan"]["collective"] in chosen
        for i, (x, y) in enumerate(points):
            beaten = any(ox <= x and oy >= y and (ox, oy) != (x, y) for ox, oy in points)
            twin = (x, y) in points[:i] or points.count((x, y)) > 1
            assert twin or (i in shown["front"]) != beaten


def test_evaluating_is_not_training_time(tmp_path: Path) -> None:
    run = folders.read_run(recorded.run(tmp_path / "run", steps=200))
    last = run.evaluations[-1]
    assert last.trained == pytest.approx(last.time - 0.8 - 10 * 0.1)  # preparing and ten evaluations
    times = np.array([0.4, 1.0, last.time, last.time + 1])
    assert run.trained(times).tolist() == pytest.approx([0.0, 0.2, last.trained, last.trained + 1])


def test_all_that_is_needed_to_run_it_again_is_there(tmp_path: Path) -> None:
    found = made(recorded.run(tmp_path / "run", seed=7))
    assert "thinwire train digits --hosts 4 --network unpredictable" in found.words("pre")
    told = found.words("dd")
    assert all(
        word in told for word in ("2.13.0", "3.11.2", "node-0", "2 cores", "2026-11-16 02:36:13 UTC", "7", "0.1")
    )


def test_records_alone_are_enough(tmp_path: Path) -> None:
    """As thinwire.attach(model, records=...) leaves them in somebody's own loop."""
    folder = recorded.run(tmp_path / "run")
    kinds = ("run", "step", "decision", "heard", "asked")
    rewrite(folder / "records.jsonl", lambda lines: [line for line in lines if line["kind"] in kinds])
    alone = tmp_path / "mine.jsonl"
    (folder / "records.jsonl").rename(alone)
    path = page.write(alone)
    assert path == tmp_path / "mine.html"
    found = Page(path.read_text())
    assert found.figures == CHARTS - {"accuracy-time", "accuracy-bytes", "loss-time", "loss-bytes", "layers"}
    assert found.text["h1"] == ["mine"]


# --- many records


@timing
def test_a_long_run_is_drawn_from_few_points_that_keep_its_extremes(tmp_path: Path) -> None:
    folder = recorded.run(tmp_path / "run", steps=30)
    whole = (folder / "records.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in whole if '"kind": "step"' in line]
    lines = whole[:2]
    for step in range(100_000):
        seconds = {50_000: 98.765, 70_000: 0.00012345}.get(step, 0.05 + 0.01 * (step % 7))
        known = {"time": 1 + step * 0.06, "step": step, "step_seconds": seconds}
        lines.append(json.dumps(steps[step // 100 % len(steps)] | known))
    (folder / "records.jsonl").write_text("\n".join(lines) + "\n")
    start = time.process_time()
    for line in lines:
        json.loads(line)
    parsed = time.process_time()
    html = page.make(folder).html
    assert time.process_time() - parsed < 5 * (parsed - start)  # seconds of this machine, for 100,000 steps
    assert len(html) < 600_000
    [chart] = [spec for spec in Page(html).specs if spec["kind"] == "panes" and "predicted" in json.dumps(spec)][:1]
    measured = chart["panes"][0]["series"][0]
    assert len(measured["x"]) <= charts.BUCKETS
    assert max(measured["high"]) == 98765 and min(measured["low"]) == 0.12345


def test_what_holds_until_it_changes_keeps_its_extremes_too() -> None:
    x = np.arange(50_000.0)
    y = np.ones(50_000)
    y[12_345], y[40_000] = 7.0, -7.0
    kept_x, kept_y = charts.thinned(x, y)
    assert len(kept_x) <= 4 * charts.BUCKETS and {7.0, -7.0} <= set(kept_y.tolist())
    assert (np.diff(kept_x) > 0).all() and (kept_x[0], kept_x[-1]) == (0.0, 49_999.0)


# --- a compare


def test_a_compare_tells_time_to_target_and_speed_up(tmp_path: Path) -> None:
    folder = recorded.compare(tmp_path / "demo", ("ddp", "adaptive", "choco@int8:ring"), target=0.9)
    loaded = folders.load(folder)
    assert isinstance(loaded, Comparison)
    result = compare.result(loaded)
    for row, name in zip(result.rows, ("0-0", "1-0", "2-0"), strict=True):
        seen = [line for line in lines_of(folder / name / "records.jsonl") if line["kind"] == "evaluated"]
        assert row.seconds == next(line["trained_seconds"] for line in seen if line["accuracy"] >= 0.9)
        assert row.quality == seen[-1]["accuracy"] and row.sent_bytes == seen[-1]["sent_bytes"]
    first = result.rows[0]
    assert [row.speedup for row in result.rows] == [first.seconds / row.seconds for row in result.rows]
    found = made(folder)
    assert {"all-quality-time", "all-quality-bytes", "all-loss-time", "all-loss-bytes"} <= found.figures
    assert {f"1-{name}" for name in CHARTS} <= found.figures
    assert [a["id"] for _, a in found.elements if a.get("role") == "tabpanel"] == ["run-0", "run-1", "run-2"]


def test_a_method_that_never_arrives_says_so_and_the_first_one_had_at_least_its_time(tmp_path: Path) -> None:
    folder = recorded.compare(tmp_path / "demo", ("ddp", "adaptive"), target=0.9)
    rewrite(folder / "0-0" / "records.jsonl", lambda lines: [_never_good(line) for line in lines])
    loaded = folders.load(folder)
    assert isinstance(loaded, Comparison)
    result = compare.result(loaded)
    assert math.isnan(result.rows[0].seconds) and result.rows[1].at_least
    assert result.rows[1].speedup == pytest.approx(loaded.runs[0].trained_seconds / result.rows[1].seconds)
    assert "not reached" in made(folder).words("td") and "more than" in made(folder).words("td")


def _never_good(line: dict[str, Any]) -> dict[str, Any]:
    return line | {"accuracy": min(line["accuracy"], 0.5)} if line["kind"] == "evaluated" else line


def test_seeds_of_a_method_are_one_row(tmp_path: Path) -> None:
    loaded = folders.load(recorded.compare(tmp_path / "demo", ("ddp", "adaptive"), steps=60, seeds=(0, 1, 2)))
    assert isinstance(loaded, Comparison)
    result = compare.result(loaded)
    assert [(row.method, row.seeds) for row in result.rows] == [("ddp", 3), ("adaptive", 3)]
    assert result.rows[0].seconds == pytest.approx(np.median([compare.reached(r, 0.9) for r in loaded.runs[::2]]))


def test_without_a_target_it_is_what_every_run_reached(tmp_path: Path) -> None:
    loaded = folders.load(recorded.compare(tmp_path / "demo", ("ddp", "adaptive"), steps=60, target=None))
    assert isinstance(loaded, Comparison)
    best = [max(e.quality for e in run.evaluations) for run in loaded.runs]
    assert compare.result(loaded).target == min(best)


# --- what is damaged or missing


def test_a_last_line_that_was_cut_is_told_and_the_rest_is_used(tmp_path: Path) -> None:
    folder = recorded.run(tmp_path / "run")
    path = folder / "records.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    report = page.make(folder)
    assert report.notes == ["The last line of records.jsonl was cut off and is left out: its writer was stopped."]
    assert Page(report.html).figures == CHARTS
    assert "unfinished" in Page(report.html).text["span"]


@pytest.mark.parametrize(
    ("gone", "told", "charts"),
    [
        (["job.json"], "job.json is missing.", CHARTS),
        (["records.jsonl"], "records.jsonl is missing.", set()),
        (["truth.jsonl"], "", CHARTS),
    ],
)
def test_a_missing_file_is_told(tmp_path: Path, gone: list[str], told: str, charts: set[str]) -> None:
    folder = recorded.run(tmp_path / "run")
    for name in gone:
        (folder / name).unlink()
    report = page.make(folder)
    assert report.notes == ([told] if told else [])
    assert Page(report.html).figures == charts


def test_lines_that_are_no_records_are_counted_and_left_out(tmp_path: Path) -> None:
    folder = recorded.run(tmp_path / "run")
    path = folder / "records.jsonl"
    lines = path.read_text().splitlines()
    lines[5:5] = ["{", "[1, 2]", "\x00\xff", "[" * 100_000]
    path.write_text("\n".join(lines) + "\n")
    report = page.make(folder)
    assert report.notes == ["4 lines of records.jsonl could not be read and were left out; see line 6."]
    assert Page(report.html).figures == CHARTS


@pytest.mark.parametrize("name", ["records.jsonl", "job.json", "compare.json"])
def test_a_newer_format_is_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    folder = recorded.run(tmp_path / "run")
    if name == "records.jsonl":
        rewrite(folder / name, lambda lines: [lines[0] | {"format": 2}, *lines[1:]])
    else:
        (folder / name).write_text(json.dumps({"format": 2}))
    with pytest.raises(ReportError, match="format 2, from a newer thinwire; this one reads format 1"):
        page.make(folder)


def test_an_empty_run_is_a_report_that_says_so(tmp_path: Path) -> None:
    folder = recorded.run(tmp_path / "run")
    (folder / "records.jsonl").write_text("")
    report = page.make(folder)
    assert report.notes == ["Nothing has been recorded in records.jsonl."]
    assert Page(report.html).figures == set() and "the run recorded no steps" in Page(report.html).words("li")


def test_a_run_that_has_just_begun_is_a_report_too(tmp_path: Path) -> None:
    folder = recorded.run(tmp_path / "run")
    everything = lines_of(folder / "records.jsonl")
    for kept in range(1, 12):
        rewrite(folder / "records.jsonl", lambda _, kept=kept: everything[:kept])  # type: ignore[misc]
        assert page.make(folder).notes == []


@pytest.mark.parametrize("what", ["nowhere", "an empty folder", "a compare without runs", "a compare that is no JSON"])
def test_what_is_no_run_is_refused_in_one_sentence(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "run"
    if what != "nowhere":
        folder.mkdir()
    if what.startswith("a compare"):
        (folder / "compare.json").write_text('{"runs": []}' if "without" in what else "{")
    with pytest.raises(ReportError) as error:
        page.make(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_a_compare_reads_only_what_is_inside_it(tmp_path: Path) -> None:
    recorded.run(tmp_path / "secret")
    folder = recorded.compare(tmp_path / "demo", ("ddp",), steps=40)
    listed = json.loads((folder / "compare.json").read_text())
    outside = ["../secret", str(tmp_path / "secret"), ".", "", "0-0/../../secret"]
    listed["runs"] += [{"method": f"m{i}", "folder": name, "seed": 0} for i, name in enumerate(outside)]
    (folder / "compare.json").write_text(json.dumps(listed))
    loaded = folders.load(folder)
    assert isinstance(loaded, Comparison)
    assert [run.method for run in loaded.runs] == ["ddp"] and len(loaded.notes) == len(outside)


def test_values_of_any_kind_in_any_place_make_a_page_or_one_sentence(tmp_path: Path) -> None:
    draw = random.Random(0)
    folder = recorded.run(tmp_path / "run", steps=40)
    clean = lines_of(folder / "records.jsonl")
    strange = [None, True, -1, 0, 1e308, -1e-308, 10**400, "x", "", [], {}, [[]], {"a": 1}, float("nan"), float("inf")]
    for _ in range(60):
        lines = json.loads(json.dumps(clean))
        for _ in range(draw.randrange(1, 12)):
            _spoil(draw.choice(lines), draw, strange)
        (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        try:
            Page(page.make(folder).html)
        except ReportError:
            pass


def _spoil(value: dict[str, Any], draw: random.Random, strange: list[Any]) -> None:
    key = draw.choice(list(value))
    inner = value[key]
    if isinstance(inner, list) and inner and isinstance(inner[0], dict) and draw.random() < 0.7:
        inner = draw.choice(inner)
    if isinstance(inner, dict) and inner and draw.random() < 0.7:
        _spoil(inner, draw, strange)
    else:
        value[key] = draw.choice(strange)


def test_a_resumed_run_goes_on_in_time_and_forgets_what_it_learned_twice(tmp_path: Path) -> None:
    folder = recorded.run(tmp_path / "run", steps=200)
    before = lines_of(folder / "records.jsonl")[:-1]
    after = lines_of(recorded.run(tmp_path / "again", steps=200) / "records.jsonl")
    resumed = [line for line in after if line.get("step", 100) >= 100 or line["kind"] == "began"]
    for line in resumed:
        line |= {"wall": line["wall"] + 1000} if "wall" in line else {}
        line |= {"step": 100, "trained_seconds": 9.5} if line["kind"] == "began" else {}
    rewrite(folder / "records.jsonl", lambda _: before + resumed)
    truth = folder / "truth.jsonl"
    earlier = lines_of(truth)
    truth.rename(folder / "truth.1.jsonl")
    truth.write_text("".join(json.dumps(line | {"wall": line["wall"] + 1000}) + "\n" for line in earlier))
    run = folders.read_run(folder)
    assert (np.diff(run.columns["time"]) >= 0).all()
    first_end = before[-1]["time"]
    steps = [e.step for e in run.evaluations]
    assert steps == sorted(set(steps)) and run.num_steps == 200
    assert (np.diff(run.losses[1]) > 0).all()
    starts = [int(np.flatnonzero(run.truth[0] == at)[0]) for at in (0.0, first_end)]
    assert run.truth[1][starts].tolist() == [recorded.STAGES[0][1]] * 2


# --- safe to open


HOSTILE = [
    pattern.format(i=i)
    for i in range(20)
    for pattern in (
        "<script>alert({i})</script>",
        '"><img src=x onerror=alert({i})>',
        "' onmouseover='alert({i})",
        "</script><svg onload=alert({i})>",
        "</style><b id=x{i}>",
        "]]><!--{i}-->",
        "&lt;i&gt;{i}&#x3c;u&#x3e;",
        "\u202etxt{i}\u2066\x00\x1b[31m",
        "javascript:alert({i})//</title><base href=//x>",
        "\ud800{{constructor}}${{alert({i})}}\u2028\\u003c/script>",
    )
]


def test_hostile_names_add_no_element_and_no_attribute(tmp_path: Path) -> None:
    assert len(set(HOSTILE)) == 200
    hostile, harmless = _Names(HOSTILE), _Names([f"{i:03}" + "a" * (len(s) - 3) for i, s in enumerate(HOSTILE)])
    for i, method in enumerate(("adaptive", "choco@int8:ring", "star-topk@0.01", "ddp")):
        bad, good = tmp_path / f"bad{i}", tmp_path / f"good{i}"
        recorded.run(bad, method=method, steps=60, rename=hostile)
        recorded.run(good, method=method, steps=60, rename=harmless)
        attacked, expected = made(bad), made(good)
        assert attacked.shape == expected.shape
        assert attacked.figures == expected.figures
        assert [sorted(spec) for spec in attacked.specs] == [sorted(spec) for spec in expected.specs]
    assert hostile.used == set(HOSTILE)


class _Names:
    """A new name for every word, the same for the same word."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.known, self.next = names, dict[str, str](), 0
        self.used: set[str] = set()

    def __call__(self, word: str) -> str:
        key = f"{word}-{self.next // 12}"  # and another one now and then, so that all have their turn
        if key not in self.known:
            self.known[key] = self.names[len(self.known) % len(self.names)]
        self.next += 1
        self.used.add(self.known[key])
        return self.known[key]


def test_hostile_methods_of_a_compare_add_nothing_either(tmp_path: Path) -> None:
    folder = recorded.compare(tmp_path / "demo", ("ddp", "adaptive"), steps=40)
    listed = json.loads((folder / "compare.json").read_text())
    hostile = ('"><script>1</script>', "</title><img src=x onerror=1>")
    shapes = []
    for names in (hostile, ["a" * len(name) for name in hostile]):
        for entry, name in zip(listed["runs"], names, strict=True):
            entry |= {"method": name, "seed": name, "message": name}
        (folder / "compare.json").write_text(json.dumps(listed))
        shapes.append(made(folder).shape)
    assert shapes[0] == shapes[1]


def test_a_folder_whose_name_is_no_text_is_reported_on(tmp_path: Path) -> None:
    folder = recorded.run(tmp_path / "run", steps=20)
    folder = folder.rename(tmp_path / os.fsdecode(b"r\xff<b>"))
    (folder / "job.json").unlink()
    assert Page(page.write(folder).read_text()).text["h1"] == ["r\ufffd<b>"]


def test_the_policy_lets_only_our_own_script_and_style_run_and_nothing_be_fetched(tmp_path: Path) -> None:
    found = made(recorded.compare(tmp_path / "demo", ("ddp", "adaptive"), steps=40))
    [policy] = [a["content"] for tag, a in found.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none';") and "unsafe" not in policy
    [style] = found.text["style"]
    script = next(text for text in found.text["script"] if not text.startswith("["))
    for kind, content in (("script", script), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    attributes = [(name, value) for _, found_ in found.elements for name, value in found_.items()]
    assert not [name for name, _ in attributes if name.startswith("on") or name in ("style", "src", "srcset")]
    assert all(str(value).startswith("#") for name, value in attributes if name == "href")
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|fetch\(|import\(", script
    )
    assert not re.search(r"url\(|@import", style)


# --- saving


def test_a_report_replaces_the_one_before_only_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recorded.run(tmp_path / "run", steps=20)
    path = page.write(folder)
    assert path == folder / "report.html" and path.stat().st_mode & 0o777 == 0o644
    before = path.read_bytes()

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        page.write(folder)
    assert path.read_bytes() == before
    assert [entry.name for entry in folder.iterdir() if entry.name.startswith(".")] == []


# --- citing


def test_every_method_can_be_cited(tmp_path: Path) -> None:
    compressed = [name for name in NAMES if name != "dense"]
    for name in [*compressed, *METHODS, "ddp", "ddp-fp16", "ddp-powersgd", "adaptive"]:
        run = Run(folder=tmp_path, name="x", method=name)
        assert len(keys(cite.bibtex(run))) > 1, name


def keys(bibtex: str) -> list[str]:
    return re.findall(r"^@\w+\{(\w+),$", bibtex, re.M)


def test_a_run_cites_what_it_ran_and_not_what_it_considered(tmp_path: Path) -> None:
    adaptive = keys(cite.bibtex(folders.load(recorded.run(tmp_path / "a"))))
    assert adaptive[:2] == ["thinwire", "tyagi2023flexible"] and "aji2017sparse" in adaptive
    assert "koloskova2020decentralized" not in adaptive and "shi2021towards" not in adaptive
    gossip = keys(cite.bibtex(folders.load(recorded.run(tmp_path / "g", method="choco@int8:ring"))))
    assert gossip == ["thinwire", "koloskova2019decentralized", "koloskova2020decentralized"]


def test_the_bibtex_of_all_methods_is_well_formed(tmp_path: Path) -> None:
    everything = cite.bibtex(folders.load(recorded.compare(tmp_path / "c", tuple(cite._METHODS), steps=4)))
    assert len(keys(everything)) == len(set(keys(everything))) == len(cite._ENTRIES) + 1
    for entry in everything.split("\n\n"):
        assert entry.count("{") == entry.count("}") and "author" in entry and "title" in entry


# --- the commands


app = typer.Typer()
app.command()(cli.report)
app.command()(cli.cite)
runner = CliRunner()


def test_report_prints_where_it_is(tmp_path: Path) -> None:
    folder = recorded.run(tmp_path / "run", steps=20)
    (folder / "truth.jsonl").write_text("{")
    result = runner.invoke(app, ["report", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(str(folder / "report.html"))
    figures = json.loads(result.stdout.splitlines()[-1])
    assert (
        figures["report"] == str(folder / "report.html") and figures["bytes"] == (folder / "report.html").stat().st_size
    )
    assert "The last line of truth.jsonl was cut off" in result.stderr


def test_report_opens_a_browser_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(typer, "launch", opened.append)
    folder = recorded.run(tmp_path / "run", steps=20)
    assert runner.invoke(app, ["report", str(folder), "--open"]).exit_code == 0
    assert opened == [(folder / "report.html").as_uri()]


@pytest.mark.parametrize("command", ["report", "cite"])
def test_what_is_no_run_is_one_sentence_and_exit_code_2(tmp_path: Path, command: str) -> None:
    result = runner.invoke(app, [command, str(tmp_path / "nowhere")])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1 and "does not exist" in result.stderr


def test_a_folder_that_cannot_be_written_is_one_sentence_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recorded.run(tmp_path / "run", steps=20)

    def full(*_: object, **__: object) -> Any:
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr("tempfile.mkstemp", full)
    result = runner.invoke(app, ["report", str(folder)])
    assert result.exit_code == 1
    assert result.stderr == f"thinwire: {folder}: No space left on device.\n"


def test_cite_prints_bibtex(tmp_path: Path) -> None:
    result = runner.invoke(app, ["cite", str(recorded.run(tmp_path / "run", steps=20))])
    assert result.exit_code == 0 and "@inproceedings{tyagi2023flexible," in result.stdout
