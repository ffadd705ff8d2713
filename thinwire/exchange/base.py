"""Exchange: N gradients in, one mean out."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from thinwire.collectives import Collective, Leg, seconds, sent_bytes
from thinwire.compress.base import Compensated
from thinwire.link.base import Link
from thinwire.types import Exchanged, Network

# Besides the energy it sent, a rank may tell the others this many numbers of its own with every exchange.
NUMBERS = 2
TOLD = 1 + NUMBERS


class Exchange(ABC):
    """One way of turning every rank's gradient into their mean.

    Attributes:
        name: as a plan spells it.
        lossless: everything is sent, nothing is left.
        bucketwise: the mean of a part of the gradient is that part of the mean, at no extra cost, so that parts may be
            exchanged as soon as backward() has made them.
    """

    name: str
    lossless = False
    bucketwise = False

    @abstractmethod
    def run(
        self, link: Link, fed: Compensated, ratio: float, step: int, numbers: tuple[float, ...], out: torch.Tensor
    ) -> Exchanged:
        """Exchange this rank's gradient for the mean of all.

        Args:
            fed: the error-fed gradient. What this rank sends is taken out of it, so that over all ranks
                average(x before) = mean + average(x after).
            ratio: the share of entries to send, in (0, 1].
            step: the same on every rank; it turns what turns with the steps.
            numbers: `NUMBERS` numbers that come back summed over all ranks, in `told` behind the energy sent.
            out: where the mean goes: `TOLD` entries longer than the gradient, so that numbers can ride at its end.
        """

    @abstractmethod
    def legs(self, numel: int, itemsize: int, ratio: float, world_size: int, leader: int = 0) -> list[Leg]:
        """The collectives that `run` uses, in order, with their sizes."""

    def seconds(
        self, network: Network, numel: int, ratio: float, world_size: int, itemsize: int = 4, leader: int = 0
    ) -> float:
        """What `run` costs on the wire, from a common start to the last rank's end."""
        return seconds(network, world_size, self.legs(numel, itemsize, ratio, world_size, leader))

    def sent_bytes(self, numel: int, ratio: float, world_size: int, itemsize: int = 4, leader: int = 0) -> int:
        """What all ranks together send."""
        return sent_bytes(world_size, self.legs(numel, itemsize, ratio, world_size, leader))


class Dense(Exchange):
    """No compression: an all-reduce of everything."""

    name = "dense"
    lossless = True

    def __init__(self, all_reduce: Collective, bucketwise: bool = False) -> None:
        self.all_reduce = all_reduce
        self.bucketwise = bucketwise

    def run(
        self, link: Link, fed: Compensated, ratio: float, step: int, numbers: tuple[float, ...], out: torch.Tensor
    ) -> Exchanged:
        numel = fed.x.numel()
        out[:numel] = fed.x
        fed.x.zero_()
        out[numel:] = out.new_tensor((fed.energy, *numbers))
        self.all_reduce.run(link, out)
        mean = out[:numel].mul_(1 / link.world_size)
        return Exchanged(mean=mean, told=out[numel:].clone())

    def legs(self, numel: int, itemsize: int, ratio: float, world_size: int, leader: int = 0) -> list[Leg]:
        return [Leg(self.all_reduce, numel + TOLD, itemsize)]
