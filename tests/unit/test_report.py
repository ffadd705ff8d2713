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
from thinwire.report import charts, cite, compare, folders, learning, page
from thinwire.report.reading import command
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


# --- a run that was resumed


FAILED = {"how": "failed", "message": "worker 1 was killed.", "log": ["Traceback", "oops"]}
UNFINISHED = {"how": "", "message": "", "seconds": None}


def resumed_run(tmp_path: Path) -> Path:
    """It was killed after step 200, and went on from the checkpoint of step 100, 1000 seconds later."""
    folder = recorded.run(tmp_path / "run", steps=200)
    before = lines_of(folder / "records.jsonl")[:-1]
    after = lines_of(recorded.run(tmp_path / "again", steps=200) / "records.jsonl")
    began = next(line for line in after if line["kind"] == "began")
    saved = next(line for line in after if line["kind"] == "evaluated" and line["step"] == 99)
    resumed = [line for line in after if line.get("step", 100) >= 100]
    for line in resumed:
        line |= {"wall": line["wall"] + 1000} if "wall" in line else {}
        line |= {"time": line["time"] - saved["time"] + began["time"]} if line["time"] > began["time"] else {}
    began |= {"step": 100, "trained_seconds": saved["trained_seconds"]}
    rewrite(folder / "records.jsonl", lambda _: before + resumed)
    truth = folder / "truth.jsonl"
    earlier = lines_of(truth)
    truth.rename(folder / "truth.1.jsonl")
    truth.write_text("".join(json.dumps(line | {"wall": line["wall"] + 1000}) + "\n" for line in earlier))
    return folder


def test_a_resumed_run_goes_on_in_time_and_forgets_what_it_learned_twice(tmp_path: Path) -> None:
    run = folders.read_run(resumed_run(tmp_path))
    assert (np.diff(run.columns["time"]) >= 0).all()
    steps = [e.step for e in run.evaluations]
    assert steps == sorted(set(steps)) and run.num_steps == 200
    assert (np.diff(run.losses[1]) > 0).all()
    [(stopped, _)] = run.gaps
    starts = [int(np.flatnonzero(run.truth[0] == at)[0]) for at in (0.0, stopped)]
    assert run.truth[1][starts].tolist() == [recorded.STAGES[0][1]] * 2


def test_starting_a_run_again_is_neither_training_nor_evaluating(tmp_path: Path) -> None:
    folder = resumed_run(tmp_path)
    run = folders.read_run(folder)
    [(stopped, resumed)] = run.gaps
    assert resumed - stopped == pytest.approx(0.8)  # as long as it took to start at first
    assert run.step_starts[200] == resumed
    evaluated = sum(line["kind"] == "evaluated" for line in lines_of(folder / "records.jsonl"))
    assert run.untrained_seconds == pytest.approx(evaluated * 0.1)
    small = made(folder).words("small")
    assert f"evaluating, saving {evaluated * 0.1:.1f} s" in small
    assert "resumed once" in made(folder).words("p")


def test_a_resumed_run_shows_the_command_of_every_start(tmp_path: Path) -> None:
    folder = resumed_run(tmp_path)
    about = json.loads((folder / "job.json").read_text())
    later = {"command": ["/usr/bin/thinwire", "train", "--resume", "runs/one"], "started": "2027-01-01T00:00:00+00:00"}
    (folder / "job.json").write_text(json.dumps(about | {"resumed": [later]}))
    shown = made(folder)
    assert "Commands, of the first start and of those after it" in shown.text["h3"]
    assert shown.text["pre"][:2] == [command(about["command"]), "thinwire train --resume runs/one"]
    assert folders.read_run(folder).started == about["started"]
    assert "Command" in made(tmp_path / "again").text["h3"]


def test_what_was_sent_in_steps_that_were_lost_was_sent(tmp_path: Path) -> None:
    """The worker goes on counting from its checkpoint. Bytes over which a curve is drawn never become less."""
    run = folders.read_run(resumed_run(tmp_path))
    sent = learning.evaluations(run)["sent"]
    assert (np.diff(sent) > 0).all() and sent[-1] == np.nansum(run.columns["sent_bytes"])


def test_lines_over_time_end_where_a_run_did_and_begin_again_where_it_went_on(tmp_path: Path) -> None:
    folder = resumed_run(tmp_path)
    [(stopped, resumed)] = folders.read_run(folder).gaps
    across, seen = set(), set()
    panes = [pane for spec in made(folder).specs if spec.get("group") == "time" for pane in spec["panes"]]
    for lane in (pane for pane in panes if pane["kind"] == "lane"):
        stretches = list(zip(lane["starts"], lane["ends"], strict=True))
        assert all(end <= stopped + 1e-3 or start >= resumed - 1e-3 for start, end in stretches)
        assert min(abs(start - resumed) for start, _ in stretches) < 1e-3
    for series in (series for pane in panes if pane["kind"] != "lane" for series in pane["series"]):
        seen.add(series["name"])
        points = list(zip(series["x"], series["y"], strict=True))
        for (x, y), (later, y_later) in zip(points, points[1:], strict=False):
            if None not in (y, y_later) and x < resumed - 1e-3 and later > stopped + 1e-3:
                across.add(series["name"])
    assert {"measured", "predicted", "ratio", "sent", "compute", "exchange"} <= seen
    assert across == {"truth", "dense, by a ring"}  # which hold whether it trains or not


@pytest.mark.parametrize("points", [10, 50_000])
def test_a_line_of_any_length_is_interrupted_at_every_gap(points: int) -> None:
    x = np.arange(float(points))
    gaps = [(2.0, 2.9), (5.0, 5.9), (float(points) + 3, float(points) + 4)]
    y = x // 7
    lines = [charts.summarised("a", 0, x, y, gaps=gaps), charts.held("b", 0, x, y, points, gaps=gaps)]
    time, (mean,) = charts.averaged(x, [y], 80, gaps)
    for x_drawn, y_drawn in [*((line.x, line.y) for line in lines), (time, mean)]:
        assert (np.diff(x_drawn) >= 0).all()
        broken_at = x_drawn[np.isnan(y_drawn)]
        assert broken_at.tolist() == pytest.approx([2.45, 5.45])
    assert {2.0, 5.0} <= set(lines[1].x.tolist())  # what is held is held until the end


@pytest.mark.parametrize("outcome", [FAILED, UNFINISHED], ids=["failed", "unfinished"])
def test_how_the_last_start_ended_counts_and_not_what_an_earlier_one_recorded(
    tmp_path: Path, outcome: dict[str, Any]
) -> None:
    """A resume that fails before it records anything leaves the records of a run that was done."""
    folder = recorded.run(tmp_path / "run", steps=40)
    before = folders.read_run(folder)
    assert before.how_it_ended == "done"
    (folder / "outcome.json").write_text(json.dumps({"format": 1, **outcome}) + " " * 5000 + "\n")
    found = made(folder)
    assert found.text["span"][0] == (outcome["how"] or "unfinished")
    assert outcome["message"] in found.words("p") and "\n".join(outcome.get("log", [])) in found.words("pre")
    assert folders.read_run(folder).trained_seconds == before.trained_seconds


def test_a_start_that_came_to_no_record_is_a_report_that_says_why(tmp_path: Path) -> None:
    folder = recorded.run(tmp_path / "run", steps=40)
    for name in ("records.jsonl", "truth.jsonl"):
        (folder / name).unlink()
    (folder / "outcome.json").write_text(json.dumps(FAILED))
    found = made(folder)
    assert found.text["span"][0] == "failed" and FAILED["message"] in found.words("p")


def test_records_that_end_before_the_run_did_are_told_of(tmp_path: Path) -> None:
    folder = recorded.run(tmp_path / "run", steps=40)
    outcome = {"how": "done", "message": "the disk is full.", "steps": 2000, "seconds": 77.7, "recorded": 1040}
    (folder / "outcome.json").write_text(json.dumps(outcome))
    report = page.make(folder)
    assert report.notes == ["After step 1,040 nothing could be recorded."]
    assert "the disk is full." in report.html and "1 min 17 s" in report.html


def test_an_outcome_that_is_damaged_is_told_of_and_the_records_count(tmp_path: Path) -> None:
    folder = recorded.run(tmp_path / "run", steps=40)
    (folder / "outcome.json").write_text('{"how": "fai')
    report = page.make(folder)
    assert report.notes == ["outcome.json is damaged and was not used."]
    assert Page(report.html).text["span"][0] == "done"


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
