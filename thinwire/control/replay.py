"""Decide again what was decided: a run's records through the same controller, or through another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from thinwire.control.adaptive import Adaptive
from thinwire.control.decision import Decision, Standing
from thinwire.control.prices import Prices
from thinwire.control.view import Seen, View


def replay(records: Iterable[Mapping[str, Any]], controller: Adaptive | None = None) -> list[Decision]:
    """The decisions that a run's records lead to. If it was resumed, they are those of several runs, one after another.

    Args:
        records: as `thinwire.records.read` gives them.
        controller: None for the one that was in charge, unless its class is your own. Another one sees what came of the
            plans that ran then, so it is told what it would have said at each moment, not what would have become of it.
    """
    decisions: list[Decision] = []
    prices: Prices | None = None
    standing: Standing | None = None
    view, was_fixed, given = View(), False, controller
    for record in records:
        if record["kind"] == "run":
            # It surveys the network and decides before it goes on from what was saved, knowing nothing of a run before.
            view, standing, prices = View(), None, Prices.from_json(record["prices"])
            was_fixed, controller = record["controller"] is None, given or _recorded(record)
            if given is not None:  # who may choose from other ways than those that were looked at then
                has_group = any(way.collective == "torch" for way in prices.ways)
                prices = prices.of(given.ways(prices.world_size, has_group))
        elif record["kind"] == "resumed":
            view, standing = View.from_json(record["view"]), Standing.from_json(record["standing"])
        elif record["kind"] == "explored" and standing is not None:
            gains = {float(ratio): float(gain) for ratio, gain in record["gains"]}
            view = view._replace(gains=view.gains.with_explored(record["exchange"], gains))
            standing = replace(standing, gain=None)
        elif record["kind"] == "heard" and prices is not None:
            seen = Seen.from_json(record)
            standing = replace(standing, plan=seen.plan) if standing else Standing(plan=seen.plan)
            view = view.after(seen, prices, may_hope=not was_fixed)
        # Where the plan was fixed nobody was asked, but could have been whenever something was heard.
        asked = record["step"] if record["kind"] == "asked" else None
        if was_fixed and record["kind"] == "heard":
            asked = record["step"] + 1
        if asked is not None and prices is not None and standing is not None and controller is not None:
            decision = controller.decide(view, standing, asked, prices)
            if decision is not None and standing.is_left_alone_by(decision):
                view = view.hoping_for_nothing()
            elif decision is not None:
                decisions.append(decision)
                standing = controller.standing_after(decision, view)
    return decisions


def _recorded(run: Mapping[str, Any]) -> Adaptive:
    """The controller that was in charge, if it is ours: how a class of a user's decides is in no record."""
    settings, name = run["controller"], run.get("decided_by", Adaptive.__name__)  # once that was not written
    if settings is None:
        raise ValueError("this run had a fixed plan: say which controller is to be asked.")
    if name != Adaptive.__name__:
        raise ValueError(f"this run was decided by {name}: give replay that controller.")
    return Adaptive(**{**settings, "ratios": tuple(settings["ratios"]), "exchanges": tuple(settings["exchanges"])})
