"""An ordinary DistributedDataParallel script: it knows nothing of thinwire and runs under torchrun as it is.

thinwire lab run --hosts 4 --latency 5ms --rate 100mbit -- python examples/ddp.py
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a process group: see below
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=512)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    train(arguments.steps, arguments.width)
    # This ends gloo's threads, unless somebody still holds the process group: a thread that drops its last message
    # while the interpreter ends makes torch 2.13 abort ("terminate called without an active exception"). The model
    # holds it, and has gone by now. So do functions of torch.distributed.nn, as default arguments, if they are imported
    # when there is a group: DDP would do that, so it is done above.
    dist.destroy_process_group()


def train(steps: int, width: int) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    teacher = torch.randn(64, 1)
    net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)

    seconds = []
    for _ in range(steps):
        x = torch.randn(64, 64)
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), (x @ teacher).tanh())
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        hosts, megabytes = dist.get_world_size(), sum(p.numel() for p in model.parameters()) * 4 / 1e6
        median = statistics.median(seconds[5:]) * 1e3  # DDP rebuilds its buckets in the first steps
        print(f"{hosts} hosts, {megabytes:.1f} MB of gradients: {median:.0f} ms per step, loss {loss:.3f}")


if __name__ == "__main__":
    main()
