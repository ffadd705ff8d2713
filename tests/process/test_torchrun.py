"""thinwire train under torchrun: on machines with disks of their own, and started again by it."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.process.runs import PLAIN, ROOT, command, lines_of, of_kind
from thinwire.jobs import outcome
from thinwire.jobs.job import Job, write_job

pytestmark = pytest.mark.process

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--no-python"]


def agent(cwd: Path, *words: str) -> subprocess.Popen[str]:
    """One machine's torchrun."""
    env = {**os.environ, **PLAIN, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*TORCHRUN, *words], cwd=cwd, env=env, text=True, **pipes)


def ended_on_both(machines: list[Path], *commands: list[str]) -> list[tuple[int, str]]:
    """Train on two machines, with a worker on each; a command for each, or one for both. Gives how each ended."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    agents = [
        agent(machine, *where, "--node-rank", str(number), *command("train", *commands[number % len(commands)]))
        for number, machine in enumerate(machines)
    ]
    try:
        return [(each.returncode, err) for each, err in [(each, each.communicate()[1]) for each in agents]]
    finally:
        for each in agents:
            each.kill()


def on_both(machines: list[Path], *words: str) -> None:
    """Train on two machines until both are done."""
    ended = ended_on_both(machines, [*words])
    assert [code for code, _ in ended] == [0, 0], ended


def job_in(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / "job.json").read_text())
    return facts


def two_machines(place: Path) -> list[Path]:
    """With disks of their own."""
    machines = [place / "a", place / "b"]
    for machine in machines:
        machine.mkdir()
    return machines


def older_run(folder: Path, **settings: Any) -> dict[Path, bytes]:
    """A run that somebody has left there, and what is in its files."""
    (folder / "checkpoints").mkdir(parents=True)
    write_job(folder, Job(hosts=2, method="ddp", **settings), ["of old"])
    (folder / "checkpoints" / "kept").write_text("dear")
    return files_in(folder)


def files_in(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_on_machines_with_disks_of_their_own_goes_on_there(tmp_path: Path) -> None:
    machines = two_machines(tmp_path)
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


def test_a_number_that_another_machine_has_is_passed_over(tmp_path: Path) -> None:
    first, second = two_machines(tmp_path)
    before = older_run(second / "runs" / "digits-ddp-1", steps=30)
    on_both([first, second], "digits", "--method", "ddp", "--steps", "3")
    assert files_in(second / "runs" / "digits-ddp-1") == before
    assert [path.name for path in (first / "runs").iterdir()] == ["digits-ddp-2"]
    assert job_in(second / "runs" / "digits-ddp-2")["job"]["steps"] == 3


def test_a_name_that_another_machine_has_is_refused_by_all(tmp_path: Path) -> None:
    machines = two_machines(tmp_path)
    before = older_run(machines[1] / "runs" / "run", name="run", steps=3)
    ended = ended_on_both(machines, ["digits", "--method", "ddp", "--steps", "3", "--name", "run"])
    for rank, (code, err) in enumerate(ended):
        says = "runs/run exists already on the machine of rank 1: choose another --name."
        assert code != 0 and f"thinwire: worker {rank}: {says}" in err
    assert files_in(machines[1] / "runs" / "run") == before and not (machines[0] / "runs").exists()


def test_a_machine_that_has_another_job_is_refused_by_all(tmp_path: Path) -> None:
    machines = two_machines(tmp_path)
    for machine, batch in zip(machines, (32, 16), strict=True):
        older_run(machine / "runs" / "run", name="run", steps=3, batch=batch)
    before = files_in(tmp_path)
    for code, err in ended_on_both(machines, ["--resume", "runs/run"]):
        assert code != 0 and "rank 1 has another job than rank 0: its batch is 16, and there it is 32." in err
    assert files_in(tmp_path) == before


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
FRAIL_WORDS = ["frail:make", "--method", "ddp", "--checkpoint-every", "5"]


def restarted(cwd: Path, *words: str) -> tuple[int, str]:
    """Its exit code and what is told of it on stderr, with one more start if the first fails."""
    (cwd / "frail.py").write_text(FRAIL)
    process = agent(cwd, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", *command("train", *words))
    try:
        err = process.communicate()[1]
    finally:
        process.kill()
    return process.returncode, err


@pytest.mark.parametrize("name", ["run", "frail-make-ddp-1"])
def test_a_run_that_torchrun_starts_again_goes_on_from_its_checkpoint(tmp_path: Path, name: str) -> None:
    named = ["--name", name] if name == "run" else []
    code, err = restarted(tmp_path, *FRAIL_WORDS, *named, "--steps", "30")
    assert code == 0, err
    folder = tmp_path / "runs" / name
    assert err.count(f"thinwire: note: torchrun has started it again: it goes on in runs/{name}.") == 1
    first, second = of_kind("began", lines_of(folder))
    assert first["step"] == 0 and second["step"] in (10, 15)  # the newest that both had saved
    assert outcome.read(folder)["how"] == "done" and outcome.read(folder)["steps"] == 30
    assert len(job_in(folder)["resumed"]) == 1


def test_a_script_that_trains_the_same_twice_has_two_runs(tmp_path: Path) -> None:
    once = shlex.join(command("train", "digits", "--method", "ddp", "--steps", "3"))
    process = agent(tmp_path, "--standalone", "--nproc-per-node", "2", "sh", "-c", f"{once} && {once}")
    try:
        err = process.communicate()[1]
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["digits-ddp-1", "digits-ddp-2"]


@pytest.mark.parametrize("steps", [30, 5])
def test_an_older_run_of_that_name_is_refused_at_every_start_though_it_is_of_the_same_job(
    tmp_path: Path, steps: int
) -> None:
    code, err = restarted(tmp_path, *FRAIL_WORDS, "--name", "run", "--steps", "5")
    assert code == 0, err
    code, err = restarted(tmp_path, *FRAIL_WORDS, "--name", "run", "--steps", str(steps))
    assert code != 0 and "runs/run exists already: go on with it by --resume runs/run" in err
    assert outcome.read(tmp_path / "runs" / "run")["steps"] == 5 and job_in(tmp_path / "runs" / "run")["resumed"] == []
