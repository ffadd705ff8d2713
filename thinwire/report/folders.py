"""From a folder to a run or a compare. What is missing or damaged is told in words, and the rest is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from thinwire import records
from thinwire.report.intake import Intake
from thinwire.report.reading import (
    ReportError,
    command,
    count,
    document,
    lines,
    number,
    or_nan,
    refuse_newer,
    text,
    texts,
)
from thinwire.report.runs import Comparison, Run, columns

RECORDS, JOB, TRUTH, COMPARE = "records.jsonl", "job.json", "truth.jsonl", "compare.json"
OUTCOME = "outcome.json"
QUALITIES = ("accuracy", "perplexity")
LONGEST_MESSAGE, MOST_LOG = 2000, 12  # letters, and lines


def load(path: Path) -> Run | Comparison:
    """What is in a run's folder, a compare's folder, or a file of records alone."""
    if not path.exists():
        raise ReportError(f"{path} does not exist. Give the folder of a run, as `thinwire train` names it at its end.")
    if path.is_dir() and (path / COMPARE).exists():
        return _comparison(path)
    return read_run(path)


def _comparison(folder: Path) -> Comparison:
    notes: list[str] = []
    written = document(folder / COMPARE, notes)
    listed = written.get("runs") if written is not None else None
    if written is None or not isinstance(listed, list):
        raise ReportError(f"{folder / COMPARE} is damaged: it lists no runs. Each run in it can be reported on alone.")
    found = [_compared(folder, entry if isinstance(entry, dict) else {}, notes) for entry in listed]
    runs = [run for run in found if run is not None]
    if not runs:
        reasons = " ".join(notes) or "there are none."
        raise ReportError(f"none of the runs that {folder / COMPARE} lists can be read: {reasons}")
    target = number(written.get("target"))
    chosen = target is not None and written.get("chosen") is not False
    notes += [f"{run.method or run.name}: {note}" for run in runs for note in run.notes]
    name, quality = text(folder.resolve().name), _quality(written.get("quality"), runs)
    return Comparison(folder=folder, name=name, quality=quality, target=target, chosen=chosen, runs=runs, notes=notes)


def _quality(said: object, runs: list[Run]) -> str:
    """Of all of them: one that failed early has not come to tell."""
    if said in QUALITIES:
        return str(said)
    return next((run.quality for run in runs if run.evaluations), runs[0].quality)


def _compared(folder: Path, entry: Mapping[str, Any], notes: list[str]) -> Run | None:
    """One run of a compare. The folder it names must be inside: a file must not make us read others."""
    method, inside = text(entry.get("method")), folder / str(entry.get("folder") or "")
    try:
        if not inside.resolve().is_relative_to(folder.resolve()) or inside.resolve() == folder.resolve():
            raise ReportError("its folder is not inside the compare's.")
        run = read_run(inside)
    except (OSError, ValueError) as error:
        notes.append(text(f"{method or 'A run'} is left out: {entry.get('message') or error}"))
        return None
    run.method, run.seed = method or run.method, text(entry.get("seed")) or run.seed
    if entry.get("message"):
        run.how_it_ended, run.message = "failed", text(entry["message"])
        run.notes.append(f"It failed: {run.message}")
    return run


def read_run(path: Path) -> Run:
    """A run's folder, or a file of records without one."""
    run = Run(folder=path, name=text(path.resolve().name if path.is_dir() else path.stem))
    if not path.exists():
        raise ReportError(f"{path} does not exist.")
    if path.is_dir():
        _read_job(run, path / JOB)
    file = path / RECORDS if path.is_dir() else path
    intake = _read_records(run, file)
    if not intake.taken and not run.settings:
        raise ReportError(f"there is no run in {path}: {' '.join(run.notes)}")
    if path.is_dir() and intake.taken:
        _read_truth(run, path, intake.begun)
    if (path / OUTCOME).exists():
        _read_outcome(run, path / OUTCOME)
    return run


def _read_job(run: Run, path: Path) -> None:
    written = document(path, run.notes)
    if written is None:
        return
    job = written.get("job")
    run.settings = texts(job)
    run.name = run.settings.get("name") or run.name
    run.method, run.seed = run.settings.get("method", ""), run.settings.get("seed", "")
    run.hosts = count(job.get("hosts")) if isinstance(job, dict) else None
    later = written.get("resumed")
    starts = [written, *(later if isinstance(later, list) else [])]
    run.commands = [command(start.get("command")) for start in starts if isinstance(start, dict)]
    run.started = text(written.get("started"))
    run.facts = {name: texts(written.get(name)) for name in ("versions", "machine")}


def _read_records(run: Run, path: Path) -> Intake:
    intake = Intake(run)
    for record in lines(path, run.notes):
        if record.get("kind") == "run":
            refuse_newer(path, record, records.FORMAT)
        intake.take(record)
    intake.finish()
    if not intake.taken and path.exists():
        run.notes.append(f"Nothing has been recorded in {path.name}.")
    return intake


def _read_outcome(run: Run, path: Path) -> None:
    """How the last start ended, which may have come to no record: where it is told here, that counts."""
    written = document(path, run.notes)
    if written is None:
        return
    run.how_it_ended, run.message = text(written.get("how")), text(written.get("message"), LONGEST_MESSAGE)
    log, recorded, seconds = written.get("log"), count(written.get("recorded")), number(written.get("seconds"))
    run.log = [text(line) for line in log[-MOST_LOG:]] if isinstance(log, list) else []
    run.ended_at = run.ended_at if seconds is None else seconds
    if recorded is not None:
        run.notes.append(f"After step {recorded:,} nothing could be recorded.")


def _read_truth(run: Run, folder: Path, begun: list[tuple[float, float]]) -> None:
    """What the lab did, on the run's clock: both tell the wall's. A run that was resumed has an earlier truth too."""
    rows = []
    for path in [*sorted(folder.glob("truth.*.jsonl"), key=lambda path: (len(path.name), path.name)), folder / TRUTH]:
        for record in lines(path, run.notes) if path.exists() else ():
            at, now = number(record.get("wall")), record.get("now")
            if at is not None and isinstance(now, dict):
                rows.append((at, or_nan(now.get("latency")), or_nan(now.get("rate"))))
    if not rows:
        return
    if not begun:
        run.notes.append("The records do not say when they began, so the network's truth cannot be laid under them.")
        return
    wall, latency, rate = columns(rows, 3)
    walls, times = columns(begun, 2)
    # On the clock of the start before it. What comes after the end of one start is how the next one finds the network.
    start = np.maximum(np.searchsorted(walls, wall, side="right") - 1, 0)
    until = np.append(times[1:], max(run.seconds, float(times[-1])))
    time = times[start] + wall - walls[start]
    seen = (start < len(begun) - 1) | (time < until[-1])
    time = np.clip(time, times[start], until[start])[seen]
    latency, rate = latency[seen], rate[seen]
    order = np.argsort(time, kind="stable")
    time, latency, rate = time[order], latency[order], rate[order]
    holds = np.append(np.diff(time) > 0, True)[: len(time)]
    run.truth = time[holds], latency[holds], rate[holds]
