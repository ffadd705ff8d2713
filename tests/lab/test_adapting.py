"""What `attach` makes of a network that changes while torch's own all_reduce sends everything."""

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
from tests.timing import timing
from thinwire.lab.run import environment

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

ROOT = Path(thinwire.__file__).parents[1]
COMPUTE, STEPS, CHANGE_AT = 0.06, 60, 25


def train_and_tell() -> None:
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
    for _ in range(STEPS):
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


@timing
def test_a_rate_that_falls_while_torch_sends_everything_is_noticed_within_a_few_steps() -> None:
    command = [sys.executable, "-m", "tests.lab.test_adapting"]
    with lab(2, latency="0.2ms", rate="500mbit") as two:
        hosts = [
            two.start(host, command, environment(two, host, os.environ), cwd=ROOT, stdout=subprocess.PIPE, stderr=None)
            for host in range(2)
        ]
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


if __name__ == "__main__":
    train_and_tell()
