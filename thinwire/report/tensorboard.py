"""A run's records as scalars for TensorBoard: one file of events, in a folder beside the records.

The file is made of the records alone, so records that are the same give the same bytes, whether they are taken while a
run writes them or long after. Events are encoded by those parts of the package `tensorboard` by which torch writes them
too; they import neither torch nor TensorFlow. Its own `summary.Writer` knows no text, and writes from a thread in which
a full disk is a traceback.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from thinwire.report.folders import RECORDS, load
from thinwire.report.reading import ReportError, count, lines, number, text
from thinwire.report.runs import Comparison, PlanName
from thinwire.report.words import MEGABITS, MILLISECONDS

FOLDER, FILE = "tensorboard", "events.out.tfevents.records"
MOST_PLANS, LONGEST_NAME = 30, 28  # plans that have a line each, and letters in a word of their names
MOST_STEPS = 2**62

_NAMES = {
    "comm/bytes_sent": "sent_bytes",
    "comm/bytes_dense": "dense_bytes",
    "comm/gain": "gain",
    "step/seconds": "step_seconds",
    "step/predicted_seconds": "predicted_seconds",
}


class Scalars:
    """A file of events that is being written. Takes records one by one; what is in it after `flush` can be seen.

    A scalar lies at the number of steps that had been made, and at the wall-clock time. Where a run was resumed,
    TensorBoard is told to forget what came after the step from which it went on.
    """

    def __init__(self, folder: Path) -> None:
        require()
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._began = Event, SessionLog(status=SessionLog.START)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / FILE).open("wb")
        self._writer = RecordWriter(self._file)
        self._start: float | None = None  # when the records' clock was at 0
        self._plans: list[str] = []

    def take(self, record: Mapping[str, Any]) -> None:
        """Take in one record of any kind; those that say nothing for a chart are passed over."""
        time = number(record.get("time"))
        if time is None:
            return
        self._set_clock(time, number(record.get("wall")))
        step = count(record.get("step"))
        if step is None or step > MOST_STEPS:
            return
        match record.get("kind"):
            case "began":
                self._write(time, step + 1, session_log=self._began)
            case "step":
                self._write_scalars(time, step + 1, _of_step(record) | self._bands(record.get("plan")))
            case "loss":
                self._write_scalars(time, step, {"train/loss": record.get("loss")})
            case "evaluated":
                known = ("loss", "accuracy", "perplexity")
                self._write_scalars(time, step, {f"test/{name}": record.get(name) for name in known})
            case "consensus":
                self._write_scalars(time, step, {"gossip/consensus": record.get("distance")})
            case "decision":
                self._write_text(time, step, "plan/decision", _in_words(step, record))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _set_clock(self, time: float, wall: float | None) -> None:
        """A run that was resumed counts its time anew, and says so by the time on the wall."""
        is_first = self._start is None
        if wall is not None:
            self._start = wall - time
        elif is_first:
            self._start = 0.0
        if is_first:
            self._write(time, 0, file_version="brain.Event:2")

    def _bands(self, plan: Any) -> dict[str, float]:
        """A line for every plan so far: 1 while it is the one that runs, else 0."""
        name = f"plan/{PlanName.read(plan, LONGEST_NAME)._replace(ratio=None)}"
        if name not in self._plans:
            name = name if len(self._plans) < MOST_PLANS else "plan/others"
            self._plans += [name] if name not in self._plans else []
        return {known: float(known == name) for known in self._plans}

    def _write_scalars(self, time: float, step: int, values: Mapping[str, Any]) -> None:
        known = {tag: found for tag, value in values.items() if (found := number(value)) is not None}
        if known:
            summary = {"value": [{"tag": tag, "simple_value": value} for tag, value in known.items()]}
            self._write(time, step, summary=summary)

    def _write_text(self, time: float, step: int, tag: str, words: str) -> None:
        # TensorBoard takes text for Markdown, by which it could fetch pictures. What is indented it shows as it is.
        tensor = {"dtype": "DT_STRING", "tensor_shape": {}, "string_val": [f"    {words}".encode()]}
        metadata = {"plugin_data": {"plugin_name": "text"}}
        self._write(time, step, summary={"value": [{"tag": tag, "tensor": tensor, "metadata": metadata}]})

    def _write(self, time: float, step: int, **what: Any) -> None:
        assert self._start is not None, "the clock is set by whatever record comes first"
        self._writer.write(self._event(wall_time=self._start + time, step=step, **what).SerializeToString())


def require() -> None:
    """Raise a ReportError if there is nothing to write events with."""
    try:
        import tensorboard.summary.writer.record_writer  # noqa: F401
    except ImportError as error:
        raise ReportError(
            f"to write what TensorBoard shows takes its package ({error}): pip install thinwire[tensorboard]"
        ) from error


def write(path: Path) -> list[Path]:
    """Convert a run's folder, every run of a compare's folder, or a file of records. What was there is replaced.

    Gives the folders of events: `tensorboard` in a run's folder, or beside a file of records.
    """
    require()
    loaded = load(path)
    return [_convert(run.folder) for run in (loaded.runs if isinstance(loaded, Comparison) else [loaded])]


def _convert(run: Path) -> Path:
    folder, records = (run / FOLDER, run / RECORDS) if run.is_dir() else (run.with_suffix(f".{FOLDER}"), run)
    with closing(Scalars(folder)) as scalars:
        for record in lines(records, []):
            scalars.take(record)
    return folder


def _of_step(record: Mapping[str, Any]) -> dict[str, Any]:
    latency, inverse_rate = number(record.get("alpha")), number(record.get("beta"))
    return {tag: record.get(name) for tag, name in _NAMES.items()} | {
        "comm/ratio": PlanName.read(record.get("plan")).ratio,
        "net/latency_ms": None if latency is None else latency / MILLISECONDS.size,
        "net/rate_mbit": 1 / inverse_rate / MEGABITS.size if inverse_rate else None,
    }


def _in_words(step: int, decision: Mapping[str, Any]) -> str:
    plan, before = (PlanName.read(decision.get(name), LONGEST_NAME) for name in ("plan", "before"))
    still = "still " if plan == before else ""
    return f"From step {step} on: {still}{plan}, because {text(decision.get('trigger'))}."
