"""What is refused, and how: no traceback, no endless loop, nothing that is silently left out."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.lab.networks import lab
from thinwire.lab import check, profiles
from thinwire.lab.errors import LabError
from thinwire.lab.lab import Lab
from thinwire.lab.network import Conditions
from thinwire.lab.schedule import read_trace

WALK = '[walk]\nevery = "1s"\nlength = "9s"\n'
SITES = "[sites]\nnumber = 2\n"

WRONG = {
    "network = 5\n": (1, "must be a table"),
    '[change]\nat = "1s"\n': (1, "in two brackets"),
    '[network]\nlatency = { low = "1ms" }\n': (2, "must be no table"),
    '# latncy = 1\n[network]\n# latncy = 2\nlatncy = "5ms"\n': (4, "Did you mean 'latency'?"),
    '[sites]\nsizes = ["a", 2]\n': (2, "like [2, 6]"),
    '[[change]]\nat = 10\nlatency = "1ms"\n': (1, "has no unit"),
    '[[change]]\nat = "1s"\n': (1, "sets nothing"),
    '[[change]]\nat = "1s"\npartition = "0|1"\nlatency = "1ms"\n': (1, "stands alone"),
    '[[change]]\nat = "1s"\nhosts = ["a"]\nlatency = "1ms"\n': (1, "there is no host 'a'"),
    '[[change]]\nat = "1s"\nwhere = "inside"\nlatency = "1ms"\n': (3, "needs [sites]"),
    SITES + '[[change]]\nat = "1s"\nwhere = "inside"\nrate = "1mbit"\n': (6, "'rate' is no key"),
    'repeat = "5s"\n[[change]]\nat = "9s"\nlatency = "1ms"\n': (1, "after the repeat"),
    '[walk]\nlength = "9s"\n': (1, "every is missing"),
    WALK: (1, "needs one of latency"),
    WALK + 'rate = { low = "2mbit", high = "1mbit", step = 0.1 }\n': (1, "0 < low < high"),
    WALK + 'latency = { low = "1ms", high = "1ms", step = 0.1 }\n': (1, "0 < low < high"),
    '[trace]\nfile = "none.csv"\n': (1, "cannot be read"),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_profile_is_refused_with_its_line(text: str, tmp_path: Path) -> None:
    line, complaint = WRONG[text]
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        profiles.schedule(str(path), 2)
    assert f"{path}:{line}: " in str(caught.value)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("", "needs a column 'time'"), ("time,rate\n", "at least one row"), ("time,rate\n0,1,2\n", "more cells")],
)
def test_a_wrong_trace_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        read_trace(path)


def test_a_trace_may_come_from_a_spreadsheet_or_have_empty_cells(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes("\ufefftime,rate,latency\r\n0.,1e+2, \r\n1,,3\r\n".encode())
    assert [dict(change.values) for change in read_trace(path)] == [{"up": 12.5e6, "down": 12.5e6}, {"latency": 0.003}]


def test_a_missing_trace_is_a_message() -> None:
    with pytest.raises(ValueError, match="none.csv cannot be read"):
        profiles.schedule("none.csv", 2)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_or_a_speed_is_a_number_above_0(factor: float) -> None:
    for change in (profiles.schedule("c2", 2).scaled, profiles.schedule("c2", 2).faster):
        with pytest.raises(ValueError, match="above 0"):
            change(factor)


def test_the_rate_between_sites_is_that_of_their_line() -> None:
    schedule = profiles.schedule("cross-region", 4)
    conditions = Conditions(4, schedule.site)
    for change in schedule.changes:
        conditions.apply(change)
    assert (conditions.rate(0, 1) * 8, conditions.rate(0, 3) * 8) == (10e9, 1e9)


@pytest.mark.lab
def test_a_lab_that_cannot_begin_says_so_at_once() -> None:
    begin = time.monotonic()
    with pytest.raises(LabError, match="cannot be written"), Lab(1, truth="/nowhere/truth"):
        pass
    assert time.monotonic() - begin < 3  # it used to wait 5 s for a process that was not dying


@pytest.mark.lab
def test_a_check_through_a_partition_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with lab(2, latency="1ms") as two:
        monkeypatch.setattr(check, "round_trips", lambda *_, **__: [])
        with pytest.raises(LabError, match="no ping"):
            check.measure(two)
