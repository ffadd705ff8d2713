"""Decentralised training with real processes on loopback."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.process.launch import outcomes, run_ranks
from tests.process.models import flat_parameters, loss_of, make
from tests.timing import timing
from thinwire.errors import PeerLost
from thinwire.gossip import METHODS
from thinwire.train.checkpoint import Checkpoint
from thinwire.train.gossip import Gossip

pytestmark = pytest.mark.process

SETTINGS: dict[str, dict[str, Any]] = {
    "dpsgd": {},
    "naive": {"compressor": "int8"},
    "dcd": {"compressor": "int8"},
    "ecd": {"compressor": "int16"},
    "choco": {"compressor": "sign", "gamma": 0.4},
    "adagossip": {"compressor": "topk:0.1", "gamma": 1e-3},
    "deepsqueeze": {"compressor": "int4", "topology": "one-peer-exponential"},
}
every_method = pytest.mark.parametrize("method", METHODS)


def start(method: str, optimizer: str = "momentum", **more: Any) -> tuple[torch.nn.Module, Any, Gossip]:
    model = make("mlp")
    optimizers: dict[str, Any] = {
        "momentum": lambda: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        "adam": lambda: torch.optim.AdamW(model.parameters(), lr=3e-3),
    }
    optim = optimizers[optimizer]()
    return model, optim, Gossip(model, optim, method, **{**SETTINGS[method], **more})


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


# --- learning


def learn(rank: int, method: str, optimizer: str) -> tuple[float, float, float, torch.Tensor]:
    model, optim, gossip = start(method, optimizer)
    before = float(loss_of(model, 0, 9999))
    train(model, optim, rank, 0, 60)
    apart = gossip.consensus()
    with gossip.average():
        after = sum(float(loss_of(model, r, 9999)) for r in range(3)) / 3
        mean = flat_parameters(model).clone()
    again = gossip.consensus()
    gossip.close()
    assert again == apart
    return before, after, apart, mean


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@every_method
def test_every_method_learns_with_the_users_optimizer(method: str, optimizer: str) -> None:
    results = run_ranks(learn, 3, method=method, optimizer=optimizer)
    for before, after, apart, mean in results:
        assert after < before
        assert 0 < apart < 0.5
        assert torch.equal(mean, results[0][3])


def alone(rank: int, method: str) -> torch.Tensor:
    model, optimizer, gossip = start(method)
    train(model, optimizer, rank, 0, 10)
    assert gossip.consensus() == 0
    with gossip.average():
        pass
    return flat_parameters(model)


@every_method
def test_one_node_trains_by_itself(method: str) -> None:
    [ours] = run_ranks(alone, 1, method=method)
    model = make("mlp")
    train(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), 0, 0, 10)
    tolerance = {"naive": 0.05, "dcd": 0.02, "ecd": 1e-2}.get(
        method, 1e-6
    )  # these compress what they say to themselves
    torch.testing.assert_close(ours, flat_parameters(model), rtol=tolerance, atol=tolerance)


def over(rank: int, **settings: Any) -> torch.Tensor:
    model, optimizer, gossip = start(**settings, topology="exponential")
    train(model, optimizer, rank, 0, 4)
    gossip.consensus()
    train(model, optimizer, rank, 4, 8)
    gossip.close()
    return flat_parameters(model)


def test_the_link_makes_no_difference() -> None:
    runs = [run_ranks(over, 4, method="dcd", link=link) for link in ("tcp", "process")]
    for ours, theirs in zip(*runs, strict=True):
        assert torch.equal(ours, theirs)


def test_overlapping_makes_no_difference() -> None:
    runs = [run_ranks(over, 4, method="choco", overlap=overlap) for overlap in (False, True)]
    for ours, theirs in zip(*runs, strict=True):
        assert torch.equal(ours, theirs)


# --- resuming


def resumable(rank: int, method: str, folder: str, first: int, last: int, kill_at: int = -1) -> torch.Tensor:
    model, optimizer, gossip = start(method)
    checkpoint = Checkpoint(folder, rank, 3)
    if first:
        state, _ = checkpoint.load(first)
        optimizer.load_state_dict(state["optimizer"])
        gossip.load_state_dict(state["gossip"])
    for step in range(first, last):
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        train(model, optimizer, rank, step, step + 1)
        if step == 7:
            checkpoint.save({"optimizer": optimizer.state_dict(), "gossip": gossip.state_dict()}, 8)
    gossip.close()
    return flat_parameters(model)


@every_method
def test_a_run_that_is_killed_and_resumed_ends_with_the_same_bits(method: str, tmp_path: Path) -> None:
    whole = run_ranks(resumable, 3, method=method, folder=str(tmp_path / "whole"), first=0, last=20)
    killed = outcomes(resumable, 3, method=method, folder=str(tmp_path / "killed"), first=0, last=20, kill_at=13)
    # One that is a little behind may hear of another's death before its own.
    assert all(outcome.exitcode == -9 or outcome.error in ("PeerLost", "RemoteError") for outcome in killed)
    resumed = run_ranks(resumable, 3, method=method, folder=str(tmp_path / "killed"), first=8, last=20)
    for ours, theirs in zip(resumed, whole, strict=True):
        assert torch.equal(ours, theirs)


# --- warnings and refusals


def warned(rank: int, **settings: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model, optimizer, gossip = start(**settings)
        train(model, optimizer, rank, 0, 2)
        gossip.close()
    return [str(warning.message) for warning in seen]


def test_dcd_says_before_it_hurts_that_its_compressor_is_too_coarse() -> None:
    for messages in run_ranks(warned, 6, method="dcd", compressor="int2"):
        assert "dcd with int2 may not converge: at step 0 its error is" in messages[0]
        assert "ring with 6 nodes (rho 0.667, mu 1.333) allows less than 0.125" in messages[0]
    assert run_ranks(warned, 2, method="dcd", compressor="int8") == [[], []]


@pytest.mark.parametrize("method", ["dcd", "ecd"])
def test_a_biased_compressor_is_warned_of_where_theory_wants_none(method: str) -> None:
    for messages in run_ranks(warned, 2, method=method, compressor="topk:0.5"):
        assert f"topk:0.5 is biased, and the theory of {method}" in messages[0]


def refused(rank: int, settings: list[dict[str, Any]]) -> list[str]:
    found = []
    for setting in settings:
        model = make("mlp")
        try:
            Gossip(model, torch.optim.SGD(model.parameters(), lr=0.1), **setting)
        except ValueError as error:
            found.append(str(error))
    return found


def test_settings_that_cannot_be_are_refused_by_name() -> None:
    settings: list[dict[str, Any]] = [
        {"method": "dcc"},
        {"compressor": "int9"},
        {"topology": [(0, 1)]},
        {"topology": "ring", "weights": torch.full((3, 3), 0.5).numpy()},
        {"method": "dcd", "gamma": 0.5},
        {"method": "choco", "gamma": 2.0},
        {"method": "dcd", "topology": "one-peer-exponential"},
        {"on_failure": "ignore"},
        {"method": "dcd", "overlap": True},
    ]
    words = [
        "unknown method 'dcc'",
        "bits must be 1 to 8, or 16, got 9",
        "not connected: 0, 1 | 2",
        "not doubly stochastic",
        "no consensus step size",
        "gamma must be in (0, 1]",
        "neighbours must not change",
        "on_failure must be",
        "cannot overlap",
    ]
    for found in run_ranks(refused, 3, settings=settings):
        assert len(found) == len(words)
        for message, word in zip(found, words, strict=True):
            assert word in message


# --- half precision, and what is not finite


def half(rank: int) -> tuple[float, float]:
    model = make("mlp").to(torch.bfloat16)
    gossip = Gossip(model, torch.optim.SGD(model.parameters(), lr=1.0), "dpsgd", mix_on_step=False)
    for _ in range(200):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.001 * (1 if rank else -1))
        gossip.mix()
    with gossip.average():
        mean = float(torch.cat([p.float().reshape(-1) for p in model.parameters()]).mean())
    return mean, gossip.consensus()


def test_half_precision_keeps_what_its_parameters_cannot_show() -> None:
    results = run_ranks(half, 2)
    expected = float(flat_parameters(make("mlp").to(torch.bfloat16)).float().mean())
    for mean, apart in results:
        assert mean == pytest.approx(expected, abs=1e-3)
        assert apart < 0.1


def not_finite(rank: int) -> tuple[int, bool]:
    model, optimizer, gossip = start("dcd")
    for step in range(6):
        optimizer.zero_grad()
        (loss_of(model, rank, step) * (float("nan") if (rank, step) == (1, 3) else 1.0)).backward()
        optimizer.step()
    return gossip.skipped, bool(torch.isfinite(flat_parameters(model)).all())


def test_a_gradient_that_is_no_number_stays_at_its_node() -> None:
    """The optimizer's momentum is the user's: it stays NaN, and so does every later step of that node."""
    assert run_ranks(not_finite, 3) == [(0, True), (3, True), (0, True)]


# --- a node dies


DEATHS = {2: 12}  # rank: step


def lose(
    rank: int, method: str, on_failure: str, folder: str, deaths: dict[int, int] = DEATHS, steps: int = 30
) -> dict[str, Any]:
    model, optimizer, gossip = start(method, on_failure=on_failure, topology="ring", timeout=30.0)
    x, y = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank)), torch.arange(8) % 10
    seen: dict[str, Any] = {"steps": 0, "slowest": 0.0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            if deaths.get(rank) == step:
                (Path(folder) / f"death of {rank}").write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            begun = time.monotonic()
            try:
                optimizer.step()
            except PeerLost as error:
                died = float((Path(folder) / f"death of {error.peer}").read_text())
                return {"lost": error.peer, "after": time.monotonic() - died, "message": str(error)}
            seen["slowest"] = max(seen["slowest"], time.monotonic() - begun)
            seen["steps"] += 1
    seen["warnings"] = [str(warning.message) for warning in caught if "lost" in str(warning.message)]
    seen["members"] = gossip.members
    seen["consensus"] = gossip.consensus()
    seen["nodes"] = gossip.topology.world_size
    return seen


@timing
def test_a_dead_node_is_named_to_all_others_within_five_seconds(tmp_path: Path) -> None:
    ended = outcomes(lose, 6, method="dcd", on_failure="raise", folder=str(tmp_path))
    assert ended[2].exitcode == -9
    for outcome in ended[:2] + ended[3:]:
        assert outcome.error == "", outcome.traceback
        assert outcome.value["lost"] == 2
        assert outcome.value["after"] < 5
        assert "rank 2" in outcome.value["message"]


@pytest.mark.parametrize("method", ["dpsgd", "dcd", "ecd", "choco", "deepsqueeze"])
@timing
def test_those_that_are_left_go_on_without_it(method: str, tmp_path: Path) -> None:
    ended = outcomes(lose, 6, method=method, on_failure="continue", folder=str(tmp_path))
    assert ended[2].exitcode == -9
    for outcome in ended[:2] + ended[3:]:
        assert outcome.error == "", outcome.traceback
        assert outcome.value["members"] == [0, 1, 3, 4, 5]
        assert outcome.value["steps"] == 30
        assert outcome.value["slowest"] < 5
        assert "rank 2 was lost" in outcome.value["warnings"][0]
        assert "5 nodes go on" in outcome.value["warnings"][0]
        assert outcome.value["consensus"] < 0.5


def test_one_node_after_the_other_may_be_lost_until_one_is_left(tmp_path: Path) -> None:
    """Rank 0 holds the store that the others meet by."""
    deaths = {3: 8, 1: 20, 2: 35}
    settings = {"method": "choco", "on_failure": "continue", "folder": str(tmp_path), "deaths": deaths, "steps": 45}
    ended = outcomes(lose, 4, **settings)
    assert [outcome.exitcode for outcome in ended] == [0, -9, -9, -9]
    last = ended[0].value
    assert (last["steps"], last["members"], last["nodes"], last["consensus"]) == (45, [0], 1, 0.0)
    for rank, message in zip((3, 1, 2), last["warnings"], strict=True):
        assert f"rank {rank} was lost" in message
