"""The live view of a run: what its records say so far, drawn again and again; plain lines where there is no terminal.

It reads the files of the run's folder as they grow and asks nobody, so that watching costs the training nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from thinwire.jobs.job import RECORDS, TRUTH, Job
from thinwire.lab.units import format_rate, format_seconds

if TYPE_CHECKING:
    from thinwire.report.tensorboard import Scalars

DRAW_EVERY, TELL_EVERY = 0.25, 5.0  # seconds between two pictures, and between two plain lines
REASONS = 3
RECENT = 15  # steps whose median is shown
BARS = "▁▂▃▄▅▆▇█"
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
            yield json.loads(line)


class Progress:
    """What is known of a run: takes in records one by one and keeps what a person wants to see.

    Attributes:
        seconds: of training so far.
        trained: of training when it was last evaluated.
        reached: when the target was reached, in seconds of training.
        reasons: the last decisions, the newest last: the step and the words.
        plans: how many changes of plan there were.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.step = 0
        self.epoch = 0.0
        self.batches_per_epoch: int | None = None
        self.seconds = 0.0
        self.trained = 0.0
        self.loss: float | None = None
        self.losses: deque[float] = deque(maxlen=1000)
        self.accuracy: float | None = None
        self.perplexity: float | None = None
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
        self.control: float | None = None
        self.reasons: deque[tuple[int, str]] = deque(maxlen=REASONS)
        self.ended: dict[str, Any] | None = None
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._began: float | None = None
        self._dense_per_step = 0

    def take(self, record: Mapping[str, Any]) -> None:
        """Take in one record of any kind; those that say nothing for the eye are passed over."""
        if self._began is not None:
            self.seconds = record.get("time", 0.0) - self._began
        self.control = record.get("control_seconds", self.control)
        match record.get("kind"):
            case "run":
                self._began, self.ended = None, None  # a run that goes on counts its time anew
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

    def take_truth(self, line: Mapping[str, Any]) -> None:
        """Take in one line of what the lab's network really was."""
        self.truth = dict(line["now"])

    def _begin(self, record: Mapping[str, Any]) -> None:
        self.seconds = self.trained = record.get("trained_seconds") or 0.0
        self._began = record["time"] - self.seconds
        self.step = record.get("step") or 0
        self.batches_per_epoch = record.get("batches_per_epoch")
        hosts, parameters = record.get("hosts", self.job.hosts), record.get("parameters", 0)
        self._dense_per_step = 2 * (hosts - 1) * 4 * parameters // max(hosts, 1)

    def _take_step(self, record: Mapping[str, Any]) -> None:
        self.step = record["step"] + 1
        if self.batches_per_epoch:
            self.epoch = self.step / self.batches_per_epoch
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

    def _take_loss(self, record: Mapping[str, Any]) -> None:
        self.loss = record["loss"]
        if self.loss is not None:
            self.losses.append(self.loss)

    def _take_evaluated(self, record: Mapping[str, Any]) -> None:
        self.accuracy, self.perplexity = record.get("accuracy"), record.get("perplexity")
        self.trained = record.get("trained_seconds", self.seconds)
        self._began = record["time"] - self.trained  # evaluating is no training
        self._take_total(record)
        target = self.job.target
        if self.reached is None and target is not None and (self.accuracy or 0.0) >= target:
            self.reached = self.trained

    def _take_total(self, record: Mapping[str, Any]) -> None:
        """What the worker has counted itself: it knows of steps that were made again."""
        self.sent_bytes = record.get("sent_bytes") or self.sent_bytes
        self.dense_bytes = record.get("dense_bytes") or self.dense_bytes

    @property
    def step_seconds(self) -> float | None:
        """The median of the last steps: one that waited for an evaluation would hide the rest."""
        return statistics.median(self._steps) if self._steps else None

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


def _inverse(beta: float | None) -> float | None:
    return 1 / beta if beta else None


# --- in words


def in_words(plan: Mapping[str, Any]) -> str:
    """A plan as its record has it.

    >>> in_words({"exchange": "star-topk", "collective": "ring", "ratio": 0.01})
    'star-topk over ring at 0.01 (100x)'
    >>> in_words({"exchange": "choco", "collective": "torus", "ratio": "int8"}), in_words({"exchange": "ddp"})
    ('choco over torus, int8', 'ddp')
    """
    words = str(plan.get("exchange", ""))
    if plan.get("collective"):
        words += f" over {plan['collective']}"
    if plan.get("broadcast", "tree") not in (None, "tree"):
        words += f", {plan['broadcast']} broadcast"
    if plan.get("values", "float32") not in (None, "float32"):
        words += f", {plan['values']} values"
    ratio = plan.get("ratio")
    if isinstance(ratio, str):
        return f"{words}, {ratio}"
    return words if ratio is None or ratio == 1 else f"{words} at {ratio:.3g} ({_three_digits(1 / ratio):g}x)"


def clock(seconds: float) -> str:
    """
    >>> clock(42.4), clock(3725)
    ('0:42', '1:02:05')
    """
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def in_bytes(number: float) -> str:
    """
    >>> in_bytes(0), in_bytes(1300), in_bytes(82e6)
    ('0 bytes', '1.3 kB', '82 MB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} bytes"


def sparkline(values: Iterable[float], width: int) -> str:
    """The course of some numbers in one line of text.

    >>> sparkline([3, 2, 1, 0], 4), sparkline([1, 1, 1, 1, 5, 5], 3), sparkline([], 4)
    ('█▆▃▁', '▁▁█', '')
    """
    listed = list(values)
    if not listed:
        return ""
    parts = min(width, len(listed))
    edges = [len(listed) * part // parts for part in range(parts + 1)]
    means = [statistics.fmean(listed[low:high]) for low, high in zip(edges, edges[1:], strict=False)]
    low, span = min(means), max(means) - min(means)
    return "".join(BARS[round((mean - low) / span * (len(BARS) - 1)) if span else 0] for mean in means)


def _wire(latency: float, rate: float | None) -> str:
    return f"{_time(latency)}, {'unlimited' if rate is None else format_rate(_three_digits(rate * 8) / 8)}"


def _time(seconds: float) -> str:
    return format_seconds(_three_digits(seconds))


def _three_digits(value: float) -> float:
    """More would flicker."""
    return float(f"{value:.3g}")


def _where(progress: Progress) -> str:
    job, parts = progress.job, []
    parts.append(f"step {progress.step}" + (f" of {job.steps}" if job.steps else ""))
    if progress.batches_per_epoch:
        parts.append(f"epoch {progress.epoch:.1f}" + (f" of {job.last_epoch}" if job.last_epoch else ""))
    parts.append(clock(progress.seconds) + (f" of {clock(job.seconds)}" if job.seconds else ""))
    if 0.02 < progress.share < 1 and progress.ended is None:
        parts.append(f"about {clock(progress.seconds / progress.share - progress.seconds)} left")
    return ", ".join(parts)


def _quality(progress: Progress) -> str:
    parts = []
    if progress.accuracy is not None:
        parts.append(f"accuracy {progress.accuracy:.1%}")
    elif progress.perplexity is not None:
        parts.append(f"perplexity {progress.perplexity:.3g}")
    if progress.reached is not None:
        parts.append(f"{progress.job.target:.0%} reached after {progress.reached:.1f} s")
    return ", ".join(parts)


def _sent(progress: Progress) -> str:
    if not progress.dense_bytes:
        return NOT_YET
    share = progress.sent_bytes / progress.dense_bytes
    return f"{in_bytes(progress.sent_bytes)}, {share:.1%} of dense ({in_bytes(progress.dense_bytes)})"


def _step_time(progress: Progress) -> str:
    if progress.step_seconds is None:
        return NOT_YET
    words = f"{_time(progress.step_seconds)} measured"
    if progress.predicted is not None:
        words += f", {_time(progress.predicted)} predicted"
    if progress.control is not None and progress.seconds > 0:
        words += f"; control {progress.control / progress.seconds:.1%}"
    return words


# --- the picture


def picture(progress: Progress, title: str, place: str) -> RenderableType:
    """All of it, for any width: every line but the bar may wrap."""
    share = progress.share
    bar = Table.grid(padding=(0, 1), expand=True)
    bar.add_column(ratio=1)
    bar.add_column(justify="right", no_wrap=True)
    bar.add_row(ProgressBar(total=1.0, completed=share), f"{share:.0%}")
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(style="cyan", no_wrap=True)
    rows.add_column()
    for label, words in _rows(progress):
        rows.add_row(label, Text(words) if isinstance(words, str) else words)  # as it is: nothing in it is markup
    return Panel(Group(bar, rows), title=Text(title, "bold"), subtitle=Text(place, "dim"), title_align="left")


def _rows(progress: Progress) -> Iterable[tuple[str, str | Text]]:
    yield "done", _where(progress) if progress.step else "the workers are starting"
    loss = Text("" if progress.loss is None else f"{progress.loss:.3f}  ")
    yield "loss", loss.append(sparkline(progress.losses, 24), "green") if progress.losses else NOT_YET
    yield "quality", Text(_quality(progress) or NOT_YET, "bold green" if progress.reached is not None else "")
    unmeasured = "not measured" if progress.step > RECENT else NOT_YET
    yield "network", unmeasured if progress.latency is None else f"{_wire(progress.latency, progress.rate)} measured"
    if progress.truth:
        yield "", Text(f"{_wire(progress.truth['latency'] or 0.0, progress.truth['rate'])} in truth", "dim")
    yield "plan", f"{progress.plan}, since step {progress.since}" if progress.plan else NOT_YET
    yield "sent", _sent(progress)
    yield "step", _step_time(progress)
    for number, (step, words) in enumerate(reversed(progress.reasons)):
        yield "why" if number == 0 else "", Text(f"step {step}: {words}", "" if number == 0 else "dim")


def say(console: Console, words: str) -> None:
    """A line that stays. Without a terminal it is one line however long it is."""
    console.print(words, markup=False, highlight=False, soft_wrap=not console.file.isatty())


def _scalars_in(folder: Path) -> Scalars:
    from thinwire.report import tensorboard  # here: it takes NumPy along, which is slow to come

    return tensorboard.Scalars(folder / tensorboard.FOLDER)


class View(ABC):
    """Somebody who watches a run: `look` often, `say` what cannot be read in its files, `close` at its end."""

    def __init__(self, progress: Progress, folder: Path, console: Console) -> None:
        self.progress, self.folder, self.console = progress, folder, console
        self._records, self._truth = Tail(folder / RECORDS), Tail(folder / TRUTH)
        self._scalars = _scalars_in(folder) if progress.job.tensorboard else None
        self._next = 0.0

    def look(self) -> None:
        """Show what is new, if it is time to."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + DRAW_EVERY
            self._read()
            self.show()

    def close(self) -> None:
        """Show how it ended."""
        self._read()
        self.show_end()
        if self._scalars is not None:
            self._scalars.close()

    def say(self, words: str) -> None:
        """Something that stays."""
        say(self.console, words)

    def _read(self) -> None:
        for line in self._truth.new():
            self.progress.take_truth(line)
        records = self._records.new()
        for record in records:
            self.progress.take(record)
            self.note(record)
        self._write_scalars(records)

    def _write_scalars(self, records: Iterable[Mapping[str, Any]]) -> None:
        """For TensorBoard. That the disk is full ends them, and not the run."""
        if self._scalars is None:
            return
        try:
            for record in records:
                self._scalars.take(record)
            self._scalars.flush()
        except OSError as error:
            self.say(f"what TensorBoard shows ends here: {error.strerror}.")
            with suppress(OSError):  # what could not be written is still waiting to be
                self._scalars.close()
            self._scalars = None

    def note(self, record: Mapping[str, Any]) -> None:
        """A record was taken in; whoever tells of single ones does it here."""
        del record

    @abstractmethod
    def show(self) -> None: ...

    @abstractmethod
    def show_end(self) -> None: ...


class Drawn(View):
    """In a terminal: one picture that changes. It is drawn from this thread alone."""

    def __init__(self, progress: Progress, folder: Path, console: Console, title: str) -> None:
        super().__init__(progress, folder, console)
        self._title = title
        self._size = console.size
        self._live = self._begin()

    def _begin(self) -> Live:
        live = Live(console=self.console, auto_refresh=False, vertical_overflow="crop")
        live.start()
        return live

    def show(self) -> None:
        if self.console.size != self._size:
            self._begin_anew()
        self._live.update(picture(self.progress, self._title, str(self.folder)), refresh=True)

    def _begin_anew(self) -> None:
        """The terminal has wrapped what was drawn in a way that nobody tells: draw on an empty screen."""
        self._live.transient = True
        self._live.stop()
        self._size = self.console.size
        self.console.clear()
        self._live = self._begin()

    def show_end(self) -> None:
        self.show()
        self._live.stop()


class Plain(View):
    """Without a terminal: a line every few seconds, and one for every change of plan."""

    def __init__(self, progress: Progress, folder: Path, console: Console, title: str) -> None:
        super().__init__(progress, folder, console)
        self._due = time.monotonic() + TELL_EVERY
        self._plan, self._line, self._told = "", "", 0
        self.say(f"{title}: {folder}")

    def note(self, record: Mapping[str, Any]) -> None:
        progress = self.progress
        if progress.plan != self._plan:
            why = f", because {progress.reasons[-1][1]}" if progress.reasons else ""
            self.say(f"from step {progress.since} on: {progress.plan}{why}")
            self._plan = progress.plan

    def show(self) -> None:
        if time.monotonic() >= self._due and self.progress.step > self._told:
            self._due = time.monotonic() + TELL_EVERY
            self._tell()

    def show_end(self) -> None:
        if self.progress.step:
            self._tell()

    def _tell(self) -> None:
        self._told, line = self.progress.step, line_of(self.progress)
        if line != self._line:
            self._line = line
            self.say(line)


def line_of(progress: Progress) -> str:
    """A run in one line."""
    parts = [_where(progress), "" if progress.loss is None else f"loss {progress.loss:.3f}", _quality(progress)]
    parts.append(f"network {_wire(progress.latency, progress.rate)}" if progress.latency is not None else "")
    parts.append(f"a step {_step_time(progress)}" if progress.step_seconds is not None else "")
    parts.append(f"sent {_sent(progress)}" if progress.sent_bytes else "")
    return "; ".join(part for part in parts if part)


def progress_of(job: Job, folder: Path) -> Progress:
    """What the records of a run say, whether it runs or has ended."""
    progress = Progress(job)
    for record in Tail(folder / RECORDS).new():
        progress.take(record)
    return progress


def summary_of(progress: Progress) -> dict[str, Any]:
    """For a script: how far it came and what it took."""
    numbers = ("step", "epoch", "seconds", "trained", "loss", "accuracy", "perplexity", "reached")
    figures = {name: getattr(progress, name) for name in (*numbers, "plan", "plans", "sent_bytes", "dense_bytes")}
    return {{"step": "steps", "epoch": "epochs"}.get(name, name): value for name, value in figures.items()}


def view_of(job: Job, folder: Path, console: Console, title: str) -> View:
    """Drawn where it can be: on a terminal that can move its cursor."""
    drawn = console.file.isatty() and not console.is_dumb_terminal
    return (Drawn if drawn else Plain)(Progress(job), folder, console, title)


def title_of(job: Job) -> str:
    """
    >>> title_of(Job(task="digits", hosts=2, method="ddp"))
    'digits, ddp, 2 hosts'
    """
    network = f" on {job.network}" if job.network else ""
    return f"{job.task}, {job.method}, {job.hosts} hosts{network}"
