"""Before the first step: run what numba compiles on first use, so that no step has to wait for it.

On a machine that has never run thinwire, compiling takes some ten seconds; it is then kept on disk. In a first step it
would look like compression that takes that long, and a controller would not compress again for a while. What is fixed
is priced too, as soon as the network is known.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time

import torch
from torch import nn

from thinwire.compress import base
from thinwire.compress.base import has_kernels, multiply
from thinwire.compress.histogram import Histogram
from thinwire.compress.quantize import Compressor, Draw
from thinwire.control import prices
from thinwire.control.prices import Prices, ways
from thinwire.exchange import TOLD, build, complete, values_for
from thinwire.link.base import Link
from thinwire.link.thread import ThreadWorld
from thinwire.train.layout import Layout
from thinwire.train.memory import ErrorMemory
from thinwire.types import Network, Told

ENTRIES = 1 << 13  # more than are looked at whole
RATIOS = (0.01, 0.1)  # at which indices are coded in different ways
STEPS = 2  # the second knows a threshold from the first
NOTICEABLE_SECONDS = 1.0

log = logging.getLogger("thinwire")


@functools.cache
def rehearse(exchanges: tuple[str, ...], values: str, dtype: torch.dtype) -> None:
    """Price exchanges, and run those that may follow on numbers of this type. Once per process."""
    numbers = torch.ones(ENTRIES, dtype=dtype)
    if not has_kernels(numbers):
        return
    begin, before = time.monotonic(), _times_compiled()
    Prices(ENTRIES, 4, 2, ways(2, has_group=False)).table(Network(alpha=1e-3, beta=1e-9), RATIOS)
    Histogram.of(numbers)
    multiply(numbers, 0.5)
    ThreadWorld(2).run(lambda link: _exchange(link, exchanges, values, dtype))
    if time.monotonic() - begin > NOTICEABLE_SECONDS and _times_compiled() > before:
        log.info("compiled what computes in %.1f s; it is kept for the next time", time.monotonic() - begin)


def _times_compiled() -> int:
    """How often numba has compiled something in this process, without what it only loaded from disk."""
    functions = [*vars(base.kernels).values(), prices._compiled()]
    return sum(sum(each.stats.cache_misses.values()) for each in functions if hasattr(each, "stats"))


def rehearse_compressor(compressor: Compressor, dtype: torch.dtype) -> None:
    """Compress a small vector and undo it, for a gossip whose neighbours would wait for the first."""
    compressor.apply(torch.linspace(-1, 1, ENTRIES, dtype=dtype), Draw(seed=0, step=0, rank=0))


def _exchange(link: Link, exchanges: tuple[str, ...], values: str, dtype: torch.dtype) -> None:
    """A small gradient, between two threads."""
    layout = Layout.of([("", nn.Parameter(torch.linspace(-1, 1, ENTRIES, dtype=dtype)))])
    out = torch.zeros(ENTRIES + TOLD, dtype=dtype)
    for name, ratio in itertools.product(exchanges, RATIOS):
        plan = complete(name, ratio, "ring", values=values_for(name, values))
        exchange, memory = build(plan, layout.sizes), ErrorMemory(layout)
        for step in range(STEPS):
            fed = memory.feed(layout.parameters)
            exchange.run(link, fed, ratio, step, Told(energy=fed.energy), out)
            memory.commit(nothing_left=False)
