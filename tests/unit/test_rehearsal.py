"""Before the first step everything that numba compiles has been compiled."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from thinwire.compress.base import kernels
from thinwire.control import prices
from thinwire.link.base import Link
from thinwire.link.thread import ThreadWorld
from thinwire.train import rehearsal
from thinwire.train.rehearsal import rehearse
from thinwire.train.sync import Synchronizer
from thinwire.types import Network

ROOT = Path(__file__).parents[2]


def compiled() -> set[str]:
    """The functions that are, each with the types that it is for."""
    functions = [*vars(kernels).values(), prices._compiled()]
    return {f"{each.__name__} {types}" for each in functions for types in getattr(each, "signatures", ())}


def first_steps(exchange: str, dtype: str) -> None:
    """In a process of its own, in which nothing has been compiled or loaded before."""

    def program(link: Link) -> set[str]:
        net = nn.Linear(3000, 100, bias=False, dtype=getattr(torch, dtype))
        sync = Synchronizer(net, exchange, link=link, collective=None if exchange == "adaptive" else "ring")
        before = compiled()
        for _ in range(3):
            net.weight.grad = torch.randn_like(net.weight)
            sync.average_gradients()
        return compiled() - before

    late = set.union(*ThreadWorld(2, Network(alpha=1e-3, beta=1e-6)).run(program))
    assert compiled() and not late, late


@pytest.mark.parametrize(
    ("exchange", "dtype"),
    [("adaptive", "float32"), ("adaptive", "float64"), ("dense", "float32"), ("ms-topk", "float32")],
)
def test_a_synchronizers_first_steps_compile_nothing(exchange: str, dtype: str) -> None:
    pytest.importorskip("numba")
    steps = f"from tests.unit.test_rehearsal import first_steps; first_steps({exchange!r}, {dtype!r})"
    done = subprocess.run([sys.executable, "-c", steps], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def rehearsed() -> None:
    """In a process of its own: however fast it is, what it has to say."""
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    rehearsal.NOTICEABLE_SECONDS = 0.0
    rehearse(("topk-allgather",), "float32", torch.float32)


def test_it_is_said_that_something_was_compiled_only_where_it_was(tmp_path: Path) -> None:
    pytest.importorskip("numba")

    def said() -> str:
        steps = "from tests.unit.test_rehearsal import rehearsed; rehearsed()"
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", steps]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "compiled what computes" in said()
    assert "compiled" not in said()


def test_it_is_done_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = list[ThreadWorld]()

    def noted(size: int) -> ThreadWorld:
        worlds.append(ThreadWorld(size))
        return worlds[-1]

    monkeypatch.setattr(rehearsal, "ThreadWorld", noted)
    rehearse.cache_clear()
    for _ in range(2):
        ThreadWorld(2).run(lambda link: Synchronizer(nn.Linear(10, 10), "star-topk", link=link))
    assert len(worlds) == 1
