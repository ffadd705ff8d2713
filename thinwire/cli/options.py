"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer


def _in_range(ratio: float) -> float:
    if not 0 < ratio <= 1:
        raise typer.BadParameter(f"must be in (0, 1], got {ratio}")
    return ratio


Json = Annotated[bool, typer.Option("--json", help="End with all figures as one JSON line.")]
Ratio = Annotated[float, typer.Option(callback=_in_range, help="Share of entries to send, in (0, 1]: 0.01 is 1 %.")]
