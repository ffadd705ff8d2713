"""What a pilot may take of a rank's time."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from thinwire.control.adaptive import Adaptive
from thinwire.control.decision import Standing
from thinwire.control.hope import Hope
from thinwire.control.monitor import Monitor
from thinwire.control.prices import Prices, ways
from thinwire.control.view import View
from thinwire.exchange import complete
from thinwire.link.base import Link, Reading, Stretch
from thinwire.link.thread import ThreadLink, ThreadWorld
from thinwire.train import survey
from thinwire.train.pilot import Course, Pilot
from thinwire.train.thrift import Thrift
from thinwire.types import Told

SHARE, LONGEST = 0.01, 10.0
STEP_SECONDS = 0.02


class Processor:
    """A link's clocks, one for all the time and one for the time in which this rank computes."""

    def __init__(self) -> None:
        self.wall = self.busy = 0.0

    def now(self) -> float:
        return self.wall

    def processor_seconds(self) -> float:
        return self.busy

    def compute(self, seconds: float) -> None:
        self.wall += seconds
        self.busy += seconds


@pytest.mark.parametrize("parts", [(0.003,), (0.003, 0.0001), (0.0001, 0.003), (0.0005,) * 6])
def test_what_is_done_now_and_then_takes_no_more_than_its_share_in_however_many_parts(parts: tuple[float, ...]) -> None:
    processor = Processor()
    thrift = Thrift(SHARE, LONGEST, cast(Link, processor))
    for _ in range(5000):
        processor.wall += STEP_SECONDS
        if thrift.allows():
            for seconds in parts:
                with thrift:
                    processor.compute(seconds)
    allowed = SHARE * processor.wall
    assert 0.8 * allowed < processor.busy <= allowed + sum(parts)


@pytest.mark.parametrize(
    ("seconds", "guessed", "is_surprised"),
    [(1.1, False, False), (1.3, False, True), (0.7, False, True), (1.3, True, False)],
)
def test_a_step_far_from_what_was_expected_makes_the_monitor_ask_more(
    seconds: float, guessed: bool, is_surprised: bool
) -> None:
    def program(link: ThreadLink) -> bool:
        pilot = Pilot(link, Prices(1000, 4, 2, ways(2, has_group=False)), Adaptive(), complete("dense", 1.0, "ring"))
        pilot.standing = Standing(plan=pilot.plan, seconds=1.0, guessed=guessed)
        pilot.note_step(0.1, 0.0)
        link.compute(seconds)
        pilot.note_step(0.1, 0.0)
        return pilot.monitor.asking.is_restless

    assert ThreadWorld(2).run(program) == [is_surprised] * 2


def test_what_was_done_before_it_was_allowed_is_waited_for() -> None:
    processor = Processor()
    thrift = Thrift(SHARE, LONGEST, cast(Link, processor))
    for _ in range(3):
        with thrift:
            processor.compute(0.001)
    processor.wall += 0.29
    assert not thrift.allows()
    processor.wall += 0.02
    assert thrift.allows()


def test_what_is_urgent_is_allowed_ahead_of_its_time_and_no_more_often_in_the_long_run() -> None:
    processor = Processor()
    thrift = Thrift(SHARE, LONGEST, cast(Link, processor))
    for _ in range(5000):
        processor.wall += STEP_SECONDS
        if thrift.allows(ahead=1.0):
            with thrift:
                processor.compute(0.003)
    allowed = SHARE * processor.wall
    assert 0.8 * allowed < processor.busy <= allowed + SHARE * 1.0 + 0.003


def test_nothing_that_happens_once_makes_a_long_pause() -> None:
    processor = Processor()
    thrift = Thrift(SHARE, 1.0, cast(Link, processor))
    for _ in range(5):
        with thrift:
            processor.compute(0.1)
    processor.wall += 1.01
    assert thrift.allows()


@pytest.mark.parametrize(
    ("took", "expected", "guessed", "period"),
    [
        (None, None, False, 4),  # nothing is known yet
        (0.5, 0.5, False, 4),
        (0.01, 0.01, False, 30),  # three times a second
        (0.015, 0.01, False, 20),
        (1.0, 0.1, False, 1),  # and at every step while something is wrong
        (0.1, 1.0, False, 1),
        (0.005, 0.1, False, 4),
        (0.01, 0.1, True, 4),  # what was only guessed does not stand for long
        (0.1, 0.01, True, 4),  # nor is it wrong that it was
    ],
)
def test_word_is_passed_beside_torch_now_and_then_and_at_every_step_while_something_is_wrong(
    took: float | None, expected: float | None, guessed: bool, period: int
) -> None:
    def program(link: ThreadLink) -> int:
        pilot = Pilot(link, Prices(1000, 4, 2, ways(2, False)), Adaptive(), complete("dense", 1.0))
        pilot.view = View(took=took)
        pilot.standing = Standing(plan=pilot.plan, seconds=expected, guessed=guessed)
        return next(step for step in range(1000) if pilot.tells_by_torch(step))

    assert ThreadWorld(2).run(program) == [period, period]


def test_a_plan_that_is_fixed_is_not_worth_a_word() -> None:
    def program(link: ThreadLink) -> bool:
        pilot = Pilot(link, Prices(1000, 4, 2, ways(2, False)), None, complete("dense", 1.0))
        return any(pilot.tells_by_torch(step) for step in range(1000))

    assert ThreadWorld(2).run(program) == [False, False]


CALM = Told(alpha_known=2, energy=2.0, energy_sent=0.4, timed=2, step_seconds=0.04, exchange_seconds=0.02)


@pytest.mark.parametrize(
    ("told", "view", "is_news"),
    [
        (CALM, View(took=0.02), False),
        (CALM._replace(beta_known=1), View(took=0.02), True),
        (CALM._replace(alpha_off=0.5), View(took=0.02), True),
        (CALM._replace(step_seconds=0.1), View(took=0.02), True),
        (CALM._replace(energy_sent=0.27), View(took=0.02), True),  # which the guard should know
        (CALM, View(took=0.02, alpha=2e-3, beta=1e-8), True),  # than when it was decided
        (CALM, View(took=0.02, alpha=1e-3, beta=2e-8), True),
        (CALM, View(took=0.02, alpha=1.2e-3, beta=1.2e-8), False),
        (CALM, View(took=0.02, hope=Hope(8)), True),  # which is being tried out
        (CALM, View(took=0.2), True),  # and long steps are few
    ],
)
def test_on_short_steps_only_news_is_taken_in_at_once(told: Told, view: View, is_news: bool) -> None:
    link = ThreadWorld(2).links[0]
    plan = complete("topk-allgather", 0.01)
    pilot = Pilot(link, Prices(1000, 4, 2, ways(2, False)), Adaptive(), plan)
    pilot.view, pilot.standing = view, Standing(plan=plan, seconds=view.took, gain=0.2, alpha=1e-3, beta=1e-8)
    pilot.tell(1, Told())
    assert pilot.listens(told) == is_news


def test_a_look_is_of_one_step_and_is_not_lost_by_saving() -> None:
    link = ThreadWorld(2).links[0]
    pilot = Pilot(link, Prices(1000, 4, 2, ways(2, False)), Adaptive(), complete("dense", 1.0))
    pilot.look(0, torch.ones(500))
    pilot.look(0, torch.ones(500))
    pilot.look(10, 3 * torch.ones(1000))
    state = pilot.state_dict()
    assert state["energy"] == pytest.approx(9000, rel=0.01)
    resumed = Pilot(link, pilot.prices, Adaptive(), complete("dense", 1.0))
    resumed.resume(Course.from_json(state))
    told = Told(energy=1.0)
    assert resumed.tell(11, told) == pilot.tell(11, told) and resumed.tell(12, told).kept > 0


def test_a_rate_is_told_when_all_tell_theirs_and_at_once_if_it_is_another() -> None:
    link = ThreadWorld(8).links[0]
    pilot = Pilot(link, Prices(1000, 4, 8, ways(8, False)), Adaptive(), complete("topk-allgather", 0.01))

    def told_after(beta: float, step: int) -> float:
        pilot.monitor = Monitor(8, 0)
        pilot.monitor.note(Reading(stretches=(Stretch(1_000_000, 1e6 * beta),)), 0)
        return pilot.tell(step, Told()).beta_known

    assert told_after(1e-8, 0) == 1  # nothing was agreed on yet
    pilot.view = View(beta=1e-8, took=0.02)
    assert told_after(1.2e-8, 11) == 0 and told_after(1.2e-8, 12) == 1
    assert pilot.tell(16, Told()).beta_known == 0  # which was told already
    assert told_after(2e-8, 17) == 1
    assert told_after(2e-8, 18) == 0  # it has said so, and the others see what they see
    assert told_after(0.5e-8, 19) == 1


def test_what_was_measured_before_a_state_was_loaded_is_told_after_it() -> None:
    """The survey of a run that goes on comes before the state that it goes on from."""
    link = ThreadWorld(2).links[0]
    prices = Prices(1000, 4, 2, ways(2, False))
    pilot = Pilot(link, prices, Adaptive(), complete("topk-allgather", 0.01))
    pilot.monitor.note(Reading(stretches=(Stretch(1_000_000, 0.016),)), 0)
    assert pilot.tell(-1, Told()).beta_known == 1
    assert pilot.tell(0, Told()).beta_known == 1  # as long as nothing is agreed
    pilot.view = View(alpha=1e-3, beta=1.6e-8)
    assert pilot.tell(1, Told()).beta_known == 1 and pilot.tell(2, Told()).beta_known == 0
    state = pilot.state_dict()
    state["view"]["beta"] = 1.6e-6
    pilot.resume(Course.from_json(state))
    told = pilot.tell(3, Told())
    assert told.beta_known == 1 and told.beta_off < 0


@pytest.mark.parametrize(("times", "timed"), [(1.0, 1), (1.2, 1), (2.0, 0), (0.01, 0)])
def test_how_long_steps_took_on_another_network_is_not_told_of_this_one(times: float, timed: int) -> None:
    pilot = Pilot(ThreadWorld(2).links[0], Prices(1000, 4, 2, ways(2, False)), Adaptive(), complete("dense", 1.0))
    pilot.view = View(alpha=1e-3, beta=1.6e-8)
    pilot.note_step(0.1, 0.0)
    pilot.note_step(0.1, 0.0)
    state = pilot.state_dict()
    resumed = Pilot(pilot.link, pilot.prices, Adaptive(), complete("dense", 1.0))
    resumed.monitor.note(Reading(stretches=(Stretch(1_000_000, 0.016 * times),)), 0)
    resumed.resume(Course.from_json(state))
    assert resumed.tell(1, Told()).timed == timed


def test_all_parts_of_a_gradient_are_looked_at_or_none() -> None:
    processor = Processor()
    prices = Prices(1000, 4, 2, ways(2, False))
    pilot = Pilot(ThreadWorld(2).links[0], prices, Adaptive(), complete("dense", 1.0))
    pilot._looking = Thrift(SHARE, LONGEST, cast(Link, processor))
    with pilot._looking:
        processor.compute(0.001)
    found = []
    for _ in range(3):
        found.append(pilot.looks_at(10))
        processor.wall += 0.06  # so that it is allowed before the third part
    assert found == [False] * 3
    assert pilot.looks_at(20) and pilot.looks_at(20) and not pilot.looks_at(21)


def test_who_decides_nothing_hopes_for_nothing() -> None:
    link, plan = ThreadWorld(2).links[0], complete("topk-allgather", 0.01)
    pilot = Pilot(link, Prices(100_000, 4, 2, ways(2, False)), None, plan)
    pilot.view = View(alpha=1e-3, beta=1e-6)
    for step in range(100):
        pilot.note_step(0.01, 0.0)
        pilot.tell(step, Told())
        pilot.hear(Told(timed=2, step_seconds=0.2, exchange_seconds=0.02), step)
        assert pilot.view.hope == Hope()


@pytest.mark.parametrize(
    ("beta", "seconds_per_byte", "largest"),
    [
        (1e-6, 1e-6, 1 << 16),  # a rate that messages bear out
        (1e-5, 1e-9, 1 << 22),  # one that was seen because a sender had to wait for a processor
        (None, 1e-8, 1 << 22),  # none was seen
        (None, 1e-4, 1 << 14),  # nor will be, in any time
    ],
)
def test_a_survey_ends_when_a_message_took_as_long_as_its_rate_says(
    beta: float | None, seconds_per_byte: float, largest: int
) -> None:
    sent = []

    def send(nbytes: int) -> float:
        sent.append(nbytes)
        return nbytes * seconds_per_byte

    survey.survey(lambda: None, send, lambda: beta)
    assert max(sent) == largest


@pytest.mark.parametrize(
    ("rates", "looks"),
    [
        ([5e8, 5e8], 1),
        ([5e7, 6e9, 6e9], 2),  # a first look that had to wait for a busy processor
        ([5e7, 1e8, 3e8, 6e9, 6e9], survey.AGAIN),
    ],
)
def test_the_last_message_of_a_survey_is_sent_until_two_looks_at_the_rate_are_alike(
    rates: list[float], looks: int
) -> None:
    largest, seen = [], iter(rates)
    rate = rates[0]

    def send(nbytes: int) -> float:
        nonlocal rate
        if nbytes == survey.SIZES[-1]:
            largest.append(nbytes)
            rate = next(seen)
        return 0.001

    survey.survey(lambda: None, send, lambda: 1 / rate)
    assert len(largest) == 1 + looks


def test_a_slow_network_is_not_surveyed_again() -> None:
    calls = []

    def send(nbytes: int) -> float:
        calls.append(nbytes)
        return nbytes * 1e-4

    survey.survey(lambda: calls.append(0), send, lambda: 1e-4)
    assert calls == [0] * survey.PINGS + [survey.SIZES[0]]
