"""thinwire train with a user's own module: found early, blamed by its name, kept out of the figures."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.process.runs import done, last_json
from thinwire.cli import app
from thinwire.jobs import outcome

pytestmark = pytest.mark.process


OWN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

number = 3

def make(loss=nn.functional.cross_entropy):
    x = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8)
    return nn.Linear(4, 2), loss, loader, loader

def fails():
    raise KeyError("the data")

def fails_on_one():
    return fails() if torch.distributed.get_rank() == 1 else make()

def bad_loss(answer, y):
    raise ValueError("what a loss")

def fails_later():
    return make(bad_loss)

def vector():
    return make(lambda answer, y: nn.functional.cross_entropy(answer, y, reduction="none"))

class Wasteful(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
        self.spare = nn.Linear(3, 3)

def unused():
    return Wasteful(), *make()[1:]

def frozen():
    return nn.Linear(4, 2).requires_grad_(False), *make()[1:]
"""


@pytest.mark.parametrize(
    ("source", "task", "says"),
    [
        (OWN, "absent_{}:make", "cannot be found: No module named 'absent_{}' in "),
        (OWN, "mine_{}:mkae", "cannot be found: module 'mine_{}' has no attribute 'mkae'."),
        (OWN, "mine_{}:number", "must be a function that makes a model and its data, got int."),
        ("import nowhere", "mine_{}:make", "cannot be imported: ModuleNotFoundError: No module named 'nowhere' ("),
        ("def make(:", "mine_{}:make", "cannot be imported: SyntaxError: "),
        ("import sys; sys.exit('usage')", "mine_{}:make", "cannot be imported: SystemExit: usage ("),
    ],
)
def test_a_module_that_cannot_be_used_is_told_before_anything_starts(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, task: str, says: str
) -> None:
    number = time.monotonic_ns()  # what was imported once is not looked for again
    (tmp_path / f"mine_{number}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for word in ("train", "compare"):
        result = CliRunner().invoke(app, [word, task.format(number), "--out", str(out)])
        assert result.exit_code == 2
        assert result.output.startswith(f"thinwire {word}: {task.format(number)} {says.format(number)}")
        assert result.output.count("\n") == 1 and not out.exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fails", r"worker \d: mine:fails failed: KeyError: 'the data' \(.*mine.py, line 14\)\."),
        ("fails_on_one", r"worker 1: mine:fails_on_one failed: KeyError: 'the data' \(.*mine.py, line 14\)\."),
        ("fails_later", r"worker \d: mine:fails_later: ValueError: what a loss \(.*mine.py, line 20\)\."),
        ("vector", r"worker \d: mine:vector: the loss must give one number, .*, got a tensor of shape \(8,\)\."),
        ("unused", r"worker \d: mine:unused: the loss does not depend on 'spare.weight', 'spare.bias'\. Leave .*"),
        ("frozen", r"worker \d: mine:frozen: the model has no parameters to train\."),
    ],
)
def test_what_fails_in_a_worker_names_the_module_and_stays_with_the_run(
    out: Path, tmp_path: Path, name: str, says: str
) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    words = ["train", f"mine:{name}", "--hosts", "2", "--method", "ddp", "--name", "run", "--out", str(out)]
    code, text, err = done(*words, cwd=tmp_path)
    assert code == 1 and "Traceback" not in err
    known = outcome.read(out / "run")
    assert known["how"] == "failed" and re.fullmatch(says, known["message"])
    assert f"thinwire train: {known['message']}\n" in err and f"report: {out / 'run' / 'report.html'}" in text


def test_what_the_users_module_prints_is_not_among_the_figures(out: Path, tmp_path: Path) -> None:
    loud = "import atexit, os\nprint('imported')\nos.system('echo started')\natexit.register(print, 'ended')\n"
    (tmp_path / "mine.py").write_text(f"{loud}{OWN}\ndef loud():\n    print('made')\n    return make()\n")
    words = ["train", "mine:loud", "--hosts", "1", "--method", "ddp", "--steps", "2", "--name", "run"]
    code, text, err = done(*words, "--out", str(out), "--json", cwd=tmp_path)
    assert code == 0, err
    assert last_json(text)["steps"] == 2
    assert err.splitlines()[:2] == ["imported", "started"] and err.splitlines()[-1] == "ended"
    assert "made" in (out / "run" / "worker-0.log").read_text().splitlines()
