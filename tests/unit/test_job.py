"""A job holds all settings of a training; what cannot be is refused in one sentence."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.disks import fill, small_disk
from thinwire.jobs.job import KEYS, Job, read_job, write_job


def test_the_default_is_a_job() -> None:
    job = Job()
    assert (job.task, job.chosen_model, job.hosts, job.method, job.last_epoch) == ("digits", "mlp", 4, "adaptive", 5)
    assert job.concentration is None and not job.own and not job.names_a_network


def test_a_job_comes_back_from_json_as_it_was() -> None:
    job = Job(task="chars", steps=10, partition="dirichlet:0.5", ratios=(0.01, 0.02), lr=1, network="home", seed=7)
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job
    assert set(job.to_json()) == set(KEYS)


def test_only_what_is_named_ends_a_training() -> None:
    assert Job(steps=10).last_epoch is None
    assert Job(seconds=1.5).last_epoch is None
    assert Job(epochs=2, steps=10).last_epoch == 2


@pytest.mark.parametrize(
    ("settings", "optimizer", "lr"),
    [
        ({}, "sgd", 0.05),
        ({"model": "vit"}, "adam", 0.001),
        ({"model": "vit", "optimizer": "sgd"}, "sgd", 0.05),
        ({"model": "resnet20"}, "sgd", 0.1),
        ({"task": "chars"}, "adam", 0.002),
        ({"lr": 3}, "sgd", 3.0),
        ({"task": "mine:make"}, "sgd", 0.05),
    ],
)
def test_a_model_brings_what_it_learns_with(settings: dict[str, Any], optimizer: str, lr: float) -> None:
    job = Job(**settings)
    assert (job.chosen_optimizer, job.chosen_lr) == (optimizer, lr)


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"task": "digit"}, "Did you mean 'digits'?"),
        ({"task": "my module:make"}, "my_module:make"),
        ({"task": "mine:make", "model": "mlp"}, "brings its own"),
        ({"task": "mine:make", "batch": 64}, "batch 64 has no effect"),
        ({"task": "mine:make", "partition": "dirichlet:0.1"}, "has no effect"),
        ({"model": "gpt"}, "Known: mlp, cnn, resnet20, vit."),
        ({"text": "a.txt"}, "chars only"),
        ({"folder_of_data": "a"}, "fashion-mnist only"),
        ({"hosts": 0}, "hosts must be from 1 to 200, got 0."),
        ({"hosts": 2.5}, "hosts must be a whole number, got 2.5."),
        ({"hosts": True}, "hosts must be a whole number"),
        ({"hosts": "4"}, "hosts must be a whole number"),
        ({"steps": 0}, "steps must be 1 or more"),
        ({"seconds": -1}, "seconds must be a number above 0"),
        ({"timeout": 1e10}, "timeout must be 1e+07 s or less, got 1e+10."),
        ({"lr": float("nan")}, "lr must be a number above 0"),
        ({"scale": float("inf")}, "scale must be"),
        ({"scale": 10}, "scale 10 has no effect"),
        ({"speed": 2, "rate": "1mbit"}, "speed 2 has no effect"),
        ({"momentum": 1.0}, "momentum must be in [0, 1)"),
        ({"target": 90}, "target is an accuracy in (0, 1]"),
        ({"task": "chars", "target": 0.9}, "target is a perplexity above 1, as chars has it, got 0.9."),
        ({"seed": -1}, "seed must be"),
        ({"port": 70000}, "port must be from 1 to 65535"),
        ({"checkpoint_every": -1}, "checkpoint_every must be 0 or more"),
        ({"link": "wifi"}, "Known: auto, lab, loopback, shaped."),
        ({"objective": "godput"}, "Did you mean 'goodput'?"),
        ({"optimizer": "lion"}, "Known: sgd, adam."),
        ({"partition": "dirichlet"}, "dirichlet:0.5"),
        ({"partition": "dirichlet:0"}, "dirichlet:0.5"),
        ({"partition": "dirichlet:nan"}, "dirichlet:0.5"),
        ({"ratios": (0.1, 0.01)}, "0 < low <= high <= 1"),
        ({"ratios": 0.1}, "two numbers"),
        ({"method": "dpp"}, "Did you mean 'ddp'?"),
        ({"name": "../up"}, "one folder"),
        ({"name": ".."}, "one folder"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(settings: dict[str, Any], hint: str) -> None:
    with pytest.raises(ValueError) as told:
        Job(**settings)
    assert hint in str(told.value)
    assert "\n" not in str(told.value)


# --- networks


def test_a_job_has_the_network_that_it_names() -> None:
    schedule = Job(network="unpredictable", scale=2, latency="20ms").schedule()
    assert schedule.name == "unpredictable"
    assert schedule.changes[0].values == {"latency": 0.02}
    assert Job(rate="8mbit").names_a_network and Job(rate="8mbit").schedule().rates() == [1e6, 1e6]


def test_a_network_that_does_not_exist_is_told_with_those_that_do() -> None:
    with pytest.raises(
        ValueError, match="no network 'unpredictible'. Did you mean 'unpredictable'. Known: .*home.*lte"
    ):
        Job(network="unpredictible").schedule()
    with pytest.raises(ValueError, match="nowhere.toml cannot be read"):
        Job(network="nowhere.toml").schedule()
    with pytest.raises(ValueError, match="is not a time"):
        Job(latency="20").schedule()


# --- a run's folder


def test_a_run_remembers_its_job(tmp_path: Path) -> None:
    job = Job(hosts=3, name="mine")
    write_job(tmp_path, job, ["thinwire", "train"])
    assert read_job(tmp_path) == job
    facts = json.loads((tmp_path / "job.json").read_text())
    assert facts["format"] == 1 and facts["command"] == ["thinwire", "train"]
    assert {"python", "thinwire", "torch"} <= facts["versions"].keys() and facts["machine"]["cores"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]


def test_a_job_that_cannot_be_written_leaves_the_one_before_and_nothing_else(tmp_path: Path) -> None:
    write_job(tmp_path, Job(steps=10), [])
    with small_disk(tmp_path / "disk", "64k") as disk:
        shutil.copy(tmp_path / "job.json", disk)
        fill(disk)
        with pytest.raises(OSError):
            write_job(disk, Job(steps=20), [])
        assert read_job(disk).steps == 10
        assert sorted(path.name for path in disk.iterdir()) == ["filler", "job.json"]


def test_a_run_that_goes_on_remembers_every_start(tmp_path: Path) -> None:
    for more in ("--steps=10", "--steps=20", "--steps=30"):
        write_job(tmp_path, Job(steps=int(more[8:])), ["thinwire", "train", more])
    facts = json.loads((tmp_path / "job.json").read_text())
    assert facts["command"][-1] == "--steps=10" and read_job(tmp_path).steps == 30
    assert [start["command"][-1] for start in facts["resumed"]] == ["--steps=20", "--steps=30"]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (None, "is no run"),
        ("{", "describes no job"),
        ("[]", "describes no job"),
        ('{"format": 2, "job": {}}', "format 2"),
        ('{"format": 1, "job": {"hosts": 0}}', "from 1 to 200"),
        ('{"format": 1, "job": {"hots": 0}}', "'hots' is no setting"),
    ],
)
def test_a_folder_that_is_no_run_is_told(text: str | None, hint: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "job.json").write_text(text)
    with pytest.raises(ValueError) as told:
        read_job(tmp_path)
    assert hint in str(told.value)


def test_a_job_is_read_without_torch() -> None:
    code = (
        "import sys; from thinwire.jobs.job import Job; Job(network='home').schedule(); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
