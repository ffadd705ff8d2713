"""Every rank's state beside a framework's own checkpoint, which only the main process writes."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from thinwire.errors import ThinwireWarning
from thinwire.train.checkpoint import Checkpoint
from thinwire.train.sync import Synchronizer

FOLDER = "thinwire"  # in a checkpoint that is a folder


def save(comm: Synchronizer, folder: str | os.PathLike[str]) -> None:
    """Write this rank's state. Call on all ranks, after the same step."""
    _checkpoint(comm, folder).save(comm.state_dict(), comm.step)


def load(comm: Synchronizer, folder: str | os.PathLike[str], step: int | None = None) -> None:
    """Go on from this rank's state at `step`, or at the newest step that all ranks have. Call on all ranks.

    A framework's checkpoint that was made without thinwire has none. Then the error starts at zero, which is said.
    """
    checkpoint = _checkpoint(comm, folder)
    steps = [known for known in checkpoint.steps() if step in (None, known)]
    common = comm.common_step(steps)
    if common is None:
        warnings.warn(
            f"{Path(folder)} holds no state of thinwire that all ranks have, so this run goes on with an empty error "
            "memory. Each rank needs the files that it wrote: where machines share no disk, resume on the same ones.",
            ThinwireWarning,
            stacklevel=3,
        )
        return
    state, _ = checkpoint.load(common)
    comm.load_state_dict(state)


def _checkpoint(comm: Synchronizer, folder: str | os.PathLike[str]) -> Checkpoint:
    return Checkpoint(folder, comm.link.rank, comm.link.world_size)
