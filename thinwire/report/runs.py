"""A run as plain numbers.

Times are seconds since the run began, in columns of equal length; a number that is not known is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.report.reading import LONGEST_TEXT, number, text

Floats = NDArray[np.float64]
Columns = tuple[Floats, ...]

HALF = "ddp-fp16"  # its ratio is that of bytes, not of entries
USUAL_BROADCAST, USUAL_VALUES = "tree", "float32"  # which a name leaves out, as everywhere

OF_STEP = (
    "time",
    "step",
    "step_seconds",
    "seconds",
    "compress_seconds",
    "predicted_seconds",
    "sent_bytes",
    "dense_bytes",
    "gain",
    "alpha",
    "beta",
)


def columns(rows: Iterable[tuple[float, ...]], width: int) -> Columns:
    table = np.array(list(rows), np.float64).reshape(-1, width)
    return tuple(np.ascontiguousarray(table[:, i]) for i in range(width))


class PlanName(NamedTuple):
    """A plan as it was recorded. The `ratio` of a gossip method is the word for its compressor.

    >>> str(PlanName("star-topk", "ring", 0.1, broadcast="scatter", values="float16"))
    'star-topk over ring, scatter broadcast, float16 values at 0.1'
    """

    exchange: str
    collective: str
    ratio: float | str | None
    broadcast: str = USUAL_BROADCAST
    values: str = USUAL_VALUES

    @staticmethod
    def read(value: Any, longest: int = LONGEST_TEXT) -> PlanName:
        """As a record has it: an object, or a name alone. Its words are cut to `longest` letters."""
        fields = value if isinstance(value, dict) else {"exchange": value}
        exchange, collective, broadcast, values = (
            text(fields.get(name), longest) for name in ("exchange", "collective", "broadcast", "values")
        )
        ratio = fields.get("ratio")
        return PlanName(
            exchange or "unknown",
            collective,
            text(ratio) if isinstance(ratio, str) else number(ratio),
            broadcast or USUAL_BROADCAST,
            values or USUAL_VALUES,
        )

    @property
    def way(self) -> str:
        """The collective, and how indices are broadcast where that is not as usual."""
        return self.collective + ("" if self.broadcast == USUAL_BROADCAST else f", {self.broadcast} broadcast")

    @property
    def sends_all(self) -> bool:
        """Whether every entry is sent, in however many bits. Compressors that choose are written with their ratio."""
        if self.exchange == HALF:
            return True
        return ":" not in self.ratio if isinstance(self.ratio, str) else self.ratio in (None, 1.0)

    def __str__(self) -> str:
        words = f"{self.exchange} over {self.way}" if self.collective else f"{self.exchange}{self.way}"
        words += "" if self.values == USUAL_VALUES else f", {self.values} values"
        if self.ratio is None or self.ratio == 1.0:
            return words
        return f"{words} at {self.ratio if isinstance(self.ratio, str) else format(self.ratio, '.3g')}"


class Candidate(NamedTuple):
    plan: PlanName
    seconds: float
    gain: float
    cost: float


class Decision(NamedTuple):
    time: float
    step: int
    trigger: str
    plan: PlanName
    before: PlanName
    seconds: float
    alpha: float
    beta: float
    candidates: tuple[Candidate, ...]


class Evaluation(NamedTuple):
    """`trained` is the time without what evaluating took; `quality` is the accuracy, or the perplexity."""

    time: float
    trained: float
    step: float
    loss: float
    quality: float
    sent_bytes: float


@dataclass(kw_only=True)
class Run:
    """One training.

    Attributes:
        settings: of its job, in words.
        facts: versions and machine, in words, by group.
        columns: what is known of each step, by the names of OF_STEP.
        plan_of_step: for each step, where its plan is in `plans`.
        layers: names and numbers of entries.
        sent_of_layers: the bytes that the recording rank sent of each; none where that is not known.
        losses: time, step and training loss.
        consensus: time and distance.
        truth: time, latency and bytes per second of the lab's network, at each change.
        clock: times, and the training time at each; the training's clock stands still while it evaluates and saves.
        pauses: from when to when nobody trained: while it was started, and from each end until it had been resumed.
        quality: what an evaluation measures, "accuracy" or "perplexity".
        ended_at: the training time at its end.
        log: the last lines of a worker that failed and could not say why.
        notes: what is missing or damaged, a sentence each.
    """

    folder: Path
    name: str
    method: str = ""
    seed: str = ""
    commands: list[str] = field(default_factory=list)
    started: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    facts: dict[str, dict[str, str]] = field(default_factory=dict)
    hosts: int | None = None
    parameters: int | None = None
    layers: list[tuple[str, int]] = field(default_factory=list)
    sent_of_layers: list[float] = field(default_factory=list)
    controller: dict[str, Any] | None = None
    columns: dict[str, Floats] = field(default_factory=dict)
    plans: list[PlanName] = field(default_factory=list)
    plan_of_step: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    losses: Columns = field(default_factory=lambda: columns([], 3))
    consensus: Columns = field(default_factory=lambda: columns([], 2))
    truth: Columns = field(default_factory=lambda: columns([], 3))
    clock: list[tuple[float, float]] = field(default_factory=list)
    pauses: list[tuple[float, float]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    quality: str = "accuracy"
    decisions: list[Decision] = field(default_factory=list)
    how_it_ended: str = ""
    ended_at: float = math.nan
    message: str = ""
    log: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """How many steps were made; those that were made again after a resume count once."""
        steps = self.columns["step"]
        return int(np.nanmax(steps)) + 1 if np.isfinite(steps).any() else len(steps)

    @property
    def step_starts(self) -> Floats:
        """When each step began: when the one before ended, and the first after a pause when that was over."""
        ends = self.columns["time"]
        starts = np.append(0.0, ends[:-1])[: len(ends)]
        for _, over in self.pauses:
            first = int(np.searchsorted(ends, over, side="right"))
            starts[first : first + 1] = over
        return starts

    @property
    def begun(self) -> float:
        """When the training began."""
        return self.pauses[0][1] if self.pauses else 0.0

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """From when to when a line over time has nothing to go through: the pauses between two steps."""
        return self.pauses[1:]

    @property
    def seconds(self) -> float:
        """When the last thing was recorded."""
        ends = [column[-1] for column in (self.columns["time"], self.losses[0]) if len(column)]
        ends += [self.evaluations[-1].time] if self.evaluations else []
        return float(max(ends, default=0.0))

    @property
    def trained_seconds(self) -> float:
        """How long it trained, as it said itself at its end."""
        return self.ended_at if math.isfinite(self.ended_at) else float(self.trained(np.array([self.seconds]))[0])

    @property
    def untrained_seconds(self) -> float:
        """How long it evaluated and saved: what of the time was neither a pause nor training."""
        paused = sum(over - begun for begun, over in self.pauses)
        begins, ends = (np.array(times) for times in ([o for _, o in self.pauses], [b for b, _ in self.gaps]))
        trained = self.trained(ends).sum() + self.trained_seconds - self.trained(begins).sum()
        return max(0.0, self.seconds - paused - float(trained))

    def trained(self, times: Floats) -> Floats:
        """The training time at these times. Before the training began it is 0."""
        if not self.clock:
            return times
        at, trained = (np.array(column) for column in zip(*self.clock, strict=True))
        last = np.searchsorted(at, times, side="right") - 1
        return np.where(last < 0, 0.0, trained[last] + times - at[last])

    def sent_at(self, times: Floats) -> Floats:
        """The bytes that the recording rank had sent by then; NaN where that is not known."""
        sent = self.columns["sent_bytes"]
        if not np.isfinite(sent).any():
            known = [(e.time, e.sent_bytes) for e in self.evaluations if math.isfinite(e.sent_bytes)]
            if not known:
                return np.full(len(times), np.nan)
            at, so_far = zip(*known, strict=True)
            return np.asarray(np.interp(times, [0.0, *at], [0.0, *so_far]), np.float64)
        total = np.concatenate([[0.0], np.cumsum(np.nan_to_num(sent))])
        return np.asarray(total[np.searchsorted(self.columns["time"], times, side="right")], np.float64)


@dataclass(kw_only=True)
class Comparison:
    """The same training under several methods.

    Attributes:
        quality: what an evaluation measures, as the compare says, or else the first run that has one.
        target: what the time is measured to, where the compare says so.
        chosen: whether somebody named it; otherwise it is what every run reached.
        notes: of the whole, and then of each run.
    """

    folder: Path
    name: str
    quality: str
    target: float | None
    chosen: bool
    runs: list[Run]
    notes: list[str]
