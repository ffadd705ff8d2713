"""thinwire train --resume, as a person uses it: from real checkpoints, whole and damaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.process.runs import PLAIN, ROOT, a_training, command, done, last_json
from thinwire.cli import app
from thinwire.jobs import outcome
from thinwire.jobs.job import Job, write_job

pytestmark = pytest.mark.process


def test_only_limits_may_change_when_a_run_goes_on(out: Path) -> None:
    (out / "one").mkdir(parents=True)
    write_job(out / "one", Job(hosts=1), [])
    result = CliRunner().invoke(app, ["train", "--resume", str(out / "one"), "--batch", "8"])
    assert result.exit_code == 2 and "--batch cannot be given with --resume" in result.output
    result = CliRunner().invoke(app, ["train", "chars", "--resume", str(out / "one")])
    assert result.exit_code == 2 and "trains digits, not chars" in " ".join(result.output.split())


@pytest.fixture
def trained(out: Path) -> Path:
    """A run of two workers with checkpoints of steps 10 and 20."""
    words = ["--hosts", "2", "--method", "ddp", "--steps", "20", "--checkpoint-every", "10", "--name", "run"]
    code, _, err = done("train", "digits", *words, "--out", str(out))
    assert code == 0, err
    assert len(list((out / "run" / "checkpoints").iterdir())) == 2
    return out / "run"


def test_a_run_without_checkpoints_says_that_it_begins_again(trained: Path) -> None:
    shutil.rmtree(trained / "checkpoints")
    code, _, err = done("train", "--resume", str(trained), "--steps", "25")
    assert code == 0, err
    assert f"{trained} has no checkpoint that all workers have saved: it begins again at step 0." in err


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "report.html"}


def test_a_run_at_its_limit_says_so_and_starts_nobody(trained: Path) -> None:
    before = contents(trained)
    code, text, err = done("train", "--resume", str(trained))
    assert code == 0 and "done: step 20 of 20" in text
    assert err == f"{trained} is already at step 20 of 20: to go on, give it more --steps.\n"
    assert last_json(done("train", "--resume", str(trained), "--json")[1])["how"] == "done"
    assert contents(trained) == before


def test_a_run_that_goes_on_tells_what_is_new(trained: Path) -> None:
    code, text, err = done("train", "--resume", str(trained), "--steps", "30", "--json")
    assert code == 0, err
    assert "from step 20 on: ddp over torch" in err and "from step 0 on" not in err and "step 20 of 20" not in err
    figures = last_json(text)
    assert (figures["steps"], figures["evaluated"]) == (30, 30)
    assert outcome.read(trained)["how"] == "done" and outcome.read(trained)["steps"] == 30
    facts = json.loads((trained / "job.json").read_text())
    (start,) = facts["resumed"]
    assert facts["job"]["steps"] == 30 and start["command"][-3:] == ["--steps", "30", "--json"]


def under_torchrun(*words: str) -> str:
    """What is told of it on stderr."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    env = {**os.environ, **PLAIN}
    ended = subprocess.run([*torchrun, *command(*words)], cwd=ROOT, text=True, capture_output=True, env=env)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def test_so_does_one_that_goes_on_under_torchrun(trained: Path) -> None:
    err = under_torchrun("train", "--resume", str(trained))
    assert err.count(f"thinwire: note: {trained} is already at step 20 of 20") == 1
    err = under_torchrun("train", "--resume", str(trained), "--steps", "30")
    assert "from step 20 on: ddp over torch" in err and "from step 0 on" not in err and "already" not in err
    assert outcome.read(trained)["how"] == "done" and outcome.read(trained)["steps"] == 30


def refused_to_go_on(folder: Path) -> str:
    """The sentence, once it is sure that nothing has changed."""
    before = contents(folder / "checkpoints")
    code, _, err = done("train", "--resume", str(folder), "--steps", "30")
    assert code == 1 and "Traceback" not in err, err
    assert contents(folder / "checkpoints") == before
    known = outcome.read(folder)
    assert known["how"] == "failed" and f"thinwire train: {known['message']}\n" in err
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
