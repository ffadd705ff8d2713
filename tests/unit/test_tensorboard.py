"""What TensorBoard shows is what the records say: read back with TensorBoard's own reader, from real files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests import recorded
from tests.disks import small_disk
from thinwire.cli import app
from thinwire.jobs import live
from thinwire.jobs.job import Job
from thinwire.report import tensorboard

accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="TensorBoard is an extra"
)
plugins = pytest.importorskip("tensorboard.plugin_util", reason="TensorBoard is an extra")

HOSTILE = "<script>alert(1)</script> ![x](http://example.org/x.png) [a](javascript:b) `\n\n# \ud800\u202e\x00/../.."


def lines_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def append(folder: Path, *records: dict[str, Any]) -> None:
    with (folder / "records.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def read_back(folder: Path) -> Any:
    """All that is in a folder of events; by default only a sample of it would be kept."""
    found = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    return found.Reload()


def points(events: Any, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def texts(events: Any, tag: str) -> list[tuple[int, str]]:
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(tag)]


def written(run: Path) -> Any:
    [folder] = tensorboard.write(run)
    return read_back(folder)


def same(found: list[tuple[int, float]], wanted: list[tuple[int, float]]) -> bool:
    """Events hold floats of 32 bits."""
    return found == [(step, float(np.float32(value))) for step, value in wanted]


# --- from records to charts


def test_every_step_is_there_with_the_numbers_of_its_record(tmp_path: Path) -> None:
    run = recorded.run(tmp_path / "run")
    events, steps = written(run), lines_of(run, "step")
    for tag, name, unit in (
        ("comm/bytes_sent", "sent_bytes", 1),
        ("comm/bytes_dense", "dense_bytes", 1),
        ("comm/gain", "gain", 1),
        ("net/latency_ms", "alpha", 1e3),
        ("step/predicted_seconds", "predicted_seconds", 1),
    ):
        wanted = [(line["step"] + 1, line[name] * unit) for line in steps]
        assert points(events, tag) == [(step, pytest.approx(value, rel=1e-6)) for step, value in wanted], tag
    assert same(points(events, "comm/ratio"), [(line["step"] + 1, line["plan"]["ratio"]) for line in steps])
    rates = [(line["step"] + 1, pytest.approx(8e-6 / line["beta"], rel=1e-6)) for line in steps]
    assert points(events, "net/rate_mbit") == rates
    known = [(line["step"] + 1, line["step_seconds"]) for line in steps if line["step_seconds"] is not None]
    assert len(known) == len(steps) - 1 and same(points(events, "step/seconds"), known)


def test_so_are_losses_and_what_was_tested(tmp_path: Path) -> None:
    run = recorded.run(tmp_path / "run")
    events, tested = written(run), lines_of(run, "evaluated")
    losses = [(line["step"], line["loss"]) for line in lines_of(run, "loss")]
    assert losses and same(points(events, "train/loss"), losses)
    for name in ("loss", "accuracy"):
        assert same(points(events, f"test/{name}"), [(line["step"], line[name]) for line in tested])
    assert "test/perplexity" not in events.Tags()["scalars"]


def test_the_plan_that_runs_is_at_1_and_the_others_at_0(tmp_path: Path) -> None:
    run = recorded.run(tmp_path / "run")
    events, steps = written(run), lines_of(run, "step")
    names = [f"plan/{line['plan']['exchange']} over {line['plan']['collective']}" for line in steps]
    bands = {tag: dict(points(events, tag)) for tag in events.Tags()["scalars"] if tag.startswith("plan/")}
    assert len(bands) > 1 and set(bands) == set(names)
    for step, running in enumerate(names, 1):
        assert {tag for tag, band in bands.items() if band.get(step) == 1} == {running}
    for band in bands.values():
        first = min(band)
        assert band[first] == 1 and sorted(band) == list(range(first, len(steps) + 1))


def test_every_decision_is_a_sentence_with_its_reason(tmp_path: Path) -> None:
    run = recorded.run(tmp_path / "run")
    decisions, found = lines_of(run, "decision"), texts(written(run), "plan/decision")
    assert [step for step, _ in found] == [line["step"] for line in decisions]
    for line, (step, words) in zip(decisions, found, strict=True):
        still = "still " if line["plan"] == line["before"] else ""
        assert words.startswith(f"    From step {step} on: {still}{line['plan']['exchange']} over ")
        assert words.endswith(f", because {line['trigger']}.")


def test_a_gossip_run_has_its_consensus_and_no_ratio(tmp_path: Path) -> None:
    run = recorded.run(tmp_path / "run", method="choco@int8:ring")
    events, told = written(run), lines_of(run, "consensus")
    assert same(points(events, "gossip/consensus"), [(line["step"], line["distance"]) for line in told])
    assert "plan/choco over ring" in events.Tags()["scalars"] and "comm/ratio" not in events.Tags()["scalars"]


def test_a_point_has_the_time_on_the_wall_at_which_it_was_recorded(tmp_path: Path) -> None:
    run = recorded.run(tmp_path / "run")
    events = written(run)
    walls = [event.wall_time for event in events.Scalars("comm/bytes_sent")]
    assert walls == pytest.approx([recorded.BEGUN + line["time"] for line in lines_of(run, "step")])
    assert events.FirstEventTimestamp() == recorded.BEGUN


def test_what_a_resumed_run_lost_is_forgotten(tmp_path: Path) -> None:
    run, wall = recorded.run(tmp_path / "run", steps=50), recorded.BEGUN + 1000
    plan = {"exchange": "dense", "collective": "torch", "ratio": 1.0}
    append(
        run,
        {"kind": "run", "time": 0.0, "format": 1, "wall": wall},
        {"kind": "began", "time": 0.5, "wall": wall + 0.5, "step": 30},
        *({"kind": "step", "time": 1.0 + step, "step": step, "plan": plan, "sent_bytes": 7} for step in (30, 31)),
    )
    events = written(run)
    sent = points(events, "comm/bytes_sent")
    assert [step for step, _ in sent] == list(range(1, 33)) and sent[-2:] == [(31, 7), (32, 7)]
    assert events.Scalars("comm/bytes_sent")[-1].wall_time == pytest.approx(wall + 32)
    assert max(step for step, _ in points(events, "train/loss")) <= 30


def test_every_run_of_a_compare_has_a_folder(tmp_path: Path) -> None:
    whole = recorded.compare(tmp_path / "compare", ("ddp", "adaptive"), steps=40)
    folders = tensorboard.write(whole)
    assert folders == [whole / "0-0" / "tensorboard", whole / "1-0" / "tensorboard"]
    for folder in folders:
        assert len(points(read_back(folder), "comm/bytes_sent")) == 40


def test_a_file_of_records_alone_has_a_folder_beside_it(tmp_path: Path) -> None:
    run = recorded.run(tmp_path / "run", steps=20)
    alone = (run / "records.jsonl").rename(tmp_path / "mine.jsonl")
    assert tensorboard.write(alone) == [tmp_path / "mine.tensorboard"]
    assert len(points(read_back(tmp_path / "mine.tensorboard"), "comm/bytes_sent")) == 20


# --- again, and while it runs


def test_a_second_time_replaces_what_is_there(tmp_path: Path) -> None:
    run = recorded.run(tmp_path / "run", steps=60)
    [folder] = tensorboard.write(run)
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert tensorboard.write(run) == [folder]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first and len(first) == 1
    recorded.run(run, steps=20)
    assert len(points(written(run), "comm/bytes_sent")) == 20


@contextmanager
def watched(run: Path) -> Iterator[live.View]:
    """Somebody who watches the run; what is said is in a file beside it."""
    with run.with_suffix(".txt").open("w") as screen:
        view = live.view_of(Job(tensorboard=True), run, Console(file=screen), "a run")
        yield view
        view.close()


def test_a_run_that_is_watched_can_be_seen_at_once_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    run = recorded.run(tmp_path / "run", steps=30)
    with watched(run) as view:
        view.look()
        assert len(points(read_back(run / "tensorboard"), "comm/bytes_sent")) == 30
        append(run, {"kind": "step", "time": 900.0, "step": 30, "plan": {"exchange": "ddp"}, "sent_bytes": 5})
    assert points(read_back(run / "tensorboard"), "comm/bytes_sent")[-1] == (31, 5)
    seen = (run / "tensorboard" / tensorboard.FILE).read_bytes()
    tensorboard.write(run)
    assert (run / "tensorboard" / tensorboard.FILE).read_bytes() == seen


def test_a_full_disk_ends_the_scalars_and_not_the_run(tmp_path: Path) -> None:
    run = recorded.run(tmp_path / "run", steps=300)
    with small_disk(tmp_path / "disk", "16k") as disk:
        (run / "tensorboard").symlink_to(disk)
        with watched(run) as view:
            view.look()
    said = (tmp_path / "run.txt").read_text()
    assert said.count("what TensorBoard shows ends here: No space left on device.") == 1 and "step 300" in said


# --- what others wrote


def test_hostile_words_are_shown_as_they_are_and_reach_no_other_file(tmp_path: Path) -> None:
    run = recorded.run(tmp_path / "a" / "run", rename=lambda word: f"{word}{HOSTILE}")
    before = {path for path in tmp_path.rglob("*")}
    events = written(run)
    assert {path for path in tmp_path.rglob("*")} - before == {
        run / "tensorboard",
        run / "tensorboard" / tensorboard.FILE,
    }
    for _, words in texts(events, "plan/decision"):
        shown = plugins.markdown_to_safe_html(words)
        assert shown.startswith("<pre><code>From step ")
        assert not [tag for tag in ("<img", "<a ", "<script", "<h1") if tag in shown]
    for tag in events.Tags()["scalars"]:
        assert tag.isprintable() and len(tag) < 150


def test_numbers_that_are_none_are_left_out(tmp_path: Path) -> None:
    run = recorded.run(tmp_path / "run", steps=5)
    bad = [None, "1", True, [], {}, 1e300, float("nan"), float("inf"), -float("inf"), 10**400]
    names = ("sent_bytes", "gain", "alpha", "beta", "step_seconds", "plan")
    append(
        run,
        *({"kind": "step", "time": 99.0, "step": 5, **dict.fromkeys(names, value)} for value in bad),
        *({"kind": "step", "time": 99.0, "step": value, "sent_bytes": 1} for value in [*bad, -1, 1e29]),
        *({"kind": "loss", "time": value, "step": 1, "loss": 1.0} for value in bad),
        {"kind": ["step"], "time": 99.0, "step": 6},
        {"kind": "step", "time": 99.0, "step": 5, "beta": 0.0, "wall": "noon", "plan": {"exchange": []}},
    )
    events = written(run)
    assert [step for step, _ in points(events, "comm/bytes_sent")] == [1, 2, 3, 4, 5]
    assert len(points(events, "train/loss")) == 3 and len(points(events, "net/rate_mbit")) == 5


def test_more_plans_than_can_be_seen_share_a_line(tmp_path: Path) -> None:
    scalars = tensorboard.Scalars(tmp_path / "many")
    for step in range(200):
        scalars.take({"kind": "step", "time": 0.1 * step, "step": step, "plan": {"exchange": f"method {step}"}})
    scalars.close()
    events = read_back(tmp_path / "many")
    assert len(events.Tags()["scalars"]) == tensorboard.MOST_PLANS + 1
    assert points(events, "plan/others")[-1] == (200, 1)


# --- the package


@pytest.fixture
def without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)


@pytest.mark.usefixtures("without_the_package")
@pytest.mark.parametrize("words", [["train", "digits"], ["compare", "digits"], ["train", "--config", "job.toml"]])
def test_that_it_is_missing_is_said_before_anything_starts(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text("tensorboard = true\n")
    given = [] if "--config" in words else ["--tensorboard"]
    result = CliRunner().invoke(app, [*words, *given])
    assert result.exit_code == 2
    assert result.output.startswith(f"thinwire {words[0]}: ") and result.output.count("\n") == 1
    assert "pip install thinwire[tensorboard]" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"]


@pytest.mark.usefixtures("without_the_package")
def test_under_torchrun_the_worker_that_would_write_says_so(tmp_path: Path) -> None:
    words = ["train", "digits", "--tensorboard", "--out", str(tmp_path / "runs")]
    result = CliRunner().invoke(app, words, env={"RANK": "0", "WORLD_SIZE": "2"})
    assert result.exit_code == 2 and "pip install thinwire[tensorboard]" in result.output


@pytest.mark.usefixtures("without_the_package")
def test_without_it_a_report_of_scalars_is_refused_and_any_other_is_made(tmp_path: Path) -> None:
    run = recorded.run(tmp_path / "run", steps=20)
    refused = CliRunner().invoke(app, ["report", str(run), "--tensorboard"])
    assert refused.exit_code == 2 and refused.output.count("\n") == 1
    assert "pip install thinwire[tensorboard]" in refused.output and not (run / "report.html").exists()
    assert CliRunner().invoke(app, ["report", str(run)]).exit_code == 0


def test_the_command_names_the_folders_and_needs_no_torch(tmp_path: Path) -> None:
    whole = recorded.compare(tmp_path / "compare", ("ddp", "adaptive"), steps=20)
    program = (
        "import sys; from typer.testing import CliRunner; from thinwire.cli import app; "
        f"print(CliRunner().invoke(app, ['report', {str(whole)!r}, '--tensorboard', '--json']).output); "
        "assert not {'torch', 'tensorflow'} & sys.modules.keys()"
    )
    shown = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=True).stdout
    folders = [str(whole / name / "tensorboard") for name in ("0-0", "1-0")]
    assert json.loads(shown.strip().splitlines()[-1])["tensorboard"] == folders
    assert shown.splitlines()[1:3] == folders


def test_a_job_says_whether_in_true_or_false() -> None:
    assert Job(tensorboard=True).tensorboard and not Job().tensorboard
    with pytest.raises(ValueError, match="tensorboard must be true or false, got 1."):
        Job(tensorboard=1)
