"""What `attach` makes of real packets: of a far network at first, of one that changes while torch sends everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import thinwire
from tests.lab.networks import lab
from tests.process.runs import done, lines_of
from tests.timing import timing
from thinwire.lab.lab import Lab
from thinwire.lab.run import environment

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

ROOT = Path(thinwire.__file__).parents[1]
COMPUTE, STEPS, CHANGE_AT = 0.06, 60, 25


def train_and_tell(steps: int) -> None:
    """On every host: a model in several buckets; after every step, its plan, the rate, and that of the decision."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(150, 150) for _ in range(6))), bucket_cap_mb=0.2)
    comm = thinwire.attach(model)
    weights = torch.randn(200, 200)
    for _ in range(steps):
        end = time.monotonic() + COMPUTE
        while time.monotonic() < end:
            weights @ weights
        model.zero_grad()
        model(torch.randn(8, 150)).square().mean().backward()
        assert comm.last is not None and comm.network is not None and comm.decision is not None
        plan, rate, decided_for = comm.last.plan, 8e-6 / comm.network.beta, 8e-6 / comm.decision.beta
        print(json.dumps([plan.exchange, plan.collective, rate, decided_for]), flush=True)
    comm.close()
    dist.destroy_process_group()


def started(place: Lab, steps: int) -> list[subprocess.Popen[bytes]]:
    """The script on every host of the lab."""
    command = [sys.executable, "-m", "tests.lab.test_adapting", str(steps)]
    return [
        place.start(host, command, environment(place, host, os.environ), cwd=ROOT, stdout=subprocess.PIPE, stderr=None)
        for host in range(place.hosts)
    ]


def test_a_far_network_is_known_before_the_first_step() -> None:
    """A message's latency is no reason to ask for no longer one: of a short one nobody sees the rate."""
    with lab(4, latency="50ms", rate="500mbit") as four:
        told = [host.communicate()[0].splitlines() for host in started(four, steps=1)]
    [first], *others = [[json.loads(line) for line in lines] for lines in told]
    assert all(lines == [first] for lines in others)
    assert first[0] != "dense" and first[2] > 12.5, first  # Mbit/s: while TCP is starting, it is seen to be too low


@timing
def test_a_rate_that_falls_while_torch_sends_everything_is_noticed_within_a_few_steps() -> None:
    with lab(2, latency="0.2ms", rate="500mbit") as two:
        hosts = started(two, STEPS)
        assert hosts[0].stdout is not None and hosts[1].stdout is not None
        told = []
        for line in hosts[0].stdout:
            told.append(json.loads(line))
            if len(told) == CHANGE_AT:
                two.set(rate="2mbit")
        others = [json.loads(line) for line in hosts[1].stdout]
        for host in hosts:
            host.stdout.close()
        assert [host.wait() for host in hosts] == [0, 0]
    plans = [(exchange, collective) for exchange, collective, *_ in told]
    assert plans == [(exchange, collective) for exchange, collective, *_ in others]
    assert plans[CHANGE_AT - 1] == ("dense", "torch")
    assert all(exchange != "dense" for exchange, _ in plans[CHANGE_AT + 15 :]), plans
    compressed = next(step for step in told[CHANGE_AT:] if step[0] != "dense")
    assert compressed[3] < 4.0  # Mbit/s: the kernel knew, before anything was sent over connections of our own
    assert told[-1][2] < 4.0  # as it is now


@timing
def test_a_latency_that_rises_and_falls_is_followed_within_a_few_steps_that_send_two_kilobytes(tmp_path: Path) -> None:
    changes = [("1.5s", "50ms"), ("3.5s", "4ms")]
    lines = "".join(f'[[change]]\nat = "{at}"\nlatency = "{latency}"\n' for at, latency in changes)
    (tmp_path / "unsteady.toml").write_text(f'[network]\nlatency = "4ms"\nrate = "3mbit"\n{lines}')
    words = ["--hosts", "4", "--network", str(tmp_path / "unsteady.toml"), "--seconds", "5"]
    run = tmp_path / f"run-{time.monotonic_ns()}"
    code, _, err = done("train", "digits", *words, "--name", run.name, "--out", str(tmp_path))
    assert code == 0, err
    records = lines_of(run)
    (began,) = (record for record in records if record["kind"] == "began")
    truth = [json.loads(line) for line in (run / "truth.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    for change, bounds in zip(truth[1:], [(0.04, 0.06), (0.003, 0.01)], strict=True):
        changed = change["wall"] - began["wall"] + began["time"]
        after = [record["alpha"] for record in steps if record["time"] > changed]
        assert any(bounds[0] < alpha < bounds[1] for alpha in after[:15]), after[:20]


if __name__ == "__main__":
    train_and_tell(int(sys.argv[1]))
