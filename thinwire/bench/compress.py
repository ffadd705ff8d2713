"""What one step of top-k compression costs on the processor: compensate, choose exactly, encode, update the error.

Compared, in the same run, with what the published code does (add the residual, torch.topk of the magnitudes, gather,
scatter), and with `r.add_(x)`, the least that any error feedback can do.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from thinwire.bench.machine import describe_machine
from thinwire.compress.base import take_entries
from thinwire.compress.coding import Coding
from thinwire.compress.topk import TopK
from thinwire.train.layout import Layout
from thinwire.train.memory import ErrorMemory

GROWTH = (10**5, 10**6, 10**7, 10**8)


class OurStep:
    """The product's own path, from the flat gradient to the encoded message and the new error."""

    def __init__(self, numel: int, ratio: float) -> None:
        self._memory = ErrorMemory(Layout.of([("flat", nn.Parameter(torch.empty(numel)))]))
        self._ratio = ratio
        self._selector = TopK()
        self._coding = Coding(numel, self._selector.count(numel, ratio), torch.float32)
        self.message = torch.empty(self._coding.nbytes, dtype=torch.uint8)

    def __call__(self, grad: torch.Tensor) -> None:
        fed = self._memory.feed({"flat": grad})
        sent = take_entries(self._selector, fed, self._ratio, step=0)
        self._coding.encode(sent, self.message)
        self._memory.commit(nothing_left=False)


class PublishedStep:
    """The same by torch.topk, as the published code of the papers does it."""

    def __init__(self, numel: int, ratio: float) -> None:
        self._residual = torch.zeros(numel)
        self._k = TopK().count(numel, ratio)

    def __call__(self, grad: torch.Tensor) -> None:
        self._residual.add_(grad)
        indices = torch.topk(self._residual.abs(), self._k, sorted=False).indices
        self.message = self._residual[indices], indices
        self._residual[indices] = 0


class Add:
    """r.add_(x)"""

    def __init__(self, numel: int) -> None:
        self._residual = torch.zeros(numel)

    def __call__(self, grad: torch.Tensor) -> None:
        self._residual.add_(grad)


def measure(numel: int, ratio: float, threads: int = 1, repeats: int = 9, seed: int = 0) -> dict[str, float]:
    """Median milliseconds of each, taken in turns on the same fresh gradients."""
    steps: dict[str, Callable[[torch.Tensor], None]] = {
        "ours_ms": OurStep(numel, ratio),
        "torch_topk_ms": PublishedStep(numel, ratio),
        "add_ms": Add(numel),
    }
    times = _times(steps, numel, threads, repeats, seed)
    times["speedup"] = times["torch_topk_ms"] / times["ours_ms"]
    times["over_add"] = times["ours_ms"] / times["add_ms"]
    return times


def growth(ratio: float, threads: int = 1, repeats: int = 5, seed: int = 0) -> dict[int, float]:
    """Nanoseconds per element of our step, by number of elements."""
    return {
        numel: _times({"ours": OurStep(numel, ratio)}, numel, threads, repeats, seed)["ours"] * 1e6 / numel
        for numel in GROWTH
    }


def _times(
    steps: dict[str, Callable[[torch.Tensor], None]], numel: int, threads: int, repeats: int, seed: int
) -> dict[str, float]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(seed)
    grad = torch.empty(numel)
    times: dict[str, list[float]] = {name: [] for name in steps}
    warm_up = 3  # kernels compile, buffers get their pages, the shortlist finds its threshold
    for i in range(warm_up + repeats):
        torch.randn(numel, generator=generator, out=grad)
        for name, step in steps.items():
            start = time.perf_counter()
            step(grad)
            if i >= warm_up:
                times[name].append((time.perf_counter() - start) * 1e3)
    torch.set_num_threads(before)
    return {name: statistics.median(taken) for name, taken in times.items()}


def main(numel: int, ratio: float, threads: int, repeats: int, seed: int, as_json: bool) -> None:
    """Print the figures, and with `as_json` all of them again as one JSON line at the end."""
    console = Console()
    figures = measure(numel, ratio, threads, repeats, seed)
    per_element = growth(ratio, threads, seed=seed)
    table = Table(title=f"one step of top-k, {numel:,} float32, ratio {ratio:g}, {threads} thread(s)")
    for column in ("", "ms", "times r.add_(x)"):
        table.add_column(column, justify="left" if not column else "right")
    for label, name in (("thinwire", "ours_ms"), ("torch.topk path", "torch_topk_ms"), ("r.add_(x)", "add_ms")):
        table.add_row(label, f"{figures[name]:.2f}", f"{figures[name] / figures['add_ms']:.2f}")
    console.print(table)
    lines = Table(title="growth of thinwire's step")
    for column in ("elements", "ms", "ns per element"):
        lines.add_column(column, justify="right")
    for n, ns in per_element.items():
        lines.add_row(f"{n:,}", f"{ns * n / 1e6:.3f}", f"{ns:.3f}")
    console.print(lines)
    if as_json:
        setting = {"numel": numel, "ratio": ratio, "threads": threads, "repeats": repeats, "seed": seed}
        ns_per_element = {str(n): _four_digits(ns) for n, ns in per_element.items()}
        rounded = {name: _four_digits(value) for name, value in figures.items()}
        print(json.dumps({**setting, **rounded, "ns_per_element": ns_per_element, **describe_machine()}))


def _four_digits(value: float) -> float:
    """Not four decimals: of few entries an addition takes some microseconds, and ratios of figures have to stay so."""
    return float(f"{value:.4g}")
