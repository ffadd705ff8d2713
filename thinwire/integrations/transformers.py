"""Transformers: a callback that attaches thinwire to a Trainer's model, and puts every rank's error in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from thinwire.integrations.saving import FOLDER, load, save
from thinwire.train.ddp import attach as attach_to
from thinwire.train.sync import Synchronizer


class ThinwireCallback(TrainerCallback):
    """Has thinwire exchange the gradients of a Trainer that runs on several processes.

        trainer = Trainer(model=model, args=arguments, train_dataset=texts)
        callback = ThinwireCallback(trainer)
        trainer.add_callback(callback)
        trainer.train()
        callback.comm.explain()

    It needs the trainer because the model that callbacks are given is the one inside of DDP. A run that is resumed
    looks for its state in `args.resume_from_checkpoint`, else in `args.output_dir/checkpoint-STEP`.

    Args:
        attach: `thinwire.attach`, or a partial of it with arguments.

    Attributes:
        comm: what `attach` gave, from the beginning of training on.
    """

    comm: Synchronizer

    def __init__(self, trainer: Trainer, attach: Callable[..., Synchronizer] = attach_to) -> None:
        self._trainer = trainer
        self._attach = attach

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """By now the model is wrapped, and what was saved is loaded."""
        self.comm = self._attach(self._trainer.model_wrapped, scaler=self._trainer.accelerator.scaler)
        if state.global_step > 0:
            load(self.comm, Path(args.resume_from_checkpoint or _newest(args, state)) / FOLDER)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not args.save_only_model:  # weights alone are for nobody to go on from
            save(self.comm, _newest(args, state) / FOLDER)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.comm.close()


def _newest(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
