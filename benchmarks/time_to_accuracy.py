"""Time to accuracy on changing networks: adaptive against fixed plans, plain DDP and DDP's own hooks.

    python benchmarks/time_to_accuracy.py                    everything that is not yet in the results, for hours
    python benchmarks/time_to_accuracy.py --networks c1 --seeds 1 --methods adaptive,ddp
    python benchmarks/time_to_accuracy.py --table            the table of what there is

Every run trains the same CNN on Fashion-MNIST from the same seed on the same data for the same time, on 8 hosts in the
lab, and keeps the parameters now and then. Accuracy is worked out afterwards, so that it costs the run nothing.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import records as thinwire_records
from thinwire.bench.machine import describe_machine
from thinwire.lab import profiles, registry
from thinwire.lab.lab import Lab, ask, visit
from thinwire.lab.run import run
from thinwire.lab.schedule import Schedule

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "time_to_accuracy.json"
HOSTS, BATCH, RATE = 8, 16, 0.05
SECONDS, KEPT_EVERY, TESTED = 45.0, 1.5, 2500
TARGETS = (0.80, 0.84, 0.86)
PLACES = ("/usr/share/datasets/fashion-mnist", "/usr/share/dataset-fashion-mnist", "/usr/share/fashion-mnist")

# Scaled so that this small model meets the paper's ratio of computing to sending, and in the time of a run.
NETWORKS: dict[str, dict[str, float]] = {
    "c1": {"scale": 200, "speed": 500 / SECONDS},
    "c2": {"scale": 200, "speed": 500 / SECONDS},
    "unpredictable": {"scale": 2, "speed": 2},
}
METHODS: dict[str, dict[str, Any]] = {
    "adaptive": {},
    "ddp": {"hook": None},
    "ddp-fp16": {"hook": "fp16"},
    "ddp-powersgd": {"hook": "powersgd"},
    "dense-ring": {"exchange": "dense", "collective": "ring"},
    "allgather-0.1": {"exchange": "topk-allgather", "ratio": 0.1},
    "allgather-0.03": {"exchange": "topk-allgather", "ratio": 0.03},
    "allgather-0.01": {"exchange": "topk-allgather", "ratio": 0.01},
    "allgather-0.003": {"exchange": "topk-allgather", "ratio": 0.003},
    "star-ring-0.1": {"exchange": "star-topk", "collective": "ring", "ratio": 0.1},
    "star-tree-0.1": {"exchange": "star-topk", "collective": "tree", "ratio": 0.1},
    "star-ring-0.03": {"exchange": "star-topk", "collective": "ring", "ratio": 0.03},
    "star-tree-0.01": {"exchange": "star-topk", "collective": "tree", "ratio": 0.01},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--worker")
    arguments = parser.parse_args()
    if arguments.worker:
        train(**json.loads(arguments.worker))
        return
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": {}}
    if not arguments.table:
        for seed in range(arguments.seeds):
            for network in arguments.networks.split(","):
                for method in arguments.methods.split(","):
                    name = f"{network} {method} {seed}"
                    if name not in kept["runs"]:
                        kept["runs"][name] = one_run(network, method, seed)
                        kept |= {"command": "python benchmarks/time_to_accuracy.py", **describe_machine()}
                        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    print_table(kept["runs"])


def one_run(network: str, method: str, seed: int) -> dict[str, Any]:
    """Train once; give accuracies over time, and what was sent."""
    shape = NETWORKS[network]
    schedule = profiles.schedule(network, HOSTS).scaled(shape["scale"]).faster(shape["speed"])
    first = replace(schedule, changes=tuple(change for change in schedule.changes if change.at == 0), repeat=0.0)
    with tempfile.TemporaryDirectory() as folder, Lab(HOSTS, first, seed=seed) as lab:
        out, ready = Path(folder) / "run.json", Path(folder) / "ready"
        config = json.dumps({"method": method, "seed": seed, "out": str(out), "ready": str(ready)})
        threading.Thread(target=play, args=(lab, schedule, ready), daemon=True).start()
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", config]
        code = run(lab, command)
        if code:
            raise RuntimeError(f"{network}, {method}, seed {seed}: exit code {code}")
        result = json.loads(out.read_text())
    print(f"{network} {method} {seed}: {result['steps']} steps, accuracy {result['accuracy'][-1][1]:.3f}", flush=True)
    return result


def play(lab: Lab, schedule: Schedule, ready: Path) -> None:
    """Let the network change as its schedule says, from the moment on at which the hosts begin to train."""
    while not ready.exists():
        time.sleep(0.01)
    begin = time.monotonic()
    _, folder = registry.find(lab.id)
    with suppress(OSError), visit(folder) as relay:  # until the lab ends
        for change in schedule.changes:
            if change.at > 0:
                time.sleep(max(0.0, begin + change.at - time.monotonic()))
                ask(relay, {"do": "change", "change": change.to_json()})


def print_table(runs: dict[str, Any]) -> None:
    """Seconds to each target, the mean over seeds; a dash where some seed never came there."""
    print(f"| network | method | seeds | steps | {' | '.join(f'{t:.0%}' for t in TARGETS)} | last |")
    print("| --- | --- | --- | --- |" + " --- |" * (len(TARGETS) + 1))
    for network in NETWORKS:
        for method in METHODS:
            found = [result for name, result in runs.items() if name.split()[:2] == [network, method]]
            if found:
                times = [_mean([time_to(result["accuracy"], target) for result in found]) for target in TARGETS]
                last = statistics.mean(max(a for _, a in result["accuracy"][-5:]) for result in found)
                steps = statistics.mean(result["steps"] for result in found)
                print(f"| {network} | {method} | {len(found)} | {steps:.0f} | {' | '.join(times)} | {last:.3f} |")


def time_to(curve: list[list[float]], target: float) -> float | None:
    """When the mean of three accuracies in a row first reached the target."""
    for (_, a), (at, b), (_, c) in zip(curve, curve[1:], curve[2:], strict=False):
        if (a + b + c) / 3 >= target:
            return at
    return None


def _mean(times: list[float | None]) -> str:
    known = [t for t in times if t is not None]
    return f"{statistics.mean(known):.1f}" if known and len(known) == len(times) else "-"


# --- on the hosts


def train(method: str, seed: int, out: str, ready: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(seed)
    images, labels = fashion("train")
    model = DistributedDataParallel(net(), bucket_cap_mb=100)
    comm = attach(model, method, rank, out)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    order = torch.Generator().manual_seed(1000 * seed + rank)
    kept, records = [(0.0, parameters(model))], []
    steps, over = 0, torch.zeros(1)
    dist.barrier()
    Path(ready).touch()
    begin = time.monotonic()
    while not over:
        batch = torch.randint(len(images), (BATCH,), generator=order)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        steps += 1
        elapsed = time.monotonic() - begin
        if rank == 0 and elapsed - kept[-1][0] >= KEPT_EVERY:
            kept.append((elapsed, parameters(model)))
        if comm is not None and rank == 0 and (not records or records[-1][1] != str(comm.plan)):
            records.append([round(elapsed, 2), str(comm.plan)])
        if steps % 10 == 0:  # all stop at the same step
            over[0] = float(elapsed > SECONDS)
            dist.broadcast(over, 0)
    if rank == 0:
        torch.set_num_threads(2)  # the others have ended, or wait for us
        curve = [[round(at, 2), accuracy(flat)] for at, flat in kept]
        result = {"steps": steps, "accuracy": curve, "plans": records, "decisions": decisions(out)}
        Path(out).write_text(json.dumps(result))
    if comm is not None:
        comm.close()
    del model
    dist.destroy_process_group()


def attach(model: DistributedDataParallel, method: str, rank: int, out: str) -> Any:
    plan = METHODS[method]
    if "hook" not in plan:
        return thinwire.attach(model, **plan, records=f"{out}.records")
    if plan["hook"] == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif plan["hook"] == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return None


def decisions(out: str) -> list[dict[str, Any]]:
    """What the run decided, and why, without the candidates."""
    path = Path(f"{out}.records")
    if not path.exists():
        return []
    left_out = ("kind", "candidates", "gains", "confidence", "before")
    found = [record for record in thinwire_records.read(path) if record["kind"] == "decision"]
    return [{key: value for key, value in record.items() if key not in left_out} for record in found]


def net() -> nn.Module:
    """206,922 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 49, 120),
        nn.ReLU(),
        nn.Linear(120, 10),
    )


def parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def accuracy(flat: torch.Tensor) -> float:
    model = net()
    nn.utils.vector_to_parameters(flat.clone(), model.parameters())
    images, labels = (part[:TESTED] for part in fashion("t10k"))
    with torch.no_grad():
        batches = zip(images.split(500), labels.split(500), strict=True)
        right = [(model(x).argmax(1) == y).sum().item() for x, y in batches]
    return sum(right) / len(labels)


def fashion(part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """IDX files, as Debian's package dataset-fashion-mnist installs them."""
    for place in map(Path, PLACES):
        with suppress(FileNotFoundError):
            images, labels = (_idx(place / f"{part}-{name}-ubyte.gz") for name in ("images-idx3", "labels-idx1"))
            pixels = torch.from_numpy(images[16:].copy()).view(-1, 1, 28, 28).float() / 255
            return (pixels - 0.286) / 0.353, torch.from_numpy(labels[8:].copy()).long()
    raise SystemExit(f"Fashion-MNIST is in none of {', '.join(PLACES)}: apt-get install dataset-fashion-mnist")


def _idx(path: Path) -> Any:
    return np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8)


if __name__ == "__main__":
    main()
