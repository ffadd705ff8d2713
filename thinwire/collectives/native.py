"""Torch's own all-reduce, for those who want exactly what DistributedDataParallel does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import cache

import torch
import torch.distributed as dist

from thinwire.collectives.base import Collective, Round
from thinwire.collectives.ring import RingAllReduce
from thinwire.link.base import LOOK_UP_SECONDS, Link


class TorchAllReduce(Collective):
    """`torch.distributed.all_reduce` over the process group of the link.

    Counted as the ring that gloo and, for large tensors, NCCL run, and priced as gloo's: its receiver tells the sender
    that it is ready before each message, so a hop takes two latencies, 4(N-1) alpha + 2 (N-1)/N M beta. Gloo cuts each
    piece in two, which hides some of that behind the bytes where there are many; NCCL's hop takes one latency.
    """

    name = "torch all-reduce"
    latencies = 2

    def rounds(self, rank: int, world_size: int, numel: int, root: int = 0) -> Iterator[Round]:
        return RingAllReduce().rounds(rank, world_size, numel, root)

    def run(self, link: Link, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        if link.group is None:
            raise ValueError(f"{type(link).__name__} has no process group for torch's own all_reduce to run on.")
        work = dist.all_reduce(tensor, group=link.group, async_op=True)
        done = threading.Event()  # waiting for it lets Ctrl-C through, waiting for the work does not
        work.get_future().add_done_callback(lambda _: done.set())
        while not done.wait(LOOK_UP_SECONDS):
            pass  # how long is the process group's business: it has a timeout of its own
        work.wait()
        self.count(link, tensor)
        return tensor

    def count(self, link: Link, tensor: torch.Tensor) -> None:
        """Add what torch sent for this rank to the link's counters."""
        messages, entries = _sent(link.rank, link.world_size, tensor.numel())
        link.sent_messages += messages
        link.sent_bytes += entries * tensor.element_size()
        link.native_bytes += entries * tensor.element_size()


@cache
def _sent(rank: int, world_size: int, numel: int) -> tuple[int, int]:
    """How many messages, and how many entries in them."""
    sends = [piece for round in TorchAllReduce().rounds(rank, world_size, numel) for piece in round.sends]
    return len(sends), sum(piece.stop - piece.start for piece in sends)
