"""The same job under several methods, one after the other: on the same network, data and seeds."""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from thinwire.errors import ThinwireError
from thinwire.jobs.ground import why_no_lab
from thinwire.jobs.job import JOB, RECORDS, SEEDS, Job, Mistake, read_job
from thinwire.jobs.live import say
from thinwire.jobs.outcome import Outcome
from thinwire.jobs.outcome import read as read_outcome
from thinwire.jobs.progress import Tail
from thinwire.jobs.resuming import newest_step
from thinwire.jobs.settings import Settings
from thinwire.jobs.start import conduct, invite
from thinwire.jobs.team import Interrupts, interrupted
from thinwire.jobs.words import in_bytes, title_of

FORMAT = 1
FILE = "compare.json"
METHODS = "ddp,adaptive"
EVALUATE_EVERY = 0.5  # seconds, unless the user says otherwise: a time to accuracy is no finer than that

# What `thinwire demo` compares. The rates are those of a thin line, so that a model of this size feels them.
_DEMO = Job(
    task="digits", hosts=4, network="unpredictable", scale=40, speed=2, seconds=50, target=0.95, evaluate_every=1
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training of a comparison, as its records tell it.

    Attributes:
        folder: relative to the comparison's.
        curve: seconds of training, and the score then; a score is an accuracy, or a perplexity below zero, so that more
            is better.
        sent_bytes: by rank 0; None where nobody counted them.
        message: what went wrong, nothing if nothing did.
    """

    method: str
    seed: int
    folder: str
    steps: int = 0
    seconds: float = 0.0
    curve: tuple[tuple[float, float], ...] = ()
    sent_bytes: int | None = None
    message: str = ""

    @property
    def best(self) -> float | None:
        return max((score for _, score in self.curve), default=None)

    def seconds_to(self, target: float) -> float | None:
        """When the target was first seen to be reached; None if never."""
        return next((seconds for seconds, score in self.curve if score >= target), None)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method in the table: the median over seeds.

    Attributes:
        seconds: to the target; None unless every seed came there.
        speed_up: the first method's seconds over ours; None where ours are none at all, and if the first failed.
        at_least: the first method never came there, so `speed_up` counts all the time that it had.
        score: the last accuracy, or perplexity.
    """

    method: str
    steps: float
    seconds: float | None
    speed_up: float | None
    at_least: bool
    sent_bytes: float | None
    score: float | None
    message: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What came of it.

    Attributes:
        target: the score that the table is about: an accuracy, or a perplexity below zero.
        set_by: the method that came to no more than the target, where nobody named one.
    """

    folder: Path
    target: float | None
    set_by: str
    runs: tuple[Run, ...]
    rows: tuple[Row, ...]
    outcome: Outcome

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "how": self.outcome.how,
            **_told(self.target, chosen=not self.set_by),
            "rows": [asdict(row) for row in self.rows],
        }


def asked(
    config: Path | None, given: Mapping[str, Any], methods: str | None, seeds: int | None
) -> tuple[Job, list[str], int]:
    """What to compare: a job, its methods and how many seeds, from options and maybe a file; options win."""
    settings = Settings("", "", {}) if config is None else Settings.read(config, also=("methods", "seeds"))
    said = settings.data
    if "method" in said:
        raise settings.refused("method", "method has no effect in a comparison: name several as methods.")
    often = {} if "evaluate_every" in said else {"evaluate_every": EVALUATE_EVERY}
    job = settings.job(**(often | dict(given)))
    named = said.get("methods", METHODS) if methods is None else methods
    named = named.split(",") if isinstance(named, str) else named
    if not isinstance(named, list) or not all(isinstance(method, str) for method in named):
        raise settings.refused("methods", f'methods must be texts, like ["ddp", "adaptive"], got {named!r}.')
    if methods is None:
        try:
            jobs_of(job, named, 1)
        except Mistake as error:
            raise settings.refused("methods", error) from error
    number = said.get("seeds", 1) if seeds is None else seeds
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        wrong = f"seeds must be 1 or more, got {number!r}."
        raise settings.refused("seeds", wrong) if seeds is None else ValueError(wrong)
    return job, named, number


def jobs_of(job: Job, methods: Sequence[str], seeds: int) -> list[Job]:
    """A job for every method and seed. Each is a folder within the comparison's."""
    if not methods:
        raise Mistake("methods", "methods are none: name at least one, as in ddp,adaptive.")
    if not all(methods):
        raise Mistake("methods", "methods have an empty place: write them with commas between, as in ddp,adaptive.")
    twice = [method for number, method in enumerate(methods) if method in methods[:number]]
    if twice:
        raise Mistake("methods", f"{twice[0]} is among the methods twice.")
    if job.seed + seeds > SEEDS:
        raise Mistake("seeds", f"seeds must end at 2^32 - 1, and {seeds} from {job.seed} on go beyond.")
    return [
        replace(job, method=method, seed=job.seed + seed, name=_name(method, job.seed + seed, seeds))
        for seed in range(seeds)
        for method in methods
    ]


def _name(method: str, seed: int, seeds: int) -> str:
    """
    >>> _name("star-topk@0.01:tree", 3, seeds=1), _name("ddp", 3, seeds=2)
    ('star-topk-0.01-tree', 'ddp-seed-3')
    """
    name = re.sub(r"[^A-Za-z0-9.]+", "-", method)
    return name if seeds == 1 else f"{name}-seed-{seed}"


def compare(
    job: Job, jobs: Sequence[Job], folder: Path, command: Sequence[str], console: Console, interrupts: Interrupts
) -> Comparison:
    """Run all of them. One that fails is told of and the others go on; an interrupt ends them all.

    What cannot be written down is told of too, and they go on: the table can be shown without its file.
    """
    invite(job, folder, console)
    done: list[Run] = []
    outcome = Outcome(how="done")
    unwritten = ""
    for number, each in enumerate(jobs, 1):
        title = f"{number} of {len(jobs)}: {title_of(each)}"
        ended = _attempt(each, folder / str(each.name), command, console, title, interrupts)
        done.append(read_run(folder, each, ended.message))
        before, unwritten = unwritten, _write(folder, _told(_goal(job), chosen=True), done)
        if unwritten and not before:
            say(console, unwritten)
        if ended.how == "failed":
            outcome = Outcome(how="failed", code=1, message="not every method came to its end.")
        elif ended.how == "interrupted":
            outcome = ended
            break
    least = None if job.target is not None else least_of(done)
    target = _goal(job) if least is None else least.best
    rows = tuple(_rows(done, list(dict.fromkeys(each.method for each in jobs)), target))
    if unwritten := _write(folder, _told(target, chosen=least is None), done, rows):
        outcome = replace(outcome, code=outcome.code or 1, message=" ".join(filter(None, (outcome.message, unwritten))))
    set_by = "" if least is None else least.method
    return Comparison(folder=folder, target=target, set_by=set_by, runs=tuple(done), rows=rows, outcome=outcome)


def _attempt(
    job: Job, folder: Path, command: Sequence[str], console: Console, title: str, interrupts: Interrupts
) -> Outcome:
    try:
        folder.mkdir()
        ended = conduct(job, folder, command, console, title, interrupts)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        ended = Outcome(how="failed", code=1, message=f"{where}{error.strerror or error}.")
    except (ValueError, ThinwireError) as error:
        ended = Outcome(how="failed", code=1, message=str(error))
    except KeyboardInterrupt:
        ended = interrupted(interrupts.seen[0])
    if ended.how == "interrupted" or not ended.code:
        return ended
    message = "; ".join([ended.message, *ended.log[-1:]])
    console.print(Text(f"{job.method}: {message}", "red"), soft_wrap=True)
    return replace(ended, message=message if ended.how == "failed" else "")


def _goal(job: Job) -> float | None:
    """The job's target as a score."""
    return -job.target if job.target is not None and job.quality == "perplexity" else job.target


def _told(target: float | None, chosen: bool) -> dict[str, Any]:
    """A target for others: what it is, its value as a person says it, and whether somebody named it.

    >>> _told(-12.5, chosen=False)
    {'quality': 'perplexity', 'target': 12.5, 'chosen': False}
    """
    if target is None:
        return {"quality": None, "target": None, "chosen": False}
    return {"quality": "accuracy" if target >= 0 else "perplexity", "target": abs(target), "chosen": chosen}


def _write(folder: Path, target: dict[str, Any], runs: Iterable[Run], rows: Iterable[Row] = ()) -> str:
    """Whole or not at all: what was there before is kept until the new one is. Gives why it could not be, if so."""
    known = ("method", "folder", "seed", "message")
    content = {
        "format": FORMAT,
        **target,
        "runs": [{key: getattr(run, key) for key in known} for run in runs],
        "rows": [asdict(row) for row in rows],
    }
    temporary = folder / f"{FILE}.tmp"
    try:
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(temporary, folder / FILE)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        return f"what came of it could not be written to {folder / FILE}: {error.strerror}."
    return ""


def demo(**settings: Any) -> tuple[Job, list[str], str]:
    """What `thinwire demo` compares: a job, its methods, and what must be said about them."""
    job = replace(_DEMO, **settings)
    if not (missing := why_no_lab()):
        return job, ["ddp", "adaptive"], ""
    note = "Shaped links do not slow down plain DDP, so dense:ring, which sends the same bytes, stands in for it."
    return replace(job, link="shaped"), ["dense:ring", "adaptive"], f"No lab here: {missing}\n{note}"


# --- from records to a table


def read_run(folder: Path, job: Job, message: str = "") -> Run:
    """What a run's records say, however it ended. Where they break off, its outcome knows of more steps."""
    steps, seconds, sent, curve = 0, 0.0, None, []
    for record in Tail(folder / str(job.name) / RECORDS).new():
        match record["kind"]:
            case "step":
                steps = record["step"] + 1
                if record.get("sent_bytes") is not None:
                    sent = (sent or 0) + record["sent_bytes"]
            case "evaluated":
                seconds = record.get("trained_seconds", record["time"])
                if (score := _score(record)) is not None:
                    curve.append((seconds, score))
            case "ended":
                steps, seconds = record.get("steps") or steps, record.get("seconds") or seconds
    return Run(
        method=job.method,
        seed=job.seed,
        folder=str(job.name),
        steps=max(steps, read_outcome(folder / str(job.name))["steps"] or 0),
        seconds=seconds,
        curve=tuple(curve),
        sent_bytes=sent,
        message=message,
    )


def _score(record: dict[str, Any]) -> float | None:
    if record.get("accuracy") is not None:
        return float(record["accuracy"])
    return -float(record["perplexity"]) if record.get("perplexity") is not None else None


def least_of(runs: Iterable[Run]) -> Run | None:
    """The run whose best every other came to, or went beyond; those that failed do not count."""
    known = [run for run in runs if not run.message and run.best is not None]
    return min(known, key=lambda run: run.best or 0.0, default=None)


def _rows(runs: Sequence[Run], methods: Sequence[str], target: float | None) -> Iterable[Row]:
    of = {method: [run for run in runs if run.method == method] for method in methods}
    first = of[methods[0]]
    base, had = _to(first, target), _median([run.seconds for run in first])
    if any(run.message for run in first):
        base = had = None  # it is no measure for the others
    for method in methods:
        seconds, all_of_it = _to(of[method], target), base if base is not None else had or None
        wrong = [run.message for run in of[method] if run.message]
        yield Row(
            method=method,
            steps=_median([run.steps for run in of[method]]) or 0,
            seconds=seconds,
            speed_up=None if all_of_it is None or not seconds else all_of_it / seconds,
            at_least=base is None,
            sent_bytes=_median([run.sent_bytes for run in of[method] if run.sent_bytes is not None]),
            score=_median([abs(run.curve[-1][1]) for run in of[method] if run.curve]),
            message=wrong[0] if wrong else "" if of[method] else "not run",
        )


def _to(runs: Sequence[Run], target: float | None) -> float | None:
    times = [None if target is None else run.seconds_to(target) for run in runs]
    known = [seconds for seconds in times if seconds is not None]
    return _median(known) if len(known) == len(times) else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def table_of(comparison: Comparison) -> Table:
    """One row per method."""
    target = comparison.target
    goal = "target" if target is None else _quality(target)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("method", "steps", f"seconds to {goal}", "speed-up", "sent per host", "at the end"):
        table.add_column(column, justify="left" if column == "method" else "right", overflow="fold")
    for row in comparison.rows:
        table.add_row(*(Text(cell) for cell in (row.method, *_cells(row))))  # as it is: nothing in it is markup
    return table


def _cells(row: Row) -> list[str]:
    if row.message:
        return ["", row.message, "", "", ""] if not row.steps else [f"{row.steps:.0f}", row.message, "", "", ""]
    return [
        f"{row.steps:.0f}",
        _or_dash(row.seconds, lambda seconds: f"{seconds:.1f}"),
        _or_dash(row.speed_up, lambda times: f"{'more than ' if row.at_least else ''}{times:.1f}x"),
        _or_dash(row.sent_bytes, in_bytes),
        _or_dash(row.score, lambda score: f"{score:.1%}" if score <= 1 else f"{score:.3g}"),
    ]


def _or_dash(value: float | None, written: Callable[[float], str]) -> str:
    return "-" if value is None else written(value)


def _quality(score: float) -> str:
    """
    >>> _quality(0.9), _quality(-12.3)
    ('90.0% accuracy', 'perplexity 12.3')
    """
    return f"{score:.1%} accuracy" if score >= 0 else f"perplexity {-score:.3g}"


def speed_up_in_words(comparison: Comparison) -> str:
    """The sentence under the table: how much faster than the first method the fastest was, or what is left to do."""
    if comparison.outcome.how == "interrupted":
        return how_to_go_on(comparison)
    first, *others = comparison.rows
    reached = [row for row in others or [first] if row.seconds is not None and not row.message]
    rivals = [row for row in reached if row.speed_up is not None]
    if first.message:
        return f"There is no speed-up to tell of: {first.method}, which the others are measured against, failed."
    if comparison.target is None or all(row.score is None for row in comparison.rows):
        return "There is no speed-up to tell of: nothing was found that tells how well they learned."
    if not rivals or not all(row.seconds for row in reached):
        how = "was there before the first step" if reached else "was not reached"
        return f"There is no speed-up to tell of: {_quality(comparison.target)} {how}."
    best = max(rivals, key=lambda row: row.speed_up or 0.0)
    more = "more than " if best.at_least else ""
    came = f"{best.method} came to {_quality(comparison.target)} in {best.seconds:.1f} s"
    told = f"{came}, {more}{best.speed_up:.1f} times as fast as {first.method}."
    if not comparison.set_by or not others:
        return told
    return (
        f"{told}\nThat is the best that {comparison.set_by} came to, and all the others did: set another by --target."
    )


def how_to_go_on(comparison: Comparison) -> str:
    """Of a comparison that was interrupted: its last run can go on by itself, if it has saved something."""
    anew = "It was interrupted, and a comparison does not go on: the same command begins anew, in a new folder."
    folder = comparison.folder / comparison.runs[-1].folder
    if not (folder / JOB).exists() or not newest_step(folder, read_job(folder).hosts):
        return anew
    return f"{anew}\nIts last run can be brought to its end alone: thinwire train --resume {quote(str(folder))}"
