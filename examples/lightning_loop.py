"""Lightning, on processors too, with thinwire below it and every rank's error in its checkpoints.

torchrun --nproc-per-node 2 examples/lightning_loop.py
torchrun --nproc-per-node 2 examples/lightning_loop.py --epochs 10 --resume runs/lightning/epoch=4.ckpt
"""

import argparse
import functools
import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire
from thinwire.integrations.lightning import ThinwireStrategy


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def train_dataloader(self) -> DataLoader:
        images, labels = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
        return DataLoader(data, batch_size=32, shuffle=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--exchange", default="adaptive", help="adaptive, or one for good: star-topk, dense, ...")
    parser.add_argument("--out", default="runs/lightning", help="where checkpoints go")
    parser.add_argument("--resume", help="a checkpoint's file")
    arguments = parser.parse_args()

    pl.seed_everything(0)
    strategy = ThinwireStrategy(
        attach=functools.partial(thinwire.attach, exchange=arguments.exchange),
        cluster_environment=TorchElasticEnvironment(),  # found by itself under torchrun, but not in the lab
    )
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=here,
        num_nodes=int(os.environ["WORLD_SIZE"]) // here,
        strategy=strategy,
        max_epochs=arguments.epochs,
        callbacks=[ModelCheckpoint(arguments.out, filename="{epoch}", save_top_k=-1)],
        logger=False,
        log_every_n_steps=10,
    )
    trainer.fit(Digits(), ckpt_path=arguments.resume)
    if trainer.is_global_zero:
        strategy.comm.explain()


if __name__ == "__main__":
    main()
