"""DistributedDataParallel under torchrun with thinwire below it: trains, saves every epoch, and goes on from there.

torchrun --nproc-per-node 2 examples/torchrun.py
torchrun --nproc-per-node 2 examples/torchrun.py --epochs 10 --resume
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a process group: examples/ddp.py says why
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import thinwire


def digits() -> TensorDataset:
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--exchange", default="adaptive", help="adaptive, or one for good: star-topk, dense, ...")
    parser.add_argument("--out", default="runs/torchrun", help="where checkpoints go")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint that all ranks have")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    train(arguments)
    dist.destroy_process_group()  # after the model has gone: see examples/ddp.py


def train(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    comm = thinwire.attach(model, arguments.exchange)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = DistributedSampler(digits(), seed=0)
    loader = DataLoader(digits(), batch_size=32, sampler=sampler)

    # One file per rank: what a rank has not sent yet is known to it alone.
    checkpoint = thinwire.Checkpoint(arguments.out, dist.get_rank(), dist.get_world_size())
    first_epoch = 0
    if arguments.resume and (step := comm.common_step(checkpoint.steps())) is not None:
        state, _ = checkpoint.load(step)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        comm.load_state_dict(state["comm"])
        first_epoch = state["epochs"]

    for epoch in range(first_epoch, arguments.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        state = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "comm": comm.state_dict(),
            "epochs": epoch + 1,
        }
        checkpoint.save(state, comm.step)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.3f}")
    if dist.get_rank() == 0:
        comm.explain()
    comm.close()


if __name__ == "__main__":
    main()
