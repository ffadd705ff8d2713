"""A training on a disk that is full, or becomes so: nothing is lost that there was, and what is missing is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disks import RESTLESS, fill, filled_while_it_trains, small_disk
from tests.process.runs import done, last_json, thinwire, until
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


@pytest.mark.parametrize("link", ["loopback", "shaped"])
def test_a_disk_that_becomes_full_is_told_of_at_once_and_at_the_end(disk: Path, tmp_path: Path, link: str) -> None:
    folder, steps = disk / "run", 1000
    (tmp_path / "restless.toml").write_text(RESTLESS)
    network = ["--network", str(tmp_path / "restless.toml"), "--method", "dense:ring"]
    words = ["--method", "ddp"] if link == "loopback" else network
    ends = 1 if link == "loopback" else 2  # of the records, and of the truth
    told = filled_while_it_trains(disk, "run", "--link", link, *words, "--steps", str(steps), ends=ends)
    assert told.code == 1
    assert len(told.lines) == ends + 2 and told.lines[-1].startswith("thinwire train: worker 0: the ")
    assert all(words in told.lines[-1] for words in told.lines[:ends])
    assert f"the checkpoint of step {steps} could not be saved" in told.lines[-1]
    known = outcome.read(folder)
    assert f"thinwire train: {known['message']}" == told.lines[-1]
    assert (known["how"], known["steps"]) == ("done", steps) and 0 < known["recorded"] < steps
    assert f"done: step {steps} of {steps} (recorded up to step {known['recorded']})" in told.out


# Its worker may write no large files, and draws a bar as tqdm does: without ever ending its line.
DRAWING = """
import resource, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def loss(answer, y):
    sys.stderr.write("\\r  7%|###")
    return nn.functional.cross_entropy(answer, y)

def make():
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    x = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8)
    return nn.Sequential(nn.Linear(4, 20_000), nn.Linear(20_000, 2)), loss, loader, loader
"""


def test_what_cannot_be_saved_is_told_though_the_users_own_line_is_unfinished(tmp_path: Path) -> None:
    (tmp_path / "drawing.py").write_text(DRAWING)
    words = ["--hosts", "1", "--method", "ddp", "--steps", "3", "--name", "run", "--out", str(tmp_path)]
    code, _, err = done("train", "drawing:make", *words, cwd=tmp_path)
    unsaved = "the checkpoint of step 3 could not be saved (File too large); there is none yet."
    assert unsaved in err.splitlines() and f"thinwire train: worker 0: {unsaved}" in err.splitlines()
    assert code == 1 and outcome.read(tmp_path / "run")["message"] == f"worker 0: {unsaved}"


def test_a_comparison_on_a_disk_that_becomes_full_shows_what_it_has(disk: Path) -> None:
    words = ["--hosts", "2", "--methods", "ddp,dense:ring", "--steps", "30", "--checkpoint-every", "0", "--json"]
    process = thinwire("compare", "digits", *words, "--name", "both", "--out", str(disk))
    try:
        until(lambda: (disk / "both" / "compare.json").exists() or process.poll() is not None)
        written = (disk / "both" / "compare.json").read_text()
        fill(disk)
        text, err = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 1 and "Traceback" not in err
    first, _ = last_json(text)["rows"]
    assert (first["method"], first["steps"], first["message"]) == ("ddp", 30, "") and first["score"] > 0
    unwritten = f"what came of it could not be written to {disk / 'both' / 'compare.json'}: No space left on device."
    said = err.splitlines()
    assert unwritten in said and any(line.startswith("thinwire compare: ") and unwritten in line for line in said)
    assert any(line.startswith("ddp  ") and " 30 " in line for line in said)  # of the table
    assert (disk / "both" / "compare.json").read_text() == written
    assert not list((disk / "both").glob("*.tmp"))
