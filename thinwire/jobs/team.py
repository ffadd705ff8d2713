"""The workers of one run: started together, watched, and ended together.

Workers have sessions of their own, so a Ctrl-C comes to us alone: we ask them to end, they save a checkpoint after
their present step, and whoever is not done with that in time is killed. They die with us, however we die.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from thinwire.jobs.ground import Ground
from thinwire.jobs.leaving import requests
from thinwire.jobs.live import View
from thinwire.jobs.outcome import Outcome
from thinwire.jobs.telling import BEGUN, CONSEQUENCE, NOTE, SENTENCE
from thinwire.lab import run

WORKER = "thinwire.jobs.worker"
# A random.py or another thinwire in the current directory is not what a worker means, unless it is all that there is.
_NOT_FROM_HERE = [] if Path(__file__).parents[2] == Path.cwd() else ["-P"]
LOOK_EVERY = 0.05
INTERRUPT_GRACE, FAILURE_GRACE = 1.4, 3.0  # seconds from asking to end to SIGKILL
LAST_LINES = 6


class Interrupts:
    """Notes Ctrl-C, SIGTERM and that the terminal was closed instead of ending by them, while this is open."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._ends = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        for number in requests():
            self._before[number] = signal.signal(number, lambda number, _: self._note(number))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextmanager
    def ending(self) -> Iterator[None]:
        """While this is open, they end what is being done, by KeyboardInterrupt: nobody looks at them yet."""
        self._ends = True
        try:
            yield
        finally:
            self._ends = False

    def _note(self, number: int) -> None:
        """Of one closed terminal both the kernel and the shell tell, which is no haste."""
        if number != signal.SIGHUP or not self.seen:
            self.seen.append(number)
        if self._ends:
            raise KeyboardInterrupt


def interrupted(number: int) -> Outcome:
    """By this signal."""
    return Outcome(how="interrupted", code=128 + number, message=f"interrupted by {signal.Signals(number).name}.")


def run_workers(ground: Ground, folder: Path, view: View, interrupts: Interrupts) -> Outcome:
    """Start all workers of the job in this folder, and give how it went when the last has ended."""
    team = _Team(ground, folder, view, interrupts)
    try:
        team.start()
        return team.attend()
    finally:
        team.kill()


class _Worker:
    """A worker's process and what it prints: kept in a file, and its last lines here, for the disk may be full."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], log: Path) -> None:
        assert process.stdout is not None
        self.rank, self.process = rank, process
        self.has_begun = False
        self.sentences: list[str] = []
        self.notes: list[str] = []
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._rest = b""
        self._source = process.stdout
        os.set_blocking(self._source.fileno(), False)
        self._log: BinaryIO | None = log.open("ab", buffering=0)

    def listen(self) -> None:
        """Take in what it has printed since."""
        while piece := self._source.read(1 << 16):
            self._keep(piece)
            *lines, self._rest = (self._rest + piece).split(b"\n")
            for line in lines:
                self._take(line.decode(errors="replace").rstrip())

    def _keep(self, piece: bytes) -> None:
        if self._log is not None:
            try:
                self._log.write(piece)
            except OSError:  # it is cut off here
                self._log.close()
                self._log = None

    def _take(self, line: str) -> None:
        if self.rank == 0 and BEGUN.match(line):
            self.has_begun = True
            return
        if line:
            self._lines.append(line)
        if match := NOTE.fullmatch(line):
            self.notes.append(match[1])
        elif match := SENTENCE.fullmatch(line):
            self.sentences.append(match[1])

    def finish(self) -> None:
        """After its end."""
        self.listen()
        self._take(self._rest.decode(errors="replace").rstrip())
        self._source.close()
        if self._log is not None:
            self._log.close()

    @property
    def guilt(self) -> tuple[bool, bool]:
        """Of several that failed, the cause has the least: it was killed, or at least it did not lose another."""
        return self.process.returncode > 0, bool(self.sentences and CONSEQUENCE.match(self.sentences[-1]))

    def how_it_failed(self) -> Outcome:
        """In its own words if it found some."""
        if self.sentences:
            return Outcome(how="failed", code=1, message=f"worker {self.rank}: {self.sentences[-1]}")
        how = f"worker {self.rank} {run.how_it_ended(self.process.returncode)}."
        return Outcome(how="failed", code=1, message=how, log=tuple(self._lines))


class _Team:
    """The workers of one run."""

    def __init__(self, ground: Ground, folder: Path, view: View, interrupts: Interrupts) -> None:
        self._ground, self._folder, self._view, self._interrupts = ground, folder, view, interrupts
        self._running: list[_Worker] = []
        self._outcome = Outcome(how="done")
        self._troubled: list[_Worker] = []
        self._told: set[str] = set()
        self._has_begun = False
        self._notes: list[str] = []  # of the ground
        self._deadline: float | None = None

    def start(self) -> None:
        command = [sys.executable, *_NOT_FROM_HERE, "-m", WORKER, str(self._folder)]
        for rank in range(self._ground.job.hosts):
            process = self._ground.start(rank, command)
            self._running.append(_Worker(rank, process, self._folder / f"worker-{rank}.log"))

    def attend(self) -> Outcome:
        """Until the last has ended."""
        while self._running:
            self._note_interrupts()
            self._note_trouble()
            self._note_ends()
            self._keep_deadline()
            self._view.look()
            time.sleep(LOOK_EVERY)
        return self._outcome if self._outcome.how != "done" else self._done()

    def kill(self) -> None:
        """End what still runs, at once; nothing does unless starting or watching failed."""
        self._signal_all(signal.SIGKILL)
        while self._running:
            worker = self._running.pop()
            worker.process.wait()
            worker.finish()

    # --- what can happen

    def _note_interrupts(self) -> None:
        seen = self._interrupts.seen
        if len(seen) > 1 and not self._outcome.at_once:
            self._outcome = replace(interrupted(seen[0]), at_once=True)
            self._signal_all(signal.SIGKILL)
        elif seen and self._outcome.how == "done":
            self._outcome = interrupted(seen[0])
            self._view.say(
                "ending the workers, after their present step if it ends in time. Once more ends them at once."
            )
            self._end_all(INTERRUPT_GRACE)

    def _note_trouble(self) -> None:
        if self._outcome.how == "done" and (trouble := self._ground.trouble()):
            self._fail(Outcome(how="failed", code=1, message=trouble))
        for note in self._ground.notes():
            self._notes.append(note)
            self._view.say(note)

    def _note_beginning(self) -> None:
        if not self._has_begun and any(worker.has_begun for worker in self._running):
            self._has_begun = True
            self._ground.begin()

    def _note_ends(self) -> None:
        for worker in self._running:
            worker.listen()
        self._note_beginning()
        ended = [worker for worker in self._running if worker.process.poll() is not None]
        self._running = [worker for worker in self._running if worker not in ended]
        for worker in ended:
            worker.finish()
        self._tell_notes([*ended, *self._running])
        failed = sorted((w for w in ended if w.process.returncode), key=lambda w: (w.guilt, w.rank))
        if failed and self._outcome.how == "done":
            self._fail(failed[0].how_it_failed())
        self._troubled += [worker for worker in ended if worker.sentences]

    def _tell_notes(self, workers: Sequence[_Worker]) -> None:
        """At once, and once though several workers say it."""
        for note in (note for worker in workers for note in worker.notes):
            if note not in self._told:
                self._told.add(note)
                self._view.say(note)

    def _done(self) -> Outcome:
        """All came to their end, and yet not all may be well. What several say is said once."""
        said = self._notes.copy()
        for worker in sorted(self._troubled, key=lambda worker: worker.rank):
            if not any(worker.sentences[-1] in other for other in said):
                said.append(f"worker {worker.rank}: {worker.sentences[-1]}")
        return Outcome(how="done", code=1 if said else 0, message=" ".join(said))

    def _fail(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._end_all(FAILURE_GRACE)

    def _keep_deadline(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._signal_all(signal.SIGKILL)
            self._deadline = None

    def _end_all(self, grace: float) -> None:
        self._signal_all(signal.SIGTERM)
        self._deadline = time.monotonic() + grace

    def _signal_all(self, number: signal.Signals) -> None:
        """To the whole group of each worker: one that started others is not asked alone."""
        for worker in self._running:
            with suppress(ProcessLookupError):
                os.killpg(worker.process.pid, number)
