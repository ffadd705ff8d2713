"""Does the controller choose right? Real hosts in the lab, a grid of networks and gradient sizes.

In every cell the network changes to a new latency, a new rate or both while an adaptive run goes on. After how many
steps do the ranks agree on what they will hold what has changed to be, and how far is that off? Then every way that
could be the best there is measured, in turns, and the one that was chosen is compared with the fastest:
    regret = measured seconds of the chosen way / measured seconds of the fastest way - 1.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.bench.machine import describe_machine
from thinwire.collectives import ALL_GATHERS
from thinwire.control.adaptive import Adaptive
from thinwire.control.prices import Prices, Way, way_of
from thinwire.lab import registry
from thinwire.lab.lab import Lab, ask, visit
from thinwire.lab.network import Change
from thinwire.lab.run import run
from thinwire.lab.schedule import Schedule
from thinwire.lab.settings import read_values
from thinwire.link.base import Link
from thinwire.link.tcp import TcpLink
from thinwire.train.sync import Synchronizer
from thinwire.types import Moment, Network

HOSTS = (4, 8)
LATENCIES = ("1ms", "5ms", "20ms")
RATES = ("20mbit", "60mbit", "200mbit")  # where eight hosts have 500 each, the lab alone needs one core of two
SIZES = (100_000, 1_000_000, 4_000_000)
STEPS = 60
REPEATS, LEAST_SECONDS = 10, 8.0  # of each way, and for how long at least: on shared cores short steps differ much
COMPUTE_SECONDS = 0.03  # what a training step does besides
WORTH_MEASURING = 2.5  # times the least price: what is beyond cannot be the fastest
CLOSE = 0.15
LAST = 10  # steps of a cell, in which all has settled
STAYING = 10  # steps after a number has come near the truth: in most of them it still is, or it has only passed by


def main(hosts: Sequence[int], sizes: Sequence[int], ratio: float, as_json: bool) -> None:
    """Measure every cell, print one line for each, and the summary as one JSON line at the end."""
    cells: list[dict[str, Any]] = []
    for number in hosts:
        # From the first on, or TCP would remember for minutes how short a round trip was before there was a network.
        first = Schedule(name="regret", changes=(_change(*_walk()[0]),))
        with tempfile.TemporaryDirectory() as folder, Lab(number, first) as lab:
            out = Path(folder) / "cells.jsonl"
            config = json.dumps({"sizes": list(sizes), "ratio": ratio, "out": str(out)})
            if run(lab, [sys.executable, "-m", "thinwire.bench.regret", config]) != 0:
                raise RuntimeError("a host failed; its error is above.")
            cells += [json.loads(line) for line in out.read_text().splitlines()]
    summary = summarise(cells)
    if as_json:
        print(json.dumps({**summary, "ratio": ratio, "each": cells, **describe_machine()}))
    else:
        for name, value in summary.items():
            print(f"{name:<24} {'-' if value is None else f'{value:.4g}'}")


def summarise(cells: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """The figures that matter, over all cells; None where no cell has any."""
    regrets = sorted(cell["regret"] for cell in cells)

    def middle(key: str) -> float | None:
        known = [cell[key] for cell in cells if cell[key] is not None]
        return round(statistics.median(known), 4) if known else None

    return {
        "median_regret": round(statistics.median(regrets), 4),
        "p90_regret": round(regrets[math.ceil(0.9 * len(regrets)) - 1], 4),
        "max_regret": round(regrets[-1], 4),
        "right": sum(regret <= 0.1 for regret in regrets),
        "cells": len(cells),
        "alpha_error": middle("alpha_error"),
        "beta_error": middle("beta_error"),
        "prediction_error": middle("prediction_error"),
        "alpha_steps": middle("alpha_steps"),
        "beta_steps": middle("beta_steps"),
        "never_near": sum(max(cell["alpha_steps"] or 0, cell["beta_steps"] or 0) > STEPS for cell in cells),
    }


# --- on the hosts


def work(sizes: Sequence[int], ratio: float, out: str) -> None:
    """What every host runs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    link = TcpLink()
    for size in sizes:
        bench = _Bench(link, size, ratio)
        for latency, rate in _walk():
            cell = bench.cell(latency, rate)
            if link.rank == 0:
                with Path(out).open("a") as file:
                    file.write(json.dumps(cell) + "\n")
                print(_line(cell), flush=True)
    link.close()
    dist.destroy_process_group()


def _walk() -> list[tuple[str, str]]:
    """All networks, in an order in which latency and rate change alone and together."""
    grid = list(itertools.product(LATENCIES, RATES))
    return grid[::2] + grid[1::2]


class _Bench:
    def __init__(self, link: Link, size: int, ratio: float) -> None:
        self._link, self._ratio = link, ratio
        self._model = nn.Linear(size, 1, bias=False)
        self._gradient = torch.randn(size, generator=torch.Generator().manual_seed(link.rank)).view(1, -1)
        self._adaptive: Synchronizer | None = None
        self._truth: Network | None = None  # in the cell before
        self._ways = Adaptive().ways(link.world_size, has_group=True)
        self._prices = Prices(size, 4, link.world_size, self._ways)
        self._fixed: dict[Way, Synchronizer] = {}

    def cell(self, latency: str, rate: str) -> dict[str, Any]:
        truth = self._set_network(latency, rate)
        before, self._truth = self._truth or truth, truth  # the first is no change: the survey finds it
        adaptive = self._going_on()
        trace = [self._step(adaptive) for _ in range(STEPS)]
        network = _last_of(trace)
        chosen, measured = way_of(adaptive.plan), self._measure(truth, way_of(adaptive.plan))
        best = min(measured, key=lambda way: measured[way])
        predicted = [step["predicted"] for step in trace[-LAST:] if step["predicted"] is not None]
        last = statistics.median(step["seconds"] for step in trace[-LAST:])
        return {
            "hosts": self._link.world_size,
            "size": self._prices.numel,
            "latency": latency,
            "rate": rate,
            "chosen": str(chosen),
            "best": str(best),
            "regret": round(measured[chosen] / measured[best] - 1, 4),
            "alpha_error": None if network is None else round(abs(network.alpha / truth.alpha - 1), 4),
            "beta_error": None if network is None else round(abs(network.beta / truth.beta - 1), 4),
            "prediction_error": round(abs(statistics.median(predicted) / last - 1), 4) if predicted else None,
            "alpha_steps": _steps_to(truth.alpha, [s["alpha"] for s in trace], before.alpha),
            "beta_steps": _steps_to(truth.beta, [s["beta"] for s in trace], before.beta),
            "measured_ms": {str(way): round(seconds * 1e3, 3) for way, seconds in measured.items()},
            "priced_ms": {
                str(way): round(self._prices.seconds(way, self._ratio, truth) * 1e3, 3) for way in self._ways
            },
        }

    def _going_on(self) -> Synchronizer:
        """The adaptive run, which knows nothing of the time in which others were measured."""
        if self._adaptive is None:
            controller = Adaptive(objective="seconds", ratios=(self._ratio, self._ratio))
            self._adaptive = Synchronizer(self._model, controller, link=self._link, broadcast_parameters=False)
        self._adaptive.pause()
        return self._adaptive

    def _set_network(self, latency: str, rate: str) -> Network:
        if self._link.rank == 0:
            _, folder = registry.find(os.environ["THINWIRE_LAB"])
            with visit(folder) as relay:
                ask(relay, {"do": "change", "change": _change(latency, rate).to_json()})
        self._meet()
        return _truth(latency, rate)

    def _step(self, sync: Synchronizer) -> dict[str, Any]:
        time.sleep(COMPUTE_SECONDS)
        for parameter in self._model.parameters():
            parameter.grad = self._gradient.clone()
        sync.average_gradients()
        assert sync.last is not None
        network, predicted = sync.network, sync.last.predicted_seconds
        return {
            "alpha": network.alpha if network else None,
            "beta": network.beta if network else None,
            "seconds": sync.last.step_seconds,
            "predicted": predicted if predicted == predicted else None,
        }

    def _measure(self, truth: Network, chosen: Way) -> dict[Way, float]:
        """The seconds of every way that could be the fastest, in turns, as the median over rounds."""
        priced = {way: self._prices.seconds(way, self._ratio, truth) for way in self._ways}
        limit = WORTH_MEASURING * min(priced.values())
        rivals = [way for way in self._ways if priced[way] <= limit or way == chosen]
        seconds: dict[Way, list[float]] = {way: [] for way in rivals}
        begin, rounds = time.monotonic(), 0
        while rounds < REPEATS or self._meet(time.monotonic() - begin)[0] < LEAST_SECONDS:
            for way in rivals:
                seconds[way].append(self._time(self._fixed_at(way)))
            rounds += 1
        return {way: statistics.median(times[1:]) for way, times in seconds.items()}

    def _fixed_at(self, way: Way) -> Synchronizer:
        if way not in self._fixed:
            self._fixed[way] = Synchronizer(
                self._model,
                way.exchange,
                ratio=None if way.exchange == "dense" else self._ratio,
                collective=way.collective,
                broadcast=way.broadcast,
                values=way.values,
                link=self._link,
                broadcast_parameters=False,
            )
        return self._fixed[way]

    def _time(self, sync: Synchronizer) -> float:
        """From a common start to the last rank's end."""
        for parameter in self._model.parameters():
            parameter.grad = self._gradient.clone()
        self._meet()
        sync.average_gradients()
        assert sync.last is not None
        return max(self._meet(sync.last.seconds))

    def _meet(self, number: float = 0.0) -> list[float]:
        """Wait for all ranks; give everyone's number."""
        numbers = torch.zeros(self._link.world_size, dtype=torch.float64)
        numbers[self._link.rank] = number
        self._link.moment = Moment(plan="bench")
        return [float(n) for n in ALL_GATHERS["direct"].run(self._link, numbers).tolist()]


def _last_of(trace: Sequence[dict[str, Any]]) -> Network | None:
    """What latency and rate were held to be in the last steps."""
    known = [step for step in trace[-LAST:] if step["alpha"] and step["beta"]]
    if not known:
        return None
    alpha, beta = (statistics.median(step[name] for step in known) for name in ("alpha", "beta"))
    return Network(alpha=alpha, beta=beta)


def _steps_to(truth: float, trace: Sequence[float | None], before: float) -> int | None:
    """After how many steps a number had come close to what it should be, to stay there; None if that is as before.

    One more than there were if it never had. Where nobody can see a rate, as where messages are single packets, it may
    never be close.
    """
    if before == truth:
        return None
    near = [seen is not None and abs(seen / truth - 1) <= CLOSE for seen in trace]
    arrivals = (step for step, is_near in enumerate(near, start=1) if is_near and _mostly(near[step : step + STAYING]))
    return next(arrivals, len(trace) + 1)


def _mostly(those: Sequence[bool]) -> bool:
    return 2 * sum(those) > len(those)


def _line(cell: dict[str, Any]) -> str:
    return (
        f"{cell['hosts']} hosts {cell['size']:>9,} {cell['latency']:>5} {cell['rate']:>8}: {cell['chosen']:<44} "
        f"regret {cell['regret']:6.1%}  off: alpha {_share(cell['alpha_error'])}, "
        f"beta {_share(cell['beta_error'])}, prediction {_share(cell['prediction_error'])}  "
        f"steps to the truth: alpha {_steps(cell['alpha_steps'])}, beta {_steps(cell['beta_steps'])}"
    )


def _share(error: float | None) -> str:
    return f"{'-':>5}" if error is None else f"{error:5.1%}"


def _steps(number: int | None) -> str:
    """
    >>> _steps(7), _steps(STEPS + 1), _steps(None)
    ('7', 'never', '-')
    """
    return "-" if number is None else str(number) if number <= STEPS else "never"


def _change(latency: str, rate: str) -> Change:
    return Change(values=read_values({"latency": latency, "rate": rate}))


def _truth(latency: str, rate: str) -> Network:
    values = _change(latency, rate).values
    return Network(alpha=float(values["latency"]), beta=1 / float(values["up"]))


if __name__ == "__main__":
    work(**json.loads(sys.argv[1]))
