"""Messages to several peers over slow lines: each waits for its turn."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

import thinwire
from tests.lab.networks import lab
from tests.timing import timing
from thinwire.collectives import ALL_GATHERS, BROADCASTS
from thinwire.lab.lab import Lab
from thinwire.lab.run import environment
from thinwire.types import Network

pytestmark = [pytest.mark.lab, pytest.mark.timeout(120)]

ROOT = Path(thinwire.__file__).parents[1]
HOSTS = 4
KNOWN = 4  # broadcasts until every host has seen how fast bytes come in
SLOW = Network(alpha=0.005, beta=8 / 20e6)


# --- on every host


def broadcast(numel: int, times: int) -> None:
    """Broadcast so often, each time from a common start and from another host; say after each how long it took."""
    import torch
    import torch.distributed as dist

    from thinwire.link.tcp import TcpLink
    from thinwire.types import Moment

    dist.init_process_group("gloo")
    link = TcpLink(timeout=60)
    x, seconds = torch.ones(numel), torch.zeros(link.world_size)
    for step in range(times):
        link.moment = Moment(step, "in turn")
        ALL_GATHERS["direct"].run(link, seconds)
        start = time.monotonic()
        BROADCASTS["tree"].run(link, x, root=step % link.world_size)
        seconds[link.rank] = time.monotonic() - start
        ALL_GATHERS["direct"].run(link, seconds)
        link.read_out()  # from which the link learns how fast its line is
        print(json.dumps(float(seconds.max())), flush=True)
    link.close()
    dist.destroy_process_group()


# --- around them


def measured(network: Lab, numel: int, times: int) -> list[float]:
    """The seconds of each."""
    command = [sys.executable, "-m", "tests.lab.test_turns", str(numel), str(times)]
    processes = [
        network.start(host, command, environment(network, host, os.environ), cwd=ROOT, stdout=subprocess.PIPE)
        for host in range(HOSTS)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * HOSTS
    return [json.loads(line) for line in outputs[0].splitlines()]


@timing
def test_a_tree_hands_on_one_message_after_the_other_as_its_price_says() -> None:
    with lab(HOSTS, latency="5ms", rate="20mbit") as network:
        seconds = measured(network, 100_000, KNOWN + 8)[KNOWN:]
    price = BROADCASTS["tree"].seconds(SLOW, 100_000, 4, HOSTS)
    assert price < statistics.median(seconds) < 1.2 * price


if __name__ == "__main__":
    broadcast(int(sys.argv[1]), int(sys.argv[2]))
