"""One file per published way of averaging gradients. `build` makes the one that a plan names."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.collectives import ALL_GATHERS, ALL_REDUCES, BROADCASTS, Collective
from thinwire.collectives.native import TorchAllReduce
from thinwire.compress.coding import VALUE_DTYPES
from thinwire.compress.topk import LayerwiseTopK, ThresholdTopK, TopK
from thinwire.exchange.ar_topk import StarTopk, VarTopk
from thinwire.exchange.base import NUMBERS, TOLD, Dense, Exchange
from thinwire.exchange.gathered import Gathered
from thinwire.types import Plan

__all__ = ["NAMES", "NUMBERS", "TOLD", "Exchange", "build", "collectives_of", "complete"]

_ALL_REDUCES: dict[str, Collective] = {**ALL_REDUCES, "torch": TorchAllReduce()}

# name: the collectives it can run over, its default first, and how it is made of one
_Maker = Callable[[Plan, tuple[int, ...]], Exchange]
_EXCHANGES: dict[str, tuple[dict[str, Collective], str, _Maker]] = {
    "dense": (_ALL_REDUCES, "torch", lambda plan, _: Dense(_ALL_REDUCES[plan.collective], plan.collective == "torch")),
    "topk-allgather": (ALL_GATHERS, "direct", lambda plan, _: _gathered(plan, TopK())),
    "layerwise-topk": (ALL_GATHERS, "direct", lambda plan, sizes: _gathered(plan, LayerwiseTopK(sizes))),
    "ms-topk": (ALL_GATHERS, "direct", lambda plan, _: _gathered(plan, ThresholdTopK())),
    "star-topk": (
        ALL_REDUCES,
        "ring",
        lambda plan, _: StarTopk(ALL_REDUCES[plan.collective], BROADCASTS[plan.broadcast]),
    ),
    "var-topk": (
        ALL_REDUCES,
        "ring",
        lambda plan, _: VarTopk(ALL_REDUCES[plan.collective], BROADCASTS[plan.broadcast]),
    ),
}
NAMES = tuple(_EXCHANGES)


def collectives_of(exchange: str) -> tuple[str, ...]:
    """The names of the collectives that an exchange can run over."""
    return tuple(_EXCHANGES[exchange][0])


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
    collectives, default, _ = _EXCHANGES[exchange]
    collective = collective or default
    _known(f"collective for {exchange}", collective, tuple(collectives))
    _known("broadcast", broadcast, tuple(BROADCASTS))
    _known("values", values, tuple(VALUE_DTYPES))
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio must be in (0, 1], got {ratio=}. For no compression use exchange='dense'.")
    if values == "float16" and collectives is not ALL_GATHERS:
        raise ValueError(
            f"{exchange} adds values on the way, and each addition in float16 would lose what no error memory sees. "
            "Use values='float32', or an exchange over all-gather."
        )
    return Plan(exchange=exchange, collective=collective, ratio=float(ratio), broadcast=broadcast, values=values)


def build(plan: Plan, sizes: tuple[int, ...]) -> Exchange:
    """The exchange that a plan names, for a gradient made of layers of these sizes."""
    return _EXCHANGES[plan.exchange][2](plan, sizes)


def _gathered(plan: Plan, selector: TopK | LayerwiseTopK | ThresholdTopK) -> Exchange:
    return Gathered(plan.exchange, selector, ALL_GATHERS[plan.collective], plan.values)


def _known(what: str, name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        raise ValueError(f"unknown {what} {name!r}. Known are: {', '.join(names)}.")
