"""Which colour means what: the same exchange has the same colour in every report. page.css says how they look."""

from __future__ import annotations

from collections.abc import Iterable

BLUE, ORANGE, GREEN, PINK, AMBER, SKY, VIOLET, GREY = range(8)
COLOURS = {
    "dense": GREY,
    "ddp": GREY,
    "topk-allgather": BLUE,
    "star-topk": ORANGE,
    "var-topk": AMBER,
    "ms-topk": PINK,
    "layerwise-topk": SKY,
    "torch": GREY,
    "ring": GREEN,
    "direct": SKY,
    "tree": PINK,
    "halving": AMBER,
}


def colours(names: Iterable[str]) -> tuple[int, ...]:
    """A colour for each name: its own if it has one, else one that no other of these has, as long as there are any."""
    listed = list(names)
    taken = {COLOURS[name] for name in listed if name in COLOURS}
    free = [colour for colour in (VIOLET, GREEN, PINK, AMBER, SKY, BLUE, ORANGE, GREY) if colour not in taken]
    others = [name for name in listed if name not in COLOURS]
    given = {name: free[i] if i < len(free) else i % 8 for i, name in enumerate(others)}
    return tuple(COLOURS.get(name, given.get(name, GREY)) for name in listed)
