"""Pilot: the part of a rank that watches the network and the gradient, and says what runs next.

It reads off what the link has noticed, tells the other ranks along with an exchange, hears the sums of what all told,
and asks the controller. Every rank's pilot hears the same sums, so all of them change course at the same step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from thinwire.collectives import ALL_GATHERS
from thinwire.compress.histogram import Histogram
from thinwire.control.adaptive import Adaptive
from thinwire.control.agreement import ALPHAS, BETAS, START, moved, off
from thinwire.control.decision import Decision, Standing
from thinwire.control.gain import CANDIDATES
from thinwire.control.monitor import Monitor
from thinwire.control.prices import Prices
from thinwire.control.view import Seen, View, is_off
from thinwire.exchange import complete
from thinwire.link.base import Link
from thinwire.records import Records
from thinwire.train.survey import survey
from thinwire.train.thrift import Thrift
from thinwire.types import Moment, Plan, Told

LOOK_EVERY = 10  # steps between two looks at how the gradient's energy is spread
LOOKING, MEASURING = 0.001, 0.004  # the share of the time that each may take
LOOK_PAUSE, MEASURE_PAUSE = 10.0, 2.0  # seconds at most after each, whose cost may have been the garbage collector's
AHEAD = 1.0  # seconds before it is due, measuring is allowed where something is not as expected
LOOKED_AT = 1 << 18  # entries, evenly spread: at the largest ratio, from which the others follow, that is within 1 %
TELL_EVERY, TELL_SECONDS = 4, 0.3  # between two tellings beside exchanges that carry no numbers: at least so much
SURPRISING = 1.2  # times what a step was expected to take
ALARMING, ALARM_SECONDS = 2.0, 0.02  # times; then there is word at every step, if steps are not shorter than that
LISTEN_SECONDS, LISTEN_EVERY = 0.1, 4  # between two steps whose numbers are taken in: so much, but steps at most
NEWS = 0.2  # of the latency, as told: by a quarter
FALLEN = 0.7  # of the gain that was expected is so little that the guard should know at once
ELSEWHERE = 1.5  # times a latency or rate, or a share of it, is another: then nobody waits

log = logging.getLogger("thinwire")


class Times(NamedTuple):
    """Of this rank's last step, as `Told` has them."""

    timed: float = 0.0
    step_seconds: float = 0.0
    exchange_seconds: float = 0.0
    compress_seconds: float = 0.0
    overlap_seconds: float = 0.0
    last_share: float = 1.0


class Course(NamedTuple):
    """A pilot's state, read and found whole."""

    view: View
    standing: Standing
    times: Times
    before: Plan | None
    turn: int
    asked: Seen
    pending: Told | None
    energy: float
    kept: list[float]

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Course:
        try:
            standing = Standing.from_json(state["standing"])
            complete(**asdict(standing.plan))  # or it is none that could run
            kept = [float(share) for share in state["kept"]]
            if len(kept) not in (0, len(CANDIDATES)):
                raise ValueError(f"kept has {len(kept)} numbers, not {len(CANDIDATES)}")
            return cls(
                view=View.from_json(state["view"]),
                standing=standing,
                times=Times(*map(float, state["times"])),
                before=None if state["before"] is None else Plan(**state["before"]),
                turn=int(state["turn"]),
                asked=Seen.from_json(state["asked"]),
                pending=None if state["pending"] is None else Told(*map(float, state["pending"])),
                energy=float(state["energy"]),
                kept=kept,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this state does not say what all ranks had agreed on: {error!r}.") from error


class Pilot:
    """See the module.

    Args:
        controller: what decides; None for a plan that is fixed, which is then only watched.
        plan: what runs first.
        records: where everything that is heard and decided is written, so that it can be decided again.

    Attributes:
        plan: what runs at the next step.
        view: what all ranks agree on.
        decision: the last one, None before the first of this run.
    """

    def __init__(
        self, link: Link, prices: Prices, controller: Adaptive | None, plan: Plan, records: Records | None = None
    ) -> None:
        self.link, self.prices, self.controller, self.records = link, prices, controller, records
        self.monitor = Monitor(link.world_size, link.rank, link.now)
        self.view = View()
        self.standing = Standing(plan=plan)
        self.decision: Decision | None = None
        self._histogram: Histogram | None = None  # of the gradient of this step, as far as it was looked at
        self._energy, self._kept = 0.0, list[float]()  # of the last one that was, and the share of it at each ratio
        self._turn = 0
        self._times = Times()
        self._before: Plan | None = None  # what these are of
        self._looking, self._measuring = Thrift(LOOKING, LOOK_PAUSE, link), Thrift(MEASURING, MEASURE_PAUSE, link)
        self._looked_at = -1
        self._considered, self._is_worth_a_look = -1, False
        self._asked = Seen(0, 0, plan, None, Told())  # what was last told of, until the sums come back
        self._told_beta: float | None = None
        self._pending: tuple[torch.Tensor, Any] | None = None
        self._last_end = math.nan
        self._surprised = False  # by how long the last step took
        self._said = plan  # that it runs; what is only tried out is not worth a word

    @property
    def plan(self) -> Plan:
        return self.standing.plan

    # --- one step

    def looks_at(self, step: int) -> bool:
        """Whether the gradient of this step is worth a look: all parts of it, or none."""
        if step != self._considered:
            due = self.controller is not None and step % LOOK_EVERY == 0
            self._considered, self._is_worth_a_look = step, due and self._looking.allows()
        return self._is_worth_a_look

    def look(self, step: int, x: torch.Tensor) -> None:
        """See how the energy of a gradient, or of the next part of one, is spread over its entries."""
        with self._looking:
            # An odd number apart, so that rows of a power of two do not always show the same columns.
            part = Histogram.of(x[:: self.prices.numel // LOOKED_AT | 1].contiguous())
        if self._histogram is not None and step == self._looked_at:
            part = self._histogram + part
        self._histogram, self._looked_at = part, step

    def tell(self, step: int, told: Told) -> Told:
        """Add to what is told of the gradient what this rank knows of the network and of the last step."""
        self._turn += 1
        self._digest_histogram()
        kept = self._kept[self._turn % len(CANDIDATES)] if self._kept else 0.0
        alpha_off, alpha_known = off(self.monitor.alpha_now(), self.view.alpha, START.alpha, ALPHAS)
        beta_off, beta_known = off(self._rate_to_tell(step), self.view.beta, START.beta, BETAS)
        self._asked = Seen(step, self._turn, self.plan, self._before, told)
        return told._replace(
            alpha_off=alpha_off,
            alpha_known=alpha_known,
            beta_off=beta_off,
            beta_known=beta_known,
            kept=kept * told.energy,
            **self._times._asdict(),
        )

    def _rate_to_tell(self, step: int) -> float | None:
        """What this rank has learned about the rate, when all tell it; but at once where the network changes.

        Only what is new: with little to send it may be long since anything was learned about it.
        """
        beta = self.monitor.beta_now()
        if beta is None or self.view.beta is None:
            return beta
        is_another = self._told_beta is not None and is_off(beta, self._told_beta, ELSEWHERE)
        is_urgent = is_another or self._is_elsewhere() or self.view.hope.is_open
        if not self.monitor.beta_is_new or not (is_urgent or self._is_heard(step)):
            return None
        self.monitor.beta_was_told()
        self._told_beta = beta
        return beta

    def _is_elsewhere(self) -> bool:
        """Whether the network is another than when it was decided; the same on all ranks."""
        view, standing = self.view, self.standing
        return _is_another((view.beta, standing.known_beta)) or (
            _is_another((view.alpha, standing.alpha)) and self._is_felt(view.alpha)
        )

    def _is_felt(self, alpha: float | None) -> bool:
        """Whether it matters that the latency is this, and not what it was when it was decided."""
        return alpha is not None and self.standing.feels(alpha, self.link.world_size)

    def _is_heard(self, step: int) -> bool:
        """Whether a step's numbers will be taken in, whatever they are; the same on all ranks."""
        took = self.view.took
        if not took or self.plan.collective == "torch":  # beside which nothing is told in vain
            return True
        return step % min(LISTEN_EVERY, math.ceil(LISTEN_SECONDS / took)) == 0

    def _digest_histogram(self) -> None:
        histogram, self._histogram = self._histogram, None
        if histogram is None:
            return
        with self._looking:
            if 0 < histogram.energy < math.inf:
                self._energy = histogram.energy
                self._kept = (histogram.energy_at(CANDIDATES) / histogram.energy).tolist()

    def listens(self, told: Told) -> bool:
        """Whether the sums of what was told last are worth taking in, on all ranks alike.

        That costs a processor as much as some ten messages do, so where steps are short and nothing is new it is done
        at some of them.
        """
        took, expected = self.view.took, self.standing.expected_seconds
        if not took or (self.controller is not None and expected is None):
            return True
        if self._is_elsewhere() or self.view.hope.is_urgent or self._is_heard(self._asked.step):
            return True
        if told.beta_known > 0 or self._is_news_of_latency(told):
            return True
        if told.energy_sent < FALLEN * told.energy * (self.standing.gain or 0.0):
            return True
        N = self.link.world_size
        return told.timed == N and is_off(told.step_seconds / N, expected or took, ALARMING)

    def _is_news_of_latency(self, told: Told) -> bool:
        if abs(told.alpha_off) <= NEWS * told.alpha_known:
            return False
        N = self.link.world_size
        return self._is_felt(moved(self.view.alpha, told.alpha_off, told.alpha_known, N, START.alpha, ALPHAS))

    def hear(self, told: Told, step: int) -> None:
        """Take in the sums of what all ranks told last, and decide for `step`. A decision may keep the plan."""
        self._take_in(self._asked._replace(told=told))
        self._decide(step)

    def _take_in(self, seen: Seen) -> None:
        self.view = self.view.after(seen, self.prices, may_hope=self.controller is not None)
        if self.records is not None:
            self.records.write("heard", **seen.to_json())

    def tell_by_torch(self, step: int, device: torch.device) -> None:
        """Tell beside an exchange that carries no numbers, from the gradient's device, without waiting for it."""
        self._note_network()
        self._digest_histogram()
        told = self.tell(step, Told(energy=self._energy, energy_sent=self._energy))
        numbers = torch.tensor(told, dtype=torch.float32, device=device)
        self._pending = numbers, dist.all_reduce(numbers, group=self.link.group, async_op=True)

    def ask_before_telling(self) -> None:
        """In the quiet before a step, have measured what will be told beside it: torch's messages would be in the way.

        While torch's connections are in use nothing else wakes ours.
        """
        self.link.probe(self.monitor.asking.due())

    def tells_by_torch(self, step: int) -> bool:
        """Whether numbers are told beside this step if it carries none, on all ranks alike.

        Now and then; but at every step once one was told of that took far other than expected, until that is settled.
        """
        if self.controller is None:
            return False
        took, expected, period = self.view.took, self.standing.expected_seconds, TELL_EVERY
        if took and expected is not None:  # otherwise there is word soon, and no guess stands for long
            is_alarming = is_off(took, expected, ALARMING)
            least, seconds = (1, ALARM_SECONDS) if is_alarming else (TELL_EVERY, TELL_SECONDS)
            period = max(least, math.ceil(seconds / took))
        return step - self._asked.step >= period

    def heard_by_torch(self) -> Told | None:
        """What all ranks told beside the last step, if they did."""
        numbers = self._arrived_numbers()
        self._pending = None
        return None if numbers is None else Told(*numbers)

    def _arrived_numbers(self) -> list[float] | None:
        if self._pending is None:
            return None
        numbers, work = self._pending
        if work is not None:
            work.wait()
        self._pending = numbers, None
        return [float(number) for number in numbers.tolist()]

    def note_step(self, exchange: float, compress: float, overlap: float = 0.0, last_share: float = 1.0) -> float:
        """A step of this rank is over: remember how long it took.

        Args:
            exchange: seconds that the step had to wait for it, computing included.
            compress: the computing in them.
            overlap: the seconds before, from the first part of the gradient that was there to the last.
            last_share: what the last part is of the whole.

        Returns:
            the seconds of the whole step, NaN for the first.
        """
        now = self.link.now()
        whole = now - self._last_end
        known = not math.isnan(whole)  # not after the first step, nor after a pause
        self._times = Times(1.0, whole, exchange, compress, overlap, last_share) if known else Times()
        self._before = self.plan
        self._last_end = now
        expected = self.standing.expected_seconds
        self._surprised = known and expected is not None and is_off(whole, expected or whole, SURPRISING)
        if self._surprised:
            self.monitor.asking.be_restless()
        return whole

    def measure(self) -> None:
        """Note what the link has noticed, and use the quiet after an exchange to ask for more."""
        if self._measuring.allows(AHEAD if self._surprised or self.monitor.is_in_doubt else 0.0):
            with self._measuring:
                self._note_network()
                self.link.probe(self.monitor.asking.due(), at_once=self.plan.collective == "torch")

    def _note_network(self) -> None:
        """Let the monitor know what the link has noticed, and record what that says has changed, and when."""
        for change in self.monitor.note(
            self.link.read_out(), self.link.sent_bytes, self.view.alpha, self.view.seen_beta
        ):
            if self.records is not None:
                ago = self.link.now() - change.time
                self.records.write("change", what=change.what, before=change.before, after=change.after, ago=ago)

    def _decide(self, step: int) -> None:
        if self.controller is None:
            return
        if self.records is not None:
            self.records.write("asked", step=step)
        decision = self.controller.decide(self.view, self.standing, step, self.prices)
        if decision is not None and self.standing.is_left_alone_by(decision):
            self.view = self.view.hoping_for_nothing()
        elif decision is not None:
            self._carry_out(decision, self.controller.standing_after(decision, self.view))
        if self.link.rank == 0 and self.decision is not None and self.plan != self._said and self.standing.hope == 1:
            log.info("step %d: %s instead of %s, because %s", step, self.plan, self._said, self.decision.trigger)
            self._said = self.plan

    def _carry_out(self, decision: Decision, standing: Standing) -> None:
        self.decision, self.standing = decision, standing
        if self.records is not None:
            confidence = {"alpha": self.monitor.alpha().confidence, "beta": self.monitor.beta().confidence}
            self.records.write("decision", **decision.to_json(), confidence=confidence)  # that of the rank that writes

    def pause(self) -> None:
        """What happens until the next step is no step's time. On one rank is enough."""
        self._last_end = math.nan

    # --- trying out

    @property
    def wants_exploring(self) -> bool:
        return self.controller is not None and self.controller.wants_exploring(self.view)

    def explored(self, exchange: str, gains: Mapping[float, float]) -> None:
        """Take in what was found by trying out ratios, the same on every rank, and think again at the next chance.

        What that took is no step's time.
        """
        self.view = self.view._replace(gains=self.view.gains.with_explored(exchange, gains))
        self.standing = replace(self.standing, gain=None)
        self.pause()
        if self.records is not None:
            self.records.write("explored", exchange=exchange, gains=[[ratio, gain] for ratio, gain in gains.items()])

    # --- the first look, before any gradient

    def survey(self) -> None:
        """Measure an idle network with messages of growing size, agree on what was found, and choose a first plan."""
        if self.controller is None or self.link.world_size == 1:
            return
        self.link.moment = Moment(plan="survey", collective="survey")
        survey(self._ping, self._agree_on_survey, lambda: self.view.beta)
        self.monitor.asking.begin()
        self._decide(0)

    def _ping(self) -> None:
        self.link.probe([peer for peer in range(self.link.world_size) if peer != self.link.rank])
        self._agree_on_survey(0)

    def _agree_on_survey(self, nbytes: int) -> float:
        """Everyone sends so many bytes to the next rank; then all tell what they know. Gives the median time."""
        link = self.link
        start = link.now()
        if nbytes:
            ahead, behind = (link.rank + 1) % link.world_size, (link.rank - 1) % link.world_size
            receive = link.post(torch.empty(nbytes, dtype=torch.uint8), behind)
            send = link.send(torch.zeros(nbytes, dtype=torch.uint8), ahead)
            receive.wait()
            send.wait()
        seconds = link.now() - start
        self.monitor.note(link.read_out(), link.sent_bytes)
        told = self.tell(-1, Told())
        everyones = torch.zeros(link.world_size, len(told), dtype=torch.float64)
        everyones[link.rank] = torch.tensor(told._replace(step_seconds=seconds), dtype=torch.float64)
        ALL_GATHERS["direct"].run(link, everyones.view(-1))
        sums = Told(*(sum(column) for column in zip(*everyones.tolist(), strict=True)))
        self._take_in(Seen(-1, 0, self.plan, None, sums))
        return float(everyones[:, Told._fields.index("step_seconds")].median())

    # --- for later

    def state_dict(self) -> dict[str, Any]:
        self._digest_histogram()
        return {
            "view": self.view.to_json(),
            "standing": self.standing.to_json(),
            "times": list(self._times),
            "before": None if self._before is None else asdict(self._before),
            "turn": self._turn,
            "asked": self._asked.to_json(),
            "pending": self._arrived_numbers(),
            "energy": self._energy,
            "kept": self._kept,
        }

    def agreed(self) -> dict[str, Any]:
        """What of the state is the same on all ranks."""
        return {"view": self.view.to_json(), "standing": self.standing.to_json(), "turn": self._turn}

    def resume(self, course: Course) -> None:
        """Go on from a state. What the link has noticed is new, the survey included: the network may be another."""
        self.monitor.beta_is_unheard_of()
        self._told_beta = None
        saved = course.view
        is_elsewhere = _is_another((self.monitor.alpha_now(), saved.alpha), (self.monitor.beta_now(), saved.beta))
        self._asked, self._before, self._turn = course.asked, course.before, course.turn
        self._times = Times() if is_elsewhere else course.times  # which are of the network that it was saved on
        self._pending = None if course.pending is None else (torch.tensor(course.pending), None)
        self._histogram, self._energy, self._kept = None, course.energy, course.kept
        self._last_end = math.nan
        self.view, self.decision = course.view, None
        if self.controller is not None:
            self.standing, self._said = course.standing, course.standing.plan
        if self.records is not None:
            self.records.write("resumed", view=self.view.to_json(), standing=self.standing.to_json())


def _is_another(*pairs: tuple[float | None, float | None]) -> bool:
    """Whether of latency and rate, now and then, one that is known both times is another."""
    return any(now and then and is_off(now, then, ELSEWHERE) for now, then in pairs)
