"""What is known of a run, from its records as they grow."""

from __future__ import annotations

import json
import os
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from thinwire.jobs import outcome
from thinwire.jobs.job import RECORDS, Job
from thinwire.jobs.words import clock, duration, in_bytes, in_words, wire

REASONS = 3
RECENT = 15  # steps whose median is shown
MANY = 100  # steps of which a share can be told: the first are not like the others
UNREAD = (b'{"kind": "heard"', b'{"kind": "asked"')  # most of the lines, and nothing here shows them
NOT_YET = "not yet"


class Tail:
    """The lines that a growing file has gained. One that was begun anew is read anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def new(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                piece = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(piece)
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return list(_records_in(line for line in lines if not line.startswith(UNREAD)))


def _records_in(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """A line that says nothing, because whoever wrote it was killed or the disk was full, is passed over."""
    for line in lines:
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                yield record


class Progress:
    """What is known of a run: takes in records one by one and keeps what a person wants to see.

    Attributes:
        recorded: the step at which the records break off, where more steps were made than they tell of.
        seconds: of training so far.
        trained: of training when it was last evaluated.
        evaluated: the step at which that was.
        reached: when the target was reached, in seconds of training.
        reasons: the last decisions, the newest last: the step and the words.
        plans: how many changes of plan there were.
        control: the share of the time in which it trained that went into measuring and deciding.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.step = 0
        self.recorded: int | None = None
        self.epoch = 0.0
        self.batches_per_epoch: int | None = None
        self.seconds = 0.0
        self.trained = 0.0
        self.loss: float | None = None
        self.losses: deque[float] = deque(maxlen=1000)
        self.accuracy: float | None = None
        self.perplexity: float | None = None
        self.evaluated: int | None = None
        self.reached: float | None = None
        self.latency: float | None = None
        self.rate: float | None = None
        self.truth: dict[str, float | None] = {}
        self.plan = ""
        self.since = 0
        self.plans = 0
        self.sent_bytes = 0
        self.dense_bytes = 0
        self.predicted: float | None = None
        self.reasons: deque[tuple[int, str]] = deque(maxlen=REASONS)
        self.ended: dict[str, Any] | None = None
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._control = _Share()
        self._began: float | None = None
        self._dense_per_step = 0

    def take(self, record: Mapping[str, Any]) -> None:
        """Take in one record of any kind; those that say nothing for the eye are passed over."""
        if self._began is not None and record.get("kind") != "run":  # whose clock is another
            self.seconds = record.get("time", 0.0) - self._began
        match record.get("kind"):
            case "run":
                self._start_anew()
            case "began":
                self._begin(record)
            case "step":
                self._take_step(record)
            case "loss":
                self._take_loss(record)
            case "evaluated":
                self._take_evaluated(record)
            case "decision":
                self.reasons.append((record["step"], record["trigger"]))
                self.latency, self.rate = record["alpha"], _inverse(record["beta"])
            case "ended":
                self.ended = dict(record)
                self._take_total(record)

    def forget_where(self) -> None:
        """Of a run that goes on: where it is and by which plan is not known until it tells."""
        self.step, self.epoch, self.seconds = 0, 0.0, 0.0
        self.plan, self.since = "", 0
        self.reasons.clear()
        self._start_anew()

    def take_truth(self, line: Mapping[str, Any]) -> None:
        """Take in one line of what the lab's network really was."""
        self.truth = dict(line["now"])

    def take_outcome(self, known: Mapping[str, Any]) -> None:
        """Take in what is known of a run that has ended: where its records break off, it is more than they tell."""
        if (known["steps"] or 0) <= self.step:
            return
        self.recorded, self.step = self.step, known["steps"]
        self.epoch, self.seconds = self._epochs(), known["seconds"] or self.seconds
        self.accuracy, self.evaluated = known["accuracy"], known["evaluated"]
        self.loss = self.perplexity = None
        self._take_total(known)

    def _start_anew(self) -> None:
        """A run that goes on counts its time anew, and what was measured of its steps is past."""
        self._began, self.ended, self.predicted = None, None, None
        self._steps.clear()

    def _begin(self, record: Mapping[str, Any]) -> None:
        self.seconds = self.trained = record.get("trained_seconds") or 0.0
        self._began = record["time"] - self.seconds
        self.step = record.get("step") or 0
        if self.evaluated is not None and self.evaluated > self.step:  # in steps that were lost
            self.accuracy = self.perplexity = self.evaluated = None
        self._control.begin(self.seconds)
        self.batches_per_epoch = record.get("batches_per_epoch")
        self.epoch = self._epochs()
        hosts, parameters = record.get("hosts", self.job.hosts), record.get("parameters", 0)
        self._dense_per_step = 2 * (hosts - 1) * 4 * parameters // max(hosts, 1)

    def _take_step(self, record: Mapping[str, Any]) -> None:
        self.step = record["step"] + 1
        self.epoch = self._epochs()
        if record.get("step_seconds") is not None:
            self._steps.append(record["step_seconds"])
        self.predicted = record.get("predicted_seconds")
        self.sent_bytes += record.get("sent_bytes") or 0
        self.dense_bytes += record.get("dense_bytes") or self._dense_per_step
        if record.get("alpha") is not None:
            self.latency, self.rate = record["alpha"], _inverse(record["beta"])
        plan = in_words(record["plan"])
        if plan != self.plan:
            self.plan, self.since, self.plans = plan, record["step"], self.plans + 1

    def _epochs(self) -> float:
        return self.step / self.batches_per_epoch if self.batches_per_epoch else 0.0

    def _take_loss(self, record: Mapping[str, Any]) -> None:
        self.loss = record["loss"]
        if self.loss is not None:
            self.losses.append(self.loss)

    def _take_evaluated(self, record: Mapping[str, Any]) -> None:
        self.accuracy, self.perplexity = record.get("accuracy"), record.get("perplexity")
        self.evaluated, self.trained = record.get("step"), record.get("trained_seconds", self.seconds)
        self._began = record["time"] - self.trained  # evaluating is no training
        self._take_total(record)
        self._control.take(record.get("control_seconds") or 0.0, self.trained)
        if self.reached is None and self._is_at_target:
            self.reached = self.trained

    @property
    def _is_at_target(self) -> bool:
        target, found = self.job.target, getattr(self, self.job.quality)
        if target is None or found is None:
            return False
        return bool(found <= target if self.job.quality == "perplexity" else found >= target)

    def _take_total(self, record: Mapping[str, Any]) -> None:
        """What the worker has counted: more than its records, where they break off; less, where steps were lost."""
        self.sent_bytes = max(self.sent_bytes, record.get("sent_bytes") or 0)
        self.dense_bytes = max(self.dense_bytes, record.get("dense_bytes") or 0)

    @property
    def step_seconds(self) -> float | None:
        """The median of the last steps: one that waited for an evaluation would hide the rest."""
        return statistics.median(self._steps) if self._steps else None

    @property
    def is_settled(self) -> bool:
        """Whether there are steps enough, since it was last started, for what is expected of them to mean something."""
        return len(self._steps) == RECENT

    @property
    def control(self) -> float | None:
        """None while too few steps are behind it."""
        return self._control.value if (self.evaluated or 0) >= MANY else None

    @property
    def share(self) -> float:
        """How much of the run is done, from 0 to 1, by the limit that will be reached first."""
        if self.ended is not None and self.ended.get("how") == "done":
            return 1.0
        done = [0.0]
        if self.job.steps:
            done.append(self.step / self.job.steps)
        if self.job.last_epoch:
            done.append(self.epoch / self.job.last_epoch)
        if self.job.seconds:
            done.append(self.seconds / self.job.seconds)
        return min(max(done), 1.0)


class _Share:
    """What of a time went into something. Every start counts both anew, and all starts are counted."""

    def __init__(self) -> None:
        self._spent = self._whole = 0.0  # by earlier starts
        self._spent_now = self._whole_now = 0.0
        self._begin = 0.0

    def begin(self, seconds: float) -> None:
        self._spent, self._whole = self._spent + self._spent_now, self._whole + self._whole_now
        self._spent_now = self._whole_now = 0.0
        self._begin = seconds

    def take(self, spent: float, seconds: float) -> None:
        self._spent_now, self._whole_now = spent, seconds - self._begin

    @property
    def value(self) -> float | None:
        whole = self._whole + self._whole_now
        return (self._spent + self._spent_now) / whole if whole > 0 else None


def _inverse(beta: float | None) -> float | None:
    return 1 / beta if beta else None


def progress_of(job: Job, folder: Path) -> Progress:
    """What the records of a run say, whether it runs or has ended."""
    progress = Progress(job)
    for record in Tail(folder / RECORDS).new():
        progress.take(record)
    progress.take_outcome(outcome.read(folder))
    return progress


def summary_of(progress: Progress) -> dict[str, Any]:
    """For a script: how far it came and what it took."""
    numbers = ("step", "epoch", "seconds", "trained", "loss", "accuracy", "perplexity", "evaluated", "reached")
    figures = {name: getattr(progress, name) for name in (*numbers, "plan", "plans", "sent_bytes", "dense_bytes")}
    return {{"step": "steps", "epoch": "epochs"}.get(name, name): value for name, value in figures.items()}


# --- in words


def where(progress: Progress) -> str:
    job, parts = progress.job, []
    parts.append(f"step {progress.step}" + (f" of {job.steps}" if job.steps else ""))
    if progress.recorded is not None:
        parts[-1] += f" (recorded up to step {progress.recorded})"
    if progress.batches_per_epoch:
        parts.append(f"epoch {progress.epoch:.1f}" + (f" of {job.last_epoch}" if job.last_epoch else ""))
    parts.append(clock(progress.seconds) + (f" of {clock(job.seconds)}" if job.seconds else ""))
    if 0.02 < progress.share < 1 and progress.ended is None:
        parts.append(f"about {clock(progress.seconds / progress.share - progress.seconds)} left")
    return ", ".join(parts)


def quality(progress: Progress) -> str:
    """With the step at which it was measured, if that was not the last."""
    parts = []
    if progress.accuracy is not None:
        parts.append(f"accuracy {progress.accuracy:.1%}")
    elif progress.perplexity is not None:
        parts.append(f"perplexity {progress.perplexity:.3g}")
    if parts and progress.evaluated not in (None, progress.step):
        parts[0] += f" at step {progress.evaluated}"
    if progress.reached is not None:
        parts.append(f"{_target(progress.job)} reached after {progress.reached:.1f} s")
    return ", ".join(parts)


def _target(job: Job) -> str:
    return f"{job.target:.3g}" if job.quality == "perplexity" else f"{job.target:.0%}"


def sent(progress: Progress) -> str:
    if not progress.dense_bytes:
        return NOT_YET
    share = progress.sent_bytes / progress.dense_bytes
    return f"{in_bytes(progress.sent_bytes)}, {share:.1%} of dense ({in_bytes(progress.dense_bytes)})"


def step_time(progress: Progress) -> str:
    if progress.step_seconds is None:
        return NOT_YET
    words = f"{duration(progress.step_seconds)} measured"
    if progress.predicted is not None and progress.is_settled:
        words += f", {duration(progress.predicted)} predicted"
    if progress.control:
        words += f"; control {progress.control:.1%}"
    return words


def line_of(progress: Progress) -> str:
    """A run in one line."""
    parts = [where(progress), "" if progress.loss is None else f"loss {progress.loss:.3f}", quality(progress)]
    parts.append(f"network {wire(progress.latency, progress.rate)}" if progress.latency is not None else "")
    parts.append(f"a step {step_time(progress)}" if progress.step_seconds is not None else "")
    parts.append(f"sent {sent(progress)}" if progress.sent_bytes else "")
    return "; ".join(part for part in parts if part)
