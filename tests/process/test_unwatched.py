"""A run that nobody looks at any more goes on to its end, and one whose terminal is closed is asked to end."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.runs import PLAIN, ROOT, command, is_training, until, workers_of
from tests.process.terminals import Terminal
from thinwire.jobs import outcome, resuming
from thinwire.jobs.team import Interrupts

pytestmark = pytest.mark.process


def a_run(out: Path, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
    words = command("train", "digits", "--hosts", "2", "--method", "ddp", "--steps", "400", "--name", "run")
    env = {**os.environ, **PLAIN}
    return subprocess.Popen([*words, "--out", str(out)], cwd=ROOT, env=env, stdout=stdout, stderr=stderr)


def came_to_its_end(folder: Path) -> bool:
    known = outcome.read(folder)
    saved = resuming.newest_step(folder, 2) == 400
    return (known["how"], known["steps"]) == ("done", 400) and saved and (folder / "report.html").exists()


@pytest.mark.parametrize("both", [False, True])
def test_whoever_reads_the_first_lines_only_does_not_end_the_run(tmp_path: Path, both: bool) -> None:
    reader, writer = os.pipe()
    process = a_run(tmp_path, writer if both else subprocess.DEVNULL, writer)
    os.close(writer)
    try:
        with os.fdopen(reader) as lines:
            assert "run" in lines.readline()
        assert process.wait() == 0
    finally:
        process.kill()
    assert came_to_its_end(tmp_path / "run")


def test_a_full_disk_under_stderr_does_not_end_the_run(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        process = a_run(tmp_path, subprocess.PIPE, full.fileno())
    text, _ = process.communicate()
    assert process.returncode == 0
    assert b"done: step 400 of 400" in text and came_to_its_end(tmp_path / "run")


def test_a_result_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        process = a_run(tmp_path, full.fileno(), subprocess.PIPE)
    _, err = process.communicate()
    assert process.returncode != 0
    assert b"thinwire train: No space left on device." in err and came_to_its_end(tmp_path / "run")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_was_closed_before_it_began_does_not_end_the_run(tmp_path: Path, closed: str) -> None:
    words = command("train", "digits", "--hosts", "1", "--steps", "3", "--name", "run", "--out", str(tmp_path))
    line = f"exec {shlex.join(words)} {closed}"
    ended = subprocess.run(["sh", "-c", line], cwd=ROOT, env={**os.environ, **PLAIN}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("done: step 3 of 3") == (closed == "2>&-")
    assert outcome.read(tmp_path / "run")["steps"] == 3 and (tmp_path / "run" / "report.html").exists()


def test_a_terminal_that_is_closed_ends_the_run_with_a_checkpoint_and_a_report(tmp_path: Path) -> None:
    folder = tmp_path / "seen"
    words = command("train", "digits", "--hosts", "2", "--name", "seen", "--out", str(tmp_path), "--epochs", "100000")
    with Terminal(words, 90, 30, {}) as terminal:
        until(lambda: is_training(folder))
        terminal.close()
        assert terminal.process.wait() == 128 + signal.SIGHUP
    assert outcome.read(folder)["how"] == "interrupted" and resuming.newest_step(folder, 2) > 0
    assert (folder / "report.html").exists() and workers_of(folder) == []


@pytest.fixture
def _hangup() -> Iterator[None]:
    """SIGHUP, as it was before."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_hangup")
def test_a_closed_terminal_is_one_request_though_it_is_told_twice_and_none_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert interrupts.seen == [signal.SIGHUP]
        signal.raise_signal(signal.SIGINT)
        assert interrupts.seen == [signal.SIGHUP, signal.SIGINT]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGHUP)
        assert interrupts.seen == []
