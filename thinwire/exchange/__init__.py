"""One file per published way of averaging gradients. `build` makes the one that a plan names."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from thinwire.collectives import ALL_GATHERS, ALL_REDUCES, BROADCASTS, Collective
from thinwire.collectives.native import TorchAllReduce
from thinwire.compress.base import Selector
from thinwire.compress.topk import LayerwiseTopK, ThresholdTopK, TopK
from thinwire.compress.values import VALUES
from thinwire.exchange.ar_topk import StarTopk, VarTopk
from thinwire.exchange.base import TOLD, Dense, Exchange, Stopwatch
from thinwire.exchange.gathered import Gathered
from thinwire.types import Plan

__all__ = ["NAMES", "TOLD", "Exchange", "Stopwatch", "build", "collectives_of", "complete", "values_for"]

_ALL_REDUCES: dict[str, Collective] = {**ALL_REDUCES, "torch": TorchAllReduce()}


class _Kind(NamedTuple):
    """What an exchange can run over, over what by default, and how it is made for a plan and layers of some sizes."""

    collectives: dict[str, Collective]
    default: str
    make: Callable[[Collective, Plan, tuple[int, ...]], Exchange]


def _gathered(selector: Callable[[tuple[int, ...]], Selector]) -> _Kind:
    return _Kind(
        ALL_GATHERS,
        "direct",
        lambda over, plan, sizes: Gathered(plan.exchange, selector(sizes), over, plan.values),
    )


_KINDS = {
    "dense": _Kind(_ALL_REDUCES, "torch", lambda over, *_: Dense(over, bucketwise=isinstance(over, TorchAllReduce))),
    "topk-allgather": _gathered(lambda sizes: TopK()),
    "layerwise-topk": _gathered(LayerwiseTopK),
    "ms-topk": _gathered(lambda sizes: ThresholdTopK()),
    "star-topk": _Kind(_ALL_REDUCES, "ring", lambda over, plan, _: StarTopk(over, BROADCASTS[plan.broadcast])),
    "var-topk": _Kind(_ALL_REDUCES, "ring", lambda over, plan, _: VarTopk(over, BROADCASTS[plan.broadcast])),
}
NAMES = tuple(_KINDS)


def collectives_of(exchange: str) -> tuple[str, ...]:
    """The names of the collectives that an exchange can run over."""
    return tuple(_KINDS[exchange].collectives)


def values_for(exchange: str, values: str) -> str:
    """How this exchange sends values where they should be sent like this, if they may be rounded.

    They may where every rank's reach all others as they were sent. Where values are added on the way each addition
    would round again, and lose what no error memory sees. And eight magnitudes are for values of like size: not for the
    largest of every layer, or layers that are far smaller than others would wait for long.
    """
    if _KINDS[exchange].collectives is not ALL_GATHERS:
        return "float32"
    return "bfloat16" if exchange == "layerwise-topk" and values == "log4" else values


def complete(
    exchange: str,
    ratio: float = 0.01,
    collective: str | None = None,
    broadcast: str = "tree",
    values: str = "float32",
) -> Plan:
    """A plan, checked, with defaults filled in.

    >>> print(complete("star-topk", ratio=0.01))
    star-topk over ring at 0.01 (100x)
    """
    _known("exchange", exchange, NAMES)
    collectives = _KINDS[exchange].collectives
    collective = collective or _KINDS[exchange].default
    _known(f"collective for {exchange}", collective, tuple(collectives))
    _known("broadcast", broadcast, tuple(BROADCASTS))
    _known("values", values, VALUES)
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio must be in (0, 1], got {ratio=}. For no compression use exchange='dense'.")
    if (can := values_for(exchange, values)) != values:
        why = (
            "adds values on the way, and each addition of rounded ones would lose what no error memory sees"
            if can == "float32"
            else f"sends layers of different scale, for which {values} is too coarse"
        )
        raise ValueError(f"{exchange} {why}. Use values={can!r}, or topk-allgather.")
    return Plan(exchange=exchange, collective=collective, ratio=float(ratio), broadcast=broadcast, values=values)


def build(plan: Plan, sizes: tuple[int, ...]) -> Exchange:
    """The exchange that a plan names, for a gradient made of layers of these sizes."""
    kind = _KINDS[plan.exchange]
    return kind.make(kind.collectives[plan.collective], plan, sizes)


def _known(what: str, name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        raise ValueError(f"unknown {what} {name!r}. Known are: {', '.join(names)}.")
