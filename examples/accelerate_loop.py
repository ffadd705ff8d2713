"""Hugging Face Accelerate, on processors or GPUs, with thinwire below it and every rank's error in its checkpoints.

torchrun --nproc-per-node 2 examples/accelerate_loop.py
torchrun --nproc-per-node 2 examples/accelerate_loop.py --epochs 10 --resume runs/accelerate/epoch-5
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire
from thinwire.integrations.accelerate import keep


def digits() -> TensorDataset:
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--exchange", default="adaptive", help="adaptive, or one for good: star-topk, dense, ...")
    parser.add_argument("--out", default="runs/accelerate", help="where checkpoints go, a folder for each epoch")
    parser.add_argument("--resume", help="a checkpoint's folder, epoch-5")
    arguments = parser.parse_args()

    # Under torchrun, Accelerate trains apart on every process unless it is told that processors are meant.
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),  # the order of an epoch is its number's
    )
    train(accelerator, arguments)
    accelerator.free_memory()  # the model goes before the process group: see examples/ddp.py
    accelerator.end_training()


def train(accelerator: Accelerator, arguments: argparse.Namespace) -> None:
    set_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model, optimizer, loader = accelerator.prepare(
        net,
        torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        DataLoader(digits(), batch_size=32, shuffle=True),
    )
    comm = thinwire.attach(model, arguments.exchange, scaler=accelerator.scaler)
    keep(comm, accelerator)
    first_epoch = 0
    if arguments.resume:
        accelerator.load_state(arguments.resume)
        first_epoch = int(arguments.resume.rpartition("-")[2])

    for epoch in range(first_epoch, arguments.epochs):
        loader.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
        accelerator.save_state(f"{arguments.out}/epoch-{epoch + 1}")
        if accelerator.is_main_process:
            print(f"epoch {epoch + 1}: loss {loss:.3f}")
    if accelerator.is_main_process:
        comm.explain()
    comm.close()


if __name__ == "__main__":
    main()
