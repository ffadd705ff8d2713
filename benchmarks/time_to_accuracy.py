"""Time to accuracy on changing networks: adaptive against fixed plans, plain DDP and DDP's own hooks.

    python benchmarks/time_to_accuracy.py                    everything that is not yet in the results: over an hour
    python benchmarks/time_to_accuracy.py --networks c1 --seeds 1 --methods adaptive,ddp
    python benchmarks/time_to_accuracy.py --table            the table of what there is

Every run trains the same CNN on Fashion-MNIST from the same seed on the same data, on 8 hosts in the lab, over
connections of its own. The parameters are kept at every tenth step. Accuracy is that of the mean of the last five kept
(Polyak & Juditsky 1992): a single model's goes up and down by 1.5 points from look to look, which would say more of
luck than of the method. For the same reason methods are compared by the mean time to several targets. Kept by steps
and not by seconds, the mean is over as much training for a slow method as for a fast one.

The machine may be another's too, and then is a third slower for minutes. So the runs of one network and seed take turns
of some four seconds, and those of a group meet the same machine; at most GROUP at a time, because what a run knows of
its network becomes old while it waits for the others. A result says beside whom it was run. Each has a clock that
stands still while it is not its turn, and by that clock the network changes as its schedule says. Accuracy is worked
out between turns, so that it costs no run anything; nor does what comes before the first step, of adaptive the survey
of the network.

All train by the same recipe, so many steps of which the last have a learning rate that falls to 0. A run ends when it
has reached the last target; those of adaptive, and of plain DDP on a network without limits, when the training is over,
to see where it comes to. One that has not reached it ends at the limit.

Adaptive is compared with each by the seeds that both have run with. A time that was not reached counts as the limit,
and the mean is said to be over what it is.

Fixed plans send values as they are, as in the papers. Adaptive rounds gathered values to four bits; how much of its
advantage that is, two fixed plans that do so too tell.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

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

Examples: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Kept: TypeAlias = tuple[float, int, torch.Tensor]  # when, at which step, all parameters

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "time_to_accuracy.json"
HOSTS, BATCH, RATE = 8, 16, 0.05  # near the best rate for dense training
SECONDS = 30.0  # that a schedule lasts, as long as it takes to come to the last target where it is not hard
LIMIT, TURN = 40.0, 4.0  # that a run may last until it is at the last target, and that a turn lasts
TRAINING, COOLING = 1000, 200  # steps in all, and those at the end in which the learning rate falls to 0
KEPT_EVERY, AVERAGED = 10, 5  # steps, and how many of those kept an accuracy is the mean of
TARGETS = (0.86, 0.865, 0.87)  # whose mean time methods are compared by: when a single one is met is luck in part
GROUP = 6  # methods that take turns with each other
REFERENCE = "unlimited"  # the network on which plain DDP shows what dense training comes to
_kept_to_the_end: list[Any] = []

# Rates are divided, so that sending is to computing as for a model of the size that networks like these are met with:
# a ResNet-18 is 59 times as large as this one, and eight hosts here have two cores. c1 and c2 are gone through on the
# way to the targets, as they were in the paper's trainings.
NETWORKS: dict[str, dict[str, float]] = {
    "c1": {"scale": 200, "speed": 500 / SECONDS},
    "c2": {"scale": 200, "speed": 500 / SECONDS},
    "unpredictable": {"scale": 20, "speed": 1},
    REFERENCE: {"scale": 1, "speed": 1},
}
METHODS: dict[str, dict[str, Any]] = {
    "adaptive": {},
    "allgather-0.01": {"exchange": "topk-allgather", "ratio": 0.01},
    "allgather-0.003": {"exchange": "topk-allgather", "ratio": 0.003},
    "allgather-0.001": {"exchange": "topk-allgather", "ratio": 0.001},
    "allgather-0.01-log4": {"exchange": "topk-allgather", "ratio": 0.01, "values": "log4"},
    "allgather-0.003-log4": {"exchange": "topk-allgather", "ratio": 0.003, "values": "log4"},
    "ddp": {"hook": None},
    "ddp-fp16": {"hook": "fp16"},
    "ddp-powersgd": {"hook": "powersgd"},
    "dense-ring": {"exchange": "dense", "collective": "ring"},
    "star-ring-0.03": {"exchange": "star-topk", "collective": "ring", "ratio": 0.03},
    "star-tree-0.03": {"exchange": "star-topk", "collective": "tree", "ratio": 0.03},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds that a run may last")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--worker")
    arguments = parser.parse_args()
    if arguments.worker:
        train_all(**json.loads(arguments.worker))
        return
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": {}}
    if not arguments.table:
        for seed, network in itertools.product(range(arguments.seeds), arguments.networks.split(",")):
            methods = ["ddp"] if network == REFERENCE else arguments.methods.split(",")
            missing = [method for method in methods if f"{network} {method} {seed}" not in kept["runs"]]
            for first in range(0, len(missing), GROUP):
                for method, result in runs(network, missing[first : first + GROUP], seed, arguments.limit):
                    kept["runs"][f"{network} {method} {seed}"] = result
                    kept |= {"command": "python benchmarks/time_to_accuracy.py", "date": f"{date.today()}"}
                    kept |= describe_machine()
                    write_whole(RESULTS, json.dumps(kept) + "\n")
    text = table(kept["runs"])
    RESULTS.with_suffix(".md").write_text(text)
    print(text, end="")


def runs(network: str, methods: list[str], seed: int, limit: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Train by all methods in turns; give of each its accuracies over time, and what was decided."""
    if not methods:
        return
    shape = NETWORKS[network]
    profile = profiles.schedule(None if network == REFERENCE else network, HOSTS)
    schedule = profile.scaled(shape["scale"]).faster(shape["speed"])
    first = replace(schedule, changes=tuple(change for change in schedule.changes if change.at == 0), repeat=0.0)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, Lab(HOSTS, first, seed=seed) as lab:
        whole = "ddp" if network == REFERENCE else "adaptive"
        config = json.dumps({"methods": methods, "whole": whole, "limit": limit, "seed": seed, "folder": folder})
        over = threading.Event()
        player = threading.Thread(target=play, args=(lab, schedule, Path(folder), over), daemon=True)
        player.start()
        try:
            code = run(lab, [sys.executable, str(Path(__file__).resolve()), "--worker", config])
        finally:
            over.set()
            player.join()
        for method in methods:
            if not (Path(folder) / method).exists():
                continue  # and the exit code says why
            result = json.loads((Path(folder) / method).read_text()) | {"beside": methods}
            print(
                f"{network} {method} {seed}: {result['steps']} steps, accuracy {result['accuracy'][-1][1]:.3f}",
                flush=True,
            )
            yield method, result
        if code:
            raise RuntimeError(f"{network}, seed {seed}: exit code {code}")


def play(lab: Lab, schedule: Schedule, folder: Path, over: threading.Event) -> None:
    """Let the network be what it is at a run's time, from the moment on at which it is asked for, until it is over.

    The hosts ask by a file with the number of the turn and the run's time, and wait for one with that number as name.
    """
    _, place = registry.find(lab.id)
    with suppress(OSError), visit(place) as relay:  # a lab that was ended is no matter
        for turn in itertools.count():
            until(lambda turn=turn: over.is_set() or asked(folder)[0] >= turn)  # type: ignore[misc]
            if over.is_set():
                return
            at, begin, coming = asked(folder)[1], time.monotonic(), deque(schedule.changes)
            while coming and asked(folder)[0] == turn and not over.is_set():
                if coming[0].at <= at + max(0.0, time.monotonic() - begin):
                    ask(relay, {"do": "change", "change": coming.popleft().to_json()})
                else:
                    if not (folder / str(turn)).exists():
                        (folder / str(turn)).touch()
                        begin = time.monotonic()
                    time.sleep(0.005)
            (folder / str(turn)).touch()


def asked(folder: Path) -> tuple[int, float]:
    """The number of the turn that is asked for, and the time of the run whose turn it is."""
    with suppress(FileNotFoundError):
        turn, at = (folder / "asked").read_text().split()
        return int(turn), float(at)
    return -1, 0.0


def write_whole(path: Path, text: str) -> None:
    """So that nobody reads half of it."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(text)
    unfinished.rename(path)


def until(true: Callable[[], bool]) -> None:
    while not true():
        time.sleep(0.005)


def table(runs: dict[str, Any]) -> str:
    """Seconds to each target, the mean over seeds, and how adaptive does."""
    lines = [
        f"| network | method | seeds | steps | {' | '.join(f'{t:.1%}' for t in TARGETS)} | mean | end |",
        "| --- | --- | --- | --- |" + " --- |" * (len(TARGETS) + 2),
    ]
    for network, method in itertools.product(NETWORKS, METHODS):
        seeds = seeds_of(runs, network, method)
        if seeds and network != REFERENCE:
            found = [runs[f"{network} {method} {seed}"] for seed in seeds]
            times = [time_of(found, target) for target in TARGETS]
            ends = [result["accuracy"][-1][1] for result in found if result["steps"] == TRAINING]
            end = f"{statistics.mean(ends):.3f}" if ends else "-"
            steps = statistics.mean(result["steps"] for result in found)
            shown = " | ".join(str(each) for each in (*times, Time.mean(times)))
            lines.append(f"| {network} | {method} | {len(found)} | {steps:.0f} | {shown} | {end} |")
    return "\n".join([*lines, "", *_verdicts(runs), *_beside_dense(runs), ""])


def seeds_of(runs: dict[str, Any], network: str, method: str) -> list[str]:
    return sorted(name.split()[2] for name in runs if name.split()[:2] == [network, method])


def time_of(results: list[dict[str, Any]], *targets: float) -> Time:
    """The mean over runs and targets."""
    return Time.mean([Time.to(each["accuracy"], t, each["limit"]) for each in results for t in targets])


class Time(NamedTuple):
    """Seconds, or more than so many."""

    seconds: float
    is_over: bool = False

    def __str__(self) -> str:
        return f"{'over ' if self.is_over else ''}{self.seconds:.1f}"

    @classmethod
    def to(cls, curve: list[list[float]], target: float, limit: float) -> Time:
        """When the accuracy first reached the target."""
        found = time_to(curve, target)
        return cls(limit, True) if found is None or found > limit else cls(found)

    @classmethod
    def mean(cls, times: list[Time]) -> Time:
        return cls(statistics.mean(t.seconds for t in times), any(t.is_over for t in times))


def _verdicts(runs: dict[str, Any]) -> Iterator[str]:
    """Two lines for each network: adaptive against the fastest of those without four-bit values, and of all.

    Each is compared by the seeds that it has in common with adaptive. What never came to the last target is not among
    the best, whatever its limit was.
    """
    for network in NETWORKS:
        pairs: dict[str, tuple[Time, Time]] = {}
        for method in METHODS:
            seeds = set(seeds_of(runs, network, "adaptive")) & set(seeds_of(runs, network, method))
            arrived = any(time_to(runs[f"{network} {method} {seed}"]["accuracy"], TARGETS[-1]) for seed in seeds)
            if arrived and method != "adaptive":
                both = ([runs[f"{network} {m} {seed}"] for seed in seeds] for m in ("adaptive", method))
                ours, theirs = (time_of(results, *TARGETS) for results in both)
                pairs[method] = ours, theirs
        without = {method: pair for method, pair in pairs.items() if "values" not in METHODS[method]}
        for others, of_whom in ((without, "without log4"), (pairs, "of all")):
            if others:
                best = max(others, key=lambda method: others[method][0].seconds / others[method][1].seconds)
                ours, theirs = others[best]
                bound = "at most " if theirs.is_over and not ours.is_over else ""
                yield (
                    f"- {network}, mean over targets: adaptive {ours} s, the best other {of_whom} ({best}) "
                    f"{theirs} s, {bound}{ours.seconds / theirs.seconds:.3f} times"
                )


def _beside_dense(runs: dict[str, Any]) -> Iterator[str]:
    """One line for each network: what adaptive and dense training come to at their ends, over the seeds of both."""
    for network in NETWORKS:
        pairs = [
            (result["accuracy"][-1][1], runs[f"{REFERENCE} ddp {name.split()[2]}"]["accuracy"][-1][1])
            for name, result in runs.items()
            if name.split()[:2] == [network, "adaptive"] and f"{REFERENCE} ddp {name.split()[2]}" in runs
            if result["steps"] == TRAINING
        ]
        if pairs:
            ours, dense = (statistics.mean(column) for column in zip(*pairs, strict=True))
            yield f"- {network}: after {TRAINING} steps adaptive is at {ours:.2%}, dense training at {dense:.2%}"


def time_to(curve: list[list[float]], target: float) -> float | None:
    """When the accuracy first reached the target, on a line between the looks before and after."""
    for (before, lower, _), (after, higher, _) in itertools.pairwise(curve):
        if higher >= target:
            return before + (after - before) * (target - lower) / (higher - lower)
    return None


# --- on the hosts


def train_all(methods: list[str], whole: str, limit: float, seed: int, folder: str) -> None:
    """By all methods in turns, by one of them to the end.

    What belongs to one is kept until all are: torch's destructors may wait for each other.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data, test = fashion("train"), fashion("t10k")
    warm_up(data)
    training = [Training(m, m == whole, limit, seed, data, test, Path(folder)) for m in methods]
    _kept_to_the_end.extend(training)
    turn = itertools.count()
    while training:
        for each in list(training):
            each.take_turn(next(turn))
            if each.is_over():
                training.remove(each)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # which no group and no model has a say in


def warm_up(data: Examples) -> None:
    """What the first steps of a process cost is nobody's in particular, and would be paid by whose turn comes first."""
    model, (images, labels) = net(), data
    for _ in range(10):
        nn.functional.cross_entropy(model(scaled(images[:BATCH])), labels[:BATCH]).backward()


class Training:
    """One run on this host, and on the first what comes of it."""

    def __init__(
        self, method: str, is_whole: bool, limit: float, seed: int, data: Examples, test: Examples, folder: Path
    ) -> None:
        self.method, self.data, self.test, self.folder = method, data, test, folder
        self.is_whole, self.limit = is_whole, limit
        self.rank, self.group = dist.get_rank(), dist.new_group()
        torch.manual_seed(seed)
        self.model = DistributedDataParallel(net(), bucket_cap_mb=100, process_group=self.group)
        self.comm = attach(self.model, method, folder)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.9, fused=True)
        self.order = torch.Generator().manual_seed(1000 * seed + self.rank)
        self.clock, self.steps = 0.0, 0
        self.pace = 10.0  # steps per second of the last turn
        self.kept = [(0.0, 0, parameters(self.model))]
        self.curve: list[list[float]] = []
        self.plans: list[Any] = []

    def take_turn(self, turn: int) -> None:
        """Make some steps on the network as it is at this run's time."""
        number = torch.tensor(min(max(1, round(TURN * self.pace)), TRAINING - self.steps))
        dist.broadcast(number, 0)
        if self.rank == 0:
            write_whole(self.folder / "asked", f"{turn} {self.clock}")
            until((self.folder / str(turn)).exists)
        if self.comm is not None:
            self.comm.pause()
        dist.barrier(self.group)
        begin = time.monotonic() - self.clock
        for _ in range(int(number)):
            self._step()
            elapsed = time.monotonic() - begin
            if self.rank == 0 and self.steps % KEPT_EVERY == 0:
                self.kept.append((elapsed, self.steps, parameters(self.model)))
            if self.rank == 0 and self.comm is not None:
                self._note_plan(round(elapsed, 2), str(self.comm.plan))
        self.pace = int(number) / (elapsed - self.clock)
        self.clock = elapsed

    def _note_plan(self, elapsed: float, plan: str) -> None:
        if not self.plans or self.plans[-1][1] != plan:
            self.plans.append([elapsed, plan])

    def _step(self) -> None:
        images, labels = self.data
        batch = torch.randint(len(images), (BATCH,), generator=self.order)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.steps)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(scaled(images[batch])), labels[batch]).backward()
        self.optimizer.step()
        self.steps += 1

    def is_over(self) -> bool:
        """Whether it has come to its end, or to the last target, or cannot any more, as the first host sees it."""
        over = torch.zeros(1)
        if self.rank == 0:
            self._draw_curve()
            arrived = time_to(self.curve, TARGETS[-1]) is not None
            has_ended = self.steps == TRAINING
            over[0] = has_ended if self.is_whole else has_ended or arrived or self.clock > self.limit
        dist.broadcast(over, 0)
        if over and self.comm is not None:
            self.comm.close()
        if over and self.rank == 0:
            result = {
                "steps": self.steps,
                "limit": self.limit,
                "accuracy": self.curve,
                "plans": self.plans,
                "decisions": decisions(self.folder / f"{self.method}.records"),
            }
            write_whole(self.folder / self.method, json.dumps(result))
        return bool(over)

    def _draw_curve(self) -> None:
        """Time, accuracy and step of each that was kept since the last time."""
        torch.set_num_threads(2)  # the others wait for us
        self.curve += [look(self.kept, place, self.test) for place in range(len(self.curve), len(self.kept))]
        torch.set_num_threads(1)


def learning_rate(step: int) -> float:
    return RATE * min(1.0, (TRAINING - step) / COOLING)


def look(kept: list[Kept], place: int, test: Examples) -> list[float]:
    """Time, accuracy and step of what was kept there: the accuracy of the mean of the last few."""
    at, step, _ = kept[place]
    model, (images, labels) = net(), test
    last = torch.stack([flat for _, _, flat in kept[max(0, place + 1 - AVERAGED) : place + 1]])
    nn.utils.vector_to_parameters(last.mean(0), model.parameters())
    with torch.no_grad():
        parts = zip(images.split(500), labels.split(500), strict=True)  # which the processor's caches hold
        right = sum(int((model(scaled(some)).argmax(1) == true).sum()) for some, true in parts)
    return [round(at, 2), round(right / len(labels), 4), step]


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


def fashion(part: str) -> Examples:
    loaded = load("fashion-mnist")
    examples = loaded.train if part == "train" else loaded.test
    return examples.inputs, examples.labels


def scaled(pixels: torch.Tensor) -> torch.Tensor:
    """With mean 0 and deviation 1, as floats, only those that are needed: eight hosts have one memory."""
    return (pixels.float() / 255 - 0.286) / 0.353


if __name__ == "__main__":
    main()
