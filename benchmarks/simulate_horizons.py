"""How far ahead to plan: rules for the ratio on changing networks, simulated without noise and without our own cost.

    python benchmarks/simulate_horizons.py                   what is not yet in the results, some 25 s a run
    python benchmarks/simulate_horizons.py --networks c1,unpredictable --rules "200 steps;300 steps" --seeds 4

Eight ranks train the CNN of time_to_accuracy.py in one process, with error feedback and values rounded as they are on
the wire. A clock counts what each step would take by our prices, so a rule is judged by what it chooses alone. Prints
seconds to accuracy, the mean over targets and over seeds, of each seed, since from one to the next they differ by more
than rules do, and the accuracy at the end of the training.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from typing import Any

import numpy as np
import time_to_accuracy as real
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from thinwire.bench.machine import describe_machine
from thinwire.compress.values import value_code
from thinwire.control.adaptive import ROOM, Adaptive
from thinwire.control.computing import compress_seconds
from thinwire.control.gain import GainCurve
from thinwire.control.learning import delay, safe_gain
from thinwire.control.prices import Prices, Way
from thinwire.control.ratios import two_digit_ratios
from thinwire.control.view import Floats
from thinwire.lab import profiles
from thinwire.types import Network

RESULTS = real.RESULTS.with_name("horizons.json")
RATIOS = two_digit_ratios(*Adaptive().ratios)
FEW = np.geomspace(RATIOS[0], RATIOS[-1], 9)  # between which prices are nearly straight lines
EXCHANGE = "topk-allgather"
WAYS = [Way(EXCHANGE, collective, values=Adaptive().values) for collective in ("direct", "halving", "ring")]
REST, SLOWNESS, BEYOND = 0.0205, 5.0, 1.0  # as they are in the lab with eight hosts on two cores
SAMPLED = 9  # one of so many entries tells where the largest begin
DECIDED_EVERY = 10  # steps
NEVER = 90.0  # seconds that a target counts for which was not reached

# What to plan for: seconds or steps, from the steps made and the seconds gone.
RULES: dict[str, tuple[str, Callable[[int, float], float]]] = {
    "100 steps": ("steps", lambda *_: 100),
    "200 steps": ("steps", lambda *_: 200),
    "300 steps": ("steps", lambda *_: 300),
    "400 steps": ("steps", lambda *_: 400),
    "600 steps": ("steps", lambda *_: 600),
    "10 seconds": ("seconds", lambda *_: 10.0),
    "always 0.01": ("ratio", lambda *_: 0.01),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="c1,c2,unpredictable")
    parser.add_argument("--rules", default=";".join(RULES), help="separated by ;")
    parser.add_argument("--seeds", type=int, default=8)
    arguments = parser.parse_args()
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": {}}
    asked = list(itertools.product(arguments.networks.split(","), arguments.rules.split(";")))
    missing = [
        (network, rule, seed)
        for seed in range(arguments.seeds)
        for network, rule in asked
        if named(network, rule, seed) not in kept["runs"]
    ]
    with ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for run, result in zip(missing, pool.map(simulated, *zip(*missing, strict=True)), strict=True):
            kept["runs"][named(*run)] = result
            kept |= {"command": "python benchmarks/simulate_horizons.py", "date": f"{date.today()}"}
            kept |= describe_machine()
            real.write_whole(RESULTS, json.dumps(kept, indent=1) + "\n")
    for network, rule in asked:
        found = [kept["runs"][named(network, rule, seed)] for seed in range(arguments.seeds)]
        seconds = [statistics.mean(result["seconds"]) for result in found]
        each = ", ".join(f"{number:.1f}" for number in seconds)
        end = statistics.mean(result["end"] for result in found)
        print(f"{network:<14} {rule:<12} {statistics.mean(seconds):5.1f} s ({each}) {end:.2%}")


def named(network: str, rule: str, seed: int) -> str:
    return f"{network}, {rule}, {seed}"


def simulated(network: str, rule: str, seed: int) -> dict[str, Any]:
    curve = Simulation(network, rule, seed).curve()
    return {"seconds": [time_to(curve, target) for target in real.TARGETS], "end": curve[-1][1]}


def time_to(curve: list[list[float]], target: float) -> float:
    return round(real.Time.to(curve, target, NEVER).seconds, 2)


def rounded(x: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """What comes of the entries from this threshold on where they are sent, and 0 elsewhere."""
    chosen = (x.abs() >= threshold).nonzero().flatten()
    code = value_code(Adaptive().values, x.dtype, len(x), len(chosen))
    wire = torch.zeros(code.nbytes(len(chosen)), dtype=torch.uint8)
    code.encode(x[chosen], wire)
    return torch.zeros_like(x).index_copy_(0, chosen, code.decode(wire, len(chosen)))


class Simulation:
    """One training by all ranks, on a clock of its own."""

    def __init__(self, network: str, rule: str, seed: int) -> None:
        shape = real.NETWORKS[network]
        profile = profiles.schedule(network, real.HOSTS).scaled(shape["scale"]).faster(shape["speed"])
        self.changes = sorted(profile.changes, key=lambda change: change.at)
        self.rule = RULES[rule]
        torch.manual_seed(seed)
        self.model = real.net()
        self.names = [name for name, _ in self.model.named_parameters()]
        self.shapes = [p.shape for p in self.model.parameters()]
        self.flat = real.parameters(self.model)
        self.momentum, self.error = torch.zeros_like(self.flat), torch.zeros(real.HOSTS, len(self.flat))
        self.orders = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(real.HOSTS)]
        self.images, self.labels = real.fashion("train")
        self.prices = Prices(len(self.flat), 4, real.HOSTS, WAYS)
        self.gradients = vmap(grad(self._loss), in_dims=(None, 0, 0))
        self.gains, self.ratio = GainCurve(), 0.01
        self.clock, self.steps = 0.0, 0
        self.priced: dict[Network, Floats] = {}

    def curve(self) -> list[list[float]]:
        """Train as in the lab, to the end; time, accuracy and step of what was kept on the way."""
        kept = [(0.0, 0, self.flat.clone())]
        while self.steps < real.TRAINING:
            self._step()
            if self.steps % real.KEPT_EVERY == 0:
                kept.append((self.clock, self.steps, self.flat.clone()))
        test = real.fashion("t10k")
        return [real.look(kept, place, test) for place in range(len(kept))]

    def _step(self) -> None:
        seconds = self._seconds(self._network())
        if self.steps % DECIDED_EVERY == 0:
            self.ratio = self._choose(seconds)
        batch = torch.stack([torch.randint(len(self.images), (real.BATCH,), generator=order) for order in self.orders])
        found = self.gradients(self._parameters(self.flat), real.scaled(self.images[batch]), self.labels[batch])
        x = torch.cat([found[name].reshape(real.HOSTS, -1) for name in self.names], 1) + self.error
        sampled = x[:, self.steps % SAMPLED :: SAMPLED].abs()
        largest = sampled.topk(max(1, round(self.ratio * sampled.shape[1])), dim=1, sorted=False).values
        sent = torch.stack([rounded(row, threshold) for row, threshold in zip(x, largest.amin(1), strict=True)])
        self.error = x - sent
        self.gains = self.gains.with_measured(
            EXCHANGE, self.ratio, 1 - float(self.error.square().sum() / x.square().sum())
        )
        self.momentum.mul_(0.9).add_(sent.mean(0))
        self.flat.sub_(self.momentum, alpha=real.learning_rate(self.steps))
        self.steps += 1
        self.clock += float(np.interp(self.ratio, RATIOS, seconds))

    def _choose(self, seconds: Floats) -> float:
        """The ratio at which most is learned in the time, or as much in the least time, unless this one is near it."""
        kind, rule = self.rule
        planned = rule(self.steps, self.clock)
        if kind == "ratio":
            return planned
        gains = np.array(self.gains.gains(EXCHANGE, tuple(RATIOS.tolist())))
        delays = np.array([delay(EXCHANGE, gain) for gain in gains])
        learned = np.maximum(planned / seconds - delays, 1e-9)
        costs = seconds * (1 + delays / planned) if kind == "steps" else 1 / learned
        costs[gains < ROOM * safe_gain(EXCHANGE)] = np.inf
        best, now = int(costs.argmin()), int(np.abs(RATIOS - self.ratio).argmin())
        return self.ratio if costs[now] * (1 - Adaptive().margin) <= costs[best] else float(RATIOS[best])

    def _seconds(self, network: Network) -> Floats:
        """Of a step at every ratio, by the way that is the fastest there."""
        if network not in self.priced:
            rows = [np.interp(RATIOS, FEW, row) for row in self.prices.table(network, FEW.tolist())]
            computing = compress_seconds(WAYS[0], RATIOS, self.prices.numel, real.HOSTS)
            self.priced[network] = REST + SLOWNESS * computing + BEYOND * np.min(rows, axis=0)
        return self.priced[network]

    def _network(self) -> Network:
        values: dict[str, float] = {}
        for change in itertools.takewhile(lambda change: change.at <= self.clock, self.changes):
            values |= {key: float(change.values[key]) for key in ("latency", "up") if key in change.values}
        return Network(alpha=values["latency"], beta=1 / values["up"])

    def _loss(self, parameters: dict[str, torch.Tensor], images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(functional_call(self.model, parameters, (images,)), labels)

    def _parameters(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = flat.split([shape.numel() for shape in self.shapes])
        return {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}


if __name__ == "__main__":
    main()
