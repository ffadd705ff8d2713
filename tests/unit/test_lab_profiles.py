"""The lab's networks by name: schedules, profiles and traces."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest

from thinwire.lab import profiles
from thinwire.lab.network import Conditions
from thinwire.lab.schedule import Schedule, read_trace
from thinwire.lab.settings import read_values


def at(schedule: Schedule, hosts: int, time: float) -> Conditions:
    conditions = Conditions(hosts, schedule.site or None)
    for change in schedule.changes:
        if change.at <= time:
            conditions.apply(change)
    return conditions


@pytest.mark.parametrize("name", profiles.names())
def test_every_profile_makes_a_network_for_any_number_of_hosts(name: str) -> None:
    for hosts in (2, 3, 8):
        schedule = profiles.schedule(name, hosts)
        now = at(schedule, hosts, 0.0)
        assert all(math.isfinite(rate) for rate in now.up + now.down)
        assert all(now.routes[src][dst].latency > 0 for src, dst in now.all_pairs())
        assert profiles.load(name).about


def test_c2_is_the_papers_table() -> None:
    table = {0: (1, 25), 4: (2, 20), 8: (4, 15), 12: (8, 10), 16: (16, 5), 20: (32, 1), 24: (32, 1)}
    table |= {28: (16, 5), 32: (8, 10), 36: (4, 15), 40: (2, 20), 44: (1, 25), 49: (1, 25)}
    schedule = profiles.schedule("c2", 2, epoch=2.0)
    for epoch, (ms, gbit) in table.items():
        now = at(schedule, 2, epoch * 2.0 + 0.1)
        assert now.routes[0][1].latency == pytest.approx(ms / 1e3)
        assert now.up[0] * 8 == pytest.approx(gbit * 1e9)


def test_c1_is_the_papers_table() -> None:
    schedule = profiles.schedule("c1", 2, epoch=1.0)
    for epoch, expected in {0: (1, 25), 11: (1, 25), 12: (1, 1), 24: (50, 1), 35: (50, 1), 36: (50, 25)}.items():
        now = at(schedule, 2, epoch + 0.5)
        assert (now.routes[0][1].latency * 1e3, now.up[0] * 8e-9) == pytest.approx(expected)


def test_scale_divides_rates_and_says_so_and_speed_divides_times() -> None:
    schedule = profiles.schedule("c2", 2).scaled(50).faster(10)
    assert at(schedule, 2, 20.5).up[0] * 8 == pytest.approx(20e6)
    assert "divided by 50" in schedule.notes[0] and "20 Mbit/s to 500 Mbit/s" in schedule.notes[0]
    assert max(change.at for change in schedule.changes) == pytest.approx(44.0)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_or_a_speed_is_a_number_above_0(factor: float) -> None:
    for change in (profiles.schedule("c2", 2).scaled, profiles.schedule("c2", 2).faster):
        with pytest.raises(ValueError, match="above 0"):
            change(factor)


def test_what_is_pinned_stays_whatever_the_schedule_says() -> None:
    schedule = profiles.schedule("c2", 2).pinned(read_values({"latency": "7ms"}))
    assert {at(schedule, 2, time).routes[1][0].latency for time in (0, 100, 250, 500)} == {0.007}
    assert at(schedule, 2, 250).up[0] * 8 == pytest.approx(1e9)


@pytest.mark.parametrize("name", ["lte", "unpredictable"])
def test_a_walk_stays_in_its_ranges_and_follows_its_seed(name: str) -> None:
    one, same, other = (profiles.schedule(name, 3, seed=seed) for seed in (5, 5, 6))
    assert one == same != other
    latencies = [float(change.values["latency"]) for change in one.changes if change.cause == "walk"]
    assert 0.001 <= min(latencies) and max(latencies) <= 0.12
    assert statistics.pstdev(latencies) > 0.005


def test_sites_are_fast_inside_and_share_a_line_between() -> None:
    now = at(profiles.schedule("cross-region", 5), 5, 0.0)
    assert now.site == [0, 0, 0, 1, 1]
    assert now.routes[0][1].latency < 0.001 < now.routes[0][4].latency
    assert [rate * 8 for rate in now.line] == pytest.approx([1e9, 1e9])


def test_the_rate_between_sites_is_that_of_their_line() -> None:
    now = at(profiles.schedule("cross-region", 4), 4, 0.0)
    assert (now.rate(0, 1) * 8, now.rate(0, 3) * 8) == (10e9, 1e9)


def test_home_is_asymmetric() -> None:
    now = at(profiles.schedule("home", 2), 2, 0.0)
    assert now.up[0] < now.down[0]


WALK = '[walk]\nevery = "1s"\nlength = "9s"\n'
SITES = "[sites]\nnumber = 2\n"

WRONG = {
    '[netwrk]\nlatency = "5ms"\n': (1, "Did you mean 'network'?"),
    'about = "x"\n\n[network]\nrate = "fast"\n': (4, "is not a rate"),
    "network = 5\n": (1, "must be a table"),
    '[network]\nlatency = { low = "1ms" }\n': (2, "must be no table"),
    '# latncy = 1\n[network]\n# latncy = 2\nlatncy = "5ms"\n': (4, "Did you mean 'latency'?"),
    '[network]\nlatency = "5ms"\n\n[[change]]\nat = "1s"\nlatncy = "3ms"\n': (6, "Did you mean 'latency'?"),
    '[[change]]\nat = "1s"\nlatency = "1ms"\n[[change]]\nlatency = "2ms"\n': (4, "needs `at` or `epoch`"),
    '[[change]]\nat = "1s"\nlatency = "1ms"\n[[change]]\nat = "2s"\nlatency = "2"\n': (6, "write it with one of"),
    '[change]\nat = "1s"\n': (1, "in two brackets"),
    '[[change]]\nat = 10\nlatency = "1ms"\n': (1, "has no unit"),
    '[[change]]\nat = "1s"\n': (1, "sets nothing"),
    '[[change]]\nat = "1s"\npartition = "0|1"\nlatency = "1ms"\n': (1, "stands alone"),
    '[[change]]\nat = "1s"\nhosts = ["a"]\nlatency = "1ms"\n': (1, "there is no host 'a'"),
    '[[change]]\nat = "1s"\nwhere = "inside"\nlatency = "1ms"\n': (3, "needs [sites]"),
    'repeat = "5s"\n[[change]]\nat = "9s"\nlatency = "1ms"\n': (1, "after the repeat"),
    SITES + 'between = { latecy = "3ms" }\n': (3, "Did you mean 'latency'?"),
    '[sites]\nsizes = ["a", 2]\n': (2, "like [2, 6]"),
    SITES + '[[change]]\nat = "1s"\nwhere = "inside"\nrate = "1mbit"\n': (6, "'rate' is no key"),
    WALK + 'rate = { low = "1mbit", hgh = "2mbit", step = 1 }\n': (4, "'high'"),
    '[walk]\nlength = "9s"\n': (1, "every is missing"),
    WALK: (1, "needs one of latency"),
    WALK + 'rate = { low = "2mbit", high = "1mbit", step = 0.1 }\n': (1, "0 < low < high"),
    WALK + 'latency = { low = "1ms", high = "1ms", step = 0.1 }\n': (1, "0 < low < high"),
    '[trace]\nfile = "none.csv"\n': (1, "cannot be read"),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_profile_is_refused_with_its_file_and_line(text: str, tmp_path: Path) -> None:
    line, complaint = WRONG[text]
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        profiles.schedule(str(path), 2)
    assert f"{path}:{line}: " in str(caught.value)
    assert complaint in str(caught.value)


def test_an_unknown_network_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="Did you mean 'cross-region'"):
        profiles.schedule("cros-region", 2)


def test_a_profile_may_change_some_and_partition_and_heal(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        '[[change]]\nat = "1s"\nhosts = [1]\nrate = "8mbit"\n'
        '[[change]]\nat = "2s"\npairs = ["0>2"]\nloss = "5%"\n'
        '[[change]]\nat = "3s"\npartition = "0|1,2"\n'
        '[[change]]\nat = "4s"\nheal = true\n'
    )
    schedule = profiles.schedule(str(path), 3)
    assert at(schedule, 3, 1.5).up == [math.inf, 1e6, math.inf]
    assert at(schedule, 3, 2.5).routes[0][2].loss == 0.05 and at(schedule, 3, 2.5).routes[2][0].loss == 0
    assert at(schedule, 3, 3.5).routes[2][0].blocked and not at(schedule, 3, 3.5).routes[1][2].blocked
    assert not at(schedule, 3, 4.5).routes[2][0].blocked


def test_a_trace_is_a_table_of_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("time, rate, latency\n0, 100, 5\n1.5, 20mbit, 50ms\n")
    first, second = read_trace(path)
    assert (first.at, second.at) == (0.0, 1.5)
    assert (first.values["latency"], second.values["latency"]) == (0.005, 0.05)
    assert second.values["up"] == 2.5e6


def test_a_trace_may_come_from_a_spreadsheet_or_have_empty_cells(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes("\ufefftime,rate,latency\r\n0.,1e+2, \r\n1,,3\r\n".encode())
    assert [dict(change.values) for change in read_trace(path)] == [{"up": 12.5e6, "down": 12.5e6}, {"latency": 0.003}]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "1: .*needs a column 'time'"),
        ("time,rte\n0,1\n", "1: .*has no column 'rte'"),
        ("time,rate\n", " .*at least one row"),
        ("time,rate\n0,1,2\n", "2: .*more cells"),
        ("time,rate\n0,1\n1,x\n", "3: .*is not a rate"),
        ("time,rate\n2,1\n1,1\n", "3: .*runs backwards"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"trace.csv:{complaint}"):
        read_trace(path)


def test_a_missing_trace_is_a_message() -> None:
    with pytest.raises(ValueError, match="none.csv cannot be read"):
        profiles.schedule("none.csv", 2)
