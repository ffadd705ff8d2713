"""What computing costs, held against what it was measured to take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinwire.control.computing import compress_seconds
from thinwire.control.prices import Way

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RUNS: list[dict[str, Any]] = [json.loads((RESULTS / f"computing-{hosts}.json").read_text()) for hosts in (4, 8)]
CASES = [(run["hosts"], numel, taken) for run in RUNS for numel, taken in run["compress_ms"].items()]


def modelled(exchange: str, ratio: float, numel: int, world_size: int) -> float:
    way = Way(exchange, "direct", "tree", "log4")
    return float(compress_seconds(way, np.array([ratio]), numel, world_size)[0])


@pytest.mark.parametrize(
    ("hosts", "numel", "taken"), CASES, ids=lambda value: str(value) * (not isinstance(value, dict))
)
def test_computing_grows_with_the_ratio_as_it_was_measured_to(hosts: int, numel: str, taken: dict[str, float]) -> None:
    for exchange, tolerance in (("topk-allgather", 1.5), ("star-topk", 2.0)):
        measured = {float(name.split()[1]): ms / 1e3 for name, ms in taken.items() if name.split()[0] == exchange}
        slowness = [seconds / modelled(exchange, ratio, int(numel), hosts) for ratio, seconds in measured.items()]
        assert len(slowness) == 4
        assert max(slowness) <= tolerance * min(slowness), slowness


@pytest.mark.parametrize("exchange", ["topk-allgather", "star-topk", "layerwise-topk"])
def test_more_entries_cost_more_but_those_of_one_cache_line_only_once(exchange: str) -> None:
    nothing, few, twice, all_, more = (modelled(exchange, ratio, 10**6, 8) for ratio in (0.0, 1e-3, 2e-3, 0.99, 1.0))
    assert (twice - nothing) / (few - nothing) == pytest.approx(2, rel=0.01)
    assert all_ <= more <= 1.001 * all_


def test_what_torch_sends_is_computed_by_nobody_here() -> None:
    assert float(compress_seconds(Way("dense", "torch", "tree", "float32"), np.ones(1), 10**6, 8)[0]) == 0
