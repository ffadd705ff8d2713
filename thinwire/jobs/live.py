"""The live view of a run: what its records say so far, drawn again and again; plain lines where there is no terminal.

It reads the files of the run's folder as they grow and asks nobody, so that watching costs the training nothing.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
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
from thinwire.jobs.progress import NOT_YET, RECENT, Progress, Tail, line_of, quality, sent, step_time, where
from thinwire.jobs.words import sparkline, wire

if TYPE_CHECKING:
    from thinwire.report.tensorboard import Scalars

DRAW_EVERY, TELL_EVERY = 0.25, 5.0  # seconds between two pictures, and between two plain lines


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
    yield "progress", where(progress) if progress.step else "the workers are starting"
    loss = Text("" if progress.loss is None else f"{progress.loss:.3f}  ")
    yield "loss", loss.append(sparkline(progress.losses, 24), "green") if progress.losses else NOT_YET
    yield "quality", Text(quality(progress) or NOT_YET, "bold green" if progress.reached is not None else "")
    unmeasured = "not measured" if progress.step > RECENT else NOT_YET
    yield "network", unmeasured if progress.latency is None else f"{wire(progress.latency, progress.rate)} measured"
    if progress.truth:
        yield "", Text(f"{wire(progress.truth['latency'] or 0.0, progress.truth['rate'])} in truth", "dim")
    yield "plan", f"{progress.plan}, since step {progress.since}" if progress.plan else NOT_YET
    yield "sent", sent(progress)
    yield "step", step_time(progress)
    for number, (step, words) in enumerate(reversed(progress.reasons)):
        yield "why" if number == 0 else "", Text(f"step {step}: {words}", "" if number == 0 else "dim")


# --- who looks


def say(console: Console, words: str) -> None:
    """A line that stays, as it is: nothing in it is markup. Without a terminal it is one line however long it is."""
    console.print(Text(words), soft_wrap=not console.file.isatty())


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

    def pass_over(self) -> None:
        """Of a run that goes on: what its records say already is past, and only what comes is shown."""
        records = self._records.new()
        for record in records:
            self.progress.take(record)
        self._write_scalars(records)
        self.progress.forget_where()

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
        if time.monotonic() < self._due:
            return
        if self.progress.step > self._told:
            self._due = time.monotonic() + TELL_EVERY
            self._tell()
        elif not self._line:
            self._line = "the workers are starting, no step is done yet"
            self.say(self._line)

    def show_end(self) -> None:
        if self.progress.step:
            self._tell()

    def _tell(self) -> None:
        self._told, line = self.progress.step, line_of(self.progress)
        if line != self._line:
            self._line = line
            self.say(line)


def view_of(job: Job, folder: Path, console: Console, title: str, goes_on: bool = False) -> View:
    """Drawn where it can be: on a terminal that can move its cursor."""
    drawn = console.file.isatty() and not console.is_dumb_terminal
    view = (Drawn if drawn else Plain)(Progress(job), folder, console, title)
    if goes_on:
        view.pass_over()
    return view
