"""Laws of training with every exchange: ranks are threads, so that a whole run takes milliseconds."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.laws.test_exchanges import WORLD_SIZES, _name, _plans
from thinwire import Plan, PlanMismatch, Synchronizer, records
from thinwire.exchange import NAMES, build, complete
from thinwire.link.thread import ThreadLink, ThreadWorld
from thinwire.train.layout import Layout
from thinwire.types import Network

PLANS = _plans(0.1)
SIZES = (30, 5, 15, 3)  # of the parameters of `small_net`


def arguments(plan: Plan) -> dict[str, Any]:
    return {
        "exchange": plan.exchange,
        "ratio": None if plan.exchange == "dense" else plan.ratio,
        "collective": plan.collective,
        "broadcast": plan.broadcast,
        "values": plan.values,
    }


def small_net() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return net


def train(sync: Synchronizer, net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + sync.link.rank)
        x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        net(x).square().sum().backward()
        sync.average_gradients()
        optimizer.step()


def start(link: ThreadLink, plan: Plan, **more: Any) -> tuple[Synchronizer, nn.Module, torch.optim.Optimizer]:
    net = small_net()
    sync = Synchronizer(net, link=link, **arguments(plan), **more)
    return sync, net, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("plan", PLANS, ids=_name)
def test_a_resumed_run_ends_with_the_same_bits_as_one_that_went_on(plan: Plan, world_size: int) -> None:
    def whole(link: ThreadLink) -> Any:
        sync, net, optimizer = start(link, plan)
        train(sync, net, optimizer, range(3))
        saved = copy.deepcopy((sync.state_dict(), net.state_dict(), optimizer.state_dict()))
        train(sync, net, optimizer, range(3, 6))
        return saved, net.state_dict(), sync.state_dict()

    went_on = ThreadWorld(world_size).run(whole)

    def resumed(link: ThreadLink) -> Any:
        sync, net, optimizer = start(link, plan)
        train(sync, net, optimizer, range(7, 8))  # whatever it held is replaced
        state = went_on[link.rank][0]
        sync.load_state_dict(state[0])
        net.load_state_dict(state[1])
        optimizer.load_state_dict(state[2])
        train(sync, net, optimizer, range(3, 6))
        return net.state_dict(), sync.state_dict()

    for (_, net, state), (net_again, state_again) in zip(went_on, ThreadWorld(world_size).run(resumed), strict=True):
        assert all(torch.equal(net[name], net_again[name]) for name in net)
        assert state_again["step"] == state["step"] == 6
        for name, error in state["error"].items():
            assert torch.equal(error, state_again["error"][name])
        assert torch.equal(net["0.weight"], went_on[0][1]["0.weight"])  # and the ranks are replicas


def test_ranks_agree_on_the_newest_step_that_all_have() -> None:
    def common(*steps: list[int]) -> set[int | None]:
        def program(link: ThreadLink) -> int | None:
            return Synchronizer(nn.Linear(2, 2), "star-topk", link=link).common_step(steps[link.rank])

        return set(ThreadWorld(len(steps)).run(program))

    assert common([3, 6, 9], [3, 6], [6, 9]) == {6}
    assert common([3], [6]) == {None}
    assert common([], [6]) == {None}
    assert common([0], [0]) == {0}


def test_the_same_seed_gives_the_same_run_twice() -> None:
    def program(link: ThreadLink) -> torch.Tensor:
        sync, net, optimizer = start(link, PLANS[-1])
        train(sync, net, optimizer, range(5))
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    first, second = (ThreadWorld(3).run(program) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_parameters_and_buffers_start_as_those_of_rank_0() -> None:
    def program(link: ThreadLink) -> tuple[torch.Tensor, torch.Tensor]:
        net = nn.BatchNorm1d(4)
        nn.init.constant_(net.weight, link.rank + 1.0)
        net.running_mean.fill_(link.rank + 5.0)
        Synchronizer(net, "star-topk", link=link)
        return net.weight.detach(), net.running_mean

    for weight, mean in ThreadWorld(3).run(program):
        assert weight.tolist() == [1.0] * 4
        assert mean.tolist() == [5.0] * 4


def test_a_parameter_without_a_gradient_gets_the_others_mean() -> None:
    def program(link: ThreadLink) -> torch.Tensor:
        net = nn.Linear(2, 1, bias=False)
        sync = Synchronizer(net, "dense", collective="ring", link=link)
        if link.rank == 0:
            net.weight.grad = torch.tensor([[3.0, 6.0]])
        sync.average_gradients()
        assert net.weight.grad is not None
        return net.weight.grad

    for grad in ThreadWorld(3).run(program):
        torch.testing.assert_close(grad, torch.tensor([[1.0, 2.0]]))


def test_scalecoms_low_pass_mixes_the_old_error_with_what_is_left() -> None:
    def program(link: ThreadLink) -> list[torch.Tensor]:
        net = nn.Linear(4, 1, bias=False)
        sync = Synchronizer(net, "topk-allgather", ratio=0.25, link=link, low_pass=0.5)
        errors = []
        for grad in ([8.0, 4.0, 2.0, 0.0], [0.0, 1.0, 0.0, 8.0]):
            net.weight.grad = torch.tensor([grad])
            sync.average_gradients()
            errors.append(sync.state_dict()["error"]["weight"].flatten())
        return errors

    first, second = ThreadWorld(1).run(program)[0]
    # m = (1 - 0.5) 0 + 0.5 [0, 4, 2, 0]
    assert first.tolist() == [0.0, 2.0, 1.0, 0.0]
    # x = [0, 3, 1, 8], of which 8 is sent: m = 0.5 m + 0.5 [0, 3, 1, 0]
    assert second.tolist() == [0.0, 2.5, 1.0, 0.0]


def test_the_record_of_a_step_says_what_was_sent_and_how_much_of_the_gradient_that_was() -> None:
    def program(link: ThreadLink) -> Any:
        net = nn.Linear(100, 1, bias=False)
        sync = Synchronizer(net, "topk-allgather", ratio=0.01, link=link)
        net.weight.grad = torch.ones(1, 100)
        net.weight.grad[0, link.rank] = 3.0
        link.sent_bytes = 0
        sync.average_gradients()
        return sync.last, link.sent_bytes

    for last, sent_bytes in ThreadWorld(4).run(program):
        assert last.gain == pytest.approx(9 / (9 + 99))
        assert last.sent_bytes == sent_bytes == 3 * (64 + 8 + 8)  # numbers, one index, one value, each in whole words
        assert last.dense_bytes == 2 * 3 * 400 // 4
        assert (last.step, last.skipped) == (0, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 1}, "this state has rank 1, this run has 0"),
        ({"world_size": 2}, "this state has world_size 2, this run has 1"),
        ({"version": 0}, "this state has version 0, this run has 5: it was saved by another version"),
        ({"error": {}}, r"missing \['weight'\]"),
        ({"error": {"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}}, r"unknown \['bias'\]"),
        ({"error": {"weight": torch.zeros(3, 1)}}, r"shape \(3, 1\), not shape \(1, 3\)"),
        ({"error": {"weight": [[0.0, 0.0, 0.0]]}}, r"type list, not shape \(1, 3\)"),
        ({"error": {"weight": torch.tensor([[0.0, torch.nan, 0.0]])}}, "not finite"),
        ({"error": {"weight": torch.tensor([[1e300, 0.0, 0.0]], dtype=torch.float64)}}, "not finite"),
        ({"error": None}, "no errors by parameter name"),
        ({"step": None}, "not whole numbers"),
        ({"skipped": -1}, "not whole numbers"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_whole(change: dict[str, Any], message: str) -> None:
    def program(link: ThreadLink) -> None:
        net = nn.Linear(3, 1, bias=False)
        sync = Synchronizer(net, "topk-allgather", ratio=0.5, link=link)
        net.weight.grad = torch.tensor([[1.0, 2.0, 3.0]])
        sync.average_gradients()
        before = copy.deepcopy(sync.state_dict())
        with pytest.raises(ValueError, match=message):
            sync.load_state_dict({**before, "step": 77, **change})
        assert sync.step == 1
        assert torch.equal(sync.state_dict()["error"]["weight"], before["error"]["weight"])

    ThreadWorld(1).run(program)


def test_a_ratio_that_a_dense_exchange_ignores_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="ratio=0.5 has no effect"):
        Synchronizer(nn.Linear(2, 2), "dense", ratio=0.5, collective="ring", link=ThreadWorld(1).links[0])


def test_bad_models_are_refused_by_name() -> None:
    link = ThreadWorld(1).links[0]
    with pytest.raises(ValueError, match="no trainable parameters"):
        Synchronizer(nn.Linear(2, 2).requires_grad_(False), link=link)
    with pytest.raises(ValueError, match=r"'0.weight' has sparse gradients"):
        Synchronizer(nn.Sequential(nn.EmbeddingBag(4, 2, sparse=True)), link=link)
    with pytest.raises(ValueError, match=r"'weight' is torch.complex64"):
        Synchronizer(nn.Linear(2, 2, dtype=torch.complex64), link=link)


def test_gradients_are_given_for_all_parameters_or_not_at_all() -> None:
    sync = Synchronizer(nn.Linear(2, 1), "topk-allgather", ratio=0.5, link=ThreadWorld(1).links[0])
    for names in (["weight"], ["weight", "bias", "nope"]):
        with pytest.raises(ValueError, match="do not fit the model"):
            sync.average({name: torch.zeros(1, 2) for name in names})
    assert sync.step == 0


def test_a_change_of_what_is_trainable_is_refused() -> None:
    net = nn.Linear(2, 1)
    sync = Synchronizer(net, link=ThreadWorld(1).links[0])
    net.bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match="other parameters are trainable now"):
        sync.average_gradients()


def test_what_is_to_be_ignored_may_be_trainable_and_keeps_its_own_gradient() -> None:
    net = nn.Linear(2, 1)
    sync = Synchronizer(net, "dense", collective="ring", link=ThreadWorld(1).links[0], ignore=["bias"])
    net(torch.ones(1, 2)).backward()
    sync.average_gradients()
    assert sync.step == 1
    assert net.bias.grad is not None
    net.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="other parameters are trainable now"):
        sync.average_gradients()


def ignoring(net: nn.Module, names: Any) -> list[str]:
    """What is averaged of it all the same."""
    sync = Synchronizer(net, "dense", collective="ring", link=ThreadWorld(1).links[0], ignore=names)
    return list(sync.averaged)


def test_what_is_to_be_ignored_is_known_by_any_of_its_names_whether_or_not_it_is_trainable() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight  # which is then named by the first of them alone
    net[2].weight.requires_grad_(False)
    assert ignoring(net, ["1.weight", "2.weight"]) == ["0.bias", "1.bias", "2.bias"]
    compiled = nn.ModuleDict({"_orig_mod": net})  # as torch.compile names what it has wrapped
    assert ignoring(compiled, {"0.weight", "_orig_mod.0.bias"}) == ["1.bias", "2.bias"]


def test_what_is_to_be_ignored_and_is_not_there_is_refused_by_name() -> None:
    net = small_net()
    with pytest.raises(ValueError, match="no parameters '2.bia', 'head', which are to be ignored"):
        ignoring(net, ["0.bias", "head", "2.bia"])
    with pytest.raises(TypeError, match=r"as in ignore=\['0.bias'\], got a single str"):
        ignoring(net, "0.bias")


def test_a_sparse_gradient_that_no_layer_announced_is_refused_by_name() -> None:
    net = nn.Linear(2, 2, bias=False)
    sync = Synchronizer(net, link=ThreadWorld(1).links[0])
    with pytest.raises(ValueError, match="gradient of 'weight' is sparse"):
        sync.average({"weight": torch.eye(2).to_sparse()})


def test_a_scaler_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="scaler must be a GradScaler, got float"):
        Synchronizer(nn.Linear(2, 2), link=ThreadWorld(1).links[0], scaler=1024.0)


def test_ranks_that_do_not_fit_together_are_told_at_the_start_by_rank_and_by_what_differs() -> None:
    def start_with(**differing: Any) -> None:
        def program(link: ThreadLink) -> None:
            chosen = {name: values[link.rank] for name, values in differing.items()}
            net = nn.Linear(chosen.pop("width", 4), 2)
            Synchronizer(net, "topk-allgather", link=link, **chosen)

        ThreadWorld(2).run(program)

    for what, differing in {
        "plan": {"ratio": (0.0019999, 0.0020001)},
        "model": {"width": (4, 5)},
        "options": {"low_pass": (1.0, 0.5)},
    }.items():
        with pytest.raises(PlanMismatch, match=f"rank . has another {what} than rank ."):
            start_with(**differing)


def test_large_gradients_have_a_finite_mean() -> None:
    def program(link: ThreadLink) -> torch.Tensor:
        net = nn.Linear(4, 1, bias=False)
        sync = Synchronizer(net, name, ratio=None if name == "dense" else 1.0, collective="ring", link=link)
        net.weight.grad = torch.full((1, 4), 2e38)
        sync.average_gradients()
        assert sync.last is not None and not sync.last.skipped
        return net.weight.grad

    for name in NAMES:
        for grad in ThreadWorld(4).run(program):
            torch.testing.assert_close(grad, torch.full((1, 4), 2e38)), name


def test_what_a_half_precision_gradient_cannot_hold_stays_in_the_error() -> None:
    def program(link: ThreadLink) -> list[float]:
        net = nn.Linear(2, 1, bias=False).half()
        sync = Synchronizer(net, "topk-allgather", ratio=1.0, link=link)
        seen = []
        for value in (60000.0, 60000.0, 0.0):
            net.weight.grad = torch.full((1, 2), value, dtype=torch.float16)
            if value == 60000.0 and not seen:
                sync.memory.put_back(slice(0, 2), torch.full((2,), 60000.0))
            sync.average_gradients()
            seen.append(float(net.weight.grad[0, 0]))
        return seen

    assert ThreadWorld(2).run(program)[0] == [65504.0, 65504.0, 180000.0 - 2 * 65504.0]


def test_a_gain_is_never_above_one() -> None:
    def program(link: ThreadLink) -> float:
        net = nn.Linear(1000, 7)
        sync = Synchronizer(net, "star-topk", ratio=1.0, link=link)
        generator = torch.Generator().manual_seed(link.rank)
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        sync.average_gradients()
        assert sync.last is not None
        return sync.last.gain

    assert all(0.999 < gain <= 1.0 for gain in ThreadWorld(3).run(program))


def test_without_a_process_group_the_way_to_one_is_shown() -> None:
    with pytest.raises(RuntimeError, match="torchrun.*init_process_group"):
        Synchronizer(nn.Linear(2, 2))


# --- what is recorded of each parameter


def test_entries_are_counted_by_the_parameter_that_they_are_of() -> None:
    sizes = {"a": 4, "b": 0, "c": 1, "d": 5}
    layout = Layout.of((name, nn.Parameter(torch.zeros(size))) for name, size in sizes.items())
    for dtype in (torch.int32, torch.int64):
        assert layout.counts(torch.tensor([0, 3, 4, 5, 9], dtype=dtype)) == [2, 0, 1, 2]
        assert layout.counts(torch.tensor([], dtype=dtype)) == [0, 0, 0, 0]


@pytest.mark.parametrize("exchange", NAMES)
def test_it_is_recorded_now_and_then_how_many_entries_of_each_parameter_were_sent(
    exchange: str, tmp_path: Path
) -> None:
    path = tmp_path / "records.jsonl"
    plan = complete(exchange, 1.0 if exchange == "dense" else 0.1)

    def program(link: ThreadLink) -> None:
        sync, net, optimizer = start(link, replace(plan, collective="ring"), records=path)
        train(sync, net, optimizer, range(3))
        sync.close()

    # The first step, and then one a second: of these some, as ranks wait for each other by turns, or none.
    for latency, more in ((1.5, True), (1e-4, False)):
        ThreadWorld(2, Network(alpha=latency, beta=0.0)).run(program)
        sent = [record for record in records.read(path) if record["kind"] == "sent"]
        steps = [record["step"] for record in sent]
        assert steps == [] if exchange == "dense" else steps[0] == 0 and (len(steps) > 1) == more
        for record in sent:
            assert len(record["entries"]) == 4 and sum(record["entries"]) == build(plan, SIZES).selector.count(53, 0.1)
