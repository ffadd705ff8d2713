"""The first thing to try: two processes train a small net on scikit-learn's digits, dense and compressed."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from thinwire.bench.launch import on_ranks

WORLD_SIZE = 2
BATCH = 32


def main(steps: int, ratio: float) -> None:
    """Train by each plan and print what came of it."""
    plans: list[dict[str, Any]] = [
        {"exchange": "dense", "collective": "torch"},
        {"exchange": "star-topk", "collective": "ring", "ratio": ratio},
        {"exchange": "topk-allgather", "collective": "direct", "ratio": ratio},
    ]
    console = Console()
    table = Table(title=f"digits, {WORLD_SIZE} processes, {steps} steps")
    for column in ("exchange", "loss", "accuracy", "sent per rank", "of dense", "seconds"):
        table.add_column(column, justify="left" if column == "exchange" else "right")
    for plan in plans:
        with console.status(f"training with {plan['exchange']} ..."):
            result = on_ranks(train, WORLD_SIZE, steps=steps, plan=plan)
        table.add_row(
            plan["exchange"] + ("" if plan["exchange"] == "dense" else f" {ratio:g}"),
            f"{result['loss']:.3f}",
            f"{result['accuracy']:.1%}",
            f"{result['sent_bytes'] / 1e6:.2f} MB",
            f"{result['sent_bytes'] / result['dense_bytes']:.1%}",
            f"{result['seconds']:.1f}",
        )
    console.print(table)


def train(rank: int, steps: int, plan: dict[str, Any]) -> dict[str, Any]:
    """What each process runs: an ordinary DDP loop and one line of ours."""
    (x, y), (test_x, test_y) = _digits()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)))
    comm = thinwire.attach(model, **plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = torch.Generator().manual_seed(rank)
    sent = dense = 0
    start = time.perf_counter()
    for _ in range(steps):
        rows = torch.randint(len(x), (BATCH,), generator=batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert comm.last is not None
        sent, dense = sent + comm.last.sent_bytes, dense + comm.last.dense_bytes
    seconds = time.perf_counter() - start
    with torch.no_grad():
        accuracy = float((model(test_x).argmax(1) == test_y).float().mean())
    comm.close()
    return {"loss": loss.item(), "accuracy": accuracy, "seconds": seconds, "sent_bytes": sent, "dense_bytes": dense}


def _digits() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """1,797 images of 8 x 8; each rank trains on its own share of the first 1,500."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit("the demo needs scikit-learn: pip install 'thinwire[demo]'") from error
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(data.data, dtype=torch.float32)[order] / 16
    y = torch.tensor(data.target)[order]
    mine = slice(dist.get_rank(), 1500, dist.get_world_size())
    return (x[mine], y[mine]), (x[1500:], y[1500:])
