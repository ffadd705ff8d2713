"""thinwire train under torchrun: on machines with disks of their own, and started again by it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.process.runs import PLAIN, ROOT, command, lines_of, of_kind
from thinwire.jobs import outcome

pytestmark = pytest.mark.process

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--no-python"]


def agent(cwd: Path, *words: str) -> subprocess.Popen[str]:
    """One machine's torchrun."""
    env = {**os.environ, **PLAIN, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*TORCHRUN, *words], cwd=cwd, env=env, text=True, **pipes)


def on_both(machines: list[Path], *words: str) -> None:
    """Train on two machines, with a worker on each, until both are done."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    agents = [
        agent(machine, *where, "--node-rank", str(number), *command("train", *words))
        for number, machine in enumerate(machines)
    ]
    try:
        ended = [(each.communicate(), each.returncode) for each in agents]
    finally:
        for each in agents:
            each.kill()
    assert [code for _, code in ended] == [0, 0], ended


def job_in(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / "job.json").read_text())
    return facts


def test_a_run_on_machines_with_disks_of_their_own_goes_on_there(tmp_path: Path) -> None:
    machines = [tmp_path / "a", tmp_path / "b"]
    for machine in machines:
        machine.mkdir()
    first, second = (machine / "runs" / "run" for machine in machines)
    on_both(machines, "digits", "--method", "ddp", "--steps", "10", "--name", "run")
    assert job_in(second)["job"] == job_in(first)["job"]
    on_both(machines, "--resume", "runs/run", "--steps", "20")
    assert [line["step"] for line in of_kind("step", lines_of(first))] == list(range(20))
    for folder in (first, second):
        assert job_in(folder)["job"]["steps"] == 20 and len(job_in(folder)["resumed"]) == 1
    on_both(machines, "--resume", "runs/run")  # with the limits that it has now
    assert outcome.read(first)["steps"] == 20
    assert not (second / "records.jsonl").exists()


def test_on_a_disk_that_machines_share_a_start_is_written_down_once(tmp_path: Path) -> None:
    on_both([tmp_path, tmp_path], "digits", "--method", "ddp", "--steps", "3", "--name", "run")
    assert job_in(tmp_path / "runs" / "run")["resumed"] == []
    on_both([tmp_path, tmp_path], "--resume", "runs/run", "--steps", "6")
    assert len(job_in(tmp_path / "runs" / "run")["resumed"]) == 1


FRAIL = """
import os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

steps = 0

def loss(answer, y):
    global steps
    steps += 1
    if steps == 16 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(3)
    return nn.functional.cross_entropy(answer, y)

def make():
    x = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8)
    return nn.Linear(4, 2), loss, loader, loader
"""
FRAIL_WORDS = ["frail:make", "--method", "ddp", "--checkpoint-every", "5", "--name", "run"]


def restarted(cwd: Path, *words: str) -> tuple[int, str]:
    """Its exit code and what is told of it on stderr, with one more start if the first fails."""
    (cwd / "frail.py").write_text(FRAIL)
    process = agent(cwd, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", *command("train", *words))
    try:
        err = process.communicate()[1]
    finally:
        process.kill()
    return process.returncode, err


def test_a_run_that_torchrun_starts_again_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    code, err = restarted(tmp_path, *FRAIL_WORDS, "--steps", "30")
    assert code == 0, err
    folder = tmp_path / "runs" / "run"
    assert err.count("thinwire: note: torchrun has started it again: it goes on in runs/run.") == 1
    first, second = of_kind("began", lines_of(folder))
    assert first["step"] == 0 and second["step"] in (10, 15)  # the newest that both had saved
    assert outcome.read(folder)["how"] == "done" and outcome.read(folder)["steps"] == 30
    assert len(job_in(folder)["resumed"]) == 1


def test_a_run_of_another_job_is_not_taken_for_one_that_is_started_again(tmp_path: Path) -> None:
    code, err = restarted(tmp_path, *FRAIL_WORDS, "--steps", "5")
    assert code == 0, err
    code, err = restarted(tmp_path, *FRAIL_WORDS, "--steps", "30")
    assert code != 0 and "runs/run exists already: go on with it by --resume runs/run" in err
    assert outcome.read(tmp_path / "runs" / "run")["steps"] == 5
