"""Does it do harm where compression does not pay? Adaptive against plain DDP on loopback, in turns, in one run.

DDP calls a hook in Python for every bucket, which costs something whatever the hook does: so torch's own hook that only
averages runs beside them.

Of equal models in one process those that were built later are the slower by some 2 %: what lies where in memory. So
everything is done in new processes several times over, and each model is built first as often as any other.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
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
KINDS = ("ddp", "hook", "adaptive")
SETTLE, BLOCK, LAUNCHES = 30, 10, 2 * len(KINDS)


def main(ranks: int, blocks: int, as_json: bool) -> None:
    """Print how many times longer a step takes, and what the controller itself takes of it."""
    nets = {name: _measured(name, ranks, blocks) for name in NETS}
    if as_json:
        print(json.dumps({**nets, "ranks": ranks, **describe_machine()}))
        return
    for name, net in nets.items():
        print(
            f"{name}: {net['adaptive_ms']:.2f} ms, plain DDP {net['ddp_ms']:.2f} ms, {net['ratio']:.3f} times "
            f"(torch's own hook that averages: {net['hook_ratio']:.3f} times); "
            f"the controller {net['control_share']:.2%} of the time, {net['control_bytes_share']:.2%} of the bytes; "
            f"{', '.join(f'{plan} in {blocks} blocks' for plan, blocks in net['plans'].items())}"
        )


def _measured(name: str, ranks: int, blocks: int) -> dict[str, Any]:
    launches = [on_ranks(measure, ranks, name=name, blocks=blocks, first=i % len(KINDS)) for i in range(LAUNCHES)]
    steps: dict[str, list[list[float]]] = {kind: [b for launch in launches for b in launch[kind]] for kind in KINDS}
    sums = {kind: [sum(block) for block in steps[kind]] for kind in KINDS}

    def times_ddp(kind: str) -> float:
        return statistics.median(ours / plain for ours, plain in zip(sums[kind], sums["ddp"], strict=True))

    return {
        **{f"{kind}_ms": statistics.median(sum(steps[kind], [])) * 1e3 for kind in KINDS},
        "ratio": times_ddp("adaptive"),
        "hook_ratio": times_ddp("hook"),
        "control_share": sum(launch["control"] for launch in launches) / sum(sums["adaptive"]),
        "control_bytes_share": statistics.mean(launch["control_bytes_share"] for launch in launches),
        "plans": dict(sum((Counter(launch["plans"]) for launch in launches), Counter())),
    }


def measure(rank: int, name: str, blocks: int, first: int) -> dict[str, Any]:
    """Seconds of all steps by each kind, block by block, and what the controller took."""
    torch.manual_seed(0)
    order = _rotated(KINDS, first)
    models = {kind: DistributedDataParallel(NETS[name]()) for kind in order}
    models["hook"].register_comm_hook(None, allreduce_hook)
    comm = thinwire.attach(models["adaptive"])
    for model in models.values():
        _steps(model, SETTLE)
    before = _counts(comm)
    times: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    plans = Counter[str]()
    for block in range(blocks):
        for kind in _rotated(order, block):
            comm.pause()  # the other models' steps are none of ours
            times[kind].append(_steps(models[kind], BLOCK))
        plans[str(comm.plan)] += 1
    control, beside, sent = (after - start for after, start in zip(_counts(comm), before, strict=True))
    comm.close()
    return {**times, "control": control, "control_bytes_share": beside / (sent + beside), "plans": plans}


def _rotated(kinds: tuple[str, ...], by: int) -> tuple[str, ...]:
    by %= len(kinds)
    return kinds[by:] + kinds[:by]


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
