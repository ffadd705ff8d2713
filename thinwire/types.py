"""The vocabulary: frozen values that every folder may hold. No logic beyond printing, no import of ours."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, kw_only=True)
class Network:
    """What a message meets: `alpha` seconds until its first byte arrives, `beta` seconds for every byte.

    1 / beta is the rate of each host's egress and of each host's ingress in bytes per second. `overhead` is the time of
    a host's own processor for every message that it sends, and again for every message that it receives. They are L, G
    and o of LogGP (Alexandrov, Ionescu, Schauser & Scheiman 1995).
    """

    alpha: float
    beta: float
    overhead: float = 0.0


class Moment(NamedTuple):
    """When a message belongs: frames carry it and errors name it."""

    step: int = 0
    plan: str = ""
    collective: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which exchange runs, over which collective, at which ratio: the one thing all ranks must agree on."""

    exchange: str
    collective: str
    ratio: float
    broadcast: str = "tree"
    values: str = "float32"

    def __str__(self) -> str:
        """In words, and in full: frames carry it, and two plans that differ must not read alike."""
        way = way_in_words(self.exchange, self.collective, self.broadcast, self.values)
        times = float(f"{1 / self.ratio:.3g}")
        return way if self.exchange == "dense" else f"{way} at {self.ratio!r} ({times:g}x)"


def way_in_words(exchange: str, collective: str, broadcast: str, values: str) -> str:
    """All of a plan but its ratio, without what is usual."""
    parts = [f"{exchange} over {collective}"]
    if broadcast != "tree":
        parts.append(f"{broadcast} broadcast")
    if values != "float32":
        parts.append(f"{values} values")
    return ", ".join(parts)


class Sparse(NamedTuple):
    """Some entries of a flat tensor: `indices` ascending and distinct, `values` beside them."""

    indices: torch.Tensor
    values: torch.Tensor


class Told(NamedTuple):
    """Numbers that ride along with every exchange: a rank's own going in, their sums over all ranks coming out.

    Attributes:
        energy_sent: how much smaller the sum of squares is of what is left; the exchange fills it in.
        energy: the sum of squares of what there was.
        gradient: that of the gradient alone, without the error; 0 where nobody looked.
        not_finite: 1 if some entry is not finite.
        holding: 1 if some of the error is being held back.
        alpha_off: how far this rank finds the latency from what was agreed, as a logarithm (control/agreement.py).
        alpha_known: 1 if it knows.
        beta_off, beta_known: the same for the seconds per byte.
        kept: the energy that the largest entries would keep at the ratio whose turn it is (control/view.py).
        timed: 1 if it knows how long its last step took; of the next five, nothing counts unless all ranks do.
        step_seconds: from the end of the exchange before the last one to the end of the last one.
        exchange_seconds: the last exchange, from the gradient in hand to the mean in hand.
        compress_seconds: the part of `exchange_seconds` that this rank computed.
        overlap_seconds: in which backward() still computed, while parts of the gradient were there already.
        last_share: the share of the gradient's bytes that was there only after that.
    """

    energy_sent: float = 0.0
    energy: float = 0.0
    gradient: float = 0.0
    not_finite: float = 0.0
    holding: float = 0.0
    alpha_off: float = 0.0
    alpha_known: float = 0.0
    beta_off: float = 0.0
    beta_known: float = 0.0
    kept: float = 0.0
    timed: float = 0.0
    step_seconds: float = 0.0
    exchange_seconds: float = 0.0
    compress_seconds: float = 0.0
    overlap_seconds: float = 0.0
    last_share: float = 0.0


class Exchanged(NamedTuple):
    """What an exchange gives back, besides what it left of this rank's gradient.

    Attributes:
        mean: with the same bits on every rank, one entry per entry of the gradient.
        told: the sums over ranks of the numbers that rode along, with the same bits on every rank.
        compress_seconds: the time spent choosing, coding and decoding entries, without any waiting.
        sent: the indices of the entries that this rank sent, ascending; None if it sent all, or does not say.
    """

    mean: torch.Tensor
    told: Told
    compress_seconds: float = 0.0
    sent: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One synchronised step as this rank saw it.

    Args:
        step: the number of synchronised steps before this one.
        plan: what ran.
        seconds: from the gradient in hand to the mean in hand.
        compress_seconds: the part of `seconds` that this rank computed: adding the error, choosing, coding, decoding.
        sent_bytes: payload bytes this rank sent.
        dense_bytes: what this rank would have sent for the whole gradient, in its own types, by a ring all-reduce.
        gain: energy sent over energy available, summed over all ranks, in [0, 1]; NaN for a skipped step, or where
            energies are beyond the range of float32.
        skipped: some rank's gradient was not finite, so every rank's was made so and no error memory changed.
        step_seconds: from the end of the last exchange to the end of this one, NaN for the first.
        predicted_seconds: what the last decision expected `step_seconds` to be, NaN if nothing was predicted.
    """

    step: int
    plan: Plan
    seconds: float
    compress_seconds: float
    sent_bytes: int
    dense_bytes: int
    gain: float
    skipped: bool
    step_seconds: float = math.nan
    predicted_seconds: float = math.nan
