"""One line on top of DistributedDataParallel, and what it did: run under torchrun or in the lab.

thinwire lab run --hosts 4 --latency 20ms --rate 50mbit -- python examples/adaptive.py
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a process group: examples/ddp.py says why
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=512)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank, width = dist.get_rank(), arguments.width
    torch.manual_seed(0)
    teacher = torch.randn(64, 1)
    net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    model = DistributedDataParallel(net)
    comm = thinwire.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)

    for _ in range(arguments.steps):
        x = torch.randn(64, 64)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), (x @ teacher).tanh())
        loss.backward()
        optimizer.step()
    if rank == 0:
        comm.explain()
        print(f"loss {loss:.3f}")
    comm.close()
    del model  # before the process group: see examples/ddp.py
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
