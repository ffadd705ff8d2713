"""How many steps training takes to an accuracy, by exchange and ratio: the data behind thinwire/control/learning.py.

N workers train in one process, with thinwire's own Synchronizer on the thread link; no time is measured. Every run
keeps its curve: at each evaluation the step, the test accuracy (or minus the test loss), the gain, and the norm of the
errors over the norm of the gradients. A run ends when it reaches the last target, or after 6 times the steps of dense.

python benchmarks/steps_to_accuracy.py          writes benchmarks/results/steps_to_accuracy.json, run after run; goes on
                                                where it was stopped. benchmarks/fit_steps.py reads it.

Fashion-MNIST is read from Debian's package dataset-fashion-mnist, text from Python's own standard library.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import thinwire
from thinwire.bench.machine import describe_machine
from thinwire.compress.base import Compensated, Selector, add_entries, take_out
from thinwire.compress.topk import LayerwiseTopK, ThresholdTopK, TopK
from thinwire.compress.values import VALUES, value_code
from thinwire.link.thread import ThreadWorld
from thinwire.train.layout import Layout
from thinwire.train.memory import ErrorMemory
from thinwire.types import Sparse

RESULTS = Path(__file__).parent / "results" / "steps_to_accuracy.json"
FASHION = Path("/usr/share/datasets/fashion-mnist")
RATIOS = (0.1, 0.033, 0.011, 0.004, 0.001)
PATIENCE = 6  # times the steps of dense
WINDOW = 5  # evaluations whose mean is compared with a target

Data = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learned, how, and which scores are the early, middle and late target."""

    data: Callable[[], tuple[Data, Data]]
    model: Callable[[], nn.Module]
    batch: int
    every: int  # steps between evaluations
    targets: tuple[float, float, float]
    lr: float
    optimizer: str = "sgd"
    score: str = "accuracy"


def digits() -> tuple[Data, Data]:
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    x = (torch.tensor(data.data, dtype=torch.float32)[order] / 16).view(-1, 1, 8, 8)
    y = torch.tensor(data.target)[order]
    return (x[:1000], y[:1000]), (x[1000:], y[1000:])


def fashion() -> tuple[Data, Data]:
    def read(name: str, offset: int) -> torch.Tensor:
        raw = gzip.decompress((FASHION / f"{name}-ubyte.gz").read_bytes())
        return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=offset).copy())

    def part(name: str) -> Data:
        images = read(f"{name}-images-idx3", 16).view(-1, 1, 28, 28)
        return F.avg_pool2d(images.float() / 255, 2) - 0.28, read(f"{name}-labels-idx1", 8).long()

    train, (x, y) = part("train"), part("t10k")
    return train, (x[:1000], y[:1000])


CONTEXT = 32


def source_text() -> tuple[Data, Data]:
    """Pieces of CONTEXT + 1 characters; those of the last files are for testing."""
    names = ["argparse.py", "ast.py", "dataclasses.py", "datetime.py", "inspect.py", "tarfile.py", "typing.py"]
    folder = Path(sysconfig.get_path("stdlib"))
    text = "".join((folder / name).read_text(encoding="utf-8") for name in names)
    codes = torch.tensor([c if 32 <= c < 127 else 127 for c in text.encode("latin-1", "replace")]) - 32
    pieces = codes[: len(codes) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    train, test = pieces[:-1000], pieces[-1000:][::7]
    return (train[:, :-1], train[:, 1:]), (test[:, :-1], test[:, 1:])


class Transformer(nn.Module):
    """One block of 64 channels and 4 heads over characters."""

    def __init__(self, width: int = 64, vocabulary: int = 96) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.randn(CONTEXT, width) * 0.1)
        self.before = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.token(x) + self.place  # (B, T, C)
        q, k, v = self.qkv(self.before(h)).view(*h.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)  # (B, heads, T, C / 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.mix(mixed.transpose(1, 2).flatten(2))
        logits: torch.Tensor = self.head(h + self.mlp(h))
        return logits.transpose(1, 2)  # (B, vocabulary, T)


def mlp(inputs: int = 64) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def cnn(side: int, width: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * (side // 2) ** 2, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


_TEXT = Task(
    data=source_text, model=Transformer, batch=8, every=10, targets=(-2.7, -2.54, -2.47), lr=0.2, score="-loss"
)
TASKS = {
    "mlp-digits": Task(data=digits, model=mlp, batch=8, every=5, targets=(0.85, 0.91, 0.94), lr=0.03),
    "cnn-digits": Task(data=digits, model=lambda: cnn(8), batch=8, every=5, targets=(0.85, 0.92, 0.95), lr=0.05),
    "cnn-fashion": Task(data=fashion, model=lambda: cnn(14), batch=16, every=10, targets=(0.70, 0.76, 0.80), lr=0.05),
    "transformer-text": _TEXT,
    "transformer-text-adam": replace(_TEXT, lr=2e-3, optimizer="adam"),
    "mlp-fashion": Task(data=fashion, model=lambda: mlp(196), batch=16, every=20, targets=(0.78, 0.82, 0.84), lr=0.01),
    "cnn-digits-cool": Task(data=digits, model=lambda: cnn(8), batch=8, every=10, targets=(0.85, 0.92, 0.95), lr=0.01),
    "cnn-fashion-cool": Task(
        data=fashion, model=lambda: cnn(14), batch=16, every=20, targets=(0.76, 0.80, 0.83), lr=0.01
    ),
    "cnn-digits-hot": Task(data=digits, model=lambda: cnn(8), batch=8, every=5, targets=(0.85, 0.92, 0.95), lr=0.1),
}

# Longer trainings, at learning rates that are far from the largest.
COOLER = ("mlp-fashion", "cnn-digits-cool", "cnn-fashion-cool")

# Another number of workers, another optimizer, a learning rate near the largest that dense training bears.
CHECKS = (("mlp-digits", 8), ("transformer-text-adam", 4), ("cnn-digits-hot", 4), ("mlp-digits", 2))


def score(task: Task, model: nn.Module, test: Data) -> float:
    model.eval()
    with torch.no_grad():
        out, y = model(test[0]), test[1]
        result = (out.argmax(1) == y).float().mean() if task.score == "accuracy" else -F.cross_entropy(out, y)
    model.train()
    return float(result)


class Workers:
    """What every rank's exchange does, rank after rank in one thread: the same selectors and error memories.

    `check` holds it against the exchanges themselves. Threads would spend most of the time waiting for one another.
    """

    def __init__(self, model: nn.Module, exchange: str, ratio: float, world_size: int, values: str = "float32") -> None:
        self.layout = Layout.of(model.named_parameters())
        self.memories = [ErrorMemory(self.layout) for _ in range(world_size)]
        self.exchange, self.ratio, self.step = exchange, ratio, 0
        selectors = {"layerwise-topk": LayerwiseTopK(self.layout.sizes), "ms-topk": ThresholdTopK()}
        self.selector: Selector = selectors.get(exchange, TopK())
        k = self.selector.count(self.layout.numel, ratio)
        self.code = value_code(values, self.layout.dtype, self.layout.numel, k)

    def errors(self) -> list[torch.Tensor]:
        return [torch.cat([e.flatten() for e in memory.state_dict().values()]) for memory in self.memories]

    def average(self, grads: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, float]:
        """The mean of what is sent, flat, and the gain."""
        fed = [memory.feed(grad) for memory, grad in zip(self.memories, grads, strict=True)]
        mean = torch.zeros(self.layout.numel)
        available = sum(f.energy for f in fed)
        for entries in self._sent(fed):
            add_entries(mean, entries, 1 / len(fed))
        sent = available - sum(float(f.x.double().square().sum()) for f in fed)
        for memory in self.memories:
            memory.commit(nothing_left=False)
        self.step += 1
        return mean, min(1.0, sent / available)

    def _sent(self, fed: list[Compensated]) -> Iterator[Sparse]:
        if self.exchange == "dense":
            yield from (take_out(f.x, torch.arange(f.x.numel(), dtype=torch.int32)) for f in fed)
        elif self.exchange not in ("star-topk", "var-topk"):
            yield from (self._rounded(f, self.selector.take(f, self.ratio, self.step)) for f in fed)
        else:
            leader = self.step % len(fed)
            if self.exchange == "var-topk":
                k = self.selector.count(fed[0].x.numel(), self.ratio)
                leader = int(np.argmax([float(torch.topk(f.x.square(), k).values.sum()) for f in fed]))
            led = self.selector.take(fed[leader], self.ratio, self.step)
            yield from (led if f is fed[leader] else take_out(f.x, led.indices) for f in fed)

    def _rounded(self, fed: Compensated, taken: Sparse) -> Sparse:
        """As the others get it; what they do not get goes back."""
        if not self.code.rounds:
            return taken
        k = taken.values.numel()
        message = torch.empty(self.code.nbytes(k), dtype=torch.uint8)
        self.code.encode(taken.values, message)
        sent = Sparse(taken.indices, self.code.decode(message, k))
        add_entries(fed.x, Sparse(taken.indices, taken.values - sent.values), 1.0)
        return sent


def check(world_size: int = 4, steps: int = 8) -> None:
    """Assert that the exchanges, run on the thread link, give the means and gains that `Workers` gives."""
    plain = [(exchange, "float32") for exchange in ("layerwise-topk", "ms-topk", "star-topk", "var-topk")]
    for exchange, values in [*(("topk-allgather", values) for values in VALUES), *plain]:
        model, world, plan = mlp(), ThreadWorld(world_size), {"ratio": 0.01, "collective": "tree", "values": values}
        syncs = world.run(lambda link: thinwire.Synchronizer(model, exchange, link=link, **plan))  # noqa: B023
        workers = Workers(model, exchange, 0.01, world_size, values)
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            grads = [
                {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}
                for _ in range(world_size)
            ]
            mean, gain = workers.average(grads)
            world.run(lambda link: syncs[link.rank].average(grads[link.rank]))  # noqa: B023
            torch.testing.assert_close(torch.cat([g.flatten() for g in grads[0].values()]), mean)
            assert math.isclose(syncs[0].last.gain, gain, rel_tol=1e-5), (exchange, step)


def train(
    name: str, exchange: str, ratio: float, world_size: int, seed: int, max_steps: int, values: str = "float32"
) -> dict[str, Any]:
    """One run. The ranks are replicas, so one model serves them all; what each has of its own is data and error."""
    task = TASKS[name]
    (x, y), test = _cached(task.data)
    torch.manual_seed(seed)
    model = task.model()
    optimizer: torch.optim.Optimizer
    if task.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=task.lr)
    workers = Workers(model, exchange, ratio, world_size, values)
    batches = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(world_size)]
    run: dict[str, Any] = {"task": name, "exchange": exchange, "ratio": ratio, "world_size": world_size, "seed": seed}
    curve, kept, gains = [], [], []
    for step in range(1, max_steps + 1):
        grads = []
        for generator in batches:
            rows = torch.randint(len(x), (task.batch,), generator=generator)
            model.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        look = step % task.every == 0
        if look and len(curve) % 4 == 0:
            kept.append(_gain_curve(workers, grads))
        mean, gain = workers.average(grads)
        gains.append(gain)
        for parameter, where in zip(model.parameters(), workers.layout.slices.values(), strict=True):
            parameter.grad = mean[where].view_as(parameter)
        optimizer.step()
        if look:
            energy = sum(float(g.square().sum()) for grad in grads for g in grad.values())
            error = sum(float(e.square().sum()) for e in workers.errors())
            told = score(task, model, test), float(np.mean(gains[-task.every :])), math.sqrt(error / energy)
            curve.append((step, *told))
            if not math.isfinite(told[0]) or _smooth(curve) >= task.targets[-1]:
                break
    run["gain"] = _round(float(np.mean(gains)))
    run["kept_at_ratios"] = [_round(v) for v in np.mean(kept, axis=0)]
    run["curve"] = [[s, *(_round(v) for v in rest)] for s, *rest in curve]
    return run


def _gain_curve(workers: Workers, grads: list[dict[str, torch.Tensor]]) -> list[float]:
    """The share of the energy in each rank's largest entries, summed over ranks, at each of RATIOS."""
    kept, total = np.zeros(len(RATIOS)), 0.0
    for error, grad in zip(workers.errors(), grads, strict=True):
        x = (error + torch.cat([g.flatten() for g in grad.values()])).double().square()
        best = torch.topk(x, int(RATIOS[0] * len(x))).values.cumsum(0)
        kept += [float(best[max(1, int(ratio * len(x))) - 1]) for ratio in RATIOS]
        total += float(x.sum())
    return list(kept / total)


def _smooth(curve: list[Any]) -> float:
    return float(np.mean([row[1] for row in curve[-WINDOW:]])) if len(curve) >= WINDOW else -math.inf


def _round(value: float) -> float:
    return float(f"{value:.4g}")


_DATA: dict[Any, Any] = {}


def _cached(load: Callable[[], tuple[Data, Data]]) -> tuple[Data, Data]:
    if load not in _DATA:
        _DATA[load] = load()
    result: tuple[Data, Data] = _DATA[load]
    return result


def steps_to(curve: list[Any], target: float) -> float | None:
    """The step at which the mean of WINDOW evaluations reaches the target, between evaluations by a straight line."""
    before: tuple[float, float] | None = None
    for i in range(WINDOW, len(curve) + 1):
        now = (float(np.mean([row[0] for row in curve[i - WINDOW : i]])), _smooth(curve[:i]))
        if now[1] >= target:
            if before is None:
                return now[0]
            share = (target - before[1]) / (now[1] - before[1])
            return round(before[0] + share * (now[0] - before[0]), 1)
        before = now
    return None


def plans() -> Iterator[tuple[str, str, float, int, int]]:
    """Task, exchange, ratio, world size, seed: the widest coverage first, repetitions after."""
    main, others = ("topk-allgather", "star-topk"), ("var-topk", "layerwise-topk", "ms-topk")
    for seed in (0, 1, 2):
        for ratios in (RATIOS[::2], RATIOS[1::2]):
            for task in ("mlp-digits", "cnn-digits", "transformer-text", "cnn-fashion", *COOLER):
                yield task, "dense", 1.0, 4, seed
                yield from ((task, exchange, ratio, 4, seed) for ratio in ratios[::-1] for exchange in main)
                yield from ((task, exchange, 0.011, 4, seed) for exchange in others[:2])
        for task, world_size in CHECKS:
            yield task, "dense", 1.0, world_size, seed
            yield from ((task, exchange, ratio, world_size, seed) for ratio in RATIOS[2::2] for exchange in main)
        for task in ("mlp-digits", "cnn-digits"):
            yield from ((task, exchange, ratio, 4, seed) for exchange in others for ratio in RATIOS[::2])


def run_all(out: Path, minutes: float) -> None:
    runs: list[dict[str, Any]] = json.loads(out.read_text())["runs"] if out.exists() else []
    done = {(r["task"], r["exchange"], r["ratio"], r["world_size"], r["seed"]) for r in runs}
    start = time.monotonic()
    check()
    for plan in plans():
        if plan in done:
            continue
        if time.monotonic() - start > 60 * minutes:
            break
        done.add(plan)
        task, exchange, ratio, world_size, seed = plan
        dense = [
            r["curve"][-1][0]
            for r in runs
            if (r["task"], r["exchange"], r["world_size"]) == (task, "dense", world_size)
        ]
        run = train(*plan, max_steps=PATIENCE * max(dense) if dense else 4000)
        run["steps"] = [steps_to(run["curve"], target) for target in TASKS[task].targets]
        runs.append(run)
        print(f"{time.monotonic() - start:6.0f} s", *plan, run["gain"], run["steps"], flush=True)
        _write(out, runs)


def _write(out: Path, runs: list[dict[str, Any]]) -> None:
    head = {
        "command": "python benchmarks/steps_to_accuracy.py",
        **describe_machine(),
        "ratios": RATIOS,
        "window": WINDOW,
        "tasks": {
            name: {
                "batch_per_worker": t.batch,
                "lr": t.lr,
                "optimizer": t.optimizer,
                "score": t.score,
                "targets": t.targets,
            }
            for name, t in TASKS.items()
        },
    }
    lines = ",\n".join(json.dumps(run) for run in runs)
    out.write_text(json.dumps(head, indent=1)[:-2] + ',\n "runs": [\n' + lines + "\n]}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    run_all(args.out, args.minutes)
