"""The report of files that are cut off, damaged, missing or hostile: honest about them, safe to open, whole on disk."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests import recorded
from tests.pages import CHARTS, Page, lines_of, made, rewrite
from thinwire.report import folders, page
from thinwire.report.reading import ReportError
from thinwire.report.runs import Comparison

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


def test_lines_that_are_no_records_are_left_out_and_told_by_number(tmp_path: Path) -> None:
    folder = recorded.run(tmp_path / "run")
    path = folder / "records.jsonl"
    lines = path.read_text().splitlines()
    lines[5:5] = ["{", "[1, 2]", "\x00\xff", "[" * 100_000]
    path.write_text("\n".join(lines) + "\n")
    report = page.make(folder)
    assert report.notes == ["Lines 6, 7, 8 and 9 of records.jsonl could not be read and were left out."]
    assert Page(report.html).figures == CHARTS


@pytest.mark.parametrize("empty", ["\n", "\n\n\n", "  \n", " \t", "\r\n\r\n"])
def test_empty_lines_say_nothing_and_are_nothing_to_tell_of(tmp_path: Path, empty: str) -> None:
    folder = recorded.run(tmp_path / "run", steps=20)
    expected = page.make(folder)
    for name in ("records.jsonl", "truth.jsonl"):
        first, rest = (folder / name).read_text().split("\n", 1)
        (folder / name).write_text(f"\n{first}\n\n{rest}{empty}")
    assert page.make(folder) == expected


def test_a_damaged_line_keeps_its_number_among_empty_ones(tmp_path: Path) -> None:
    folder = recorded.run(tmp_path / "run", steps=20)
    with (folder / "records.jsonl").open("a") as file:
        file.write("\n\n{\n\n")
    number = len((folder / "records.jsonl").read_text().splitlines()) - 1
    assert page.make(folder).notes == [f"Line {number} of records.jsonl could not be read and was left out."]


@pytest.mark.parametrize("name", ["records.jsonl", "job.json", "compare.json", "outcome.json"])
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
