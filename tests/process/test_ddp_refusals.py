"""What DDP users must not attempt, and what ends a run: told at once, by rank and by name, with the way out."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.process.launch import outcomes, run_ranks
from tests.process.models import loss_of, make
from tests.timing import timing
from thinwire.control.decision import Standing
from thinwire.exchange import complete

pytestmark = pytest.mark.process


def _different_plans(rank: int) -> None:
    model = DDP(make("mlp"))
    comm = thinwire.attach(model, exchange="topk-allgather", ratio=0.05, timeout=20)
    if rank == 1:
        # Nobody does this; a bug might.
        comm._pilot.standing = Standing(plan=complete("topk-allgather", 0.1))
    loss_of(model, rank, 0).backward()


def test_ranks_with_different_plans_are_told_so_by_rank_and_field() -> None:
    first, second = outcomes(_different_plans, 2)
    assert {first.error, second.error} <= {"PlanMismatch", "RemoteError"}
    assert "PlanMismatch" in {first.error, second.error}
    for outcome in (first, second):
        assert "rank 0" in outcome.message and "rank 1" in outcome.message and "plan" in outcome.message
        assert f"topk-allgather over direct at {('0.05', '0.1')[outcome.rank]}" in outcome.message or (
            outcome.error == "RemoteError"
        )


def _interrupted(rank: int, link: str, collective: str) -> float:
    model = DDP(make("mlp"))
    comm = thinwire.attach(model, exchange="star-topk", collective=collective, link=link, timeout=50)
    store = torch.distributed.group.WORLD.get_group_store()
    if rank == 1:
        store.get("rank 0 has seen its Ctrl-C")
        os.kill(os.getpid(), signal.SIGKILL)  # a clean farewell would wait for what rank 0 has begun
    pressed = []

    def press() -> None:
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.5, press).start()  # by then backward() waits for rank 1, which never comes
    try:
        loss_of(model, rank, 0).backward()
    except KeyboardInterrupt:
        took = time.monotonic() - pressed[0]
        store.set("rank 0 has seen its Ctrl-C", "")
        return took
    comm.close()
    return float("inf")


@pytest.mark.parametrize(("link", "collective"), [("tcp", "ring"), ("process", "ring"), ("tcp", "torch")])
@timing
def test_ctrl_c_ends_a_backward_that_waits_for_a_peer_within_a_second(link: str, collective: str) -> None:
    first, second = outcomes(_interrupted, 2, link=link, collective=collective)
    assert second.exitcode == -signal.SIGKILL
    assert first.value is not None and first.value < 1.0, first


def _one_fails(rank: int) -> None:
    model = DDP(make("mlp"))
    comm = thinwire.attach(model, exchange="star-topk", ratio=0.05, timeout=30)
    for step in range(3):
        model.zero_grad()
        loss_of(model, rank, step).backward()
        if rank == 1 and step == 1:
            raise KeyError("a broken sample")
    comm.close()


def test_a_rank_that_fails_in_its_own_code_ends_the_others_at_once_by_name() -> None:
    ended = outcomes(_one_fails, 3, limit=25)
    assert ended[1].error == "KeyError"
    for survivor in (ended[0], ended[2]):
        assert survivor.error in ("PeerLost", "RemoteError")
        assert "rank 1" in survivor.message


def _bad_input(rank: int) -> dict[str, str]:
    def refusal(model: nn.Module, wrap: bool = True, **arguments: Any) -> str:
        """What `attach` says to a model, wrapped by DDP if it is not yet."""
        try:
            thinwire.attach(DDP(model) if wrap else model, **arguments)  # type: ignore[arg-type]
        except (ValueError, TypeError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    tied = DDP(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    tied.module[1].weight = tied.module[0].weight
    frozen = DDP(nn.Sequential(nn.Embedding(5, 3, sparse=True)))
    frozen.requires_grad_(False)
    skipping = DDP(make("mlp"), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    twice = DDP(make("mlp"))
    thinwire.attach(twice)
    try:
        thinwire.attach(twice)
        again = "accepted"
    except RuntimeError as error:
        again = str(error)
    return {
        "twice": again,
        "not ddp": refusal(make("mlp"), wrap=False),
        "exchange": refusal(make("mlp"), exchange="topk"),
        "collective": refusal(make("mlp"), exchange="star-topk", collective="star"),
        "gathered over torch": refusal(make("mlp"), exchange="topk-allgather", collective="torch"),
        "broadcast": refusal(make("mlp"), exchange="star-topk", broadcast="ring"),
        "values": refusal(make("mlp"), exchange="topk-allgather", values="int8"),
        "half reduced": refusal(make("mlp"), exchange="star-topk", values="float16"),
        "coarse": refusal(make("mlp"), exchange="layerwise-topk", values="log4"),
        "link": refusal(make("mlp"), link="udp"),
        "low pass": refusal(make("mlp"), low_pass=0.0),
        "ratio 0": refusal(make("mlp"), exchange="star-topk", ratio=0.0),
        "ratio 2": refusal(make("mlp"), exchange="star-topk", ratio=2.0),
        "ratio nan": refusal(make("mlp"), exchange="star-topk", ratio=float("nan")),
        "ratio of its own": refusal(make("mlp"), ratio=0.1),
        "complex": refusal(Complex()),
        "sparse": refusal(nn.Sequential(nn.Embedding(5, 3, sparse=True))),
        "sparse and frozen since": refusal(frozen, wrap=False),
        "tied since": refusal(tied, wrap=False),
        "skipping": refusal(skipping, wrap=False),
    }


def test_bad_input_is_refused_before_anything_is_sent_with_the_way_out() -> None:
    refusals = run_ranks(_bad_input, 1)[0]
    expected = {
        "twice": "attached to this model already",
        "not ddp": "TypeError: attach needs a model wrapped in DistributedDataParallel.*thinwire.Synchronizer",
        "exchange": "'topk'. Known are: adaptive, dense, topk-allgather, layerwise-topk, ms-topk, star-topk, var-topk",
        "collective": "collective for star-topk 'star'. Known are: ring, tree, halving, direct, torch",
        "gathered over torch": "collective for topk-allgather 'torch'. Known are: ring, tree, halving, direct",
        "broadcast": "Known are: tree, scatter",
        "values": "Known are: float32, float16, bfloat16, log4",
        "half reduced": "star-topk adds values on the way.*values='float32'",
        "coarse": "layers of different scale.*values='bfloat16'",
        "link": "Known are: tcp, process",
        "low pass": r"low_pass must be in \(0, 1\]",
        "ratio 0": r"ratio must be in \(0, 1\], got ratio=0.0",
        "ratio 2": r"ratio must be in \(0, 1\], got ratio=2.0",
        "ratio nan": r"ratio must be in \(0, 1\], got ratio=nan",
        "ratio of its own": "ratio=0.1 belongs to a fixed exchange, and adaptive chooses for itself",
        "complex": "'phase' is torch.complex64",
        "sparse": "'0.weight' has sparse gradients",
        "sparse and frozen since": "ValueError: DDP has buckets for sparse gradients.*sparse=False",
        "tied since": "1 of the parameters that DDP averages are no longer the module's.*Wrap it anew",
        "skipping": r"DDP\(skip_all_reduce_unused_params=True\)",
    }
    for what, pattern in expected.items():
        assert re.search(pattern, refusals[what]), (what, refusals[what])


def _averaged_twice(rank: int) -> list[str]:
    words = []
    for model in (DDP(make("mlp")), torch.compile(DDP(make("mlp")))):
        with pytest.raises(TypeError) as raised:
            thinwire.Synchronizer(model)
        words.append(str(raised.value))
    return words


def test_a_model_that_ddp_averages_already_is_refused_by_a_synchronizer_of_its_own() -> None:
    for words in run_ranks(_averaged_twice, 1)[0]:
        assert "wrapped in DistributedDataParallel, which averages already: use thinwire.attach(model)" in words
