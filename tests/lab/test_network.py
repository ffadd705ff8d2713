"""What hosts see of the network, measured with plain sockets from inside them."""

from __future__ import annotations

import json
import math
import statistics

import pytest

from tests.lab.networks import lab
from tests.timing import timing
from thinwire.lab import check, profiles
from thinwire.lab.lab import Lab

pytestmark = pytest.mark.lab


@pytest.mark.parametrize(("latency", "rate"), [("0.5ms", "100mbit"), ("5ms", "10mbit"), ("20ms", "300mbit")])
@timing
def test_round_trip_and_throughput_are_what_was_asked(latency: str, rate: str) -> None:
    with lab(latency=latency, rate=rate) as two:
        figures = check.measure(two)
    assert figures["rtt_ms"] == pytest.approx(figures["rtt_ideal_ms"], rel=0.1, abs=0.5)
    assert figures["throughput_mbit"] == pytest.approx(figures["rate_mbit"], rel=0.08)


@timing
def test_all_to_all_starves_nobody() -> None:
    with lab(4, latency="5ms", rate="50mbit") as four:
        rates, _ = check.all_to_all(four, settle=3, window=5)
    assert [sum(row) * 8e-6 for row in rates] == pytest.approx([50] * 4, rel=0.15)
    flows = [flow * 8e-6 for host, row in enumerate(rates) for other, flow in enumerate(row) if host != other]
    assert min(flows) > 50 / 3 / 3  # a third of its fair share at the very least


@pytest.mark.parametrize("loss", [0.01, 0.05])
@timing
def test_loss_is_what_was_asked_over_50_000_packets(loss: float) -> None:
    with lab(latency="1ms", rate="1gbit", loss=str(loss), mtu=1500) as two:
        arrived = check.one_way(two, number=50_000, per_second=10_000)
        packets = two.stats()["packets"]
    assert 50_000 - len(arrived) == pytest.approx(50_000 * loss, rel=0.1)
    assert packets["lost"] == 50_000 - len(arrived), "nothing but loss took packets"


@pytest.mark.parametrize(("distribution", "deviation"), [("uniform", 5 / math.sqrt(3)), ("normal", 5.0)])
@timing
def test_jitter_is_distributed_as_asked(distribution: str, deviation: float) -> None:
    with lab(latency="30ms", jitter="5ms", distribution=distribution, reorder=True) as two:
        arrived = check.one_way(two, number=2000, per_second=1000)
    delays = [datagram.seconds * 1e3 for datagram in arrived]
    assert statistics.median(delays) == pytest.approx(30, abs=0.6)
    assert statistics.stdev(delays) == pytest.approx(deviation, rel=0.1)
    assert [a.number for a in arrived] != sorted(a.number for a in arrived)


def test_jitter_that_may_not_reorder_does_not() -> None:
    with lab(latency="30ms", jitter="5ms") as two:
        arrived = check.one_way(two, number=500, per_second=1000)
    assert [datagram.number for datagram in arrived] == list(range(500))


@timing
def test_a_change_takes_effect_within_50_ms() -> None:
    with lab(latency="5ms", rate="100mbit") as two:
        changed: list[float] = []

        def change() -> None:
            changed.append(two.start_time + two.set(latency="40ms"))

        arrived = check.one_way(two, number=1000, per_second=500, half_way=change)
    late = [d.seconds for d in arrived if d.sent > changed[0] + 0.05]
    early = [d.seconds for d in arrived if d.sent < changed[0] - 0.05]
    assert len(early) > 50 and len(late) > 50
    assert statistics.median(early) == pytest.approx(0.005, abs=0.0005)
    assert min(late) > 0.0399 and statistics.median(late) == pytest.approx(0.04, abs=0.001)


@timing
def test_a_rate_changes_within_50_ms() -> None:
    with lab(latency="1ms", rate="100mbit") as two, check.probing(two, 1, "sink", "0.05", serves=True) as sink:
        with check.probing(two, 0, "source", two.address(1)):
            lines = sink.lines()
            begin = next(lines)
            for line in lines:
                if line["time"] > begin["time"] + 2:
                    break
            changed = two.start_time + two.set(rate="10mbit")
            seen = [line for line, _ in zip(lines, range(30), strict=False)]
    slow = [line for line in seen if line["time"] > changed + 0.05]
    # Over 0.25 s, because a receiver that has to wait for the processor takes more at once afterwards. Ten milliseconds
    # of the old rate would still make it 14 Mbit/s.
    rates = [(b["bytes"] - a["bytes"]) / (b["time"] - a["time"]) * 8e-6 for a, b in zip(slow, slow[5:], strict=False)]
    assert len(rates) > 10 and max(rates) < 12


@timing
def test_a_host_and_a_pair_can_be_changed_alone() -> None:
    with lab(3, latency="5ms") as three:
        three.set(latency="20ms", host=2)
        three.set(latency="30ms", pair="0>1")
        trips = {pair: statistics.median(check.round_trips(three, *pair, number=15)) for pair in [(0, 1), (0, 2)]}
    assert trips[0, 1] == pytest.approx(0.035, abs=0.001)
    assert trips[0, 2] == pytest.approx(0.040, abs=0.001)


def test_a_partition_stops_one_way_or_both_and_heals() -> None:
    def through(two: Lab) -> tuple[int, int]:
        there, back = (check.one_way(two, *pair, number=100, silence=0.5) for pair in [(0, 1), (1, 0)])
        return len(there), len(back)

    with lab(latency="2ms") as two:
        assert through(two) == (100, 100)
        two.partition("0>1")
        assert through(two) == (0, 100)
        two.partition("0|1")
        assert through(two) == (0, 0)
        two.heal()
        assert through(two) == (100, 100)


def test_packets_that_are_too_large_for_a_path_vanish_and_others_pass() -> None:
    with lab(latency="2ms", mtu=9000) as two:
        two.set(max_packet=84, pair="0>1")  # just what a probe takes
        assert len(check.one_way(two, number=100)) == 100
        two.set(max_packet=83, pair="0>1")
        assert check.one_way(two, number=100, silence=0.3) == []
        assert len(check.one_way(two, 1, 0, number=100)) == 100
        assert two.stats()["packets"]["too_large"] == 100
        two.set(max_packet=0)
        assert len(check.one_way(two, number=100)) == 100


@pytest.mark.parametrize("size", ["-1", "1.5kB", "large"])
def test_a_size_that_is_none_is_refused(size: str) -> None:
    with lab() as two, pytest.raises(ValueError, match="is no size of a packet: use a number of bytes, like 1500"):
        two.set(max_packet=size)


@timing
def test_the_papers_schedule_and_an_independent_ping_agree_at_every_stage() -> None:
    schedule = profiles.schedule("c2", 2).scaled(50).faster(50)  # a stage lasts 0.8 s, the whole 10 s
    with Lab(2, schedule) as two:
        begin = two.start_time
        with check.probing(two, 0, "ping", two.address(1), "5000", "0.005") as pings:
            answers = []
            for answer in pings.lines():
                answers.append((answer["time"] - begin, answer["rtt"]))
                if answers[-1][0] > 9.5:
                    break
        truth = [json.loads(line) for line in two.truth.read_text().splitlines()]
    assert len(truth) == 11
    for record, following in zip(truth, [*truth[1:], {"time": 9.5}], strict=True):
        stage = [rtt for sent, rtt in answers if record["time"] + 0.05 < sent < following["time"] - 0.1]
        ideal = 2 * (record["now"]["latency"] + 84 / record["now"]["rate"])
        assert statistics.median(stage) == pytest.approx(ideal, rel=0.1), record


@timing
def test_two_labs_run_side_by_side() -> None:
    with lab(latency="3ms") as one, lab(latency="12ms") as other:
        assert one.id != other.id
        assert statistics.median(check.round_trips(one, number=10)) == pytest.approx(0.006, abs=0.001)
        assert statistics.median(check.round_trips(other, number=10)) == pytest.approx(0.024, abs=0.001)
