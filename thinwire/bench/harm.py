"""Does it do harm where compression does not pay? Adaptive against plain DDP on loopback, in turns, in one run.

Of two equal models in one process the one that was built second is the slower by some 2 %: what lies where in memory.
So everything is done in new processes several times over, and each model is built first as often as the other.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.bench.launch import on_ranks
from thinwire.bench.machine import describe_machine
from thinwire.link.tcp import TcpLink

NETS = {
    "mlp": lambda: nn.Sequential(
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    ),
    "cnn": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 16, 16)),
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 64, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    ),
}
SETTLE, BLOCK, LAUNCHES = 30, 10, 4


def main(ranks: int, blocks: int, as_json: bool) -> None:
    """Print how many times longer a step takes, and what the controller itself takes of it."""
    nets = {name: _measured(name, ranks, blocks) for name in NETS}
    if as_json:
        print(json.dumps({**nets, "ranks": ranks, **describe_machine()}))
        return
    for name, net in nets.items():
        print(
            f"{name}: {net['adaptive_ms']:.2f} ms, plain DDP {net['ddp_ms']:.2f} ms, {net['ratio']:.3f} times; "
            f"the controller {net['control_share']:.2%} of the time, {net['control_bytes_share']:.2%} of the bytes; "
            f"{net['plan']}"
        )


def _measured(name: str, ranks: int, blocks: int) -> dict[str, Any]:
    launches = [on_ranks(measure, ranks, name=name, blocks=blocks, ours_first=bool(i % 2)) for i in range(LAUNCHES)]
    ddp, adaptive, ratios, control = (
        [value for launch in launches for value in launch[what]] for what in ("ddp", "adaptive", "ratios", "control")
    )
    return {
        "ddp_ms": statistics.median(ddp) * 1e3,
        "adaptive_ms": statistics.median(adaptive) * 1e3,
        "ratio": statistics.median(ratios),
        "control_share": sum(control) / sum(adaptive),
        "control_bytes_share": statistics.mean(launch["control_bytes_share"] for launch in launches),
        "plan": launches[-1]["plan"],
    }


def measure(rank: int, name: str, blocks: int, ours_first: bool) -> dict[str, Any]:
    """Seconds of all steps, and for each pair of blocks how many times as long ours took."""
    torch.manual_seed(0)
    first, second = (DistributedDataParallel(NETS[name]()) for _ in range(2))
    ours, plain = (first, second) if ours_first else (second, first)
    comm = thinwire.attach(ours)
    for model in (plain, ours):
        _steps(model, SETTLE)
    before = _counts(comm)
    ddp, adaptive = list[list[float]](), list[list[float]]()
    for block in range(blocks):
        turns = [(ddp, plain), (adaptive, ours)]
        for times, model in turns if block % 2 else reversed(turns):
            comm.pause()  # the other model's steps are none of ours
            times.append(_steps(model, BLOCK))
    control, beside, sent = (after - start for after, start in zip(_counts(comm), before, strict=True))
    plan = str(comm.plan)
    comm.close()
    return {
        "ddp": sum(ddp, []),
        "adaptive": sum(adaptive, []),
        "ratios": [sum(b) / sum(a) for a, b in zip(ddp, adaptive, strict=True)],
        "control": [control],
        "control_bytes_share": beside / (sent + beside),
        "plan": plan,
    }


def _counts(comm: thinwire.Synchronizer) -> tuple[float, int, int]:
    """Seconds of the controller, bytes that are sent for it alone, and bytes of gradients, so far."""
    assert isinstance(comm.link, TcpLink)
    return comm.control_seconds, comm.link.probe_bytes + comm.told_bytes, comm.link.sent_bytes


def _steps(model: nn.Module, number: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seconds = []
    dist.barrier()
    for _ in range(number):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.randn(64, 256)), torch.randint(10, (64,)))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return seconds
