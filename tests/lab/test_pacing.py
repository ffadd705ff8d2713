"""Messages to several peers over slow lines: each has its share of the way out, or its turn."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

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
KNOWN = 4  # exchanges until every host has seen how fast bytes come in
SLOW = Network(alpha=0.005, beta=8 / 20e6)


# --- on every host


def exchange(kind: str, numel: int, times: int, paced: bool) -> None:
    """Run a collective so often, each time from a common start; say after each how long it took."""
    import torch
    import torch.distributed as dist

    from thinwire.link.egress import Egress
    from thinwire.link.tcp import TcpLink
    from thinwire.types import Moment

    dist.init_process_group("gloo")
    link = TcpLink(timeout=60)
    link._egress = link._egress if paced else Egress({})
    collective = ALL_GATHERS["direct"] if kind == "gather" else BROADCASTS["tree"]
    x, together = torch.ones(numel), torch.zeros(link.world_size)
    for step in range(times):
        link.moment = Moment(step, "paced")
        ALL_GATHERS["direct"].run(link, together)
        start = time.monotonic()
        collective.run(link, x)
        together[link.rank] = time.monotonic() - start
        ALL_GATHERS["direct"].run(link, together)
        link.read_out()  # from which the link learns how fast its line is
        print(json.dumps(float(together.max())), flush=True)
    link.close()
    dist.destroy_process_group()


# --- around them


def run(network: Lab, kind: str, numel: int, times: int, paced: bool = True) -> tuple[list[float], dict[str, Any]]:
    """Seconds of each, and what became of the packets of all but the first few."""
    command = [sys.executable, "-m", "tests.lab.test_pacing", kind, str(numel), str(times), str(int(paced))]
    processes = [
        network.start(host, command, environment(network, host, os.environ), cwd=ROOT, stdout=subprocess.PIPE)
        for host in range(HOSTS)
    ]
    seconds, before = [], {}
    assert processes[0].stdout is not None
    for line in processes[0].stdout:
        seconds.append(json.loads(line))
        before = network.stats()["packets"] if len(seconds) == KNOWN else before
    assert [process.wait() for process in processes] == [0] * HOSTS
    for process in processes:
        assert process.stdout is not None
        process.stdout.close()
    after = network.stats()["packets"]
    return seconds[KNOWN:], {name: count - before.get(name, 0) for name, count in after.items()}


@timing
def test_an_all_gather_over_slow_lines_loses_few_packets_where_it_would_lose_many() -> None:
    lost, medians = [], []
    for paced in (True, False):
        with lab(HOSTS, latency="5ms", rate="20mbit") as network:
            seconds, packets = run(network, "gather", HOSTS * 40_000, KNOWN + 12, paced)
        lost.append(packets.get("dropped_egress", 0))
        medians.append(statistics.median(seconds))
    assert lost[0] * 4 < lost[1]
    price = ALL_GATHERS["direct"].seconds(SLOW, HOSTS * 40_000, 4, HOSTS)
    assert price < medians[0] < 1.15 * price


@timing
def test_a_tree_hands_on_one_message_after_the_other_as_its_price_says() -> None:
    with lab(HOSTS, latency="5ms", rate="20mbit") as network:
        seconds, _ = run(network, "broadcast", 100_000, KNOWN + 8)
    price = BROADCASTS["tree"].seconds(SLOW, 100_000, 4, HOSTS)
    assert price < statistics.median(seconds) < 1.2 * price


if __name__ == "__main__":
    exchange(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1")
