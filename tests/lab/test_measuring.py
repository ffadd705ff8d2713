"""What the monitor finds in networks whose truth is known, while exchanges run and processors are scarce.

python -m tests.lab.test_measuring 4      # prints how near it comes over a grid of networks, with so many hosts
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import thinwire
from tests.lab.networks import lab
from tests.timing import timing
from thinwire.lab import units
from thinwire.lab.lab import Lab
from thinwire.lab.run import environment

pytestmark = [pytest.mark.lab, pytest.mark.timeout(100)]

ROOT = Path(thinwire.__file__).parents[1]
NEAR = 0.15


# --- on every host


def exchange_and_measure(link_name: str, numel: int, steps: int, compute: float) -> None:
    """Compute, exchange, measure, and say after every step what this rank thinks of the network."""
    import torch
    import torch.distributed as dist

    from thinwire.collectives import ALL_REDUCES
    from thinwire.control.monitor import Monitor
    from thinwire.link.process import ProcessLink
    from thinwire.link.tcp import TcpLink
    from thinwire.types import Moment

    dist.init_process_group("gloo")
    link = TcpLink(timeout=60) if link_name == "tcp" else ProcessLink(timeout=60)
    monitor = Monitor(link.world_size, link.rank)
    x, weights = torch.ones(numel), torch.randn(200, 200)
    for step in range(steps):
        end = time.monotonic() + compute
        while time.monotonic() < end:
            weights @ weights
        link.moment = Moment(step, "measured")
        ALL_REDUCES["ring"].run(link, x)
        monitor.note(link.read_out(), link.sent_bytes)
        link.probe(monitor.asking.due())
        line = {
            "time": time.monotonic(),
            "alpha": monitor.alpha().value,
            "beta": monitor.beta().value,
            "peers": list(monitor.pairs()),
            "probe_bytes": getattr(link, "probe_bytes", 0),
            "sent_bytes": link.sent_bytes,
        }
        print(json.dumps(line), flush=True)
    link.close()
    dist.destroy_process_group()


# --- around them

Line = dict[str, Any]


class Host(NamedTuple):
    process: subprocess.Popen[bytes]
    lines: list[Line]

    def steps(self) -> Iterator[int]:
        """The number of each step, as it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))
            yield len(self.lines) - 1


def start(network: Lab, link: str, numel: int, steps: int, compute: float) -> list[Host]:
    command = [sys.executable, "-m", "tests.lab.test_measuring", "host", link, str(numel), str(steps), str(compute)]
    return [
        Host(
            network.start(
                host, command, environment(network, host, os.environ), cwd=ROOT, stdout=subprocess.PIPE, stderr=None
            ),
            [],
        )
        for host in range(network.hosts)
    ]


def finish(hosts: list[Host]) -> list[list[Line]]:
    """All lines of all hosts."""
    for host in hosts:
        for _ in host.steps():
            pass
        assert host.process.stdout is not None
        host.process.stdout.close()
    assert [host.process.wait() for host in hosts] == [0] * len(hosts)
    return [host.lines for host in hosts]


class Truth(NamedTuple):
    latency: str
    rate: str

    def error(self, line: Line) -> tuple[float, float]:
        """How far alpha and beta are off, relatively; infinitely if they are not known."""
        alpha, beta = line["alpha"] or math.inf, line["beta"] or math.inf
        return alpha / units.seconds(self.latency) - 1, beta * units.rate(self.rate) - 1

    def is_near(self, line: Line) -> bool:
        return max(map(abs, self.error(line))) <= NEAR


def median_errors(truth: Truth, lines: list[Line]) -> tuple[float, float]:
    alphas, betas = zip(*(truth.error(line) for line in lines), strict=True)
    return statistics.median(map(abs, alphas)), statistics.median(map(abs, betas))


def steps_to_follow(truth: Truth, lines: list[Line], since: float) -> int:
    """Steps that ended after a change until one was near the new truth."""
    after = [line for line in lines if line["time"] > since]
    return next((i + 1 for i, line in enumerate(after) if truth.is_near(line)), len(after) + 1)


@timing
def test_latency_and_rate_are_found_and_followed_up_and_down() -> None:
    near, far = Truth("5ms", "100mbit"), Truth("20ms", "30mbit")
    changed: dict[int, float] = {}
    with lab(4, latency=near.latency, rate=near.rate) as four:
        hosts = start(four, "tcp", numel=100_000, steps=45, compute=0.03)
        for step in hosts[0].steps():
            if step in (14, 29):
                truth = far if step == 14 else near
                four.set(latency=truth.latency, rate=truth.rate)
                changed[step] = time.monotonic()
        every = finish(hosts)
    settled = [line for lines in every for line in lines if lines[5]["time"] < line["time"] < changed[14]]
    assert max(median_errors(near, settled)) <= NEAR
    for step, truth in ((14, far), (29, near)):
        took = [steps_to_follow(truth, lines, changed[step]) for lines in every]
        assert statistics.median(took) <= 7 and max(took) <= 10, (step, took)  # the first may have begun before
    assert all(lines[-1]["probe_bytes"] < 0.01 * lines[-1]["sent_bytes"] for lines in every)


@timing
def test_eight_processes_on_few_processors_do_not_look_like_a_slow_network() -> None:
    truth = Truth("10ms", "50mbit")
    with lab(8, latency=truth.latency, rate=truth.rate) as eight:
        every = finish(start(eight, "tcp", numel=60_000, steps=16, compute=0.05))
    assert max(median_errors(truth, [line for lines in every for line in lines[8:]])) <= NEAR


@timing
def test_gloos_connections_tell_the_round_trip_to_each_host() -> None:
    with lab(3, latency="10ms", rate="100mbit") as three:
        every = finish(start(three, "process", numel=20_000, steps=12, compute=0.02))
    for rank, lines in enumerate(every):
        assert lines[-1]["peers"] == [peer for peer in range(3) if peer != rank]
        # The kernel's smoothed round trip contains queues and delayed acknowledgements, so it is only about right.
        assert 0.009 < lines[-1]["alpha"] < 0.030


# --- the grid


def print_grid(num_hosts: int) -> None:
    """The median errors over all hosts and the second half of the steps, for each network."""
    cells = []
    for latency in ("0.5ms", "5ms", "50ms"):
        for rate, numel in (("10mbit", 30_000), ("100mbit", 100_000), ("1000mbit", 1_000_000)):
            with lab(num_hosts, latency=latency, rate=rate) as network:
                every = finish(start(network, "tcp", numel, steps=16, compute=0.03))
            errors = median_errors(Truth(latency, rate), [line for lines in every for line in lines[8:]])
            cells.append(errors)
            print(
                f"{num_hosts} hosts {latency:>6} {rate:>8}: alpha {errors[0]:6.1%}  beta {errors[1]:6.1%}", flush=True
            )
    alphas, betas = zip(*cells, strict=True)
    print(f"median of cells: alpha {statistics.median(alphas):.1%}, beta {statistics.median(betas):.1%}")


if __name__ == "__main__":
    if sys.argv[1] == "host":
        exchange_and_measure(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
    else:
        print_grid(int(sys.argv[1]))
