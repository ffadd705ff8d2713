"""The main job in the lab: a real network that changes, seen beside what was measured."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.disks import RESTLESS, filled_while_it_trains, small_disk
from tests.lab.leftovers import left_behind
from tests.process.runs import command, done, is_training, last_json, lines_of, thinwire, until, workers_of
from tests.process.terminals import Terminal
from tests.timing import timing
from thinwire.jobs import outcome
from thinwire.lab import registry

pytestmark = pytest.mark.lab


def truth_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "truth.jsonl").read_text().splitlines()]


def test_a_training_in_the_lab_measures_the_network_that_it_was_given(tmp_path: Path, folder: Path) -> None:
    network = ["--latency", "10ms", "--rate", "20mbit"]
    words = ["train", "digits", "--hosts", "3", *network, "--steps", "60", "--name", "run", "--out", str(tmp_path)]
    code, text, err = done(*words, "--json")
    assert code == 0, err
    now = truth_of(tmp_path / "run")[-1]["now"]
    assert (now["latency"], now["rate"]) == (0.01, 2.5e6)
    last = [line for line in lines_of(tmp_path / "run") if line["kind"] == "step"][-1]
    assert last["alpha"] == pytest.approx(0.01, rel=0.3)
    assert json.loads((tmp_path / "run" / "job.json").read_text())["job"]["link"] == "lab"
    assert last_json(text)["steps"] == 60 and Path(last_json(text)["report"]).exists()
    assert left_behind(folder) == ([], [])


@timing
def test_ctrl_c_ends_the_hosts_too(tmp_path: Path, folder: Path) -> None:
    run = tmp_path / f"run-{time.monotonic_ns()}"
    words = ["--hosts", "3", "--network", "unpredictable", "--scale", "10", "--epochs", "10000", "--name", run.name]
    process = thinwire("train", "digits", *words, "--out", str(tmp_path))
    until(lambda: is_training(run))
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    until(lambda: not workers_of(run))
    assert time.monotonic() - begin < 2
    _, err = process.communicate()
    assert process.returncode == 130, err
    assert (run / "report.html").exists()
    assert left_behind(folder) == ([], [])


def test_a_lab_that_breaks_down_ends_the_run(tmp_path: Path, folder: Path) -> None:
    run = tmp_path / "run"
    words = ["--hosts", "2", "--latency", "2ms", "--epochs", "10000", "--name", run.name, "--out", str(tmp_path)]
    process = thinwire("train", "digits", *words)
    until(lambda: is_training(run, 0))
    ((entry, _),) = registry.running()
    os.kill(entry.relay, signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode == 1
    assert "thinwire train: the lab's relay was ended by SIGKILL" in err
    assert left_behind(folder) == ([], [])


def test_a_disk_that_becomes_full_ends_the_truth_and_not_the_run(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "restless.toml").write_text(RESTLESS)
    with small_disk(tmp_path / "disk", "2m") as disk:
        words = ["--network", str(tmp_path / "restless.toml"), "--method", "ddp", "--steps", "1000"]
        told = filled_while_it_trains(disk, "run", *words, ends=2)
        assert told.code == 1
        truth = f"the truth in {disk / 'run' / 'truth.jsonl'} ends here: No space left on device."
        assert told.lines.count(truth) == 1 and told.lines[-1].startswith(f"thinwire train: {truth} worker 0: the ")
        known = outcome.read(disk / "run")
    assert (known["how"], known["steps"]) == ("done", 1000)
    assert left_behind(folder) == ([], [])


def test_methods_are_compared_on_the_same_network(tmp_path: Path, folder: Path) -> None:
    network = ["--network", "unpredictable", "--scale", "10", "--speed", "20"]
    words = ["--hosts", "2", "--seconds", "2", "--methods", "ddp,adaptive", "--name", "both", "--out", str(tmp_path)]
    code, text, err = done("compare", "digits", *network, *words, "--json")
    assert code == 0, err
    first, second = (truth_of(tmp_path / "both" / method) for method in ("ddp", "adaptive"))
    common = min(len(first), len(second))
    assert common > 3
    assert [line["now"] for line in first[:common]] == [line["now"] for line in second[:common]]
    assert "rates divided by 10" in err
    assert left_behind(folder) == ([], [])


def test_the_network_waits_for_the_training_to_begin(tmp_path: Path, folder: Path) -> None:
    soon = '[network]\nlatency = "1ms"\n[[change]]\nat = "0.2s"\nlatency = "5ms"\n'
    (tmp_path / "soon.toml").write_text(soon)
    words = ["--hosts", "2", "--network", str(tmp_path / "soon.toml"), "--seconds", "1", "--name", "run"]
    code, _, err = done("train", "digits", *words, "--out", str(tmp_path))
    assert code == 0, err
    (began,) = (line for line in lines_of(tmp_path / "run") if line["kind"] == "began")
    first, second = truth_of(tmp_path / "run")
    assert first["wall"] < began["wall"] < second["wall"]
    assert second["time"] == pytest.approx(0.2, abs=0.01)
    assert left_behind(folder) == ([], [])


def test_a_terminal_shows_the_truth_beside_what_was_measured(tmp_path: Path, folder: Path) -> None:
    network = ["--latency", "5ms", "--rate", "50mbit"]
    words = command("train", "digits", "--hosts", "2", *network, "--steps", "80", "--out", str(tmp_path))
    with Terminal(words, 100, 30, {"NO_COLOR": "1"}) as terminal:
        terminal.expect("5 ms, 50 Mbit/s in truth")
        terminal.expect("ms predicted")
        assert terminal.wait() == 0
    assert "done: step 80 of 80" in terminal.text
