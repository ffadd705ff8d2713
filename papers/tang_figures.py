"""Figures 2 to 4 of Tang et al. 2018 in small: epoch times and loss over time on their four networks.

    python papers/tang_figures.py                          everything that is not yet in the results; needs root
    python papers/tang_figures.py --networks tang-3 --methods ddp,"dcd int8"
    python papers/tang_figures.py --table                  the table and the plot of what there is

Eight hosts in the lab train a CNN of 55,338 parameters on Fashion-MNIST, from one seed, for the same time. All-reduce
is that of gradients, in one piece: by DDP itself, by a ring of ours, and over whichever of our collectives is priced
lowest. Gossip is on a ring. Every rank keeps its parameters now and then; what is shown is the loss of their mean,
worked out afterwards.
Writes tang_figures.json, .md and .png beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.bench.machine import describe_machine
from thinwire.control.prices import Prices, ways
from thinwire.lab import profiles, units
from thinwire.lab.lab import Lab
from thinwire.lab.run import run
from thinwire.types import Network

sys.path.insert(0, str(Path(__file__).parents[1]))
from papers import fashion  # noqa: E402

HERE = Path(__file__).parent
HOSTS, BATCH, RATE, SEED = 8, 16, 0.05, 0
SECONDS = 20.0
WARM_UP = 2  # steps in which loops are compiled and connections open
LEAST_STEPS, GRACE = 30, 10  # ranks of a ring of eight are at most four steps apart
NUMEL, EPOCH = 55_338, 60_000 // (HOSTS * BATCH)
JUDGED = 1000
NETWORKS = {
    "tang-1": ("1.4gbit", "0.13ms"),
    "tang-2": ("1.4gbit", "20ms"),
    "tang-3": ("5mbit", "20ms"),
    "tang-4": ("5mbit", "0.13ms"),
}
ALL_REDUCE = ("ddp", "all-reduce ring", "all-reduce cheapest")
GOSSIP = ("dpsgd none", "dcd int8", "ecd int16", "choco int8", "choco topk:0.01")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--methods", default=",".join((*ALL_REDUCE, *GOSSIP)))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--worker")
    arguments = parser.parse_args()
    if arguments.worker:
        train(**json.loads(arguments.worker))
        return
    results = HERE / "tang_figures.json"
    kept: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {"runs": {}}
    for network in [] if arguments.table else arguments.networks.split(","):
        for method in arguments.methods.split(","):
            name = f"{network} {method}"
            if name not in kept["runs"]:
                kept["runs"][name] = one_run(network, method)
                kept |= {"command": "python papers/tang_figures.py", "seconds": SECONDS, **describe_machine()}
                results.write_text(json.dumps(kept, indent=1) + "\n")
    shown = table(kept["runs"])
    print(shown)
    if not arguments.table or kept["runs"]:
        facts = f"`{kept['command']}`, torch {kept['torch']}, {kept['cores']} cores, {SECONDS:g} s per run, one seed."
        (HERE / "tang_figures.md").write_text(f"# Tang's four networks\n\n{facts}\n\n{shown}\n")
        draw(kept["runs"], HERE / "tang_figures.png")


def one_run(network: str, method: str) -> dict[str, Any]:
    """Train once; give the loss of the mean model over time, and seconds per step."""
    began = time.time()
    rate, latency = NETWORKS[network]
    here = Network(alpha=units.seconds(latency), beta=1 / units.rate(rate))
    plan = {"all-reduce ring": "ring", "all-reduce cheapest": cheapest(here)}.get(method, "")
    with tempfile.TemporaryDirectory() as folder, Lab(HOSTS, profiles.schedule(network, HOSTS), seed=SEED) as lab:
        config = json.dumps({"method": method, "collective": plan, "folder": folder})
        code = run(lab, [sys.executable, str(Path(__file__).resolve()), "--worker", config])
        if code:
            raise RuntimeError(f"{network}, {method}: exit code {code}")
        result = {**read(Path(folder)), "collective": plan, "load": os.getloadavg()[0]}
    print(
        f"{network} {method} {plan}: {result['steps']} steps of {result['step_seconds']:.3f} s, "
        f"loss {result['curve'][-1][1]:.3f}, {time.time() - began:.0f} s in all",
        flush=True,
    )
    return result


def cheapest(network: Network) -> str:
    """Of our own collectives, the one that sends everything in the least time."""
    dense = [way for way in ways(HOSTS, has_group=False, exchanges=("dense",)) if way.collective != "torch"]
    seconds = Prices(NUMEL, 4, HOSTS, dense).table(network, [1.0])[:, 0]
    return dense[int(seconds.argmin())].collective


def read(folder: Path) -> dict[str, Any]:
    """What the ranks left behind: times (rank, kept step) and models (rank, kept step, entry)."""
    files = sorted(folder.glob("rank*.npz"))
    ranks = [np.load(file) for file in files]
    kept, steps = ranks[0]["kept"], int(ranks[0]["steps"])
    ends = np.max([rank["ends"] for rank in ranks], 0) - min(float(rank["begin"]) for rank in ranks)
    examples, tested = fashion.first("train", JUDGED), fashion.first("t10k", JUDGED)
    curve = []
    for place, step in enumerate(kept):
        mean = torch.from_numpy(np.mean([rank["models"][place] for rank in ranks], 0))
        loss, _ = fashion.judge(mean, examples)
        curve.append([round(float(ends[step - 1]), 3), round(loss, 5), int(step)])
    _, accuracy = fashion.judge(mean, tested)
    return {"steps": steps, "step_seconds": float(ends[-1] / steps), "accuracy": accuracy, "curve": curve}


# --- what is shown


def smooth(curve: list[list[float]]) -> list[tuple[float, float]]:
    """The median of three losses in a row."""
    return [(b[0], float(np.median([a[1], b[1], c[1]]))) for a, b, c in zip(curve, curve[1:], curve[2:], strict=False)]


def time_to(curve: list[list[float]], target: float) -> float | None:
    return next((at for at, loss in smooth(curve) if loss <= target), None)


def target_of(runs: dict[str, Any], network: str) -> float:
    """The loss at which the best of the all-reduces ended."""
    ends = [smooth(runs[f"{network} {name}"]["curve"])[-1][1] for name in ALL_REDUCE if f"{network} {name}" in runs]
    return min(ends, default=float("nan"))


def table(runs: dict[str, Any]) -> str:
    lines = [
        "| network | method | step | epoch | loss at the end | accuracy | time to the all-reduces' loss |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for network, (rate, latency) in NETWORKS.items():
        target = target_of(runs, network)
        for method in (*ALL_REDUCE, *GOSSIP):
            if (result := runs.get(f"{network} {method}")) is not None:
                reached = time_to(result["curve"], target)
                collective = f" ({result['collective']})" if method == "all-reduce cheapest" else ""
                lines.append(
                    f"| {rate}, {latency} | {method}{collective} | {1e3 * result['step_seconds']:.0f} ms "
                    f"| {EPOCH * result['step_seconds']:.1f} s | {smooth(result['curve'])[-1][1]:.3f} "
                    f"| {result['accuracy']:.3f} | {'-' if reached is None else f'{reached:.1f} s'} to {target:.3f} |"
                )
    return "\n".join(lines)


def draw(runs: dict[str, Any], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(NETWORKS), figsize=(18, 8))
    methods = (*ALL_REDUCE, *GOSSIP)
    for column, (network, (rate, latency)) in enumerate(NETWORKS.items()):
        over_time, epochs = axes[0][column], axes[1][column]
        for number, method in enumerate(methods):
            if (result := runs.get(f"{network} {method}")) is not None:
                at, loss = zip(*smooth(result["curve"]), strict=True)
                over_time.plot(at, loss, label=method, linewidth=1, color=f"C{number}")
                epochs.bar(method, EPOCH * result["step_seconds"], color=f"C{number}")
        over_time.set(title=f"{rate}, {latency}", xlabel="seconds", ylabel="training loss" if column == 0 else "")
        if over_time.lines:
            over_time.legend(fontsize=7)
        epochs.set(ylabel="seconds per epoch" if column == 0 else "")
        epochs.tick_params(axis="x", rotation=60, labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


# --- on the hosts


class Clock:
    """When steps ended, the models that are kept, and when to stop: all ranks after the same step, without a message.

    The ranks share a disk although they share no wire: rank 0 writes down after which step all end.
    """

    def __init__(self, folder: Path, rank: int, model: nn.Module) -> None:
        self._folder, self._rank, self._model = folder, rank, model
        self._stop = folder / "stop"
        self._last: int | None = None
        self.begin = time.monotonic()
        self.ends: list[float] = []
        self.kept: list[int] = []
        self.models: list[np.ndarray] = []

    def goes_on(self) -> bool:
        """At the end of every step."""
        self.ends.append(time.monotonic())
        step = len(self.ends)
        if step % (1 << max(0, step.bit_length() - 4)) == 0:  # eight to the octave
            self.kept.append(step)
            self.models.append(nn.utils.parameters_to_vector(self._model.parameters()).detach().numpy().copy())
        if self._last is None:
            self._last = self._told(step)
        return step != self._last

    def _told(self, step: int) -> int | None:
        if self._rank == 0 and step >= LEAST_STEPS - GRACE and time.monotonic() - self.begin > SECONDS:
            draft = self._folder / "draft"
            draft.write_text(str(step + GRACE))
            os.replace(draft, self._stop)
        return int(self._stop.read_text()) if self._stop.exists() else None

    def save(self) -> None:
        facts = {"begin": self.begin, "ends": self.ends, "kept": self.kept, "steps": len(self.ends)}
        np.savez(self._folder / f"rank{self._rank}.npz", models=np.stack(self.models), **facts)


def train(method: str, collective: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(SEED)
    images, labels = fashion.load("train")
    model, link = fashion.net(), None
    wrapped: nn.Module = model
    if method in ALL_REDUCE:
        wrapped = DistributedDataParallel(model)
        link = thinwire.attach(wrapped, "dense", collective=collective) if collective else None
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    if method not in ALL_REDUCE:
        name, compressor = method.split()
        link = thinwire.Gossip(model, optimizer, name, topology="ring", compressor=compressor, seed=SEED)
    order = torch.Generator().manual_seed(1000 * SEED + rank)

    def step() -> None:
        batch = torch.randint(len(images), (BATCH,), generator=order)
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(fashion.pixels(images[batch])), labels[batch]).backward()
        optimizer.step()

    for _ in range(WARM_UP):
        step()
    dist.barrier()
    clock, going = Clock(Path(folder), rank, model), True
    while going:
        step()
        going = clock.goes_on()
    clock.save()
    dist.barrier()
    if link is not None:
        link.close()
    wrapped = model  # DDP goes before its process group does
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
