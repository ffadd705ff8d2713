"""Time to accuracy on changing networks: adaptive against fixed plans, plain DDP and DDP's own hooks.

    python benchmarks/time_to_accuracy.py                    everything that is not yet in the results: over an hour
    python benchmarks/time_to_accuracy.py --networks c1 --seeds 1 --methods adaptive,ddp
    python benchmarks/time_to_accuracy.py --table            the table of what there is

Every run trains the same CNN on Fashion-MNIST from the same seed on the same data for the same time, on 8 hosts in the
lab, and keeps the parameters twice a second. Accuracy is worked out afterwards, so that it costs the run nothing. It is
that of the mean of the last five models (Polyak & Juditsky 1992): a single one's goes up and down by 1.5 points from
second to second, which would say more of luck than of the method. The runs of one network and seed follow each other in
the same processes, over connections of their own: those of the run before may still be recovering from what they met.
Before each the network is as at the beginning, and from its first step on it changes as its schedule says.

The machine may be another's too, and then is a third slower for minutes. So before and after each run all hosts make
some forward passes at the same time, and look at what one costs a processor: a run beside which that was a sixth more
than beside the fastest is made again, twice at most.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import records as thinwire_records
from thinwire.bench.machine import describe_machine
from thinwire.jobs.data import load
from thinwire.lab import profiles, registry
from thinwire.lab.lab import Lab, ask, visit
from thinwire.lab.run import run
from thinwire.lab.schedule import Schedule

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "time_to_accuracy.json"
HOSTS, BATCH, RATE = 8, 16, 0.05  # near the best rate for dense training
SECONDS, KEPT_EVERY, AVERAGED = 50.0, 0.5, 5
TARGETS = (0.84, 0.86, 0.87)
TARGET = 0.87  # by which methods are compared: most stages of a network have come by then, and dense takes 480 steps
REFERENCE = "unlimited"  # the network on which plain DDP shows what dense training comes to
SLOWER, ATTEMPTS = 1.17, 3
_kept_to_the_end: list[Any] = []
PASSES = 50  # by which it is seen how fast the machine is

# Rates are divided, so that sending is to computing as for a model of the size that networks like these are met with:
# a ResNet-18 is 59 times as large as this one, and eight hosts here have two cores. c1 and c2 last as long as a run.
NETWORKS: dict[str, dict[str, float]] = {
    "c1": {"scale": 200, "speed": 500 / SECONDS},
    "c2": {"scale": 200, "speed": 500 / SECONDS},
    "unpredictable": {"scale": 20, "speed": 1},
    REFERENCE: {"scale": 1, "speed": 1},
}
METHODS: dict[str, dict[str, Any]] = {
    "adaptive": {},
    "ddp": {"hook": None},
    "ddp-fp16": {"hook": "fp16"},
    "ddp-powersgd": {"hook": "powersgd"},
    "dense-ring": {"exchange": "dense", "collective": "ring"},
    "allgather-0.01": {"exchange": "topk-allgather", "ratio": 0.01},
    "allgather-0.003": {"exchange": "topk-allgather", "ratio": 0.003},
    "allgather-0.001": {"exchange": "topk-allgather", "ratio": 0.001},
    "star-ring-0.03": {"exchange": "star-topk", "collective": "ring", "ratio": 0.03},
    "star-tree-0.03": {"exchange": "star-topk", "collective": "tree", "ratio": 0.03},
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
        train_all(**json.loads(arguments.worker))
        return
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": {}}
    if not arguments.table:
        for seed, network in itertools.product(range(arguments.seeds), arguments.networks.split(",")):
            for _ in range(ATTEMPTS):
                methods = ["ddp"] if network == REFERENCE else arguments.methods.split(",")
                names = {f"{network} {method} {seed}": method for method in methods}
                wanted = [method for name, method in names.items() if is_wanted(name, kept["runs"])]
                for method, result in runs(network, wanted, seed):
                    name = f"{network} {method} {seed}"
                    kept["runs"][name] = quieter(kept["runs"].get(name), result)
                    kept |= {"command": "python benchmarks/time_to_accuracy.py", **describe_machine()}
                    RESULTS.write_text(json.dumps(kept) + "\n")
    text = table(kept["runs"])
    RESULTS.with_suffix(".md").write_text(text)
    print(text, end="")


def is_wanted(name: str, known: dict[str, Any]) -> bool:
    """Whether there is no such run, or only one of a time when the machine was slow."""
    fastest = min((run["forward_ms"] for run in known.values()), default=math.inf)
    run = known.get(name)
    return run is None or (run["forward_ms"] > SLOWER * fastest and run["attempts"] < ATTEMPTS)


def quieter(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """Of two attempts at the same run, that of the time when the machine was faster."""
    if before is None:
        return now | {"attempts": 1}
    best = min(before, now, key=lambda run: float(run["forward_ms"]))
    return best | {"attempts": before["attempts"] + 1}


def runs(network: str, methods: list[str], seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Train by one method after the other; give of each its accuracies over time, and what was decided."""
    if not methods:
        return
    shape = NETWORKS[network]
    profile = profiles.schedule(None if network == REFERENCE else network, HOSTS)
    schedule = profile.scaled(shape["scale"]).faster(shape["speed"])
    first = replace(schedule, changes=tuple(change for change in schedule.changes if change.at == 0), repeat=0.0)
    with tempfile.TemporaryDirectory() as folder, Lab(HOSTS, first, seed=seed) as lab:
        config = json.dumps({"methods": methods, "seed": seed, "folder": folder})
        threading.Thread(target=play, args=(lab, schedule, Path(folder), methods), daemon=True).start()
        code = run(lab, [sys.executable, str(Path(__file__).resolve()), "--worker", config])
        for method in methods:
            if code and not (Path(folder) / method).exists():
                raise RuntimeError(f"{network}, {method}, seed {seed}: exit code {code}")
            result = json.loads((Path(folder) / method).read_text())
            print(
                f"{network} {method} {seed}: {result['steps']} steps, accuracy {result['accuracy'][-1][1]:.3f}",
                flush=True,
            )
            yield method, result


def play(lab: Lab, schedule: Schedule, folder: Path, methods: list[str]) -> None:
    """For each run, let the network change as its schedule says from the moment on at which the hosts begin to train.

    Hosts and we wait for each other by files: METHOD.begins, METHOD (its result, once it is over), METHOD.ends.
    """
    _, place = registry.find(lab.id)
    with suppress(OSError), visit(place) as relay:  # until the lab ends
        for method in methods:
            until((folder / f"{method}.begins").exists)
            begin, result = time.monotonic(), folder / method
            for change in schedule.changes:
                while time.monotonic() < begin + change.at and not result.exists():
                    time.sleep(0.005)
                if change.at > 0 and not result.exists():
                    ask(relay, {"do": "change", "change": change.to_json()})
            until(result.exists)
            for change in schedule.changes:
                if change.at == 0:
                    ask(relay, {"do": "change", "change": change.to_json()})
            (folder / f"{method}.ends").touch()


def until(true: Callable[[], bool]) -> None:
    while not true():
        time.sleep(0.005)


def table(runs: dict[str, Any]) -> str:
    """Seconds to each target, the mean over seeds; a dash where some seed never came there. And how adaptive does."""
    lines = [
        f"| network | method | seeds | steps | {' | '.join(f'{t:.0%}' for t in TARGETS)} | last |",
        "| --- | --- | --- | --- |" + " --- |" * (len(TARGETS) + 1),
    ]
    means: dict[tuple[str, str], list[float | None]] = {}
    for network, method in itertools.product(NETWORKS, METHODS):
        found = [result for name, result in runs.items() if name.split()[:2] == [network, method]]
        if found:
            means[network, method] = [_mean([time_to(each["accuracy"], t) for each in found]) for t in TARGETS]
            times = " | ".join("-" if mean is None else f"{mean:.1f}" for mean in means[network, method])
            last = statistics.mean(result["accuracy"][-1][1] for result in found)
            steps = statistics.mean(result["steps"] for result in found)
            lines.append(f"| {network} | {method} | {len(found)} | {steps:.0f} | {times} | {last:.3f} |")
    return "\n".join([*lines, "", *_verdicts(means), *_beside_dense(runs), ""])


def _verdicts(means: dict[tuple[str, str], list[float | None]]) -> Iterator[str]:
    """One line for each network: adaptive against whichever other method was the fastest there."""
    for network in NETWORKS:
        times = {m: mean[TARGETS.index(TARGET)] for (n, m), mean in means.items() if n == network}
        ours = times.pop("adaptive", None)
        others = {method: seconds for method, seconds in times.items() if seconds is not None}
        if ours is not None and others:
            best = min(others, key=others.__getitem__)
            yield (
                f"- {network}, {TARGET:.0%}: adaptive {ours:.1f} s, the best other ({best}) {others[best]:.1f} s, "
                f"{ours / others[best]:.2f} times"
            )


def _beside_dense(runs: dict[str, Any]) -> Iterator[str]:
    """One line for each network: what adaptive came to, and dense training of the same seeds after as many steps."""
    for network in NETWORKS:
        pairs = []
        for name, result in runs.items():
            reference = runs.get(f"{REFERENCE} ddp {name.split()[2]}")
            if name.split()[:2] == [network, "adaptive"] and reference is not None:
                dense = min(reference["accuracy"], key=lambda look, steps=result["steps"]: abs(look[2] - steps))
                pairs.append((result["accuracy"][-1][1], dense[1]))
        if pairs:
            ours, dense = (statistics.mean(column) for column in zip(*pairs, strict=True))
            yield f"- {network}: adaptive ends at {ours:.1%}, dense training after as many steps is at {dense:.1%}"


def time_to(curve: list[list[float]], target: float) -> float | None:
    """When the accuracy first reached the target, on a line between the looks before and after."""
    for (before, lower, _), (after, higher, _) in itertools.pairwise(curve):
        if higher >= target:
            return before + (after - before) * (target - lower) / (higher - lower)
    return None


def _mean(times: list[float | None]) -> float | None:
    known = [t for t in times if t is not None]
    return statistics.mean(known) if known and len(known) == len(times) else None


# --- on the hosts


def train_all(methods: list[str], seed: int, folder: str) -> None:
    """By each method. What belongs to one is kept to the end: torch's destructors at times wait for each other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = fashion("train")
    for method in methods:
        result = train(method, seed, data, Path(folder))
        if dist.get_rank() == 0:
            unfinished = Path(folder) / f"{method}.part"
            unfinished.write_text(json.dumps(result))
            unfinished.rename(Path(folder) / method)
        until((Path(folder) / f"{method}.ends").exists)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # which no group and no model has a say in


def train(method: str, seed: int, data: tuple[torch.Tensor, torch.Tensor], folder: Path) -> dict[str, Any]:
    """One run on this host. Its result, on the first."""
    rank, group = dist.get_rank(), dist.new_group()
    torch.manual_seed(seed)
    images, labels = data
    model = DistributedDataParallel(net(), bucket_cap_mb=100, process_group=group)
    comm = attach(model, method, folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, fused=True)
    order = torch.Generator().manual_seed(1000 * seed + rank)
    kept, plans = [(0.0, 0, parameters(model))], list[Any]()
    forward = [forward_seconds(model.module, images)]
    steps, more = 0, torch.ones(1)  # steps to make before the hosts ask each other whether it is over
    dist.barrier(group)
    (folder / f"{method}.begins").touch()
    begin = time.monotonic()
    while more:
        for _ in range(int(more)):
            batch = torch.randint(len(images), (BATCH,), generator=order)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(scaled(images[batch])), labels[batch])
            loss.backward()
            optimizer.step()
            steps += 1
            elapsed = time.monotonic() - begin
            if rank == 0 and elapsed - kept[-1][0] >= KEPT_EVERY:
                kept.append((elapsed, steps, parameters(model)))
            if comm is not None and rank == 0 and (not plans or plans[-1][1] != str(comm.plan)):
                plans.append([round(elapsed, 2), str(comm.plan)])
        more[0] = 0 if elapsed > SECONDS else max(1, round(steps / elapsed))  # about a second
        dist.broadcast(more, 0, group=group)
    forward.append(forward_seconds(model.module, images))
    if comm is not None:
        comm.close()
    _kept_to_the_end.append((group, model, comm))
    if rank:
        return {}
    return {
        "steps": steps,
        "forward_ms": round(1e3 * max(forward), 4),
        "accuracy": curve_of(kept),
        "plans": plans,
        "decisions": decisions(folder / f"{method}.records"),
    }


def forward_seconds(model: nn.Module, images: torch.Tensor) -> float:
    """What a forward pass costs this processor just now, while the others do the same."""
    dist.barrier()
    found = []
    for _ in range(PASSES):
        start = time.thread_time()
        with torch.no_grad():
            model(scaled(images[:BATCH]))
        found.append(time.thread_time() - start)
    return statistics.median(found)


def attach(model: DistributedDataParallel, method: str, folder: Path) -> Any:
    plan = METHODS[method]
    if "hook" not in plan:
        return thinwire.attach(model, **plan, records=str(folder / f"{method}.records"))
    if plan["hook"] == "fp16":
        model.register_comm_hook(model.process_group, default_hooks.fp16_compress_hook)
    elif plan["hook"] == "powersgd":
        state = powerSGD_hook.PowerSGDState(model.process_group, matrix_approximation_rank=2, start_powerSGD_iter=10)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return None


def decisions(path: Path) -> list[dict[str, Any]]:
    """What the run decided, and why, without the candidates."""
    if not path.exists():
        return []
    left_out = ("kind", "candidates", "gains", "confidence", "before")
    found = [record for record in thinwire_records.read(path) if record["kind"] == "decision"]
    return [{key: value for key, value in record.items() if key not in left_out} for record in found]


def net() -> nn.Module:
    """197,918 parameters, and little computing: eight hosts share two cores, and what is compared is the network."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 81, 300),
        nn.ReLU(),
        nn.Linear(300, 10),
    )


def parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def curve_of(kept: list[tuple[float, int, torch.Tensor]]) -> list[list[float]]:
    """Time, accuracy and step of each that was kept."""
    torch.set_num_threads(2)  # the others wait for us
    model, (images, labels) = net(), fashion("t10k")
    images, curve = scaled(images), list[list[float]]()
    for place, (at, step, _) in enumerate(kept):
        last = torch.stack([flat for _, _, flat in kept[max(0, place + 1 - AVERAGED) : place + 1]])
        nn.utils.vector_to_parameters(last.mean(0), model.parameters())
        with torch.no_grad():
            right = (model(images).argmax(1) == labels).double().mean().item()
        curve.append([round(at, 2), round(right, 4), step])
    torch.set_num_threads(1)
    return curve


def fashion(part: str) -> tuple[torch.Tensor, torch.Tensor]:
    loaded = load("fashion-mnist")
    examples = loaded.train if part == "train" else loaded.test
    return examples.inputs, examples.labels


def scaled(pixels: torch.Tensor) -> torch.Tensor:
    """With mean 0 and deviation 1, as floats, only those that are needed: eight hosts have one memory."""
    return (pixels.float() / 255 - 0.286) / 0.353


if __name__ == "__main__":
    main()
