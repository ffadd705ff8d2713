"""`thinwire.Gossip`: averages, states that are loaded, steps that are not finite, refusals, records."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.laws.faulty import FaultyWorld
from thinwire.compress.quantize import Compressor
from thinwire.gossip.mail import Event
from thinwire.gossip.topology import build
from thinwire.link.thread import ThreadLink, ThreadWorld
from thinwire.records import read
from thinwire.train.gossip import Gossip
from thinwire.train.rehearsal import rehearse_compressor


def start_gossip(link: ThreadLink, method: str, **settings: Any) -> tuple[torch.nn.Module, Any, Gossip]:
    torch.manual_seed(link.rank)
    model = torch.nn.Linear(20, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, Gossip(model, optimizer, method, link=link, **settings)


def train(model: torch.nn.Module, optimizer: Any, rank: int, first: int, last: int, lr: float = 0.05) -> None:
    for step in range(first, last):
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), torch.arange(8) % 5).backward()
        optimizer.step()


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def ends_alike_either_way(program: Callable[[ThreadLink, bool], torch.Tensor]) -> bool:
    """Whether three ranks end with the same bits if `program` is told True as if it is told False."""
    ours = ThreadWorld(3).run(lambda link: program(link, True))
    theirs = ThreadWorld(3).run(lambda link: program(link, False))
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("dpsgd", {}),
        ("dpsgd", {"overlap": True}),
        ("dcd", {}),
        ("choco", {"compressor": "sign", "gamma": 0.4, "overlap": True}),
        ("deepsqueeze", {"compressor": "int8", "topology": "one-peer-exponential"}),
    ],
)
def test_an_average_that_stays_is_where_training_goes_on(method: str, settings: dict[str, Any]) -> None:
    def program(link: ThreadLink) -> tuple[float, float, torch.Tensor, torch.Tensor]:
        model, optimizer, gossip = start_gossip(link, method, **settings)
        train(model, optimizer, link.rank, 0, 10)
        apart = gossip.consensus()
        gossip.average()
        mean = flat(model).clone()
        saved = gossip.state_dict()
        train(model, optimizer, link.rank, 10, 11, lr=0.0)
        moved = float((flat(model) - mean).norm() / mean.norm())
        stored = torch.cat([t.reshape(-1) for t in saved["tensors"]["x"].values()])
        return apart, moved, mean, stored

    results = ThreadWorld(4).run(program)
    for apart, moved, mean, stored in results:
        assert apart > 1e-2
        assert moved < (1e-2 if method == "deepsqueeze" else 1e-6)
        assert torch.equal(stored, mean)
        assert torch.equal(mean, results[0][2])


def test_a_state_that_is_loaded_after_an_average_is_what_counts() -> None:
    def program(link: ThreadLink, average: bool) -> torch.Tensor:
        model, optimizer, gossip = start_gossip(link, "dcd")
        train(model, optimizer, link.rank, 0, 5)
        saved, momentum = gossip.state_dict(), copy.deepcopy(optimizer.state_dict())
        if average:
            gossip.average()
            gossip.load_state_dict(saved)
            optimizer.load_state_dict(momentum)
        train(model, optimizer, link.rank, 5, 7)
        return flat(model)

    assert ends_alike_either_way(program)


def test_one_node_alone_is_watched_too() -> None:
    """Its neighbours are no way away, for ever."""

    def program(link: ThreadLink) -> float:
        model, optimizer, gossip = start_gossip(link, "choco", compressor="sign")
        train(model, optimizer, link.rank, 0, 201)
        return gossip.consensus()

    assert ThreadWorld(1).run(program) == [0.0]


def test_an_average_for_a_while_leaves_no_trace() -> None:
    def program(link: ThreadLink, look: bool) -> torch.Tensor:
        model, optimizer, gossip = start_gossip(link, "dcd")
        for step in range(6):
            train(model, optimizer, link.rank, step, step + 1)
            if look:
                with gossip.average():
                    gossip.state_dict()
        return flat(model)

    assert ends_alike_either_way(program)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_average_for_a_while_leaves_one_that_stays(overlap: bool) -> None:
    def program(link: ThreadLink, look: bool) -> torch.Tensor:
        model, optimizer, gossip = start_gossip(link, "dpsgd" if overlap else "dcd", overlap=overlap)
        train(model, optimizer, link.rank, 0, 5)
        gossip.average()
        if look:
            mean = flat(model).clone()
            with gossip.average():
                gossip.average()
            assert torch.equal(flat(model), mean)
            stored = torch.cat([t.reshape(-1) for t in gossip.state_dict()["tensors"]["x"].values()])
            assert torch.equal(stored, mean)
        train(model, optimizer, link.rank, 5, 8)
        return flat(model)

    assert ends_alike_either_way(program)


def test_a_state_knows_which_compressor_it_was_left_with() -> None:
    def first(link: ThreadLink) -> tuple[Any, Any, torch.Tensor]:
        model, optimizer, gossip = start_gossip(link, "adagossip", compressor="topk:0.1", gamma=1e-3)
        train(model, optimizer, link.rank, 0, 5)
        gossip.recompress("topk:0.3")
        train(model, optimizer, link.rank, 5, 8)
        saved = gossip.state_dict(), copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, link.rank, 8, 12)
        return *saved, flat(model)

    saved = ThreadWorld(3).run(first)

    def second(link: ThreadLink) -> torch.Tensor:
        model, optimizer, gossip = start_gossip(link, "adagossip", compressor="topk:0.1", gamma=1e-3)
        gossip.load_state_dict(saved[link.rank][0])
        optimizer.load_state_dict(saved[link.rank][1])
        assert str(gossip.compressor) == "topk:0.3"
        train(model, optimizer, link.rank, 8, 12)
        return flat(model)

    for ours, (_, _, theirs) in zip(ThreadWorld(3).run(second), saved, strict=True):
        assert torch.equal(ours, theirs)


def state_of_a_run_with(weights: Any) -> list[dict[str, Any]]:
    def program(link: ThreadLink) -> dict[str, Any]:
        model, optimizer, gossip = start_gossip(link, "choco", gamma=0.5, weights=weights)
        train(model, optimizer, link.rank, 0, 3)
        return gossip.state_dict()

    return ThreadWorld(3).run(program)


def test_a_state_of_another_mixing_matrix_is_refused_and_one_of_before_is_not() -> None:
    lazy, quick = (np.full((3, 3), share) + (1 - 3 * share) * np.eye(3) for share in (0.25, 0.4))
    saved = state_of_a_run_with(lazy)

    def program(link: ThreadLink) -> int:
        _, _, same = start_gossip(link, "choco", gamma=0.5, weights=lazy)
        same.load_state_dict(saved[link.rank])
        _, _, other = start_gossip(link, "choco", gamma=0.5, weights=quick)
        with pytest.raises(ValueError, match="another mixing matrix"):
            other.load_state_dict(saved[link.rank])
        assert other.step == 0
        before = {name: value for name, value in saved[link.rank].items() if name != "mixing matrix"}
        other.load_state_dict(before)
        return other.step

    assert ThreadWorld(3).run(program) == [3, 3, 3]


def with_gradients_not_finite_at(steps: Collection[int], optimizer_of: Any) -> list[str]:
    """What is warned of when rank 1 has gradients not finite in these of ten steps, and how many each rank skipped."""

    def program(link: ThreadLink) -> int:
        torch.manual_seed(0)
        model = torch.nn.Linear(20, 5)
        optimizer = optimizer_of(model.parameters(), lr=0.01)
        gossip = Gossip(model, optimizer, "dpsgd", link=link)
        for step in range(10):
            torch.nn.functional.cross_entropy(model(torch.ones(8, 20)), torch.arange(8) % 5).backward()
            if link.rank == 1 and step in steps:
                model.weight.grad[0, 0] = torch.nan
            optimizer.step()
            optimizer.zero_grad()
        assert torch.isfinite(flat(model)).all()
        return gossip.skipped

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        skipped = ThreadWorld(3).run(program)
    return [*(str(warning.message) for warning in caught), str(skipped)]


def test_one_gradient_that_is_not_finite_is_told_and_so_is_that_adam_remembers_it() -> None:
    first, later, skipped = with_gradients_not_finite_at([2], torch.optim.Adam)
    assert "step 2 gave something not finite on rank 1 and was taken back" in first
    assert "rank 1 does not learn" in later and "optimizer's state" in later and "exp_avg, exp_avg_sq" in later
    assert skipped == "[0, 8, 0]"


def test_an_optimizer_that_forgets_is_not_blamed() -> None:
    first, skipped = with_gradients_not_finite_at([2, 4, 5, 6, 7], torch.optim.SGD)
    assert "step 2" in first and skipped == "[0, 5, 0]"
    _, later, skipped = with_gradients_not_finite_at(range(1, 7), torch.optim.SGD)
    assert "look at the gradients" in later and skipped == "[0, 6, 0]"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"topology": build("ring", 3), "weights": np.full((3, 3), 1 / 3)}, "a Topology has its weights already"),
        ({"topology": 5}, "list of pairs of ranks.* got 5"),
        ({"topology": [(0, 1, 0.5), (1, 2, 0.5)]}, "list of pairs of ranks"),
        ({"compressor": 8}, "a compressor is a name, as in 'int8', or a Compressor, got 8"),
        ({"ignore": ("weight", "nosuch")}, "no parameter of this model: 'nosuch'"),
        ({"on_failure": "continue"}, "needs link='tcp'"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_sent(settings: dict[str, Any], words: str) -> None:
    def program(link: ThreadLink) -> int:
        with pytest.raises(ValueError, match=words):
            start_gossip(link, "dcd", **settings)
        return link.sent_bytes

    assert ThreadWorld(3).run(program) == [0, 0, 0]


def test_going_on_without_a_node_is_refused_for_a_link_by_name_too() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="needs link='tcp', which alone can connect anew, got 'process'"):
        Gossip(model, optimizer, link="process", on_failure="continue")


def test_what_is_not_a_compressor_is_refused_on_the_way_too() -> None:
    def program(link: ThreadLink) -> str:
        _, _, gossip = start_gossip(link, "dcd")
        with pytest.raises(ValueError, match="a compressor is a name"):
            gossip.recompress(4)  # type: ignore[arg-type]
        return str(gossip.compressor)

    assert ThreadWorld(2).run(program) == ["int8", "int8"]


def test_whatever_a_compressor_has_to_compile_it_compiles_before_a_step_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the first step all neighbours would wait for it, and in the first after `recompress` again."""
    ran = list[str]()

    def noting(compressor: Compressor, dtype: torch.dtype) -> None:
        ran.append(f"{compressor} {dtype}")
        rehearse_compressor(compressor, dtype)

    monkeypatch.setattr("thinwire.train.gossip.rehearse_compressor", noting)

    def program(link: ThreadLink) -> None:
        _, _, gossip = start_gossip(link, "choco", compressor="int4")
        gossip.recompress("topk:0.1")

    ThreadWorld(2).run(program)
    assert sorted(ran) == ["int4 torch.float32"] * 2 + ["topk:0.1 torch.float32"] * 2


def test_records_hold_every_step_and_everything_that_went_wrong(tmp_path: Path) -> None:
    def program(link: Any) -> tuple[dict[str, int], list[Any]]:
        torch.manual_seed(link.rank)
        model = torch.nn.Linear(20, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        gossip = Gossip(model, optimizer, "dcd", link=link, records=tmp_path / "gossip.jsonl")
        link.misbehave()
        for step in range(40):
            if step == 37:
                link.calm_down()
            train(model, optimizer, link.rank, step, step + 1)
        gossip.consensus()
        gossip.close()
        return dict(gossip.method.mail.counts), gossip.method.mail.events

    world = FaultyWorld(3, rate=0.1, seed=4, calm=True)
    counts, events = world.run(program)[0]
    lines = list(read(tmp_path / "gossip.jsonl"))
    assert lines[0]["kind"] == "run"
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(40))
    assert steps[1]["plan"] == {"exchange": "dcd", "collective": "ring", "ratio": "int8"}
    assert steps[0]["step_seconds"] is None
    assert sum(line["step_seconds"] for line in steps[1:]) > 0.02
    assert sum(line["resynchronised"] for line in steps) == counts["resynchronised"] > 0
    edges = [Event(line["step"], line["peer"], line["what"]) for line in lines if line["kind"] == "edge"]
    assert edges == events
    assert lines[-1]["kind"] == "consensus"
