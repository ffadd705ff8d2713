"""Options that several commands share, and what --json means for all of them."""

from __future__ import annotations

import json as json_module
from typing import Annotated, Any

import typer

from thinwire.cli import streams
from thinwire.records import plain


def _in_range(ratio: float) -> float:
    if not 0 < ratio <= 1:
        raise typer.BadParameter(f"must be in (0, 1], got {ratio}")
    return ratio


Json = Annotated[
    bool, typer.Option("--json", help="Print all figures as one JSON line; what is for people goes to stderr.")
]
Ratio = Annotated[
    float, typer.Option(callback=_in_range, metavar="R", help="Share of entries to send, in (0, 1]: 0.01 is 1 %.")
]


def print_figures(figures: dict[str, Any]) -> None:
    """The one line that --json leaves on stdout. What is not finite is null."""
    typer.echo(json_module.dumps(plain(figures), allow_nan=False), file=streams.figures())
