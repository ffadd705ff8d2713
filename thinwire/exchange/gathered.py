"""Every rank sends its own choice of entries to all: they cannot be added on the way, so they are gathered."""

from __future__ import annotations

import torch

from thinwire.collectives import Collective, Leg
from thinwire.compress.base import Compensated, Selector, add_entries, take_entries
from thinwire.compress.coding import Coding
from thinwire.exchange.base import TOLD, Exchange, Stopwatch
from thinwire.link.base import Link
from thinwire.types import Exchanged, Sparse, Told


class Gathered(Exchange):
    """mean = 1/N sum_r C(x_r), with each C(x_r) sent whole, as [numbers | indices | values].

    With `selector` the exact top k this is the classical Top-k over all-gather; layer-wise top-k and MSTopk differ in
    the selector only.
    """

    def __init__(self, name: str, selector: Selector, all_gather: Collective, values: str = "float32") -> None:
        self.name = name
        self.selector = selector
        self.all_gather = all_gather
        self.values = values

    def run(self, link: Link, fed: Compensated, ratio: float, step: int, told: Told, out: torch.Tensor) -> Exchanged:
        coding, watch = self._coding(fed.x.numel(), fed.x.dtype, ratio), Stopwatch(link)
        head = TOLD * fed.x.element_size()
        messages = torch.empty(link.world_size, head + coding.nbytes, dtype=torch.uint8, device=fed.x.device)
        with watch:
            sent, energy = self._take(fed, ratio, step, coding, messages[link.rank, head:])
            told = told._replace(energy_sent=energy)
            messages[link.rank, :head].view(fed.x.dtype).copy_(torch.tensor(told, dtype=fed.x.dtype))
        self.all_gather.run(link, messages.view(-1))
        with watch:
            mean = out[: fed.x.numel()].zero_()
            for message in messages:  # in the order of ranks, so that every rank adds up the same bits
                add_entries(mean, coding.decode(message[head:]), 1 / link.world_size)
            everyones = messages[:, :head].contiguous().view(fed.x.dtype).tolist()
        return Exchanged(mean, Told(*map(sum, zip(*everyones, strict=True))), watch.seconds, sent.indices)

    def legs(self, numel: int, itemsize: int, ratio: float, world_size: int, leader: int = 0) -> list[Leg]:
        dtype = torch.float64 if itemsize == 8 else torch.float32
        return [Leg(self.all_gather, world_size * (itemsize * TOLD + self._coding(numel, dtype, ratio).nbytes), 1)]

    def _take(
        self, fed: Compensated, ratio: float, step: int, coding: Coding, message: torch.Tensor
    ) -> tuple[Sparse, float]:
        """Take the chosen entries out of x into a message; what rounding loses stays.

        Returns:
            the entries as the other ends will see them, and the energy that x has less for it.
        """
        taken = take_entries(self.selector, fed, ratio, step)
        coding.encode(taken, message)
        if not coding.rounds:
            return taken, _energy(taken.values)
        sent = Sparse(taken.indices, coding.decode_values(message))
        lost = taken.values - sent.values
        add_entries(fed.x, Sparse(taken.indices, lost), 1.0)
        return sent, _energy(taken.values) - _energy(lost)

    def _coding(self, numel: int, dtype: torch.dtype, ratio: float) -> Coding:
        return Coding(numel, self.selector.count(numel, ratio), dtype, self.values)


def _energy(values: torch.Tensor) -> float:
    return float(values.double().square().sum())
