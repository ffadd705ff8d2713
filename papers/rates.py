"""How fast decentralised methods converge on a strongly convex problem, and where naive compression stalls.

    python papers/rates.py --steps 3000

Four nodes on a ring, f_i(x) = |x - b_i|^2 / 2 in 256 dimensions. Left: noisy gradients, step size 2 / (t + 20), where
Tang et al. 2018 and Koloskova et al. 2020 promise the rate of D-PSGD. Right: exact gradients, step size 0.1. Writes
rates.json, rates.md and, where there is matplotlib, rates.png beside this file.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from thinwire.compress.quantize import build
from thinwire.gossip import METHODS
from thinwire.gossip.topology import build as topology_of
from thinwire.link.thread import ThreadLink, ThreadWorld

NODES, NUMEL = 4, 256
NOISY = ("dpsgd none", "dcd int8", "ecd int16", "choco int8", "choco sign", "choco topk:0.1", "ecd int8")
EXACT = ("dpsgd none", "dcd int8", "choco int8", "naive int4", "naive int6", "naive int8", "naive int16")


def descend(run: str, steps: int, lr: Callable[[int], float], noise: float, seed: int) -> list[float]:
    """f(mean model) - f* after every step."""
    name, compressor = run.split()
    b = 3 + np.random.default_rng(seed).standard_normal((NODES, NUMEL))
    graph = topology_of("ring", NODES)

    def program(link: ThreadLink) -> np.ndarray:
        x = torch.zeros(NUMEL, dtype=torch.float64)
        method = METHODS[name](link, graph, build(compressor), x, seed)
        random, seen = np.random.default_rng([seed, link.rank]), []
        for t in range(steps):
            x += torch.from_numpy(-lr(t) * (x.numpy() - b[link.rank] + noise * random.standard_normal(NUMEL)))
            method.step(x)
            seen.append(x.numpy().copy())
        return np.stack(seen)

    models = np.stack(ThreadWorld(NODES).run(program))
    return (((models.mean(0) - b.mean(0)) ** 2).sum(1) / 2).tolist()


def slope(values: list[float]) -> float:
    T = np.arange(1, len(values) + 1)
    late = T > len(T) / 10
    return float(np.polyfit(np.log(T[late]), np.log(np.array(values)[late]), 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    steps, seed, here = arguments.steps, arguments.seed, Path(__file__).parent
    noisy = {run: descend(run, steps, lambda t: 2 / (t + 20), 1.0, seed) for run in NOISY}
    exact = {run: descend(run, 400, lambda t: 0.1, 0.0, seed) for run in EXACT}
    lines = [
        "# Rates on a strongly convex problem",
        "",
        f"`python papers/rates.py --steps {steps} --seed {seed}`, torch {torch.__version__}, {platform.machine()}.",
        "",
        "Noisy gradients, step size 2 / (t + 20): slope of log(f - f*) against log T, and f - f* at the end.",
        "",
        "| run | slope | at the end |",
        "| --- | --- | --- |",
        *(f"| {run} | {slope(values):.3f} | {values[-1]:.3g} |" for run, values in noisy.items()),
        "",
        "Exact gradients, step size 0.1: mean of f - f* over steps 300 to 400.",
        "",
        "| run | floor |",
        "| --- | --- |",
        *(f"| {run} | {np.mean(values[300:]):.3g} |" for run, values in exact.items()),
        "",
    ]
    (here / "rates.md").write_text("\n".join(lines))
    thinned = {name: {run: values[:: max(1, len(values) // 100)] for run, values in curves.items()}
               for name, curves in (("noisy", noisy), ("exact", exact))}  # fmt: skip
    (here / "rates.json").write_text(json.dumps(thinned))
    draw(noisy, exact, here / "rates.png")


def draw(noisy: dict[str, list[float]], exact: dict[str, list[float]], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for run, values in noisy.items():
        left.loglog(range(1, len(values) + 1), values, label=run, linewidth=1)
    for run, values in exact.items():
        right.semilogy(np.maximum(values, 1e-16), label=run, linewidth=1)
    left.set(xlabel="T", ylabel="f - f*", title="noisy gradients, step size ~ 1/t")
    right.set(xlabel="T", title="exact gradients, step size 0.1")
    for axes in (left, right):
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
