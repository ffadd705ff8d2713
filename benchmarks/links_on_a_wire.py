"""Step times of both links on the same wire: run it in the lab or under torchrun.

thinwire lab run --hosts 4 --latency 5ms --rate 100mbit -- python benchmarks/links_on_a_wire.py
"""

from __future__ import annotations

import json
import statistics

import torch
import torch.distributed as dist
from torch import nn

import thinwire
from thinwire.bench.machine import describe_machine

PLANS = {
    "topk-allgather over direct": {"exchange": "topk-allgather", "collective": "direct", "ratio": 0.01},
    "star-topk over ring": {"exchange": "star-topk", "collective": "ring", "ratio": 0.01},
    "star-topk over tree": {"exchange": "star-topk", "collective": "tree", "ratio": 0.01},
    "dense over ring": {"exchange": "dense", "collective": "ring"},
}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Linear(1000, 100)  # 100,100 parameters, 400 kB
    result: dict[str, dict[str, float]] = {}
    for name, plan in PLANS.items():
        for link in ("process", "tcp"):
            sync = thinwire.Synchronizer(model, link=link, **plan)
            times = []
            for step in range(12):
                for p in model.parameters():
                    p.grad = torch.randn(p.shape)
                dist.barrier()
                sync.average_gradients()
                assert sync.last is not None
                if step >= 4:
                    times.append(sync.last.seconds * 1e3)
            result.setdefault(name, {})[f"{link}_ms"] = round(statistics.median(times), 2)
            sync.close()
    if dist.get_rank() == 0:
        print(json.dumps({**result, **describe_machine()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
