"""Laws of deciding: all ranks hold the same plan, whatever they measure, and a run can be decided again."""

from __future__ import annotations

import copy
import json
import math
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from thinwire import records
from thinwire.control.adaptive import Adaptive
from thinwire.control.decision import Decision, Standing
from thinwire.control.prices import Prices
from thinwire.control.replay import replay
from thinwire.control.view import View
from thinwire.link.base import Reading, Stretch
from thinwire.link.thread import ThreadLink, ThreadWorld
from thinwire.train.sync import Synchronizer
from thinwire.types import Network, Plan

GOLDEN = Path(__file__).parent.parent / "golden"
JUNK = [0.0, -1.0, math.nan, math.inf, -math.inf, 1e-30, 1e30, 1e-3, 0.05, 0.7, 5.0]


def step(sync: Synchronizer, net: nn.Linear, number: int, seconds: float = 0.0) -> None:
    """One step of training: some computing, a gradient with a few large entries, its mean."""
    generator = torch.Generator().manual_seed(1000 * number + sync.link.rank)
    spread = torch.linspace(-3, 3, net.weight.numel()).exp().view(net.weight.shape)
    sync.link.compute(seconds)  # type: ignore[attr-defined]
    net.weight.grad = torch.randn(net.weight.shape, generator=generator) * spread
    sync.average_gradients()


def a_net(numel: int) -> nn.Linear:
    return nn.Linear(numel // 20, 20, bias=False)


# --- agreement


class Liar(random.Random):
    """Readings of all kinds, other ones on every rank."""

    def reading(self, world_size: int) -> Reading:
        stretches = [Stretch(self.choice([0, -5, 1, 10**6]), self.choice(JUNK)) for _ in range(self.randrange(3))]
        clear, delayed = self._trips(world_size), self._trips(world_size)
        return Reading(clear, tuple(stretches), self.choice([0, -1, 128]), delayed)

    def _trips(self, world_size: int) -> tuple[tuple[int, float], ...]:
        return tuple((self.randrange(-2, world_size + 2), self.choice(JUNK)) for _ in range(self.randrange(4)))


@pytest.mark.parametrize("block", range(10))
def test_all_ranks_hold_the_same_plan_whatever_each_of_them_measures(block: int) -> None:
    changes = 0
    for seed in range(100 * block, 100 * block + 100):
        plans = ThreadWorld(1 + seed % 4, Network(alpha=0.01, beta=1e-6)).run(lambda link, s=seed: lied_to(link, s))
        assert all(plan == plans[0] for plan in plans)
        changes += len(set(plans[0])) - 1
    assert changes > 0


def lied_to(link: ThreadLink, seed: int) -> list[Plan]:
    liar = Liar(f"{seed} {link.rank}")
    link.read_out = lambda: liar.reading(link.world_size)  # type: ignore[method-assign]
    net = a_net(400)
    sync = Synchronizer(net, Adaptive(patience=1, objective=("goodput", "seconds")[seed % 2]), link=link)
    plans = [sync.plan]
    for number in range(5):
        step(sync, net, number, seconds=liar.choice([0.0, 1e-6, 0.1, 3600.0]))
        plans.append(sync.plan)
    return plans


def test_what_one_rank_does_between_steps_is_nobodys_step_and_no_reason_to_decide_otherwise() -> None:
    def program(link: ThreadLink) -> tuple[list[Plan], str]:
        net, plans = a_net(20_000), list[Plan]()
        sync = Synchronizer(net, Adaptive(patience=1), link=link)
        for number in range(60):
            changing(link, number)
            if link.rank == number % 4 and number % 3 == 0:  # as when one rank alone tests or saves
                link.compute(5.0)
                sync.pause()
            step(sync, net, number, seconds=0.02)
            plans.append(sync.plan)
        rest = sync._pilot.view.rest
        assert rest is not None and rest.value == pytest.approx(0.02, rel=0.05)
        return plans, json.dumps(sync._pilot.agreed())

    first, *others = ThreadWorld(4, Network(alpha=1e-3, beta=1e-8)).run(program)
    assert all(other == first for other in others)


# --- replay and resume


BESIDES = ("kind", "time", "confidence")  # in the record of a decision, and no part of it


def decided(decisions: list[Decision]) -> list[Any]:
    return [records.plain(decision.to_json()) for decision in decisions]


def changing(link: ThreadLink, number: int) -> None:
    """The network becomes slow, far, and near and fast again."""
    if link.rank == 0:
        alpha, beta = [(1e-3, 1e-8), (1e-3, 1e-6), (5e-2, 1e-6), (1e-4, 1e-9)][number // 12 % 4]
        link.world.wire.network = Network(alpha=alpha, beta=beta)


@pytest.mark.parametrize("objective", ["goodput", "seconds", "knee"])
def test_a_recorded_run_is_decided_again_alike(objective: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    def program(link: ThreadLink) -> None:
        net = a_net(20_000)
        sync = Synchronizer(net, Adaptive(objective=objective), link=link, records=path)
        for number in range(48):
            changing(link, number)
            step(sync, net, number, seconds=0.02)
        sync.close()

    ThreadWorld(4, Network(alpha=1e-3, beta=1e-8)).run(program)
    written = list(records.read(path))
    made = [record for record in written if record["kind"] == "decision"]
    assert len(made) >= 4
    assert all(0 <= record["confidence"][what] <= 1 for record in made for what in ("alpha", "beta"))
    assert decided(replay(written)) == [{key: record[key] for key in record if key not in BESIDES} for record in made]


class Stubborn(Adaptive):
    """Decides in a way that no record could tell."""

    def decide(self, view: View, standing: Standing, step: int, prices: Prices) -> Decision | None:
        return None if step else super().decide(view, standing, step, prices)


def test_a_run_that_a_class_of_ones_own_decided_is_decided_again_by_that_class_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    def program(link: ThreadLink) -> None:
        net = a_net(20_000)
        sync = Synchronizer(net, Stubborn(), link=link, records=path)
        for number in range(48):
            changing(link, number)
            step(sync, net, number, seconds=0.02)
        sync.close()

    ThreadWorld(4, Network(alpha=1e-3, beta=1e-6)).run(program)
    written = list(records.read(path))
    with pytest.raises(ValueError, match="this run was decided by Stubborn: give replay that controller."):
        replay(written)
    assert len(replay(written, Stubborn())) == 1 < len(replay(written, Adaptive()))
    for record in written:
        record.pop("decided_by", None)  # as records were once
    assert decided(replay(written)) == decided(replay(written, Adaptive()))


def test_another_controller_can_be_asked_about_a_recorded_run(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    def program(link: ThreadLink) -> None:
        net = a_net(20_000)
        sync = Synchronizer(net, "star-topk", link=link, records=path)
        for number in range(20):
            step(sync, net, number, seconds=0.02)
        sync.close()

    ThreadWorld(4, Network(alpha=1e-3, beta=1e-6)).run(program)
    with pytest.raises(ValueError, match="fixed plan"):
        replay(records.read(path))
    first, *_ = replay(records.read(path), Adaptive(patience=1))
    assert first.before.exchange == "star-topk" and first.trigger == "the network was measured"
    # It chooses from what it may choose from, although the run that was recorded had only one plan.
    for exchange, values in (("topk-allgather", "log4"), ("topk-allgather", "float32"), ("var-topk", "float32")):
        controller = Adaptive(exchanges=(exchange,), values=values)
        plan = replay(records.read(path), controller)[-1].plan
        assert (plan.exchange, plan.values) == (exchange, values)
    assert replay(records.read(path), Adaptive(objective="knee"))


def test_an_adaptive_run_that_was_resumed_ends_with_the_same_bits_as_one_that_went_on() -> None:
    network = Network(alpha=1e-3, beta=1e-7)

    def start(link: ThreadLink) -> tuple[Synchronizer, nn.Linear]:
        net = a_net(4000)
        return Synchronizer(net, link=link), net

    def whole(link: ThreadLink) -> Any:
        sync, net = start(link)
        for number in range(30):
            step(sync, net, number, seconds=0.02)
            if number == 14:
                saved = copy.deepcopy(sync.state_dict())
                link.clock += 100  # as long as it takes to come back
                sync.pause()
        return saved, sync.state_dict(), sync.plan, net.weight.grad

    def resumed(link: ThreadLink) -> Any:
        sync, net = start(link)
        for number in range(3):
            step(sync, net, number, seconds=0.5)
        sync.load_state_dict(went_on[link.rank][0])
        for number in range(15, 30):
            step(sync, net, number, seconds=0.02)
        return sync.state_dict(), sync.plan, net.weight.grad

    went_on = ThreadWorld(3, network).run(whole)
    for (_, state, plan, grad), (state_again, plan_again, grad_again) in zip(
        went_on, ThreadWorld(3, network).run(resumed), strict=True
    ):
        assert plan == plan_again and torch.equal(grad, grad_again)
        times, times_again = state["pilot"].pop("times"), state_again["pilot"].pop("times")
        assert times == pytest.approx(times_again)  # differences of a clock that reads differently
        # What an exchange took beyond its price is the wire's: after coming back, a probe lies elsewhere on it.
        for name, (seconds, samples) in state["pilot"]["view"].pop("extra").items():
            seconds_again, samples_again = state_again["pilot"]["view"]["extra"][name]
            assert samples == samples_again and seconds == pytest.approx(seconds_again, abs=1e-6)
        state_again["pilot"]["view"].pop("extra")
        assert state["pilot"] == state_again["pilot"]


def test_a_run_that_was_resumed_while_recorded_is_decided_again_alike(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    def program(link: ThreadLink) -> None:
        net = a_net(20_000)
        first = Synchronizer(net, link=link)
        for number in range(12):
            step(first, net, number, seconds=0.02)
        sync = Synchronizer(net, link=link, records=path)
        sync.load_state_dict(first.state_dict())
        for number in range(12, 36):
            changing(link, number)
            step(sync, net, number, seconds=0.02)
        sync.close()

    ThreadWorld(2, Network(alpha=1e-3, beta=1e-8)).run(program)
    written = list(records.read(path))
    made = [record for record in written if record["kind"] == "decision"]
    assert len(made) >= 3 and made[-1]["step"] > 12
    assert decided(replay(written)) == [{key: record[key] for key in record if key not in BESIDES} for record in made]


def test_of_records_that_a_resumed_run_has_been_added_to_every_run_is_decided_again_alike(tmp_path: Path) -> None:
    path, controllers = tmp_path / "run.jsonl", (Adaptive(), Adaptive(objective="seconds"))

    def program(link: ThreadLink) -> None:
        net, path_of_second = a_net(20_000), tmp_path / "run.jsonl.new"
        first = Synchronizer(net, controllers[0], link=link, records=path)
        for number in range(12):
            step(first, net, number, seconds=0.02)
        if first.records is not None:
            first.records.close()
        second = Synchronizer(net, controllers[1], link=link, records=path_of_second)
        if second.records is not None:
            second.records.go_on_in(path)
        second.load_state_dict(first.state_dict())
        for number in range(12, 36):
            changing(link, number)
            step(second, net, number, seconds=0.02)
        second.close()

    ThreadWorld(2, Network(alpha=1e-3, beta=1e-8)).run(program)
    written = list(records.read(path))
    kinds = [record["kind"] for record in written]
    assert kinds.count("run") == 2 and kinds.index("resumed") > kinds.index("run", 1)
    made = [record for record in written if record["kind"] == "decision"]
    assert sum(record["step"] == 0 for record in made) == 2, "each run decides before its first step"
    assert decided(replay(written)) == [{key: record[key] for key in record if key not in BESIDES} for record in made]
    asked = replay(written, controllers[0])
    assert asked[0].step == 0 and decided(asked) != decided(replay(written)), "one that is given is asked in both"


def test_energies_beyond_the_range_of_float32_are_recorded_and_decided_again(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    def program(link: ThreadLink) -> None:
        net = a_net(400)
        sync = Synchronizer(net, link=link, records=path)
        for _ in range(3):
            net.weight.grad = torch.full_like(net.weight, 1e25)
            sync.average_gradients()
        sync.close()

    ThreadWorld(2, Network(alpha=1e-3, beta=1e-8)).run(program)
    assert len(replay(records.read(path))) == 1


@pytest.mark.parametrize("damage", ["view", "standing", "asked", "times", "alpha", "exchange"])
def test_a_state_that_is_not_whole_is_refused_whole(damage: str) -> None:
    def program(link: ThreadLink) -> None:
        net = a_net(400)
        sync = Synchronizer(net, link=link)
        for number in range(8):
            step(sync, net, number)
        before, damaged = copy.deepcopy(sync.state_dict()), copy.deepcopy(sync.state_dict())
        damaged["error"]["weight"] += 1
        damaged["step"] = 3
        if damage == "alpha":
            damaged["pilot"]["view"]["alpha"] = "far"
        elif damage == "exchange":
            damaged["pilot"]["standing"]["plan"]["exchange"] = "telepathy"
        else:
            del damaged["pilot"][damage]
        with pytest.raises(ValueError, match="what all ranks had agreed on"):
            sync.load_state_dict(damaged)
        after = sync.state_dict()
        assert torch.equal(before["error"].pop("weight"), after["error"].pop("weight")) and before == after

    ThreadWorld(2, Network(alpha=1e-3, beta=1e-7)).run(program)


# --- saying why


def said(sync: Synchronizer, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    sync.explain()
    return capsys.readouterr().out


def test_explain_says_at_every_moment_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    def program(link: ThreadLink) -> None:
        net = a_net(4000)
        fixed = Synchronizer(net, "star-topk", link=link)
        assert said(fixed, capsys).startswith("star-topk over ring at 0.01 (100x), fixed.")
        sync = Synchronizer(net, Adaptive(objective="knee"), link=link)
        if link.world_size == 1:
            assert said(sync, capsys).startswith("dense over ring, until the network has been measured.")
            step(sync, net, 0)
            assert said(sync, capsys) == "dense over ring, as there is nobody to exchange with.\n"
            return
        for number in range(20):
            text = said(sync, capsys)
            assert str(sync.plan) in text.partition("The network")[0]
            way = f"* {sync.plan.exchange} over {sync.plan.collective}"
            assert [line.startswith(way) for line in text.splitlines() if line.startswith("*")] == [True]
            step(sync, net, number, seconds=0.02)
        again = Synchronizer(net, link=link)
        again.load_state_dict(sync.state_dict())
        since = sync._pilot.standing.since
        assert said(again, capsys).startswith(f"{sync.plan}, since step {since}, as it was decided before")

    for world_size in (1, 8):
        ThreadWorld(world_size, Network(alpha=1e-3, beta=1e-7)).run(program)


def test_a_full_disk_ends_the_records_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no disk that is always full")

    def program(link: ThreadLink) -> int:
        net = a_net(400)
        sync = Synchronizer(net, link=link, records="/dev/full")
        for number in range(3):
            step(sync, net, number)
        sync.close()
        return sync.step

    assert ThreadWorld(2, Network(alpha=1e-3, beta=1e-8)).run(program) == [3, 3]
    assert [record.getMessage() for record in caplog.records if "/dev/full" in record.getMessage()] == [
        "the records in /dev/full end here: No space left on device."
    ]


# --- histories

# PAPERS: Tyagi & Swany 2023: latency in ms, rate in Gbit/s; a stage here is 20 steps, rates are divided by 50.
C1 = [(1, 25), (1, 1), (50, 1), (50, 25)]
C2 = [(1, 25), (2, 20), (4, 15), (8, 10), (16, 5), (32, 1), (16, 5), (8, 10), (4, 15), (2, 20), (1, 25)]
LAN = [(1, 5000), (1, 10), (1, 5000)]  # compressing pays on the one in the middle alone
STAGE, SCALE = 20, 50


def history(stages: list[tuple[int, int]]) -> str:
    """The decisions of a run of 8 ranks whose network goes through these stages, a line each."""
    lines: list[str] = []

    def program(link: ThreadLink) -> None:
        net = a_net(200_000)
        sync = Synchronizer(net, link=link)
        told: Decision | None = None
        for number in range(STAGE * len(stages)):
            alpha, rate = stages[number // STAGE]
            if link.rank == 0:
                link.world.wire.network = Network(alpha=alpha * 1e-3, beta=SCALE * 8e-9 / rate)
                if number % STAGE == 0:
                    lines.append(f"-- {alpha} ms, {rate * 1000 // SCALE} Mbit/s")
                decision = sync._pilot.decision
                if decision is not None and decision is not told:
                    told = decision
                    lines.append(line_of(decision))
            step(sync, net, number, seconds=0.05)

    ThreadWorld(8, Network(alpha=1e-3, beta=SCALE * 8e-9 / 25)).run(program)
    return "\n".join(lines) + "\n"


def line_of(decision: Decision) -> str:
    kept = "keeps" if decision.plan == decision.before else "takes"
    return f"{decision.step:4d} {kept} {decision.plan}: {decision.trigger} ({decision.seconds * 1e3:.0f} ms a step)"


@pytest.mark.parametrize(("name", "stages"), [("c1", C1), ("c2", C2), ("lan", LAN)])
def test_the_history_of_decisions_is_as_it_was(name: str, stages: list[Any], request: pytest.FixtureRequest) -> None:
    """Run pytest with --rewrite-golden to write down a new one, and read what has changed."""
    path, found = GOLDEN / f"{name}.txt", history(stages)
    if request.config.getoption("--rewrite-golden"):
        path.write_text(found)
    assert found == path.read_text()


# --- trying out


def warned(program: Callable[[Synchronizer, nn.Linear], None]) -> list[str]:
    """What two ranks are warned of while one that nobody explores for runs the program."""

    def run(link: ThreadLink) -> None:
        net = a_net(400)
        sync = Synchronizer(net, Adaptive(explore="restore"), link=link)
        for number in range(3):
            step(sync, net, number)
        program(sync, net)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ThreadWorld(2, Network(alpha=1e-3, beta=1e-7)).run(run)
    return [str(each.message) for each in caught if "Explorer" in str(each.message)]


def late(sync: Synchronizer, net: nn.Linear) -> None:
    """As where numbers are told beside torch's own all_reduce: there is word at some steps only, and then at more."""
    sync.step = 103
    for number in range(5):
        step(sync, net, number)


def test_that_nobody_explores_is_said_once_on_every_rank_whenever_word_comes() -> None:
    assert len(warned(late)) == 2


def test_it_is_not_said_where_something_was_tried_out_however_much_the_gain_has_changed_since() -> None:
    def program(sync: Synchronizer, net: nn.Linear) -> None:
        sync.explored("star-topk", {0.1: 0.9, 0.01: 0.01})
        late(sync, net)

    assert not warned(program)


def test_it_is_not_said_before_a_resumed_run_has_had_its_steps_too() -> None:
    def program(sync: Synchronizer, net: nn.Linear) -> None:
        sync.load_state_dict(sync.state_dict() | {"step": 500})
        for number in range(5):
            step(sync, net, number)

    assert not warned(program)
