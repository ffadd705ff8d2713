"""Hugging Face Accelerate: its save_state and load_state take every rank's error along.

`Accelerator.register_for_checkpointing` would write the main process's state only, and hand it to all when loading.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import Accelerator

from thinwire.integrations.saving import FOLDER, load, save
from thinwire.train.sync import Synchronizer


def keep(comm: Synchronizer, accelerator: Accelerator) -> None:
    """Have `accelerator.save_state` and `accelerator.load_state` save and load `comm` too, on every rank.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        comm = thinwire.attach(model, scaler=accelerator.scaler)
        keep(comm, accelerator)

    The files are in the checkpoint's folder, in `thinwire/`. Save each time to a new folder, as Accelerate's automatic
    names do: it replaces the files of an old one one after the other, and a run that is killed meanwhile mixes both.
    """

    def save_too(models: list[Any], weights: list[Any], folder: str) -> None:
        save(comm, Path(folder) / FOLDER)

    def load_too(models: list[Any], folder: str) -> None:
        load(comm, Path(folder) / FOLDER)

    accelerator.register_save_state_pre_hook(save_too)
    accelerator.register_load_state_pre_hook(load_too)
