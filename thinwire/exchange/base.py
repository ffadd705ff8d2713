"""Exchange: N gradients in, one mean out."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from thinwire.collectives import Collective, Leg, seconds, sent_bytes
from thinwire.compress.base import Compensated
from thinwire.link.base import Link
from thinwire.types import Exchanged, Network, Told

TOLD = len(Told._fields)


class Stopwatch:
    """Adds up the seconds spent inside `with`, on a link's clock: on a virtual one computing takes no time."""

    def __init__(self, link: Link) -> None:
        self.seconds = 0.0
        self._now = link.now

    def __enter__(self) -> None:
        self._start = self._now()

    def __exit__(self, *_: object) -> None:
        self.seconds += self._now() - self._start


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
    def run(self, link: Link, fed: Compensated, ratio: float, step: int, told: Told, out: torch.Tensor) -> Exchanged:
        """Exchange this rank's gradient for the mean of all.

        Args:
            fed: the error-fed gradient. What this rank sends is taken out of it, so that over all ranks
                average(x before) = mean + average(x after).
            ratio: the share of entries to send, in (0, 1].
            step: the same on every rank; it turns what turns with the steps.
            told: this rank's numbers, to be told to all.
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

    def run(self, link: Link, fed: Compensated, ratio: float, step: int, told: Told, out: torch.Tensor) -> Exchanged:
        numel, watch = fed.x.numel(), Stopwatch(link)
        with watch:
            # Divided before it is added up, as DDP does: the mean of large numbers is finite where their sum is not.
            torch.mul(fed.x, 1 / link.world_size, out=out[:numel])
            fed.x.zero_()
            out[numel:] = out.new_tensor(told._replace(energy_sent=told.energy))
        self.all_reduce.run(link, out)
        return Exchanged(out[:numel], Told(*out[numel:].tolist()), watch.seconds)

    def legs(self, numel: int, itemsize: int, ratio: float, world_size: int, leader: int = 0) -> list[Leg]:
        return [Leg(self.all_reduce, numel if self.bucketwise else numel + TOLD, itemsize)]
