"""`thinwire.Gossip`: averages, states that are loaded, records."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.laws.faulty import FaultyWorld
from thinwire.gossip.mail import Event
from thinwire.link.thread import ThreadLink, ThreadWorld
from thinwire.records import read
from thinwire.train.gossip import Gossip


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

    averaged = ThreadWorld(3).run(functools.partial(program, average=True))
    plain = ThreadWorld(3).run(functools.partial(program, average=False))
    for ours, theirs in zip(averaged, plain, strict=True):
        assert torch.equal(ours, theirs)


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

    looked = ThreadWorld(3).run(functools.partial(program, look=True))
    plain = ThreadWorld(3).run(functools.partial(program, look=False))
    for ours, theirs in zip(looked, plain, strict=True):
        assert torch.equal(ours, theirs)


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
