"""thinwire train and compare, as a person uses them: real workers on loopback, real folders, real signals."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.disks import small_disk
from tests.process.terminals import Terminal
from tests.timing import timing
from thinwire.cli import app
from thinwire.jobs.job import Job, write_job
from thinwire.lab import namespaces

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
PLAIN = {"NO_COLOR": "1", "COLUMNS": "200"}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "thinwire", *words]


def thinwire(*words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command(*words), cwd=ROOT, text=True, env={**os.environ, **PLAIN, **(env or {})}, **pipes)


def done(*words: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    process = thinwire(*words, env=env)
    out, err = process.communicate()
    return process.returncode, out, err


def last_json(out: str) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(out.splitlines()[-1])
    return figures


def lines_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "records.jsonl"
    whole = (
        [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []
    )
    return [json.loads(line) for line in whole]


def until(condition: Any, seconds: float = 60.0) -> Any:
    """What the condition gives, as soon as it is something."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)
    return found


def workers_of(folder: Path) -> list[int]:
    """The processes that work in this folder."""
    mark = f"thinwire.jobs.worker\0{folder}\0".encode()
    found = []
    for pid in namespaces.all_processes():
        try:
            if mark in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            pass  # it has ended
    return found


def is_training(folder: Path, steps: int = 5) -> bool:
    return any(line["kind"] == "step" and line["step"] >= steps for line in lines_of(folder))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@contextmanager
def a_training(out: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A training without an end that has made some steps, and its folder."""
    name = f"long-{time.monotonic_ns()}"
    endless = ["--epochs", "100000", "--checkpoint-every", "20", *words]
    process = thinwire("train", "digits", "--hosts", "2", "--name", name, "--out", str(out), *endless)
    try:
        until(lambda: is_training(out / name) or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        yield process, out / name
    finally:
        process.kill()
        process.communicate()


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


def test_torchruns_worker_refuses_a_network_that_it_could_not_have(out: Path) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "1"}
    result = CliRunner().invoke(app, ["train", "--network", "home", "--out", str(out)], env=env)
    assert result.exit_code == 2 and "on the network that there is" in result.output
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


@timing
def test_sigterm_ends_all_within_2_s_and_leaves_a_checkpoint_and_a_report(out: Path) -> None:
    with a_training(out) as (process, folder):
        interrupt(process, folder, signal.SIGTERM)


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


def test_a_typo_in_a_file_is_told_with_its_line_and_the_nearest_key(out: Path, tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text('# a job\ntask = "digits"\nbacth = 16\n')
    result = CliRunner().invoke(app, ["train", "--config", str(config), "--out", str(out)])
    assert result.exit_code == 2
    assert f"{config}:3: 'bacth' is no setting of a job. Did you mean 'batch'?" in result.output
    assert result.output.count("\n") == 1 and not out.exists()


def test_a_port_in_use_is_one_sentence(out: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, text, err = done("train", "digits", "--port", str(port), "--out", str(out))
    assert code == 2
    assert err == f"thinwire train: port {port} is in use: choose another --port, or none for one that is free.\n"
    assert list(out.iterdir()) == []


def test_only_limits_may_change_when_a_run_goes_on(out: Path) -> None:
    (out / "one").mkdir(parents=True)
    write_job(out / "one", Job(hosts=1), [])
    result = CliRunner().invoke(app, ["train", "--resume", str(out / "one"), "--batch", "8"])
    assert result.exit_code == 2 and "--batch cannot be given with --resume" in result.output


def test_under_torchrun_one_worker_tells_how_it_goes(out: Path) -> None:
    words = ["train", "digits", "--method", "ddp", "--steps", "20", "--name", "joined", "--out", str(out)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "thinwire"]
    ended = subprocess.run([*command, *words], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count(f"digits, ddp, 2 hosts: {out / 'joined'}") == 1
    assert ended.stderr.count("step 20 of 20") == 1
    assert ended.stdout == f"report: {out / 'joined' / 'report.html'}\n"


@pytest.fixture
def trained(out: Path) -> Path:
    """A run of two workers with checkpoints of steps 10 and 20."""
    words = ["--hosts", "2", "--method", "ddp", "--steps", "20", "--checkpoint-every", "10", "--name", "run"]
    code, _, err = done("train", "digits", *words, "--out", str(out))
    assert code == 0, err
    assert len(list((out / "run" / "checkpoints").iterdir())) == 2
    return out / "run"


def refused_to_go_on(folder: Path) -> str:
    """The sentence, once it is sure that nothing has changed."""
    before = {path: path.read_bytes() for path in (folder / "checkpoints").rglob("*") if path.is_file()}
    code, _, err = done("train", "--resume", str(folder), "--steps", "30")
    assert code == 1 and "Traceback" not in err, err
    assert {path: path.read_bytes() for path in (folder / "checkpoints").rglob("*") if path.is_file()} == before
    return err


def cut_off(folder: Path, step: int, rank: int) -> None:
    os.truncate(folder / "checkpoints" / f"step-{step:09d}" / f"rank-{rank:05d}.safetensors", 1000)


def test_nobody_goes_back_behind_a_damaged_checkpoint_unasked(trained: Path) -> None:
    cut_off(trained, 20, rank=1)
    newest, err = trained / "checkpoints" / "step-000000020", refused_to_go_on(trained)
    assert f"step 20 in {newest.parent} is damaged. To go on from step 10, remove {newest}." in err
    shutil.rmtree(newest)
    code, text, err = done("train", "--resume", str(trained), "--steps", "30", "--json")
    assert code == 0 and last_json(text)["steps"] == 30, err


def test_nobody_begins_anew_where_all_checkpoints_are_damaged(trained: Path) -> None:
    cut_off(trained, 10, rank=0)
    cut_off(trained, 20, rank=0)
    assert "is damaged. There is no older one that all workers have" in refused_to_go_on(trained)


def test_a_checkpoint_with_a_flipped_bit_names_the_way_back(trained: Path) -> None:
    file = trained / "checkpoints" / "step-000000020" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    err = refused_to_go_on(trained)
    assert f"{file} is damaged" in err and f"To go on from step 10, remove {file.parent}." in err


def test_a_checkpoint_of_another_model_is_told_apart(trained: Path) -> None:
    facts = json.loads((trained / "job.json").read_text())
    facts["job"]["model"] = "cnn"
    (trained / "job.json").write_text(json.dumps(facts))
    assert "the checkpoint of step 20 is of another model or optimizer: " in refused_to_go_on(trained)


def test_a_run_that_is_being_trained_is_not_trained_by_another(out: Path) -> None:
    with a_training(out) as (_, folder):
        code, _, err = done("train", "--resume", str(folder), "--steps", "30")
    assert code == 2
    assert f"{folder} is being trained by another process: wait for it, or end it." in err


@pytest.fixture
def full_soon(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "2m") as folder:
        yield folder


def test_a_full_disk_is_one_sentence_and_loses_nothing(full_soon: Path) -> None:
    words = ["--hosts", "2", "--name", "run", "--out", str(full_soon), "--model", "cnn", "--method", "ddp"]
    code, _, err = done("train", "digits", *words, "--steps", "3")
    assert code == 0, err
    folder = full_soon / "run"
    before = {path: path.read_bytes() for path in (folder / "checkpoints").rglob("*") if path.is_file()}
    assert before
    full = full_soon / "other"
    full.write_bytes(b"x" * (os.statvfs(full_soon).f_bavail * os.statvfs(full_soon).f_frsize))
    code, text, err = done("train", "--resume", str(folder), "--steps", "30")
    assert code == 1, err
    assert "No space left on device" in err and "Traceback" not in err
    assert {path: path.read_bytes() for path in before} == before


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


# --- compare


def test_a_comparison_ends_with_a_table_a_file_and_one_report(out: Path) -> None:
    words = ["--hosts", "2", "--steps", "40", "--target", "0.3", "--evaluate-every", "0.2"]
    methods = ["--methods", "ddp,adaptive,star-topk@0.01:tree"]
    code, text, err = done("compare", "digits", *words, *methods, "--out", str(out), "--json")
    assert code == 0, err
    folder = out / "compare-1"
    written = json.loads((folder / "compare.json").read_text())
    assert written["target"] == 0.3
    assert [run["folder"] for run in written["runs"]] == ["ddp", "adaptive", "star-topk-0.01-tree"]
    assert all((folder / run["folder"] / "job.json").exists() for run in written["runs"])
    figures = last_json(text)
    assert [row["method"] for row in figures["rows"]] == ["ddp", "adaptive", "star-topk@0.01:tree"]
    assert figures["rows"][0]["speed_up"] == 1 and figures["rows"][0]["steps"] == 40
    assert Path(figures["report"]).parent == folder
    assert "seconds to 30.0% accuracy" in text and "star-topk@0.01:tree" in text


def test_a_method_that_fails_is_a_row_and_the_others_go_on(out: Path) -> None:
    words = ["--hosts", "3", "--steps", "5", "--methods", "dcd@int8:hypercube,ddp", "--out", str(out), "--json"]
    code, text, err = done("compare", "digits", *words)
    assert code == 1
    failed, fine = last_json(text)["rows"]
    assert "worker" in failed["message"] and fine["message"] == "" and fine["steps"] == 5
    assert "dcd@int8:hypercube: worker" in err and (out / "compare-1" / "report.html").exists()


def test_an_interrupt_ends_a_comparison_and_keeps_what_there_is(out: Path) -> None:
    folder = out / "compare-1"
    words = ["--hosts", "2", "--steps", "10", "--methods", "ddp,adaptive", "--out", str(out)]
    process = thinwire("compare", "digits", *words)
    until(lambda: is_training(folder / "ddp", 0))
    process.send_signal(signal.SIGINT)
    text, err = process.communicate()
    assert process.returncode == 130, err
    runs = json.loads((folder / "compare.json").read_text())["runs"]
    assert [run["method"] for run in runs] == ["ddp"]
    assert not (folder / "adaptive").exists() and workers_of(folder / "ddp") == []


def test_a_wrong_method_is_refused_before_the_first_runs(out: Path) -> None:
    result = CliRunner().invoke(app, ["compare", "digits", "--methods", "ddp,adaptve", "--out", str(out)])
    assert result.exit_code == 2 and "Did you mean 'adaptive'?" in result.output
    twice = CliRunner().invoke(app, ["compare", "digits", "--methods", "ddp,ddp", "--out", str(out)])
    assert twice.exit_code == 2 and "ddp is among the methods twice." in twice.output
    assert not out.exists()


# --- help


@pytest.mark.parametrize("word", ["train", "compare", "demo"])
def test_help_shows_examples_and_needs_no_torch(word: str) -> None:
    program = (
        "import sys; from typer.testing import CliRunner; from thinwire.cli import app; "
        f"print(CliRunner().invoke(app, [{word!r}, '--help']).output); assert 'torch' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=True, cwd=ROOT).stdout
    assert "Usage" in shown and ("thinwire train digits" in shown if word == "train" else True)


@timing
def test_help_comes_at_once() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command("--help"), capture_output=True, check=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.4
