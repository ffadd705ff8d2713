"""AR-Topk: one rank leads and names the entries, everyone sends its own values there, and those can be all-reduced.

Reference: Tyagi & Swany 2023, Algorithm 1. STAR's rule is also CLT-k of ScaleCom (Chen et al. 2020).
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from thinwire.collectives import ALL_GATHERS, Collective, Leg
from thinwire.compress.base import Compensated, Selector, add_entries, take_entries, take_out
from thinwire.compress.coding import Coding
from thinwire.compress.topk import TopK
from thinwire.exchange.base import TOLD, Exchange, Stopwatch
from thinwire.link.base import Link
from thinwire.types import Exchanged, Sparse, Told


class ARTopk(Exchange):
    """Algorithm 1, whoever leads.

    The paper sends 8-byte indices; ours cost what their coding costs. Its values are averaged, as Eq. (1a) and the
    published code do, where Algorithm 1 leaves it open; steps count from 0 where the paper's i counts from 1.
    """

    def __init__(self, all_reduce: Collective, broadcast: Collective) -> None:
        self.selector: Selector = TopK()
        self.all_reduce = all_reduce
        self.broadcast = broadcast

    def run(self, link: Link, fed: Compensated, ratio: float, step: int, told: Told, out: torch.Tensor) -> Exchanged:
        coding = Coding(fed.x.numel(), self.selector.count(fed.x.numel(), ratio), fed.x.dtype)
        code = torch.empty(coding.index_bytes, dtype=torch.uint8, device=fed.x.device)
        watch = Stopwatch(link)
        leader, taken = self._lead(link, fed, ratio, step, watch)
        if link.rank == leader:
            with watch:
                coding.encode_indices(taken.indices, code)
        self.broadcast.run(link, code, root=leader)
        with watch:
            sent = taken if link.rank == leader else take_out(fed.x, coding.decode_indices(code))
            told = told._replace(energy_sent=float(sent.values.double().square().sum()))
            values = torch.cat((sent.values * (1 / link.world_size), sent.values.new_tensor(told)))
        self.all_reduce.run(link, values)
        with watch:
            mean = out[: fed.x.numel()].zero_()
            add_entries(mean, Sparse(sent.indices, values[:-TOLD]), 1.0)
        return Exchanged(mean, Told(*values[-TOLD:].tolist()), watch.seconds, sent.indices)

    def legs(self, numel: int, itemsize: int, ratio: float, world_size: int, leader: int = 0) -> list[Leg]:
        dtype = torch.float64 if itemsize == 8 else torch.float32
        coding = Coding(numel, self.selector.count(numel, ratio), dtype)
        return [
            Leg(self.broadcast, coding.index_bytes, 1, leader),
            Leg(self.all_reduce, coding.k + TOLD, itemsize),
        ]

    @abstractmethod
    def _lead(self, link: Link, fed: Compensated, ratio: float, step: int, watch: Stopwatch) -> tuple[int, Sparse]:
        """Who leads this step, and, on that rank, the entries that it has taken."""


class StarTopk(ARTopk):
    """STAR: ranks lead in turn, r~ = i mod N. Only the leader has to choose."""

    name = "star-topk"

    def _lead(self, link: Link, fed: Compensated, ratio: float, step: int, watch: Stopwatch) -> tuple[int, Sparse]:
        leader = step % link.world_size
        if link.rank == leader:
            with watch:
                return leader, take_entries(self.selector, fed, ratio, step)
        return leader, Sparse(fed.x[:0], fed.x[:0])


class VarTopk(ARTopk):
    """VAR: the rank whose chosen entries carry most energy leads, var_r = ||g_r||^2, r~ = argmax var.

    The published code takes the norm of the raw gradient, smoothed; Algorithm 1 says the compressed, error-fed one, and
    so does this. It costs everyone a top-k and an all-gather of 4 N bytes, alpha + 4 (N-1) beta here.
    """

    name = "var-topk"
    _all_gather = ALL_GATHERS["direct"]

    def _lead(self, link: Link, fed: Compensated, ratio: float, step: int, watch: Stopwatch) -> tuple[int, Sparse]:
        variances = torch.zeros(link.world_size)
        with watch:
            taken = take_entries(self.selector, fed, ratio, step)
            variances[link.rank] = taken.values.square().sum()
        self._all_gather.run(link, variances)
        leader = int(variances.argmax())
        if link.rank != leader:
            with watch:
                add_entries(fed.x, taken, 1.0)
        return leader, taken

    def legs(self, numel: int, itemsize: int, ratio: float, world_size: int, leader: int = 0) -> list[Leg]:
        return [Leg(self._all_gather, world_size, 4), *super().legs(numel, itemsize, ratio, world_size, leader)]
