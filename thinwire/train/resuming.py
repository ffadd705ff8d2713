"""What a rank needs to go on as if nothing had happened, and from which step all ranks can."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from thinwire.collectives import ALL_GATHERS
from thinwire.link.base import Link
from thinwire.train.pilot import Course

VERSION = 5
_STEPS_COMPARED = 16


class Saved(NamedTuple):
    """A Synchronizer's state, read and found to fit this rank."""

    step: int
    skipped: int
    error: Mapping[str, torch.Tensor]
    course: Course

    @classmethod
    def read(cls, state: Mapping[str, Any], link: Link) -> Saved:
        """Refuses whatever is not the whole state of this rank, in a world of this size."""
        if state.get("version") != VERSION:
            raise ValueError(
                f"this state has version {state.get('version')!r}, this run has {VERSION}: it was saved by "
                "another version of thinwire."
            )
        expected = {"rank": link.rank, "world_size": link.world_size}
        for field, ours in expected.items():
            if state.get(field) != ours:
                raise ValueError(
                    f"this state has {field} {state.get(field)!r}, this run has {ours!r}: every rank keeps an error of "
                    "its own, so each must load the state that it saved, in a world of the same size."
                )
        counts = {name: state.get(name) for name in ("step", "skipped")}
        if not all(isinstance(count, int) and count >= 0 for count in counts.values()):
            raise ValueError(f"this state's counts are not whole numbers: {counts}.")
        if not isinstance(state.get("error"), Mapping):
            raise ValueError("this state has no errors by parameter name.")
        if not isinstance(state.get("pilot"), Mapping):
            raise ValueError("this state does not say which plan was in force.")
        return cls(state["step"], state["skipped"], state["error"], Course.from_json(state["pilot"]))


def newest_common(link: Link, steps: Collection[int]) -> int | None:
    """The newest step that is among every rank's; None if there is none. Call on all ranks."""
    newest = sorted(steps)[-_STEPS_COMPARED:]
    everyones = torch.full((link.world_size, _STEPS_COMPARED), -1, dtype=torch.int64)
    everyones[link.rank, : len(newest)] = torch.tensor(newest, dtype=torch.int64)
    ALL_GATHERS["direct"].run(link, everyones.view(-1))
    return max(set.intersection(*(set(row) - {-1} for row in everyones.tolist())), default=None)
