"""One rank of a training: its steps, what is tested and saved between them, and what is written down.

It goes on from the newest checkpoint that all workers have, if there is one. Workers must do the same things at the
same steps, so what depends on a clock or on a signal is agreed upon (thinwire.jobs.agreeing).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import CheckpointError
from thinwire.jobs import data, exchanging, outcome, telling
from thinwire.jobs.agreeing import Agreement, Clock, Words
from thinwire.jobs.job import CHECKPOINTS, RECORDS, Job
from thinwire.jobs.leaving import GRACE, Leaving
from thinwire.jobs.task import check_used, evaluate, optimizer_of, task_of
from thinwire.train.checkpoint import Checkpoint

MOST_STEPS_TO_AGREE = 100
LOSS_SECONDS = 0.2  # between two records of the loss, at least
EVALUATING_SHARE = 0.2  # of the time, at most
STEPS_COMPARED = 16
SLOW_STEP = GRACE / 3  # seconds: who is asked to end hears of it a step later, and then has another to make
SAVING_SHARE = 0.05  # of the time, at most, where steps are slow


class Ending(NamedTuple):
    """How a training came to its end: done, interrupted or failed, and what there is to say."""

    how: str
    message: str = ""


class Training:
    """One rank of a training."""

    def __init__(self, job: Job, folder: Path, leaving: Leaving) -> None:
        self._job, self._folder, self._leaving = job, folder, leaving
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        # Of its own, so that words do not wait behind gradients, and gradients not behind words.
        self._group = dist.new_group(timeout=timedelta(seconds=job.timeout))
        self._task = task_of(job, self._group)
        self._optimizer = optimizer_of(job, self._task.module)
        self._checkpoint = Checkpoint(folder / CHECKPOINTS, self._rank, self._world_size, job.keep)
        self._agreement = Agreement(self._group)
        self._clock, self._trained = Clock(), 0.0
        self._step = self._epoch = self._batch = 0
        self._saved_at = self._evaluated_at = -1
        self._next_saving = 0.0
        self._step_seconds = 0.0
        self._next_evaluation = job.evaluate_every
        self._loss_recorded = -math.inf
        self._loss: float | None = None  # of the last step, if it is not recorded yet
        self._not_finite = False
        self._accuracy: float | None = None
        self._unsaved = ""
        self._warned = telling.Warned()
        self._ended = False
        fresh = folder / (RECORDS if not (folder / RECORDS).exists() else f"{RECORDS}.new")
        self._exchanging = exchanging.begin(job, self._task.module, self._optimizer, folder, fresh)
        if self._exchanging.records is not None and fresh.name != RECORDS:
            self._exchanging.records.go_on_in(folder / RECORDS)
        self._random: dict[str, Any] | None = None
        self._go_on()

    @property
    def goes_on(self) -> bool:
        """Whether it was begun before."""
        return self._step > 0

    @property
    def _planned(self) -> float:
        """How many steps there will be at most."""
        epochs = self._job.last_epoch
        by_epochs = math.inf if epochs is None else epochs * self._task.batches.per_epoch
        return min(by_epochs, math.inf if self._job.steps is None else self._job.steps)

    # --- going on

    def _go_on(self) -> None:
        """From the newest checkpoint that all workers have. Behind a newer one that is damaged nobody goes unasked."""
        step, damaged = self._common_step()
        if damaged is not None:
            place = self._folder / CHECKPOINTS
            raise ValueError(f"the checkpoint of step {damaged} in {place} is damaged. {self._way_back(damaged, step)}")
        if step is None:
            data.seed_all([self._job.seed, self._rank])
            return
        try:
            state, _ = self._checkpoint.load(step)
        except CheckpointError as error:
            older = [other for other in self._checkpoint.steps() if other < step]
            raise ValueError(f"{error} {self._way_back(step, max(older, default=None))}") from error
        try:
            self._task.module.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
        except (KeyError, RuntimeError, ValueError) as error:
            why = " ".join(str(error).split())
            raise ValueError(f"the checkpoint of step {step} is of another model or optimizer: {why}") from error
        self._exchanging.load_state_dict(state["comm"])
        self._exchanging.sent_bytes, self._exchanging.dense_bytes = state["sent_bytes"], state["dense_bytes"]
        self._epoch, self._batch = state["position"]
        self._trained = state["trained_seconds"]
        self._next_evaluation = self._trained + self._job.evaluate_every
        self._accuracy, self._evaluated_at = state["accuracy"], state.get("evaluated", -1)
        self._random = state["random"]
        self._step = self._saved_at = step

    def _common_step(self) -> tuple[int | None, int | None]:
        """The newest step that all workers can go on from, and the newest that is damaged on some, if it is newer."""
        mine = torch.full((STEPS_COMPARED + 1,), -1, dtype=torch.int64)
        newest = self._checkpoint.steps()[-STEPS_COMPARED:]
        mine[: len(newest)] = torch.tensor(newest, dtype=torch.int64)
        mine[-1] = max(self._checkpoint.damaged(), default=-1)
        everyones = [torch.empty_like(mine) for _ in range(self._world_size)]
        dist.all_gather(everyones, mine, group=self._group)
        common = max(set.intersection(*(set(steps[:-1].tolist()) - {-1} for steps in everyones)), default=-1)
        damaged = max(int(steps[-1]) for steps in everyones)
        return common if common >= 0 else None, damaged if damaged > common else None

    def _way_back(self, damaged: int, older: int | None) -> str:
        if older is None:
            return "There is no older one that all workers have; put back a copy, or begin anew in another folder."
        return f"To go on from step {older}, remove {self._folder / CHECKPOINTS / f'step-{damaged:09d}'}."

    def _save(self) -> None:
        """A checkpoint that cannot be written is told of, and training goes on: the older ones are still there."""
        state = {
            "model": self._task.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "comm": self._exchanging.state_dict(),
            "position": [self._epoch, self._batch],
            "trained_seconds": self._clock(),
            "sent_bytes": self._exchanging.sent_bytes,
            "dense_bytes": self._exchanging.dense_bytes,
            "accuracy": self._accuracy,
            "evaluated": self._evaluated_at,
            "random": data.random_state(),
        }
        with self._paused():
            start = time.monotonic()
            self._leaving.saving = True
            try:
                self._checkpoint.save(state, self._step)
                self._saved_at, self._unsaved = self._step, ""
            except OSError as error:
                self._note_unsaved(error)
            self._leaving.saving = False
            self._record("saved", step=self._step, trouble=self._unsaved)
            self._next_saving = self._trained + (time.monotonic() - start) / SAVING_SHARE

    def _note_unsaved(self, error: OSError) -> None:
        """Tell of the first that could not be saved; of the last it is told at the end."""
        kept = max(self._checkpoint.steps(), default=None)
        still = "there is none yet" if kept is None else f"the one of step {kept} is kept"
        words = f"the checkpoint of step {self._step} could not be saved ({error.strerror}); {still}."
        if not self._unsaved:
            telling.note(words)
        self._unsaved = words

    @property
    def trouble(self) -> str:
        """What is not as it should be, though the training goes on."""
        return " ".join([*self._warned.words, *([self._unsaved] if self._unsaved else [])])

    # --- training

    def run(self) -> Ending:
        """Until it is done, interrupted, or makes no sense any more. Then its checkpoint and its records are whole."""
        self._record_beginning()
        self._clock.set(self._trained)  # preparing was no training
        if self._step == 0:
            self._evaluate(alone=True)
        if self._rank == 0:
            telling.begun()
        ending = self._train()
        self._agreement.hear()  # what is still on its way, on all workers alike
        if ending.how == "done" and self._evaluated_at != self._step:
            self._evaluate()
        if ending.how != "failed" and self._saved_at != self._step:
            self._save()
        self.end(ending)
        return ending

    def _train(self) -> Ending:
        ending = None if self._step < self._planned else Ending("done")
        while ending is None:
            batches = self._task.batches.epoch(self._epoch, self._batch)
            if self._random is not None:
                data.set_random_state(self._random)
                self._random = None
            for x, y in batches:
                self._learn(x, y)
                ending = self._after_step()
                if ending is not None:
                    break
        if self._loss is not None:
            self._record_loss(self._loss)
        return ending

    def _learn(self, x: Any, y: Any) -> None:
        start = time.monotonic()
        self._optimizer.zero_grad()
        loss = self._task.loss(self._exchanging.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._job.own and isinstance(self._exchanging.model, DistributedDataParallel):
            check_used(self._job.task, self._task.module)
        self._optimizer.step()
        self._exchanging.after_step()
        self._step += 1
        self._batch += 1
        if self._batch == self._task.batches.per_epoch:
            self._epoch, self._batch = self._epoch + 1, 0
        seconds = time.monotonic() - start
        self._step_seconds += (seconds - self._step_seconds) * (0.2 if self._step_seconds else 1.0)
        self._note_loss(float(loss.detach()))

    def _note_loss(self, loss: float) -> None:
        self._not_finite |= not math.isfinite(loss)
        self._loss = loss
        if time.monotonic() - self._loss_recorded >= LOSS_SECONDS:
            self._record_loss(loss)

    def _record_loss(self, loss: float) -> None:
        self._loss, self._loss_recorded = None, time.monotonic()
        self._record("loss", step=self._step, epoch=self._epoch, loss=loss)

    def _after_step(self) -> Ending | None:
        heard = Words()
        if due := self._agreement.is_due(self._step):
            heard = self._agreement.hear()
        if heard.not_finite:
            many = f"{heard.not_finite:.0f} of {self._world_size} workers"
            return Ending("failed", f"the loss is not finite on {many} by step {self._step}: try a smaller --lr.")
        if heard.interrupted:
            return Ending("interrupted", f"interrupted after step {self._step}.")
        if heard.evaluate:
            self._evaluate()
        every = self._job.checkpoint_every
        if (heard.save or (every and self._step % every == 0)) and not self._not_finite:
            self._save()
        if heard.over or self._step >= self._planned:
            return Ending("done")
        if due:
            self._agreement.say(self._words(), self._step)
        return None

    def _words(self) -> Words:
        words = Words(interrupted=float(self._leaving.asked), not_finite=float(self._not_finite))
        if self._rank != 0:
            return words
        steps = min(max(1, math.ceil(self._agreement.seconds / max(self._step_seconds, 1e-6))), MOST_STEPS_TO_AGREE)
        now = self._clock()
        return words._replace(
            steps=float(steps),
            over=float(self._job.seconds is not None and now + steps * self._step_seconds >= self._job.seconds),
            evaluate=float(now >= self._next_evaluation),
            save=float(self._cannot_leave_in_time and now >= self._next_saving),
        )

    @property
    def _cannot_leave_in_time(self) -> bool:
        """Steps are so long that an interrupt comes in the midst of one: then what is there has to be saved before."""
        return self._job.checkpoint_every > 0 and self._step_seconds > SLOW_STEP

    # --- looking

    def _evaluate(self, alone: bool = False) -> None:
        """Rank 0 tests, the others wait. With `alone` nobody does: at first all models are the same."""
        with self._paused():
            start = time.monotonic()
            if alone:
                self._test()
            else:
                with self._exchanging.looking(self._task.module, self._group) as distance:
                    if distance is not None:
                        self._record("consensus", step=self._step, distance=distance)
                    self._test()
                dist.barrier(group=self._group)
            cost = time.monotonic() - start
        pause = max(self._job.evaluate_every, cost * (1 / EVALUATING_SHARE - 1))
        self._next_evaluation = self._clock() + pause
        self._evaluated_at = self._step

    def _test(self) -> None:
        if self._rank != 0:
            return
        tested = evaluate(self._task)
        self._accuracy = tested.accuracy
        self._record(
            "evaluated",
            step=self._step,
            epoch=self._epoch,
            trained_seconds=self._trained,
            loss=tested.loss,
            accuracy=tested.accuracy,
            perplexity=math.exp(min(tested.loss, 700.0)) if self._task.is_text else None,
            sent_bytes=self._exchanging.sent_bytes,
            dense_bytes=self._exchanging.dense_bytes,
            control_seconds=self._exchanging.control_seconds,
        )

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """What happens within is neither training nor a step. On all workers at the same step."""
        self._trained = self._clock()
        try:
            yield
        finally:
            self._clock.set(self._trained)
            self._exchanging.pause()

    # --- what is written down

    def _record(self, kind: str, **fields: Any) -> None:
        if self._exchanging.records is not None:
            self._exchanging.records.write(kind, **fields)

    def _record_beginning(self) -> None:
        named = [(name, p.numel()) for name, p in self._task.module.named_parameters() if p.requires_grad]
        self._record(
            "began",
            wall=time.time(),
            monotonic=time.monotonic(),
            hosts=self._world_size,
            method=self._job.method,
            parameters=sum(numel for _, numel in named),
            batches_per_epoch=self._task.batches.per_epoch,
            steps=None if math.isinf(self._planned) else int(self._planned),
            seconds=self._job.seconds,
            step=self._step,
            trained_seconds=self._trained,
            layers=named,
        )

    def end(self, ending: Ending) -> None:
        """The last record; there is one only."""
        if self._ended:
            return
        self._ended = True
        facts: dict[str, Any] = {
            "how": ending.how,
            "message": " ".join(words for words in (ending.message, self.trouble) if words),
            "steps": self._step,
            "seconds": self._clock(),
            "accuracy": self._accuracy,
            "evaluated": None if self._evaluated_at < 0 else self._evaluated_at,
            "sent_bytes": self._exchanging.sent_bytes,
            "dense_bytes": self._exchanging.dense_bytes,
            "saved": None if self._saved_at < 0 else self._saved_at,
        }
        self._record("ended", **facts)
        if self._rank == 0:
            outcome.note(self._folder, **facts)

    def say_interrupted(self) -> None:
        """Last words of a worker that leaves alone."""
        saved = f"the last checkpoint is of step {self._saved_at}" if self._saved_at >= 0 else "there is no checkpoint"
        self.end(Ending("interrupted", f"interrupted in step {self._step}; {saved}."))

    def close(self) -> None:
        self._exchanging.close()
        self._warned.close()
