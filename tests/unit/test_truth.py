"""What a network was is written down line by line, also where a line was cut off before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from thinwire.lab.network import Change, Conditions
from thinwire.lab.truth import Truth


@pytest.mark.parametrize("before", ["", '{"time": 0.0}\n', '{"time": 0.0}\n{"time": 1'])
def test_a_truth_that_goes_on_begins_with_a_line_of_its_own(tmp_path: Path, before: str) -> None:
    path = tmp_path / "truth.jsonl"
    path.write_text(before)
    truth = Truth(path, "a", pytest.fail)
    truth.write(Change(values={"latency": 0.02}), 2.0, 100.0, Conditions(2, None))
    truth.close()
    *earlier, last = path.read_text().splitlines()
    assert earlier == before.splitlines() and json.loads(last)["set"] == {"latency": 0.02}
