"""thinwire train, as a person uses it: real workers on loopback, real folders, real signals."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.process.runs import (
    PLAIN,
    ROOT,
    a_training,
    command,
    done,
    last_json,
    lines_of,
    thinwire,
    until,
    workers_of,
)
from tests.process.terminals import Terminal
from tests.timing import timing
from tests.unit.test_data import write_fashion
from thinwire.cli import app
from thinwire.jobs import outcome, resuming
from thinwire.lab import namespaces

pytestmark = pytest.mark.process


@timing
def test_no_step_waits_for_what_has_to_be_compiled_on_a_machine_that_has_never_run_this(tmp_path: Path) -> None:
    run = tmp_path / f"run-{time.monotonic_ns()}"
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / f"{run.name}-cache")}
    words = ["--hosts", "2", "--method", "topk-allgather@0.01", "--steps", "3", "--name", run.name]
    code, _, err = done("train", "digits", *words, "--out", str(tmp_path), env=env)
    assert code == 0, err
    first = next(line for line in lines_of(run) if line["kind"] == "step")
    assert 0 < first["compress_seconds"] < 0.5


# --- train


def test_a_training_ends_with_its_figures_and_a_report(out: Path) -> None:
    code, text, err = done("train", "digits", "--hosts", "2", "--steps", "30", "--out", str(out), "--json")
    assert code == 0, err
    figures = last_json(text)
    folder = out / "digits-adaptive-1"
    assert figures["folder"] == str(folder) and figures["how"] == "done" and figures["steps"] == 30
    assert 0 < figures["accuracy"] <= 1 and 0 < figures["sent_bytes"]
    assert Path(figures["report"]).read_text().startswith("<!doctype html>")
    assert json.loads((folder / "job.json").read_text())["job"]["link"] == "loopback"
    assert "\x1b" not in err and "from step 0 on" in err and "step 30 of 30" in err
    assert sorted(path.name for path in folder.glob("worker-*.log")) == ["worker-0.log", "worker-1.log"]
    assert workers_of(folder) == []
    known = outcome.read(folder)
    assert (known["how"], known["message"], known["steps"], known["recorded"]) == ("done", "", 30, None)


def test_what_tensorboard_shows_grows_while_a_run_does_and_ends_as_its_records_do(out: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def steps(folder: Path) -> list[int]:
        found = events.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
        known = "comm/bytes_sent" in found.Tags()["scalars"]
        return [event.step for event in found.Scalars("comm/bytes_sent")] if known else []

    with a_training(out, "--tensorboard") as (process, folder):
        seen = until(lambda: steps(folder))
        until(lambda: len(steps(folder)) > len(seen))
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert f"to watch it: tensorboard --logdir {folder}" in err
    assert steps(folder) == [line["step"] + 1 for line in lines_of(folder) if line["kind"] == "step"]


def test_a_file_holds_the_settings_and_options_win(out: Path, tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text('task = "digits"\nhosts = 2\nsteps = 500\nmethod = "ddp"\n')
    words = ["train", "--config", str(config), "--steps", "4", "--out", str(out), "--json"]
    code, text, err = done(*words)
    assert code == 0, err
    assert last_json(text)["steps"] == 4 and last_json(text)["folder"].endswith("digits-ddp-1")


def test_runs_get_names_that_are_free_and_never_take_one(out: Path) -> None:
    (out / "digits-ddp-1").mkdir(parents=True)
    (out / "mine").mkdir()
    words = ["train", "digits", "--method", "ddp", "--hosts", "1", "--steps", "2", "--out", str(out)]
    code, text, err = done(*words)
    assert code == 0, err
    assert (out / "digits-ddp-2" / "report.html").exists() and not list((out / "digits-ddp-1").iterdir())
    again = CliRunner().invoke(app, [*words, "--name", "mine"])
    assert again.exit_code == 2
    assert again.output == (
        f"thinwire train: {out / 'mine'} exists already: go on with it by --resume {out / 'mine'}, or choose another "
        "--name.\n"
    )


def test_torchruns_worker_joins_instead_of_starting_its_own(out: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    words = command("train", "digits", "--steps", "6", "--name", "joined", "--out", str(out))
    ended = subprocess.run([*torchrun, *words], cwd=ROOT, text=True, capture_output=True, env={**os.environ, **PLAIN})
    assert ended.returncode == 0, ended.stderr
    steps = [line["step"] for line in lines_of(out / "joined") if line["kind"] == "step"]
    assert steps == list(range(6))
    assert json.loads((out / "joined" / "job.json").read_text())["job"]["hosts"] == 2
    assert f"report: {out / 'joined' / 'report.html'}" in ended.stdout
    assert outcome.read(out / "joined")["how"] == "done" and outcome.read(out / "joined")["steps"] == 6


def test_torchruns_worker_refuses_a_network_that_it_could_not_have(out: Path) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "1"}
    result = CliRunner().invoke(app, ["train", "--network", "home", "--out", str(out)], env=env)
    assert result.exit_code == 2 and "on the network that there is" in result.output
    assert not out.exists()


def test_torchruns_worker_refuses_another_number_of_hosts(out: Path) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2"}
    result = CliRunner().invoke(app, ["train", "--hosts", "7", "--out", str(out)], env=env)
    assert result.exit_code == 2 and "--hosts 7 has no effect: torchrun has started 2 workers." in result.output


def test_torchruns_worker_refuses_a_module_that_it_cannot_use_before_it_meets_the_others(out: Path) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2"}
    result = CliRunner().invoke(app, ["train", "absent_module:make", "--out", str(out)], env=env)
    assert result.exit_code == 2 and "No module named 'absent_module' in " in result.output
    assert not out.exists()


# --- how it ends


def interrupt(process: subprocess.Popen[str], folder: Path, number: signal.Signals) -> None:
    """All of it ends within 2 s, and leaves a checkpoint and a report."""
    assert len(workers_of(folder)) == 2
    begin = time.monotonic()
    process.send_signal(number)
    until(lambda: not workers_of(folder))
    assert time.monotonic() - begin < 2
    text, err = process.communicate()
    assert process.returncode == 128 + number, err
    assert "Traceback" not in err
    assert (folder / "report.html").exists()
    assert f"to go on: thinwire train --resume {folder}" in text
    assert list((folder / "checkpoints").glob("step-*/rank-00001.json"))
    assert outcome.read(folder)["how"] == "interrupted"


@timing
def test_where_no_step_ends_in_time_those_before_it_are_saved(out: Path) -> None:
    slow = ["--method", "dense:ring", "--link", "shaped", "--latency", "500ms", "--rate", "100mbit"]
    with a_training(out, *slow) as (process, folder):
        interrupt(process, folder, signal.SIGINT)
    saved = resuming.newest_step(folder, 2)
    assert 2 <= saved < 20  # which is when the first would be due


def test_an_interrupt_before_the_first_step_does_not_say_that_anything_is_saved(out: Path, tmp_path: Path) -> None:
    endless = "import threading, pathlib\ndef make():\n pathlib.Path('made').touch()\n threading.Event().wait()\n"
    (tmp_path / "endless.py").write_text(endless)
    words = ["train", "endless:make", "--hosts", "2", "--name", "early", "--out", str(out)]
    process = thinwire(*words, env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    until(lambda: (tmp_path / "made").exists())
    process.send_signal(signal.SIGINT)
    text, err = process.communicate()
    assert process.returncode == 130, err
    assert "no checkpoint is saved" in text and "to go on" not in text


def test_workers_do_not_take_a_file_of_the_current_directory_for_a_module(out: Path, tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError('not this one')\n")
    script = "import sys; sys.path.pop(0); from thinwire.cli import app; app(sys.argv[1:])"
    words = ["train", "--hosts", "2", "--steps", "3", "--out", str(out)]
    env = {**os.environ, **PLAIN, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", script, *words], cwd=tmp_path, env=env, text=True, capture_output=True
    )
    assert ended.returncode == 0, ended.stderr


@timing
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_end_ends_all_within_2_s_and_leaves_a_checkpoint_and_a_report(out: Path, number: int) -> None:
    with a_training(out) as (process, folder):
        interrupt(process, folder, signal.Signals(number))


@timing
def test_so_does_ctrl_c_and_the_run_can_go_on(out: Path) -> None:
    with a_training(out) as (process, folder):
        interrupt(process, folder, signal.SIGINT)
    last = max(int(path.parent.name[5:]) for path in (folder / "checkpoints").glob("step-*/rank-00000.json"))
    code, text, err = done("train", "--resume", str(folder), "--steps", str(last + 10), "--json")
    assert code == 0, err
    assert last_json(text)["steps"] == last + 10
    lines = lines_of(folder)
    anew = max(number for number, line in enumerate(lines) if line["kind"] == "run")
    assert [line["step"] for line in lines[anew:] if line["kind"] == "step"] == list(range(last, last + 10))


@timing
def test_a_second_interrupt_ends_all_at_once(out: Path) -> None:
    with a_training(out) as (process, folder):
        for pid in workers_of(folder):
            os.kill(pid, signal.SIGSTOP)  # one that cannot answer
        process.send_signal(signal.SIGINT)
        until(lambda: process.stderr is not None and "ending the workers" in process.stderr.readline())
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate()
        assert process.returncode == 130
        assert time.monotonic() - begin < 1
        assert workers_of(folder) == [] and not (folder / "report.html").exists()


def test_workers_die_with_whoever_started_them(out: Path) -> None:
    with a_training(out) as (process, folder):
        process.kill()
        until(lambda: not workers_of(folder), seconds=5)


def test_a_worker_that_dies_is_named_and_ends_all(out: Path) -> None:
    with a_training(out) as (process, folder):
        victim = next(pid for pid in workers_of(folder) if b"RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
        os.kill(victim, signal.SIGKILL)
        text, err = process.communicate()
        assert process.returncode == 1
        assert "thinwire train: worker 1 was ended by SIGKILL" in err
        assert "failed: step" in text and (folder / "report.html").exists()
        assert outcome.read(folder)["how"] == "failed" and "worker 1 was ended by" in outcome.read(folder)["message"]
        assert workers_of(folder) == []


def test_ctrl_c_in_a_terminal_leaves_nothing_running_and_a_whole_screen(out: Path) -> None:
    folder = out / "seen"
    words = command("train", "digits", "--hosts", "2", "--name", "seen", "--out", str(out), "--epochs", "100000")
    with Terminal(words, 90, 30, {"NO_COLOR": ""}) as terminal:
        terminal.expect("the workers are starting")
        terminal.expect("since step 0")
        assert len(workers_of(folder)) == 2
        terminal.resize(60, 30)
        terminal.expect("╰")
        terminal.type(b"\x03")
        assert terminal.wait() == 130
    assert "to go on: thinwire train --resume" in terminal.text
    assert terminal.written.rstrip().endswith(str(folder).encode())
    assert b"\x1b[?25h" in terminal.written[terminal.written.rindex(b"\x1b[?25l") :]  # the cursor is back
    assert workers_of(folder) == []


# --- mistakes


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--hosts", "0"], "hosts must be from 1 to 200, got 0."),
        (["--network", "mars"], "there is no network 'mars'. Known: c1, c2, cross-region, datacenter, home, lte,"),
        (["--network", "unpredictible"], "Did you mean 'unpredictable'?"),
        (["--method", "star-topk@0.01:treee"], "Did you mean 'tree'?"),
        (["--method", "telepathy"], "there is no method 'telepathy'. Known: adaptive, ddp, ddp-fp16, ddp-powersgd,"),
        (["--config", "/nowhere/job.toml"], "/nowhere/job.toml cannot be read: No such file or directory."),
        (["--resume", "/nowhere"], "/nowhere is no run: there is no such folder."),
        (["--latency", "5"], "'5' is not a time"),
        (["--link", "shaped"], "a shaped link needs a network to be like"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(out: Path, words: list[str], says: str) -> None:
    where = [] if "--resume" in words else ["--out", str(out)]
    result = CliRunner().invoke(app, ["train", *words, *where])
    assert result.exit_code == 2
    assert result.output.startswith("thinwire train: ") and result.output.count("\n") == 1
    assert says in result.output
    assert not out.exists()


@pytest.mark.parametrize(
    "words", [["train", "chars", "--text", "/no/text"], ["train", "fashion-mnist", "--folder-of-data", "/no/text"]]
)
def test_missing_data_is_said_before_anything_starts(out: Path, words: list[str]) -> None:
    result = CliRunner().invoke(app, [*words, "--out", str(out)])
    assert result.exit_code == 2
    assert "/no/text does not exist" in result.output and result.output.count("\n") == 1
    assert not out.exists()


def test_so_is_a_file_that_is_missing_among_others(out: Path, tmp_path: Path) -> None:
    (write_fashion(tmp_path / "images") / "t10k-labels-idx1-ubyte.gz").unlink()
    result = CliRunner().invoke(
        app, ["train", "fashion-mnist", "--folder-of-data", str(tmp_path / "images"), "--out", str(out)]
    )
    assert result.exit_code == 2
    assert "t10k-labels-idx1-ubyte.gz is missing" in result.output and result.output.count("\n") == 1
    assert not out.exists()


def test_a_typo_in_a_file_is_told_with_its_line_and_the_nearest_key(out: Path, tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text('# a job\ntask = "digits"\nbacth = 16\n')
    result = CliRunner().invoke(app, ["train", "--config", str(config), "--out", str(out)])
    assert result.exit_code == 2
    assert f"{config}:3: 'bacth' is no setting of a job. Did you mean 'batch'?" in result.output
    assert result.output.count("\n") == 1 and not out.exists()


@pytest.mark.parametrize("word", ["train", "compare"])
def test_a_port_in_use_is_one_sentence_and_leaves_nothing(out: Path, word: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, [word, "digits", "--port", str(port), "--out", str(out)])
    assert result.exit_code == 2 and not out.exists()
    another = "choose another --port, or none for one that is free."
    assert result.output == f"thinwire {word}: port {port} is in use: {another}\n"


def test_under_torchrun_one_worker_tells_how_it_goes(out: Path) -> None:
    words = ["train", "digits", "--method", "ddp", "--steps", "20", "--name", "joined", "--out", str(out)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "thinwire"]
    ended = subprocess.run([*command, *words], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count(f"digits, ddp, 2 hosts: {out / 'joined'}") == 1
    assert ended.stderr.count("step 20 of 20") == 1
    assert ended.stdout == f"report: {out / 'joined' / 'report.html'}\n"


# --- where there can be no lab


def test_without_a_lab_links_are_shaped_and_that_is_said(out: Path) -> None:
    words = ["--hosts", "2", "--latency", "5ms", "--rate", "50mbit", "--steps", "10", "--name", "shaped"]
    none = {namespaces.TUN_VARIABLE: "/nowhere/tun"}
    code, _, err = done("train", "digits", *words, "--out", str(out), env=none)
    assert code == 0, err
    assert "No lab here:" in err and "thinwire's own links are shaped instead" in err
    assert json.loads((out / "shaped" / "job.json").read_text())["job"]["link"] == "shaped"
    seen = [line["alpha"] for line in lines_of(out / "shaped") if line["kind"] == "step"][-1]
    assert seen == pytest.approx(5e-3, rel=0.5)
    code, _, err = done("train", "digits", *words[:-1], "lab", "--link", "lab", "--out", str(out), env=none)
    assert code == 2 and "/nowhere/tun" in err
    assert not (out / "lab").exists()


# --- help


@pytest.mark.parametrize("word", ["train", "compare", "demo"])
def test_help_shows_examples_and_needs_no_torch(word: str) -> None:
    program = (
        "import sys; from typer.testing import CliRunner; from thinwire.cli import app; "
        f"print(CliRunner().invoke(app, [{word!r}, '--help']).output); assert 'torch' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=True, cwd=ROOT).stdout
    assert "Usage" in shown and ("thinwire train digits" in shown if word == "train" else True)


def computing_seconds(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@timing
def test_help_comes_at_once() -> None:
    """Long before torch would be there, however fast the machine is."""
    assert computing_seconds(command("--help")) < 0.25 * computing_seconds([sys.executable, "-c", "import torch"])
