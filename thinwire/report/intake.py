"""Records, one after the other, into a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from thinwire.report.reading import command, count, number, or_nan, text, texts
from thinwire.report.runs import OF_STEP, Candidate, Decision, Evaluation, PlanName, Run, columns


class Intake:
    """Takes records in.

    A run that was resumed begins again at time 0, with steps that it may have made before. Here time goes on, and what
    was learned in steps that were lost is forgotten; what they took and sent is not.

    Attributes:
        taken: how many records there were.
        begun: for each time that the run was started, the wall-clock time and the run's.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.taken = run, 0
        self.begun: list[tuple[float, float]] = []
        self._rows: list[tuple[float, ...]] = []
        self._plans: dict[PlanName, int] = {}
        self._plan_of_step: list[int] = []
        self._losses: list[tuple[float, ...]] = []
        self._consensus: list[tuple[float, ...]] = []
        self._evaluated: list[tuple[float, Mapping[str, Any]]] = []
        self._shares = _Shares()
        self._before, self._last = 0.0, 0.0
        self._paused_at: float | None = 0.0  # None while somebody trains
        self._takers = {
            "run": self._run,
            "began": self._began,
            "step": self._step,
            "sent": self._sent,
            "loss": self._loss,
            "evaluated": self._evaluation,
            "consensus": self._distance,
            "decision": self._decision,
            "ended": self._ended,
        }

    def take(self, record: Mapping[str, Any]) -> None:
        kind, time = record.get("kind"), number(record.get("time"))
        if time is None or not isinstance(kind, str):
            return
        self.taken += 1
        if kind == "run":
            self._before = self._last
            self._paused_at = self._last if self._paused_at is None else self._paused_at
        self._last = max(self._last, self._before + time)
        if kind in self._takers:
            self._takers[kind](self._last, record)

    def finish(self) -> None:
        run = self.run
        run.columns = dict(zip(OF_STEP, columns(self._rows, len(OF_STEP)), strict=True))
        run.plans, run.plan_of_step = list(self._plans), np.array(self._plan_of_step, np.int64)
        run.sent_of_layers = self._shares.of([numel for _, numel in run.layers])
        run.losses = columns(self._losses, 3)
        run.consensus = columns(self._consensus, 2)
        run.quality = "accuracy" if self._evaluates("accuracy") or not self._evaluates("perplexity") else "perplexity"
        run.evaluations = [_evaluation(time, record, run.quality) for time, record in self._evaluated]
        run.method = run.method or _method(run)

    def _evaluates(self, quality: str) -> bool:
        return any(number(record.get(quality)) is not None for _, record in self._evaluated)

    # --- what there is to take

    def _run(self, time: float, record: Mapping[str, Any]) -> None:
        run = self.run
        self._note_wall(time, record)
        run.commands = run.commands or [command(record.get("command"))]
        known = {name: texts(record.get(name)) for name in ("versions", "machine")}
        known["machine"] |= {"system": text(record["system"])} if record.get("system") else {}
        for group, facts in known.items():
            run.facts[group] = facts | run.facts.get(group, {})
        controller, prices = record.get("controller"), record.get("prices")
        if isinstance(controller, dict):
            run.controller = controller
        if isinstance(prices, dict):
            run.hosts = run.hosts or count(prices.get("world_size"))
            run.parameters = run.parameters or count(prices.get("numel"))

    def _began(self, time: float, record: Mapping[str, Any]) -> None:
        run = self.run
        if not self.begun:
            self._note_wall(time, record)
        self._forget_from(or_nan(record.get("step")))
        run.how_it_ended, run.message, run.ended_at = "", "", math.nan
        run.clock.append((time, number(record.get("trained_seconds")) or 0.0))
        if self._paused_at is not None:
            run.pauses.append((self._paused_at, time))
            self._paused_at = None
        run.hosts = count(record.get("hosts")) or run.hosts
        run.parameters = count(record.get("parameters")) or run.parameters
        layers = record.get("layers")
        found = [_layer(entry) for entry in layers] if isinstance(layers, list) else []
        run.layers = [layer for layer in found if layer is not None] or run.layers

    def _note_wall(self, time: float, record: Mapping[str, Any]) -> None:
        wall = number(record.get("wall"))
        if wall is None:
            return
        self.begun.append((wall, time))
        self.run.started = self.run.started or _iso(wall)

    def _forget_from(self, step: float) -> None:
        self._losses = [loss for loss in self._losses if not loss[1] > step]
        self._evaluated = [(at, record) for at, record in self._evaluated if not or_nan(record.get("step")) > step]

    def _step(self, time: float, record: Mapping[str, Any]) -> None:
        plan = PlanName.read(record.get("plan"))
        self._rows.append((time, *(or_nan(record.get(name)) for name in OF_STEP[1:])))
        self._plan_of_step.append(self._plans.setdefault(plan, len(self._plans)))
        self._shares.take_step(number(record.get("sent_bytes")) or 0.0, plan.sends_all)

    def _sent(self, time: float, record: Mapping[str, Any]) -> None:
        listed = record.get("entries")
        self._shares.take([count(entry) or 0 for entry in listed] if isinstance(listed, list) else [])

    def _loss(self, time: float, record: Mapping[str, Any]) -> None:
        self._losses.append((time, or_nan(record.get("step")), or_nan(record.get("loss"))))

    def _evaluation(self, time: float, record: Mapping[str, Any]) -> None:
        self._evaluated.append((time, record))
        trained = number(record.get("trained_seconds"))
        if trained is not None:
            self.run.clock.append((time, trained))

    def _distance(self, time: float, record: Mapping[str, Any]) -> None:
        self._consensus.append((time, or_nan(record.get("distance"))))

    def _decision(self, time: float, record: Mapping[str, Any]) -> None:
        listed = record.get("candidates")
        self.run.decisions.append(
            Decision(
                time=time,
                step=count(record.get("step")) or 0,
                trigger=text(record.get("trigger")),
                plan=PlanName.read(record.get("plan")),
                before=PlanName.read(record.get("before")),
                seconds=or_nan(record.get("seconds")),
                alpha=or_nan(record.get("alpha")),
                beta=or_nan(record.get("beta")),
                candidates=tuple(_candidates(listed if isinstance(listed, list) else [])),
            )
        )

    def _ended(self, time: float, record: Mapping[str, Any]) -> None:
        self.run.how_it_ended, self.run.message = text(record.get("how")), text(record.get("message"))
        self.run.ended_at = or_nan(record.get("seconds"))
        if math.isfinite(self.run.ended_at):
            self.run.clock.append((time, self.run.ended_at))


class _Shares:
    """What of the bytes that were sent belongs to which layer.

    How many entries of each a step sent is recorded now and then. All steps since the last such record are taken to
    have sent alike.
    """

    def __init__(self) -> None:
        self._all, self._waiting = 0.0, 0.0  # bytes: of steps that sent everything, and of those since the last record
        self._entries, self._sums = np.zeros(0), np.zeros(0)

    def take_step(self, nbytes: float, sends_all: bool) -> None:
        if sends_all:
            self._all += nbytes
        else:
            self._waiting += nbytes

    def take(self, entries: list[int]) -> None:
        if sum(entries) <= 0 or len(entries) != (len(self._sums) or len(entries)):
            return
        if not len(self._sums):
            self._sums = np.zeros(len(entries))
        self._entries = np.array(entries, np.float64)
        self._share_out()

    def _share_out(self) -> None:
        self._sums = self._sums + self._waiting * self._entries / self._entries.sum()
        self._waiting = 0.0

    def of(self, sizes: list[int]) -> list[float]:
        """The bytes of each layer; nothing if some were sent of nobody knows which."""
        if len(self._entries) == len(sizes) > 0:
            self._share_out()
        if self._waiting or not sum(sizes) or len(self._sums) not in (0, len(sizes)):
            return []
        whole = self._all * np.array(sizes, np.float64) / sum(sizes)
        found: list[float] = (whole + self._sums if len(self._sums) else whole).tolist()
        return found if sum(found) > 0 else []


def _candidates(listed: list[Any]) -> Iterable[Candidate]:
    for entry in listed:
        if isinstance(entry, dict):
            numbers = (or_nan(entry.get(name)) for name in ("seconds", "gain", "cost"))
            yield Candidate(PlanName.read(entry.get("plan")), *numbers)


def _evaluation(time: float, record: Mapping[str, Any], quality: str) -> Evaluation:
    trained = number(record.get("trained_seconds"))
    numbers = (or_nan(record.get(name)) for name in ("step", "loss", quality, "sent_bytes"))
    return Evaluation(time, time if trained is None else trained, *numbers)


def _method(run: Run) -> str:
    """What a run without a job trained by."""
    if run.controller is not None:
        return "adaptive"
    return str(run.plans[0]) if run.plans else ""


def _layer(entry: Any) -> tuple[str, int] | None:
    if not isinstance(entry, list) or len(entry) != 2:
        return None
    numel = count(entry[1])
    return None if numel is None else (text(entry[0]), numel)


def _iso(wall: float) -> str:
    try:
        return datetime.fromtimestamp(wall, UTC).isoformat(timespec="seconds")
    except (OverflowError, OSError, ValueError):
        return ""
