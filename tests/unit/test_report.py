"""The report: from the records of runs to one page that shows what they were like, and the commands that make it."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from tests import recorded
from tests.pages import CHARTS, Page, lines_of, made, rewrite
from tests.timing import timing
from thinwire.cli import report as cli
from thinwire.exchange import NAMES
from thinwire.gossip import METHODS
from thinwire.report import charts, cite, compare, folders, page
from thinwire.report.runs import Comparison, Run

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


def test_what_is_shown_over_time_begins_when_the_training_did(tmp_path: Path) -> None:
    folder = recorded.run(tmp_path / "run", steps=60)
    specs = [spec for spec in made(folder).specs if spec.get("group") == "time"]
    assert [spec["x"]["low"] for spec in specs] == [0.8] * 4
    starts = [pane["series"][0]["x"][0] for spec in specs for pane in spec["panes"] if "series" in pane]
    assert min(starts) == 0.8


def test_a_first_step_that_waited_long_is_drawn_though_nobody_knows_when_it_began(tmp_path: Path) -> None:
    folder = recorded.run(tmp_path / "run", steps=60)

    def stalled(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        first = next(line for line in lines if line["kind"] == "step")
        first |= {"step_seconds": None, "seconds": 12.5}
        return lines

    rewrite(folder / "records.jsonl", stalled)
    lines = [line for spec in made(folder).specs for pane in spec.get("panes", []) for line in pane.get("series", [])]
    assert 12500 in [max(line.get("high", line["y"])) for line in lines if line["name"] == "measured"]  # ms


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


@pytest.mark.parametrize(("field", "word"), [("broadcast", "scatter"), ("values", "float16")])
def test_plans_that_differ_in_one_word_have_two_names_and_going_from_one_to_the_other_is_a_change(
    tmp_path: Path, field: str, word: str
) -> None:
    folder = recorded.run(tmp_path / "run", method="star-topk@0.01:ring", steps=60)

    def changed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        steps = [line for line in lines if line["kind"] == "step"]
        before = steps[0]["plan"]
        plan = before | {field: word}
        for line in steps[30:]:
            line["plan"] = plan
        prices = {"seconds": 0.1, "gain": 0.5, "cost": 0.2}
        candidates = [{"plan": plan} | prices, {"plan": before} | prices]
        seen = {"trigger": "so", "alpha": 0.01, "beta": 1e-6, "seconds": 0.1, "candidates": candidates}
        decision = {"kind": "decision", "time": steps[29]["time"], "step": 30, "plan": plan, "before": before, **seen}
        return [*lines[: lines.index(steps[30])], decision, *lines[lines.index(steps[30]) :]]

    rewrite(folder / "records.jsonl", changed)
    specs = made(folder).specs
    [front] = [spec for spec in specs if spec["kind"] == "front"]
    assert front["names"] == [f"star-topk over ring, {word} {field} at 0.01", "star-topk over ring at 0.01"]
    assert front["decisions"][0]["changed"] and front["decisions"][0]["chosen"] == 0
    assert f"{word} {field} at 0.01 instead of star-topk over ring at 0.01" in front["decisions"][0]["what"]
    lanes = [pane for spec in specs for pane in spec.get("panes", []) if pane["kind"] == "lane"]
    assert [len(lane["which"]) for lane in lanes if any(word in name for name in lane["names"])] == [2]


def layers_of(folder: Path) -> tuple[dict[str, Any], Run]:
    [spec] = [spec for spec in made(folder).specs if spec["kind"] == "bars"]
    return spec, folders.read_run(folder)


def test_bytes_per_layer_are_those_that_were_sent_beside_those_of_a_dense_gradient(tmp_path: Path) -> None:
    folder = recorded.run(tmp_path / "run", method="star-topk@0.01:ring", steps=40)
    sizes = dict(recorded.LAYERS)
    only = [float(name == "fc.bias") for name in sizes]  # in the first half; then all layers alike
    entries = {0: only, 20: list(sizes.values())}

    def sampled(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        kept = []
        for line in (line for line in lines if line["kind"] != "sent"):
            kept.append(line)
            if line["kind"] == "step" and line["step"] in (19, 21):
                counts = [int(count) for count in entries[0 if line["step"] == 19 else 20]]
                kept.append({"kind": "sent", "time": line["time"], "step": line["step"], "entries": counts})
        return kept

    rewrite(folder / "records.jsonl", sampled)
    spec, run = layers_of(folder)
    sent = run.columns["sent_bytes"]
    expected = [sent[20:].sum() * n / sum(sizes.values()) for n in sizes.values()]
    expected[list(sizes).index("fc.bias")] += sent[:20].sum()
    assert run.sent_of_layers == pytest.approx(expected) and sum(run.sent_of_layers) == pytest.approx(sent.sum())
    assert sum(spec["shares"]) == pytest.approx(1, abs=0.01) and sum(spec["sent"]) == pytest.approx(1, abs=0.01)
    assert spec["names"][-1] == "7 others" and spec["sent"][-1] > 0.5 > 0.05 > spec["shares"][-1]


@pytest.mark.parametrize(("method", "known"), [("choco@int8:ring", False), ("ddp", False), ("adaptive", True)])
def test_where_nobody_knows_what_was_sent_of_a_layer_it_is_said(tmp_path: Path, method: str, known: bool) -> None:
    folder = recorded.run(tmp_path / "run", method=method, steps=60)
    spec, _ = layers_of(folder)
    assert ("sent" in spec) == known
    rewrite(folder / "records.jsonl", lambda lines: [line for line in lines if line["kind"] != "sent"])
    assert "sent" not in layers_of(folder)[0] and "What was sent of each is not known." in made(folder).words("p")


@pytest.mark.parametrize(("method", "known"), [("ddp-fp16", True), ("ddp-powersgd", False)])
def test_where_every_entry_is_sent_as_half_of_its_bits_all_layers_are_sent_alike(
    tmp_path: Path, method: str, known: bool
) -> None:
    plan = {"exchange": method, "collective": "torch", "ratio": 0.5}
    of_step = {"plan": plan, "sent_bytes": 500, "dense_bytes": 1000}
    folder = recorded.run(tmp_path / "run", method="ddp", steps=20)
    rewrite(
        folder / "records.jsonl",
        lambda lines: [line | of_step if line["kind"] == "step" else line for line in lines],
    )
    spec, run = layers_of(folder)
    assert ("sent" in spec) == known and (sum(run.sent_of_layers) > 0) == known


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


@pytest.mark.parametrize("program", ["/opt/venv/bin/thinwire", "/opt/src/thinwire/__main__.py", "thinwire"])
def test_the_command_is_what_a_person_would_type(tmp_path: Path, program: str) -> None:
    folder = recorded.run(tmp_path / "run", steps=20)
    about = json.loads((folder / "job.json").read_text())
    about["command"] = [program, "train", "digits", "--name", "my first"]
    (folder / "job.json").write_text(json.dumps(about))
    assert "thinwire train digits --name 'my first'" in made(folder).text["pre"]


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
    # Nobody promised an end, a loss or the layers, so nothing is missing.
    assert not [a for tag, a in found.elements if tag == "span" and str(a.get("class")).startswith("pill")]
    said = found.words("span", "p", "li")
    assert not [word for word in ("unfinished", "Over bytes", "Accuracy:", "Loss:", "its layers") if word in said]


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
    assert [row.speed_up for row in result.rows] == [first.seconds / row.seconds for row in result.rows]
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
    assert result.rows[1].speed_up == pytest.approx(loaded.runs[0].trained_seconds / result.rows[1].seconds)
    assert "not reached" in made(folder).words("td") and "more than" in made(folder).words("td")


def test_a_first_method_that_failed_says_neither_what_is_measured_nor_how_fast_the_others_are(tmp_path: Path) -> None:
    folder = recorded.compare(tmp_path / "demo", ("ddp", "adaptive"), steps=60, target=9.0)
    rewrite(folder / "0-0" / "records.jsonl", lambda lines: [line for line in lines if line["kind"] != "evaluated"])
    rewrite(folder / "1-0" / "records.jsonl", lambda lines: [_of_text(line) for line in lines])
    path = folder / "compare.json"
    about = json.loads(path.read_text())
    about["runs"][0]["message"] = "it broke"
    for said in ({}, {"quality": "perplexity", "chosen": False}):
        path.write_text(json.dumps(about | said))
        loaded = folders.load(folder)
        assert isinstance(loaded, Comparison)
        result = compare.result(loaded)
        assert result.quality == "perplexity" and math.isfinite(result.rows[1].seconds)
        assert [compare.speedup(row) for row in result.rows] == ["–", "–"]
        assert result.to_json()["chosen"] == (not said)
        assert "time to 9" in made(folder).words("th") and "perplexity" in made(folder).words("th")


def _of_text(line: dict[str, Any]) -> dict[str, Any]:
    return line | {"accuracy": None, "perplexity": 8.0} if line["kind"] == "evaluated" else line


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


@pytest.mark.parametrize(("chosen", "says"), [(True, False), (False, True), (None, False)])
def test_it_is_said_whether_a_target_was_set(tmp_path: Path, chosen: bool | None, says: bool) -> None:
    """A compare that has ended has a target, whoever set it; one that does not say who was given it."""
    folder = recorded.compare(tmp_path / "demo", ("ddp", "adaptive"), steps=60, target=0.5)
    path = folder / "compare.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | ({} if chosen is None else {"chosen": chosen})))
    found = made(folder)
    assert ("No target was set" in found.words("p")) == says
    assert "time to 50 %" in found.words("th")


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
    result = runner.invoke(app, ["report", str(folder)])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(str(folder / "report.html")) and result.stdout.count("\n") == 1
    assert "The last line of truth.jsonl was cut off" in result.stderr
    figures = json.loads(runner.invoke(app, ["report", str(folder), "--json"]).stdout)
    assert figures["report"] == str(folder / "report.html")
    assert figures["bytes"] == (folder / "report.html").stat().st_size
    [note] = figures["notes"]
    assert "The last line of truth.jsonl was cut off" in note


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
