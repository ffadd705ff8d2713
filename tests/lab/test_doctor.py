"""`thinwire doctor` on every host of a lab, as a person would run it: what it finds on networks with one fault each."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, NamedTuple

import pytest

from tests.lab.networks import lab
from tests.timing import timing
from thinwire.lab.lab import Lab
from thinwire.lab.run import run

pytestmark = pytest.mark.lab

DOCTOR = (sys.executable, "-m", "thinwire", "doctor", "--json")


class Told(NamedTuple):
    """What came of it: the exit code, the figures, and the words for people."""

    code: int
    figures: dict[str, Any]
    words: str

    @property
    def problems(self) -> list[tuple[str, str]]:
        return [(problem["kind"], problem["where"]) for problem in self.figures["problems"]]


def examined(network: Lab, capfd: pytest.CaptureFixture[str], *before: str, arguments: tuple[str, ...] = ()) -> Told:
    """Run it on all hosts. `before` comes before the command: env NAME=VALUE."""
    code = run(network, [*before, *DOCTOR, *arguments], env={**os.environ, "OMP_NUM_THREADS": "1"})
    out, err = capfd.readouterr()
    assert out.startswith("[0] ") and out.count("\n") == 1, "rank 0 speaks for all" + err
    return Told(code, json.loads(out.removeprefix("[0] ")), err)


@timing
def test_a_network_without_faults_is_measured_and_no_problem_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    with lab(4, latency="5ms", rate="100mbit") as four:
        told = examined(four, capfd, arguments=("--params", "1000000"))
    assert (told.code, told.problems) == (0, []), told.words
    assert (told.figures["interface"], told.figures["loopback"]) == ("wire0", False)
    latency = [cell for row in told.figures["latency_ms"] for cell in row if cell is not None]
    rate = [cell for row in told.figures["rate_mbit"] for cell in row if cell is not None]
    assert len(latency) == len(rate) == 12
    assert min(latency) > 4.99, "nothing is faster than the wire"
    assert latency == pytest.approx([5] * 12, abs=1)
    assert rate == pytest.approx([100] * 12, rel=0.4)
    assert told.figures["plan"]["params"] == 1_000_000
    assert told.figures["seconds"] < 5, "0.5 s for each of three turns, and some for a busy machine"
    assert "gloo and thinwire's links are up between all ranks" in told.words


def test_an_interface_that_is_loopback_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    with lab(2, latency="1ms") as two:
        told = examined(two, capfd, "env", "GLOO_SOCKET_IFNAME=lo")
    assert told.code == 1
    assert told.problems == [("loopback", "ranks 0, 1")]
    assert told.figures["loopback"] is True and told.figures["interface"] == "lo"
    assert "GLOO_SOCKET_IFNAME=wire0 (10.77.0.1)" in told.figures["problems"][0]["advice"]


def test_a_host_name_that_leads_gloo_to_loopback_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    """The name of the machine stands for no address of a lab's host, so gloo falls back to loopback."""
    with lab(2, latency="1ms") as two:
        told = examined(two, capfd, "env", "--unset=GLOO_SOCKET_IFNAME")
    assert told.code == 1
    assert told.problems == [("loopback", "ranks 0, 1")]
    assert told.figures["interface"] == "wire0", "our own links follow MASTER_ADDR"
    assert told.figures["problems"][0]["what"].startswith("gloo would use loopback")
    assert told.figures["rate_mbit"][0][1] > 0, "and what can be measured is measured"


@timing
def test_a_host_with_a_tenth_of_the_others_rate_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    with lab(3, latency="2ms", rate="100mbit") as three:
        three.set(rate="10mbit", host=2)
        told = examined(three, capfd)
    assert told.code == 1
    assert told.problems == [("slow-host", "rank 2")], told.words
    assert told.figures["rate_mbit"][0][2] == pytest.approx(10, rel=0.4)


@timing
def test_a_pair_that_is_slower_one_way_than_the_other_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    with lab(2, latency="2ms", rate="100mbit") as two:
        two.set(up="10mbit", host=0)
        told = examined(two, capfd)
    assert told.code == 1
    assert told.problems == [("asymmetric-pair", "rank 0 -> rank 1")], told.words


@timing
def test_a_pair_that_loses_packets_one_way_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    with lab(2, latency="2ms", rate="50mbit") as two:
        two.set(loss="10%", pair="1>0")
        told = examined(two, capfd)
    assert told.code == 1
    assert set(told.problems) == {("asymmetric-pair", "rank 1 -> rank 0")}, told.words


@timing
def test_a_pair_that_is_later_one_way_than_the_other_is_guessed(capfd: pytest.CaptureFixture[str]) -> None:
    with lab(4, latency="2ms", rate="50mbit") as four:
        four.set(latency="25ms", pair="0>3")
        told = examined(four, capfd)
    assert told.code == 1
    assert told.problems == [("asymmetric-latency", "rank 0 -> rank 3")], told.words


@timing
def test_a_mtu_of_9000_bytes_that_the_path_drops_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    with lab(2, latency="2ms", rate="100mbit", mtu=9000) as two:
        two.set(max_packet=1500, pair="0>1")
        told = examined(two, capfd)
        assert two.stats()["packets"]["too_large"] > 0
    assert told.code == 1
    assert told.figures["mtu"] == 9000
    [problem] = told.figures["problems"]
    assert (problem["kind"], problem["where"]) == ("mtu", "rank 0 -> rank 1")
    assert "swallows large packets: 1500 bytes pass, 2000 do not" in problem["what"]
    assert "ip link set dev wire0 mtu 1500" in problem["advice"]
    assert told.figures["rate_mbit"][0][1] is None, "large messages stall"
    assert told.figures["rate_mbit"][1][0] == pytest.approx(100, rel=0.4), "the way back is measured"


@timing
def test_a_pair_that_cannot_reach_each_other_is_named_and_the_others_are_measured(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with lab(3, latency="2ms", rate="50mbit") as three:
        three.partition("1>2")
        told = examined(three, capfd)
    assert told.code == 1
    assert told.problems == [("unreachable", "ranks 1 and 2")], told.words
    assert told.figures["rate_mbit"][0][1] == pytest.approx(50, rel=0.4)


def test_a_rank_that_does_not_come_is_named_in_bounded_time(capfd: pytest.CaptureFixture[str]) -> None:
    script = '[ "$RANK" = 1 ] && exec sleep 60; exec "$@"'
    with lab(2, latency="2ms") as two:
        begin = time.monotonic()
        told = examined(two, capfd, "sh", "-c", script, "sh", arguments=("--wait", "2"))
        assert time.monotonic() - begin < 30
    assert told.code == 1
    assert told.problems == [("missing", "rank 1")], told.words
