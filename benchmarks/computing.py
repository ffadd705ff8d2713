"""What computing an exchange takes, by ratio, where hosts share processors: run it in the lab or under torchrun.

thinwire lab run --hosts 8 --latency 1ms --rate 200mbit -- python benchmarks/computing.py

The constants of thinwire/control/computing.py are from here: what is measured should be the same multiple of what they
say, whatever the ratio is.
"""

from __future__ import annotations

import itertools
import json
import statistics

import torch
import torch.distributed as dist
from torch import nn

import thinwire
from thinwire.bench.machine import describe_machine

RATIOS = (0.003, 0.01, 0.03, 0.1)
PLANS = {
    **{f"topk-allgather {r}": {"exchange": "topk-allgather", "ratio": r, "values": "log4"} for r in RATIOS},
    **{f"star-topk {r}": {"exchange": "star-topk", "ratio": r, "collective": "direct"} for r in RATIOS},
    "dense 1": {"exchange": "dense", "collective": "direct"},
}
STEPS = {200_000: 40, 2_000_000: 10}  # in a turn, by number of entries
TURNS = 4  # of which the first finds thresholds and memory; plans take turns, since the machine may be another's too


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {numel: measure(numel, steps) for numel, steps in STEPS.items()}
    if dist.get_rank() == 0:
        print(json.dumps({"hosts": dist.get_world_size(), "compress_ms": found, **describe_machine()}))
    dist.destroy_process_group()


def measure(numel: int, steps: int) -> dict[str, float]:
    """Milliseconds of computing in a step by plan: of each rank the median, and of these the mean."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    model = nn.Linear(numel, 1, bias=False)
    syncs = {name: thinwire.Synchronizer(model, **plan) for name, plan in PLANS.items()}
    taken: dict[str, list[float]] = {name: [] for name in PLANS}
    for turn, (name, sync) in itertools.product(range(TURNS), syncs.items()):
        dist.barrier()
        for _ in range(steps):
            # A few large entries and many small ones, and as much computing before an exchange as backward() has.
            model.weight.grad = torch.randn(1, numel, generator=generator) ** 3
            sync.average_gradients()
            assert sync.last is not None
            if turn:
                taken[name].append(sync.last.compress_seconds * 1e3)
    medians = torch.tensor([statistics.median(each) for each in taken.values()])
    dist.all_reduce(medians)
    for sync in syncs.values():
        sync.close()
    means = (medians / dist.get_world_size()).tolist()
    return {name: round(mean, 3) for name, mean in zip(taken, means, strict=True)}


if __name__ == "__main__":
    main()
