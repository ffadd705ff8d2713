"""How fast decentralised methods converge, and where naive compression stalls: a strongly convex problem and a net.

    python papers/rates.py --steps 2000

Four nodes on a ring. Convex: f_i(x) = |x - b_i|^2 / 2 in 256 dimensions, with noisy gradients and step size 2/(t + 20),
where Tang et al. 2018 and Koloskova et al. 2020 promise the rate of D-PSGD, and with exact gradients and step size 0.1.
Net: 64-32-10 on scikit-learn's digits, batches of 16, step size 0.2; all digits can be fitted, so f* is 0. Writes
rates.json, rates.md and, where there is matplotlib, rates.png beside this file.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

from thinwire.compress.quantize import build
from thinwire.gossip import METHODS
from thinwire.gossip.topology import build as topology_of
from thinwire.link.thread import ThreadLink, ThreadWorld

NODES, NUMEL = 4, 256
FAITHFUL = ("dpsgd none", "dcd int8", "ecd int16", "choco int8", "choco sign", "choco topk:0.1")
NOISY = (*FAITHFUL, "ecd int8")
EXACT = ("dpsgd none", "dcd int8", "choco int8", "naive int4", "naive int6", "naive int8", "naive int16")
SMALL_NET = (*FAITHFUL, "naive int3", "naive int4", "naive int5", "naive int8")
LAYERS = ((32, 64), (32,), (10, 32), (10,))


# --- a strongly convex problem


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


def slope(values: list[float], T: np.ndarray | None = None) -> float:
    """Of the logarithm against the logarithm of T, over the last nine tenths of T's range."""
    T = np.arange(1, len(values) + 1) if T is None else T
    late = T > T[-1] / 10
    return float(np.polyfit(np.log(T[late]), np.log(np.array(values)[late]), 1)[0])


# --- a small net


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


def loss(flat: torch.Tensor, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    sizes = [int(np.prod(shape)) for shape in LAYERS]
    W, b, V, c = (part.view(shape) for part, shape in zip(flat.split(sizes), LAYERS, strict=True))
    return torch.nn.functional.cross_entropy(torch.relu(images @ W.T + b) @ V.T + c, labels)


def first_model(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    parts = [
        torch.randn(shape, generator=generator) * (shape[1] ** -0.5 if len(shape) > 1 else 0.0) for shape in LAYERS
    ]
    return torch.cat([part.flatten() for part in parts])


def learn(run: str, steps: int, seed: int, lr: float = 0.2, batch: int = 16) -> tuple[np.ndarray, list[float]]:
    """Some T from 1 to `steps`, evenly on a logarithmic scale, and f(mean model) after T steps."""
    name, compressor = run.split()
    images, labels = digits()
    graph, T = topology_of("ring", NODES), np.unique(np.geomspace(1, steps, 80).astype(int))

    def program(link: ThreadLink) -> torch.Tensor:
        x = first_model(seed)
        method = METHODS[name](link, graph, build(compressor), x, seed)
        random, seen, wanted = torch.Generator().manual_seed(1000 * seed + link.rank), [], set(T.tolist())
        share_x, share_y = images[link.rank :: NODES], labels[link.rank :: NODES]
        for t in range(1, steps + 1):
            chosen = torch.randint(len(share_y), (batch,), generator=random)
            at = x.clone().requires_grad_()
            x.sub_(torch.autograd.grad(loss(at, share_x[chosen], share_y[chosen]), at)[0], alpha=lr)
            method.step(x)
            if t in wanted:
                seen.append(x.clone())
        return torch.stack(seen)

    models = torch.stack(ThreadWorld(NODES).run(program)).mean(0)
    with torch.no_grad():
        return T, [float(loss(model, images, labels)) for model in models]


# --- what is shown


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--net-steps", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    steps, seed, here = arguments.steps, arguments.seed, Path(__file__).parent
    noisy = {run: descend(run, steps, lambda t: 2 / (t + 20), 1.0, seed) for run in NOISY}
    exact = {run: descend(run, 400, lambda t: 0.1, 0.0, seed) for run in EXACT}
    curves = {run: learn(run, arguments.net_steps, seed) for run in SMALL_NET}
    T, net = curves["dpsgd none"][0], {run: values for run, (_, values) in curves.items()}
    lines = [
        "# Rates",
        "",
        f"`python papers/rates.py --steps {steps} --net-steps {arguments.net_steps} --seed {seed}`, "
        f"torch {torch.__version__}, {platform.machine()}.",
        "",
        "Strongly convex, noisy gradients, step size 2 / (t + 20): slope of log(f - f*) against log T, and f - f* at "
        "the end.",
        "",
        "| run | slope | at the end |",
        "| --- | --- | --- |",
        *(f"| {run} | {slope(values):.3f} | {values[-1]:.3g} |" for run, values in noisy.items()),
        "",
        "The same with exact gradients, step size 0.1: mean of f - f* over steps 300 to 400.",
        "",
        "| run | floor |",
        "| --- | --- |",
        *(f"| {run} | {np.mean(values[300:]):.3g} |" for run, values in exact.items()),
        "",
        "A small net: slope of log f against log T, and f at the end (mean over the last tenth of log T).",
        "",
        "| run | slope | at the end |",
        "| --- | --- | --- |",
        *(f"| {run} | {slope(values, T):.3f} | {at_the_end(values):.3g} |" for run, values in net.items()),
        "",
    ]
    (here / "rates.md").write_text("\n".join(lines))
    thinned: dict[str, Any] = {
        name: {run: values[:: max(1, len(values) // 100)] for run, values in shown.items()}
        for name, shown in (("noisy", noisy), ("exact", exact))
    }
    (here / "rates.json").write_text(json.dumps({**thinned, "net": net, "net_T": T.tolist()}))
    draw(noisy, exact, T, net, here / "rates.png")


def at_the_end(values: list[float]) -> float:
    return float(np.mean(values[-len(values) // 10 :]))


def draw(
    noisy: dict[str, list[float]],
    exact: dict[str, list[float]],
    T: np.ndarray,
    net: dict[str, list[float]],
    path: Path,
) -> None:
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4))
    for run, values in noisy.items():
        left.loglog(range(1, len(values) + 1), values, label=run, linewidth=1)
    for run, values in exact.items():
        middle.semilogy(np.maximum(values, 1e-16), label=run, linewidth=1)
    for run, values in net.items():
        right.loglog(T, values, label=run, linewidth=1)
    left.set(xlabel="T", ylabel="f - f*", title="convex, noisy gradients, step size ~ 1/t")
    middle.set(xlabel="T", title="convex, exact gradients, step size 0.1")
    right.set(xlabel="T", title="a small net on digits")
    for axes in (left, middle, right):
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
