"""What a Synchronizer was asked for: a plan for good, or a controller with what it may choose from."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from typing import Any

from thinwire import exchange as exchanges
from thinwire.control.adaptive import Adaptive
from thinwire.control.prices import Prices, ways
from thinwire.errors import ThinwireWarning
from thinwire.exchange import complete
from thinwire.link.base import Link
from thinwire.train.layout import Layout
from thinwire.types import Plan


def chosen(
    exchange: str | Adaptive, ratio: float | None, collective: str | None, broadcast: str, values: str | None
) -> tuple[Adaptive | None, Plan]:
    """The controller, None where the plan is fixed, and that plan, or else what is sure to do no harm at first."""
    if exchange == "adaptive":
        exchange = Adaptive()
    if isinstance(exchange, Adaptive):
        _refuse_settings_of_a_plan(ratio=ratio, collective=collective, broadcast=broadcast, values=values)
        return exchange, complete("dense", 1.0)
    if not isinstance(exchange, str):
        raise TypeError(f"exchange must be a name or an Adaptive, got {type(exchange).__name__}.")
    if exchange not in exchanges.NAMES:
        raise ValueError(f"unknown exchange {exchange!r}. Known are: adaptive, {', '.join(exchanges.NAMES)}.")
    if exchange == "dense" and ratio not in (None, 1):
        # From the line that calls attach; for a Synchronizer it is one further out.
        warnings.warn(f"ratio={ratio} has no effect: exchange='dense' sends everything.", ThinwireWarning, stacklevel=4)
    default = 1.0 if exchange == "dense" else 0.01
    values = "float32" if values is None else values
    return None, complete(exchange, default if ratio is None else ratio, collective, broadcast, values)


def _refuse_settings_of_a_plan(**given: Any) -> None:
    """What bounds a choice has no counterpart of a collective or a broadcast: those are fixed with an exchange."""
    defaults, bounds = {"broadcast": "tree"}, {"ratio": "ratios=(0.001, 0.1)", "values": f"values={given['values']!r}"}
    for name, value in given.items():
        if value != defaults.get(name):
            instead = f"Name an exchange to fix its {name}, like exchange='star-topk'."
            if name in bounds:
                instead = f"Set its bounds by exchange=thinwire.Adaptive({bounds[name]}), or name an exchange."
            raise ValueError(
                f"{name}={value!r} belongs to a fixed exchange, and adaptive chooses for itself. {instead}"
            )


def prices_for(layout: Layout, link: Link, controller: Adaptive | None, in_buckets: bool) -> Prices:
    """Of whatever the controller may choose from; where there is none, of dense alone."""
    world_size, has_group = link.world_size, link.group is not None
    dense = ways(world_size, has_group, ("dense",))
    choice = dense if controller is None else controller.ways(world_size, has_group)
    bucket_bytes = layout.nbytes if in_buckets else None
    return Prices(layout.numel, layout.dtype.itemsize, link.world_size, choice, layout.sizes, bucket_bytes)


def described(prices: Prices, controller: Adaptive | None) -> dict[str, Any]:
    """What was decided upon, as a record: the controller by its settings and, since it may be a user's, its class."""
    settings, name = (None, None) if controller is None else (asdict(controller), type(controller).__name__)
    return {"prices": prices.to_json(), "controller": settings, "decided_by": name}
