"""Before the first step: run what numba compiles on first use, so that no step has to wait for it.

On a machine that has never run thinwire, compiling takes some ten seconds; it is then kept on disk. In a first step it
would look like compression that takes that long, and a controller would not compress again for a while. What is fixed
is priced too, as soon as the network is known.
"""

from __future__ import annotations

import functools
import logging
import time

import torch
from torch import nn

from thinwire.compress.base import has_kernels, multiply
from thinwire.compress.histogram import Histogram
from thinwire.compress.quantize import Compressor, Draw
from thinwire.control.prices import Prices, ways
from thinwire.link.base import Link
from thinwire.link.thread import ThreadWorld
from thinwire.train.sync import Synchronizer
from thinwire.types import Network

ENTRIES = 1 << 13  # more than are looked at whole
RATIOS = (0.01, 0.1)  # at which indices are coded in different ways
STEPS = 2  # the second knows a threshold from the first
NOTICEABLE_SECONDS = 1.0

log = logging.getLogger("thinwire")


@functools.cache
def rehearse(compresses: bool = True) -> None:
    """Price an exchange, and compress in every way that the controller may choose. Once per process.

    Args:
        compresses: whether what follows may; if not, pricing is all that there is to compile.
    """
    numbers = torch.ones(ENTRIES)
    if not has_kernels(numbers):
        return
    begin = time.monotonic()
    Prices(ENTRIES, 4, 2, ways(2, has_group=False)).table(Network(alpha=1e-3, beta=1e-9), RATIOS)
    if compresses:
        Histogram.of(numbers)
        multiply(numbers, 0.5)
        ThreadWorld(2).run(_exchange)
    if time.monotonic() - begin > NOTICEABLE_SECONDS:
        log.info("compiled what computes in %.1f s; it is kept for the next time", time.monotonic() - begin)


def rehearse_compressor(compressor: Compressor, dtype: torch.dtype) -> None:
    """Compress a small vector and undo it, for a gossip whose neighbours would wait for the first."""
    compressor.apply(torch.linspace(-1, 1, ENTRIES, dtype=dtype), Draw(seed=0, step=0, rank=0))


def _exchange(link: Link) -> None:
    """A small gradient, between two threads."""
    model = nn.Linear(ENTRIES, 1, bias=False)
    model.weight.grad = torch.linspace(-1, 1, ENTRIES).view(1, -1)
    for exchange in ("topk-allgather", "star-topk"):
        for ratio in RATIOS:
            sync = Synchronizer(model, exchange, ratio=ratio, link=link, broadcast_parameters=False)
            for _ in range(STEPS):
                sync.average_gradients()
