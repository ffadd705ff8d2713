"""The exchange that docs/extending.md shows obeys the laws, word for word as it stands there."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
import thinwire.exchange
from tests.laws import test_exchanges as laws
from thinwire.exchange import collectives_of, complete
from thinwire.link.thread import ThreadLink, ThreadWorld
from thinwire.types import Plan

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
[MODULE] = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
[ROW] = re.findall(r"^\+ +(.*)$", PAGE.read_text(), re.MULTILINE)
NAME = "shared-randomk"


@pytest.fixture(autouse=True)
def _the_row_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    module: dict[str, Any] = {"__name__": "thinwire.exchange.shared_randomk"}
    exec(compile(MODULE, PAGE, "exec"), module)
    kinds = eval(f"{{{ROW}}}", {**vars(thinwire.exchange), "SharedRandomK": module["SharedRandomK"]})
    monkeypatch.setitem(thinwire.exchange._KINDS, NAME, kinds[NAME])
    monkeypatch.setattr(thinwire.exchange, "NAMES", tuple(thinwire.exchange._KINDS))


def plans(ratio: float) -> list[Plan]:
    return [complete(NAME, ratio, collective) for collective in collectives_of(NAME) if collective != "torch"]


def test_it_is_40_lines() -> None:
    assert len(MODULE.splitlines()) <= 40


@pytest.mark.parametrize("world_size", laws.WORLD_SIZES)
def test_it_obeys_the_laws(world_size: int) -> None:
    for plan in plans(0.05):
        laws.test_every_rank_holds_the_same_bits(plan, world_size)
        laws.test_nothing_is_lost(plan, world_size)
        laws.test_as_many_entries_are_sent_as_the_ratio_says(plan, world_size)
        laws.test_bytes_sent_are_bytes_priced(plan, world_size)
        laws.test_seconds_on_the_clock_are_seconds_priced(plan, world_size, 3e-5)
        laws.test_numbers_ride_along_and_come_back_summed(plan, world_size)
        laws.test_ratio_one_is_dense(dataclasses.replace(plan, ratio=1.0), world_size)


def test_zeros_and_what_is_not_finite_are_exchanged_like_any() -> None:
    for plan in plans(0.05):
        laws.test_degenerate_gradients_are_exchanged_like_any(plan, torch.full((3, 5), -2.0))
        laws.test_a_gradient_that_is_not_finite_hangs_nothing_and_is_told_to_all(plan)


def test_it_trains_by_its_name() -> None:
    x = torch.randn(2, 150, 8, generator=torch.Generator().manual_seed(0))

    def program(link: ThreadLink) -> torch.Tensor:
        model = nn.Linear(8, 1, bias=False)
        nn.init.zeros_(model.weight)
        sync = thinwire.Synchronizer(model, NAME, ratio=0.3, link=link)
        for inputs in x[link.rank]:
            model.zero_grad()
            (model(inputs) - inputs.sum()).square().sum().backward()
            sync.average_gradients()
            with torch.no_grad():
                model.weight -= 0.02 * model.weight.grad
        return model.weight.detach()

    first, second = ThreadWorld(2).run(program)
    assert torch.equal(first, second)
    assert (first - 1).abs().max() < 0.1  # it began 1 away
