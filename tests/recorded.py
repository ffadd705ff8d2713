"""Folders of runs and compares as `thinwire train` and `thinwire compare` leave them, made up but likely.

run(tmp_path / "adaptive", steps=500)
compare(tmp_path / "compare", ("ddp", "adaptive", "choco@int8:ring"))
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BEGUN = 1_790_000_000.0
STAGES = (  # the share of the time at which it begins, seconds, bytes per second
    (0.00, 0.0003, 500e6),
    (0.12, 0.002, 12.5e6),
    (0.25, 0.02, 2.5e6),
    (0.36, 0.06, 0.6e6),
    (0.50, 0.015, 1.2e6),
    (0.62, 0.004, 8e6),
    (0.74, 0.0004, 300e6),
    (0.84, 0.03, 2e6),
    (0.93, 0.005, 6e6),
)
LAYERS = (
    ("conv1.weight", 432),
    ("layer1.0.conv1.weight", 2304),
    ("layer1.0.conv2.weight", 2304),
    ("layer2.0.conv1.weight", 4608),
    ("layer2.0.conv2.weight", 9216),
    ("layer2.0.downsample.0.weight", 512),
    ("layer3.0.conv1.weight", 18432),
    ("layer3.0.conv2.weight", 36864),
    ("layer3.1.conv1.weight", 36864),
    ("layer3.1.conv2.weight", 36864),
    ("layer3.0.downsample.0.weight", 2048),
    ("fc.weight", 640),
    ("fc.bias", 10),
    ("bn1.weight", 16),
    ("bn1.bias", 16),
    ("layer1.0.bn1.weight", 16),
)
DENSE_BYTES = 4 * sum(numel for _, numel in LAYERS) * 3 // 2
GOSSIP = ("dpsgd", "dcd", "ecd", "choco", "deepsqueeze")

Rename = Callable[[str], str]


def run(
    folder: Path,
    *,
    method: str = "adaptive",
    steps: int = 400,
    seed: int = 0,
    rename: Rename = str,
    target: float | None = None,
) -> Path:
    """One training; `rename` is asked for every word that a user or another machine may have chosen."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = _Writer(method, steps, seed, rename)
    writer.train()
    (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in writer.lines))
    (folder / "truth.jsonl").write_text("".join(json.dumps(line) + "\n" for line in _truth(writer.period, writer.time)))
    job = {
        "task": "digits",
        "model": "resnet20",
        "hosts": 4,
        "network": rename("unpredictable"),
        "method": rename(method),
        "batch": 32,
        "lr": 0.1,
        "momentum": 0.9,
        "partition": "iid",
        "seed": seed,
        "target": target,
        "name": rename(folder.name),
    }
    about = {
        "format": 1,
        "job": job,
        "command": [
            "thinwire",
            "train",
            "digits",
            "--hosts",
            "4",
            "--network",
            rename("unpredictable"),
            "--method",
            method,
        ],
        "versions": {"python": "3.11.2", "thinwire": "0.1.0", "torch": "2.13.0"},
        "machine": {"host": rename("node-0"), "cpu": rename("2 cores"), "memory": "23 GB"},
        "started": "2026-11-16T02:36:13+00:00",
    }
    (folder / "job.json").write_text(json.dumps(about))
    return folder


def compare(
    folder: Path, methods: Sequence[str], *, steps: int = 300, seeds: Sequence[int] = (0,), target: float | None = 0.9
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    listed = []
    for seed in seeds:
        for i, method in enumerate(methods):
            name = f"{i}-{seed}"
            run(folder / name, method=method, steps=steps, seed=seed, target=target)
            listed.append({"method": method, "folder": name, "seed": seed})
    (folder / "compare.json").write_text(json.dumps({"format": 1, "target": target, "runs": listed}))
    return folder


class _Writer:
    def __init__(self, method: str, steps: int, seed: int, rename: Rename) -> None:
        self.method, self.steps, self.rename = method, steps, rename
        self.random = random.Random(seed)
        self.time, self.sent, self.paused = 0.0, 0, 0.0
        self.lines: list[dict[str, Any]] = []
        self.name = method.partition("@")[0].partition(":")[0]
        self.period = steps * 0.09  # then the network begins again

    def write(self, kind: str, **fields: Any) -> None:
        self.lines.append({"kind": kind, "time": round(self.time, 6), **fields})

    def train(self) -> None:
        adaptive = self.method == "adaptive"
        controller = {"objective": "goodput", "ratios": [0.001, 0.1]} if adaptive else None
        self.write(
            "run",
            format=1,
            wall=BEGUN,
            command=["x"],
            versions={"python": "3.11.2"},
            system="Linux",
            controller=controller,
        )
        self.time = self.paused = 0.8
        layers = [[self.rename(name), numel] for name, numel in LAYERS]
        parameters = sum(numel for _, numel in LAYERS)
        self.write(
            "began",
            wall=BEGUN + 0.8,
            monotonic=5.0,
            hosts=4,
            parameters=parameters,
            batches_per_epoch=11,
            layers=layers,
        )
        plan, seen = self.plan("dense", "torch", 1.0), (0.0, 1.0)
        for step in range(self.steps):
            latency, rate = self.network()
            if adaptive and (step == 0 or abs(math.log(seen[0] / latency)) > 0.3 or step % 97 == 96):
                seen = (latency, rate)
                plan = self.decide(step, plan, latency, rate)
            elif not adaptive:
                plan = self.fixed()
            self.step(step, plan, latency, rate)
            if step % 20 == 19 or step == self.steps - 1:
                self.evaluate(step)
        self.write("ended", how="done", message="", steps=self.steps, seconds=self.time - self.paused, accuracy=0.97)

    def network(self) -> tuple[float, float]:
        share = self.time / self.period % 1
        _, latency, rate = [stage for stage in STAGES if stage[0] <= share][-1]
        return latency, rate

    def plan(self, exchange: str, collective: str, ratio: float | str) -> dict[str, Any]:
        return {
            "exchange": self.rename(exchange),
            "collective": self.rename(collective),
            "ratio": self.rename(ratio) if isinstance(ratio, str) else ratio,
            "broadcast": self.rename("tree"),
            "values": self.rename("float32"),
        }

    def fixed(self) -> dict[str, Any]:
        if self.name in GOSSIP:
            return self.plan(self.name, "ring", "int8")
        if self.name.startswith("ddp"):
            return {"exchange": self.rename(self.name)}
        return self.plan(self.name, "ring", 0.01)

    def candidates(self, latency: float, rate: float) -> list[dict[str, Any]]:
        listed = []
        for exchange, collective, messages in (
            ("dense", "torch", 6),
            ("dense", "ring", 6.5),
            ("topk-allgather", "direct", 3),
            ("topk-allgather", "ring", 4),
            ("star-topk", "ring", 8),
            ("star-topk", "tree", 3.5),
            ("var-topk", "tree", 5),
            ("ms-topk", "direct", 3.2),
        ):
            fitting = rate / 1e8 * {"star-topk": 6, "var-topk": 4, "ms-topk": 1.5}.get(exchange, 1)
            ratio = 1.0 if exchange == "dense" else min(0.1, max(0.001, fitting))
            nbytes = DENSE_BYTES * ratio * {"dense": 1, "star-topk": 1.3, "var-topk": 1.3}.get(exchange, 2.2)
            seconds = 0.03 + messages * latency * 1.05 + nbytes / rate
            gain = 1.0 if exchange == "dense" else min(0.98, 0.25 + 0.27 * math.log10(ratio * 1000 + 1))
            gain *= {"star-topk": 0.88, "var-topk": 0.92, "ms-topk": 0.97}.get(exchange, 1.0)
            taken = 1 + 0.6 * (1 - gain)
            plan = self.plan(exchange, collective, round(ratio, 6))
            listed.append({"plan": plan, "seconds": seconds, "gain": gain, "steps": taken, "cost": seconds * taken})
        return sorted(listed, key=lambda candidate: candidate["cost"])

    def decide(self, step: int, before: dict[str, Any], latency: float, rate: float) -> dict[str, Any]:
        listed = self.candidates(latency, rate)
        best = listed[0]
        self.predicted = best["seconds"]
        trigger = "the network was measured" if step == 0 else f"the latency is {latency * 1e3:.3g} ms now"
        self.write("asked", step=step)
        self.write(
            "decision",
            step=step,
            trigger=self.rename(trigger),
            plan=best["plan"],
            before=before,
            seconds=best["seconds"],
            alpha=latency,
            beta=1 / rate,
            rest=0.03,
            compress=0.001,
            gain=best["gain"],
            gains={},
            candidates=listed,
            confidence={"alpha": 0.9, "beta": 0.8},
        )
        return dict(best["plan"])

    def step(self, step: int, plan: dict[str, Any], latency: float, rate: float) -> None:
        noise = self.random.lognormvariate(0, 0.08) * (4 if self.random.random() < 0.01 else 1)
        full = not isinstance(plan.get("ratio"), float) or plan["ratio"] == 1
        share = (
            0.27
            if self.name in GOSSIP
            else 1
            if full
            else plan["ratio"] * (1.3 if plan["collective"] == "tree" else 2.2)
        )
        nbytes = int(DENSE_BYTES * share)
        compute, compress = 0.03 * noise, 0.0 if full else 0.0015 * noise
        exchange = (latency * (1 if self.name in GOSSIP else 6 if full else 3) + nbytes / rate) * noise + compress
        self.time += compute + exchange
        self.sent += nbytes
        first = step == 0
        known: dict[str, Any] = {"step_seconds": None if first else compute + exchange, "sent_bytes": nbytes}
        if self.method == "adaptive" or self.name.endswith("topk"):
            known |= {
                "seconds": exchange,
                "compress_seconds": compress,
                "dense_bytes": DENSE_BYTES,
                "gain": 0.8,
                "skipped": False,
                "predicted_seconds": self.predicted if self.method == "adaptive" else None,
                "alpha": latency * self.random.lognormvariate(0, 0.06),
                "beta": 1 / rate * self.random.lognormvariate(0, 0.1),
            }
        self.write("heard", step=step, told=[0.0] * 12)
        self.write("step", step=step, plan=plan, **known)
        if not full and step % 10 == 0:
            self.write("sent", step=step, entries=[self.random.randint(0, numel) for _, numel in LAYERS])
        decay = math.exp(-step / (0.18 * self.steps))
        if step % 2 == 0:
            self.write("loss", step=step, loss=2.3 * decay + 0.08 + 0.1 * decay * self.random.random())
        if self.name in GOSSIP and step % 5 == 0:
            self.write("consensus", step=step, distance=2.0 * decay + 0.05 * self.random.random() + 0.01)

    def evaluate(self, step: int) -> None:
        self.time += 0.1
        self.paused += 0.1
        decay = math.exp(-(step + 1) / (0.2 * self.steps))
        best = {"ddp": 0.972, "adaptive": 0.968}.get(self.method, 0.95)
        accuracy = best - (best - 0.1) * decay + 0.004 * self.random.random()
        self.write(
            "evaluated",
            step=step,
            epoch=step / 11,
            loss=2.3 * decay + 0.11,
            accuracy=accuracy,
            sent_bytes=self.sent,
            trained_seconds=self.time - self.paused,
        )


def _truth(period: float, end: float) -> list[dict[str, Any]]:
    """The lab begins a moment before the run."""
    return [
        {
            "time": (turn + at) * period,
            "wall": BEGUN - 0.5 + (turn + at) * period,
            "cause": "schedule",
            "hosts": None,
            "pairs": None,
            "set": {"latency": latency, "up": rate, "down": rate},
            "now": {"latency": latency, "rate": rate, "loss": 0.0, "blocked": 0.0},
        }
        for turn in range(int(end / period) + 1)
        for at, latency, rate in STAGES
    ]
