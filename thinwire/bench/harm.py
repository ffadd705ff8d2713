"""Does it do harm where compression does not pay? Adaptive against plain DDP on loopback, in turns, in one run."""

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
from thinwire.link.base import Link
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
SETTLE, BLOCK = 30, 10


def main(ranks: int, blocks: int, as_json: bool) -> None:
    """Print how many times longer a step takes, and what the controller itself takes of it."""
    result = {**on_ranks(measure, ranks, blocks=blocks), "ranks": ranks, **describe_machine()}
    if as_json:
        print(json.dumps(result))
        return
    for name in NETS:
        net = result[name]
        print(
            f"{name}: {net['adaptive_ms']:.2f} ms, plain DDP {net['ddp_ms']:.2f} ms, {net['ratio']:.3f} times; "
            f"the controller {net['control_share']:.2%} of the time, {net['control_bytes_share']:.2%} of the bytes; "
            f"{net['plan']}"
        )


def measure(rank: int, blocks: int) -> dict[str, Any]:
    return {name: _compare(make, blocks) for name, make in NETS.items()}


def _compare(make: Any, blocks: int) -> dict[str, Any]:
    torch.manual_seed(0)
    plain, ours = (DistributedDataParallel(make()) for _ in range(2))
    comm = thinwire.attach(ours)
    for model in (plain, ours):
        _steps(model, SETTLE)
    before = comm.control_seconds, _probe_bytes(comm.link), comm.link.sent_bytes
    times: dict[str, list[float]] = {"ddp": [], "adaptive": []}
    for block in range(blocks):
        order = [("ddp", plain), ("adaptive", ours)]
        for name, model in order if block % 2 else reversed(order):
            times[name] += _steps(model, BLOCK)
    control, probes, sent = (
        after - start
        for after, start in zip(
            (comm.control_seconds, _probe_bytes(comm.link), comm.link.sent_bytes), before, strict=True
        )
    )
    ddp, adaptive = (statistics.median(times[name]) for name in ("ddp", "adaptive"))
    blocks_of = [times[name][i : i + BLOCK] for name in times for i in range(0, len(times[name]), BLOCK)]
    half = len(blocks_of) // 2
    ratios = [sum(b) / sum(a) for a, b in zip(blocks_of[:half], blocks_of[half:], strict=True)]
    result = {
        "ddp_ms": ddp * 1e3,
        "adaptive_ms": adaptive * 1e3,
        "ratio": statistics.median(ratios),
        "control_share": control / sum(times["adaptive"]),
        "control_bytes_share": probes / sent,
        "plan": str(comm.plan),
    }
    comm.close()
    return result


def _probe_bytes(link: Link) -> int:
    assert isinstance(link, TcpLink)
    return link.probe_bytes


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
