"""A training on a disk that is full, or becomes so: nothing is lost that there was, and what is missing is told."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disks import fill, small_disk
from tests.process.runs import done, is_training, thinwire, until
from thinwire.jobs import outcome

pytestmark = pytest.mark.process


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "2m") as folder:
        yield folder


def test_a_full_disk_is_one_sentence_and_loses_nothing(disk: Path) -> None:
    words = ["--hosts", "2", "--name", "run", "--out", str(disk), "--model", "cnn", "--method", "ddp"]
    code, _, err = done("train", "digits", *words, "--steps", "3")
    assert code == 0, err
    folder = disk / "run"
    before = {path: path.read_bytes() for path in (folder / "checkpoints").rglob("*") if path.is_file()}
    assert before
    fill(disk)
    code, text, err = done("train", "--resume", str(folder), "--steps", "30")
    assert code == 1, err
    assert "No space left on device" in err and "Traceback" not in err
    assert {path: path.read_bytes() for path in before} == before
    assert outcome.read(folder)["how"] == "done"  # it was not begun


def read_until(process: subprocess.Popen[str], words: str) -> list[str]:
    """The lines on stderr, as they come, until these words are in one."""
    assert process.stderr is not None
    said: list[str] = []
    while not said or words not in said[-1]:
        line = process.stderr.readline()
        assert line, said
        said.append(line.rstrip())
    return said


def test_a_disk_that_becomes_full_is_told_of_at_once_and_at_the_end(disk: Path) -> None:
    folder, steps = disk / "run", 1000
    words = ["--hosts", "2", "--name", "run", "--out", str(disk), "--method", "ddp", "--steps", str(steps)]
    process = thinwire("train", "digits", *words, "--checkpoint-every", "0")
    try:
        until(lambda: is_training(folder, 2) or process.poll() is not None)
        fill(disk)
        said = read_until(process, "end here: No space left on device.")
        assert process.poll() is None  # it is training on
        text, rest = process.communicate()
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1
    told = [line for line in (*said, *rest.splitlines()) if "could not be saved" in line or "end here" in line]
    assert len(told) == 3 and told[-1].startswith("thinwire train: worker 0: the records in ")
    assert f"the checkpoint of step {steps} could not be saved" in told[-1]
    known = outcome.read(folder)
    assert f"thinwire train: {known['message']}" == told[-1]
    assert (known["how"], known["steps"]) == ("done", steps) and 0 < known["recorded"] < steps
    assert f"done: step {steps} of {steps} (recorded up to step {known['recorded']})" in text
