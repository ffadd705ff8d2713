"""One line on top of DDP: it measures, chooses, says why, and changes its mind without losing anything."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.process.decisions import decision_for
from tests.process.launch import run_ranks
from tests.process.models import flat_parameters, loss_of, make
from thinwire import records
from thinwire.bench import harm
from thinwire.control.adaptive import Adaptive
from thinwire.control.decision import Decision, Standing
from thinwire.control.prices import Prices
from thinwire.control.replay import replay
from thinwire.control.view import View
from thinwire.exchange import complete
from thinwire.link.tcp import TcpLink
from thinwire.train import pilot
from thinwire.types import Plan

pytestmark = pytest.mark.process


def _train(rank: int, kind: str, steps: int, path: str | None, **attach: Any) -> dict[str, Any]:
    model = DDP(make(kind))
    comm = thinwire.attach(model, records=path, **attach)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    plans = [str(comm.plan)]
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        plans.append(str(comm.plan))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        comm.explain()
    share = comm.control_seconds
    comm.close()
    return {"parameters": flat_parameters(model), "plans": plans, "said": said.getvalue(), "control": share}


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_attach_alone_trains_with_the_same_plans_and_bits_on_all_ranks(kind: str, ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    ended = run_ranks(_train, ranks, kind=kind, steps=30, path=str(path))
    for other in ended[1:]:
        assert other["plans"] == ended[0]["plans"]
        assert torch.equal(other["parameters"], ended[0]["parameters"])
    written = list(records.read(path))
    assert written[0]["kind"] == "run" and sum(record["kind"] == "step" for record in written) == 30
    if ranks > 1:
        assert "From step" in ended[0]["said"] and "one way" in ended[0]["said"]
        made = [record for record in written if record["kind"] == "decision"]
        assert [records.plain(decision.to_json())["plan"] for decision in replay(written)] == [d["plan"] for d in made]


# --- changing plans


@dataclass(frozen=True, kw_only=True)
class Restless(Adaptive):
    """Another plan at every step."""

    plans = (
        complete("dense", 1.0),
        complete("star-topk", 0.05, "tree"),
        complete("dense", 1.0, "ring"),
        complete("topk-allgather", 0.1),
        complete("dense", 1.0),
        complete("dense", 1.0),
        complete("topk-allgather", 0.02, "ring"),
    )

    def decide(self, view: View, standing: Standing, step: int, prices: Prices) -> Decision:
        return decision_for(self.plans[step % len(self.plans)], standing, step, "restlessness")


class Linear(nn.Module):
    """Its gradients do not depend on its parameters, so that what was sent late can be counted."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(50 + 10 * i)) for i in range(8))

    def forward(self, factors: list[torch.Tensor]) -> torch.Tensor:
        return sum(((w * c).sum() for w, c in zip(self.weights, factors, strict=True)), torch.zeros(()))


def _tell_always() -> None:
    """So that plans can change at every step, also beside exchanges that carry no numbers. For this process."""
    pilot.TELL_EVERY, pilot.TELL_SECONDS, pilot.ALARM_SECONDS, pilot.LISTEN_EVERY = 1, 0.0, 0.0, 1


def _restless(
    rank: int, ranks: int, steps: int, link: str, **options: bool
) -> tuple[torch.Tensor, torch.Tensor, list[Plan]]:
    _tell_always()
    model = DDP(Linear(), bucket_cap_mb=1e-4, **options)
    comm = thinwire.attach(model, Restless(), link=link)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    total, ran = torch.zeros(sum(p.numel() for p in model.parameters())), []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        everyones = [[torch.randn(p.shape, generator=generator) for p in model.parameters()] for _ in range(ranks)]
        total += torch.stack([torch.cat(factors) for factors in everyones]).mean(0)
        optimizer.zero_grad()
        model(everyones[rank]).backward()
        optimizer.step()
        assert comm.last is not None
        ran.append(comm.last.plan)
    comm.close()
    return flat_parameters(model), total, ran


@pytest.mark.parametrize(
    ("ranks", "link", "options"),
    [
        (2, "tcp", {}),
        (3, "tcp", {}),
        (2, "process", {}),
        (2, "tcp", {"find_unused_parameters": True}),
        (2, "tcp", {"static_graph": True}),
    ],
)
def test_changing_the_plan_at_every_step_loses_nothing(ranks: int, link: str, options: dict[str, bool]) -> None:
    steps = 7 * 6 + 1  # the last one is dense, so that everything has been sent
    ended = run_ranks(_restless, ranks, ranks=ranks, steps=steps, link=link, **options)
    for parameters, total, ran in ended:
        assert torch.equal(parameters, ended[0][0])
        assert ran == [Restless.plans[step % len(Restless.plans)] for step in range(steps)]
        torch.testing.assert_close(-parameters, total, rtol=1e-4, atol=1e-4)


def _resumed(rank: int, folder: str, steps: int) -> None:
    _tell_always()
    checkpoint = thinwire.Checkpoint(folder, rank, 2, keep=steps)

    def go_on(first: int) -> torch.Tensor:
        model = DDP(make("mlp"))
        comm = thinwire.attach(model, Restless())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if first:
            state, _ = checkpoint.load(first)
            model.module.load_state_dict(state["model"])
            comm.load_state_dict(state["comm"])
        for step in range(first, steps):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            if not first:
                checkpoint.save({"model": model.module.state_dict(), "comm": comm.state_dict()}, step + 1)
        comm.close()
        return flat_parameters(model)

    whole = go_on(0)
    for first in range(1, steps):
        assert torch.equal(go_on(first), whole), first


def test_a_run_resumed_at_any_step_ends_with_the_same_bits_also_between_telling_and_hearing(tmp_path: Path) -> None:
    run_ranks(_resumed, 2, folder=str(tmp_path), steps=10)


def _not_writable(rank: int, path: str) -> str:
    model = DDP(make("mlp"))
    with pytest.raises(FileNotFoundError if rank == 0 else thinwire.RemoteError) as raised:
        thinwire.attach(model, records=path)
    return str(raised.value)


def test_records_that_cannot_be_begun_end_all_ranks_at_once() -> None:
    words = run_ranks(_not_writable, 2, path="/proc/nowhere/run.jsonl")
    assert all("/proc/nowhere" in text for text in words)


def _watching(rank: int, steps: int) -> float | None:
    model = make("mlp")
    sync = thinwire.Synchronizer(model, "dense")
    for step in range(steps):
        loss_of(model, rank, step).backward()
        sync.average_gradients()
        if sync._pilot.view.alpha is not None:  # on all ranks at the same step
            break
    sync.close()
    return sync._pilot.view.alpha


def test_latency_is_measured_also_while_torch_sends_everything() -> None:
    first, second = run_ranks(_watching, 2, steps=3000)
    assert first == second and first is not None


@dataclass(frozen=True, kw_only=True)
class Dense(Adaptive):
    """Torch's own all_reduce for good, beside which numbers are told."""

    def decide(self, view: View, standing: Standing, step: int, prices: Prices) -> Decision:
        return decision_for(complete("dense", 1.0), standing, step, "habit")


def _telling(rank: int, steps: int) -> int:
    _tell_always()
    model = DDP(make("mlp"))
    comm = thinwire.attach(model, Dense())
    for step in range(steps):
        loss_of(model, rank, step).backward()
    assert isinstance(comm.link, TcpLink)
    least, (_, beside, _), most = comm.link.probe_bytes, harm._counts(comm), comm.link.probe_bytes
    assert least <= beside - comm.told_bytes <= most  # another rank may be asking at any time
    comm.close()
    return comm.told_bytes


def test_numbers_told_beside_torch_are_counted_as_a_ring_sends_them_and_are_the_controllers() -> None:
    assert run_ranks(_telling, 2, steps=7) == [7 * 16 * 4] * 2  # half of them there and half back
