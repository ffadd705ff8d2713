"""thinwire compare, as a person uses it: real workers on loopback, one table at the end."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.process.runs import done, is_training, last_json, thinwire, until, workers_of
from thinwire.cli import app
from thinwire.lab import namespaces

pytestmark = pytest.mark.process


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
    assert "seconds to 30.0% accuracy" in err and "star-topk@0.01:tree" in err


def test_a_demo_without_a_lab_says_what_stands_in_for_ddp_and_ends_as_any_other(out: Path) -> None:
    none = {namespaces.TUN_VARIABLE: "/nowhere/tun"}
    code, text, err = done("demo", "--seconds", "1", "--out", str(out), env=none)
    assert code == 0, err
    missing, stand_in = err.splitlines()[:2]
    assert missing.startswith("No lab here: /nowhere/tun cannot be opened")
    assert stand_in.startswith("Shaped links do not slow down plain DDP, so dense:ring")
    *table, _, sentence, report = text.splitlines()
    assert "seconds to 95.0%" in " ".join(table)
    assert [line.split()[0] for line in table[-2:]] == ["dense:ring", "adaptive"]
    assert "times as fast as dense:ring." in sentence or sentence.startswith("There is no speed-up to tell of")
    assert report == f"report: {out / 'demo-1' / 'report.html'}" and (out / "demo-1" / "report.html").exists()
    assert json.loads((out / "demo-1" / "adaptive" / "job.json").read_text())["job"]["link"] == "shaped"


# DDP wants every parameter to be used, and gossip does not.
WASTEFUL = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Wasteful(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
        self.spare = nn.Linear(3, 3)

def make():
    x = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8)
    return Wasteful(), nn.functional.cross_entropy, loader, loader
"""


def test_a_method_that_fails_is_a_row_and_the_others_go_on(out: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WASTEFUL)
    words = ["--hosts", "2", "--steps", "5", "--methods", "adaptive,dcd@sign:ring", "--out", str(out), "--json"]
    code, text, err = done("compare", "mine:make", *words, cwd=tmp_path)
    assert code == 1
    failed, fine = last_json(text)["rows"]
    assert "worker" in failed["message"] and fine["message"] == "" and fine["steps"] == 5
    assert "adaptive: worker" in err and (out / "compare-1" / "report.html").exists()
    assert "adaptive, which the others are measured against, failed." in err
    assert err.count("dcd with sign may not converge") == 1  # which its worker warns of again and again


def test_a_graph_that_so_many_hosts_cannot_be_is_refused_before_the_first_runs(out: Path) -> None:
    words = ["compare", "digits", "--hosts", "3", "--methods", "ddp,dcd@int8:hypercube", "--out", str(out)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and "nodes, not 3" in result.output and not out.exists()


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
    *_, anew, alone, _ = text.splitlines()
    assert anew == "It was interrupted, and a comparison does not go on: the same command begins anew, in a new folder."
    assert alone == f"Its last run can be brought to its end alone: thinwire train --resume {folder / 'ddp'}"
    code, text, err = done("train", "--resume", str(folder / "ddp"), "--json")
    assert code == 0 and last_json(text)["how"] == "done", err


def test_the_name_of_a_comparison_is_taken_once(out: Path) -> None:
    (out / "mine").mkdir(parents=True)
    result = CliRunner().invoke(app, ["compare", "digits", "--name", "mine", "--out", str(out)])
    assert result.exit_code == 2
    assert result.output == f"thinwire compare: {out / 'mine'} exists already: choose another --name.\n"


def test_a_wrong_method_is_refused_before_the_first_runs(out: Path) -> None:
    result = CliRunner().invoke(app, ["compare", "digits", "--methods", "ddp,adaptve", "--out", str(out)])
    assert result.exit_code == 2 and "Did you mean 'adaptive'?" in result.output
    twice = CliRunner().invoke(app, ["compare", "digits", "--methods", "ddp,ddp", "--out", str(out)])
    assert twice.exit_code == 2 and "ddp is among the methods twice." in twice.output
    assert not out.exists()
