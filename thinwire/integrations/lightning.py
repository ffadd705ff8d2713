"""Lightning: a DDP strategy with thinwire under it, on any device, whose checkpoints have every rank's error.

Lightning's own way in, DDPStrategy(ddp_comm_hook=...), does nothing without CUDA, and only rank 0 writes a checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from thinwire.integrations.saving import load, save
from thinwire.train.ddp import attach as attach_to
from thinwire.train.sync import Synchronizer

_STEP = "thinwire_step"  # in Lightning's checkpoint: which of our generations belongs to it


class ThinwireStrategy(DDPStrategy):
    """DDPStrategy whose gradients thinwire exchanges.

        strategy = ThinwireStrategy(attach=functools.partial(thinwire.attach, exchange="star-topk", ratio=0.01))
        trainer = Trainer(strategy=strategy, ...)
        trainer.fit(module, loader)
        strategy.comm.explain()

    A checkpoint `last.ckpt` has a folder `last.ckpt.thinwire` beside it with a file per rank, so `dirpath` must be on a
    local or shared disk.

    Args:
        attach: `thinwire.attach`, or a partial of it with arguments.
        **kwargs: those of DDPStrategy.

    Attributes:
        comm: what `attach` gave, from the beginning of `fit` on.
    """

    comm: Synchronizer

    def __init__(self, attach: Callable[..., Synchronizer] = attach_to, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._attach = attach
        self._resumed_from = ""

    def configure_ddp(self) -> None:
        super().configure_ddp()
        self.comm = self._attach(self.model, scaler=getattr(self.precision_plugin, "scaler", None))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Called on all ranks."""
        if "optimizer_states" in checkpoint:  # weights alone are for nobody to go on from
            save(self.comm, _beside(filepath))
            checkpoint[_STEP] = self.comm.step
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Called before there is a DDP model, and to test as well: only the path is noted."""
        self._resumed_from = _beside(checkpoint_path)
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Called when training goes on, once there is one."""
        super().load_optimizer_state_dict(checkpoint)
        load(self.comm, self._resumed_from, checkpoint.get(_STEP))

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        super().remove_checkpoint(filepath)
        shutil.rmtree(_beside(filepath), ignore_errors=True)  # by all ranks: their disks may not be one

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "comm"):
            self.comm.close()


def _beside(checkpoint: str | os.PathLike[str]) -> str:
    return f"{os.fspath(checkpoint)}.thinwire"
