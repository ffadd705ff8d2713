"""The report of a run that was resumed, or whose records end before it did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import recorded
from tests.pages import Page, lines_of, made, rewrite
from thinwire.report import charts, folders, learning, page
from thinwire.report.reading import command

FAILED = {"how": "failed", "message": "worker 1 was killed.", "log": ["Traceback", "oops"]}
UNFINISHED = {"how": "", "message": "", "seconds": None}


def resumed_run(tmp_path: Path) -> Path:
    """It was killed after step 200, and went on from the checkpoint of step 100, 1000 seconds later."""
    folder = recorded.run(tmp_path / "run", steps=200)
    before = lines_of(folder / "records.jsonl")[:-1]
    after = lines_of(recorded.run(tmp_path / "again", steps=200) / "records.jsonl")
    began = next(line for line in after if line["kind"] == "began")
    saved = next(line for line in after if line["kind"] == "evaluated" and line["step"] == 99)
    # A step's record has its number, from 0 on; a loss has the number of steps that were made.
    resumed = [line for line in after if line.get("step", 101) >= 100 + (line["kind"] == "loss")]
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
    assert 100 in run.losses[1]  # that of the checkpoint is not lost
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
