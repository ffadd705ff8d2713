"""The lab's model and its words, without a single packet of the kernel's."""

from __future__ import annotations

import math
import statistics

import pytest

from thinwire.lab.network import Change, Conditions
from thinwire.lab.settings import change_from_words, heal, partition, read_values
from thinwire.lab.switch import LEAST_PACKETS, Switch
from thinwire.link.wire import Arrival, Wire
from thinwire.types import Network

MTU = 1500


def switch(hosts: int = 2, site: list[int] | None = None, seed: int = 0, **words: object) -> Switch:
    conditions = Conditions(hosts, site)
    conditions.apply(Change(values=read_values(words)))
    return Switch(conditions, MTU, seed)


def deliveries(emulated: Switch, until: float = math.inf) -> list[tuple[float, int, bytes]]:
    """Everything that is delivered until then, and when."""
    seen = []
    while (now := emulated.next_time()) <= until and math.isfinite(now):
        seen += [(now, host, packet) for host, packet in emulated.advance(now)]
    return seen


# --- queues


def test_an_idle_route_takes_its_latency_and_the_bytes_over_the_rate() -> None:
    emulated = switch(latency="5ms", rate="8mbit")
    emulated.enter(0, 1, bytes(1000), 2.0)
    [(time, host, packet)] = deliveries(emulated)
    assert time == pytest.approx(2.0 + 0.005 + 0.001)
    assert (host, packet) == (1, bytes(1000))


def test_packets_leave_one_after_the_other() -> None:
    emulated = switch(latency="5ms", rate="8mbit")
    for _ in range(3):
        emulated.enter(0, 1, bytes(1000), 0.0)
    assert [time for time, _, _ in deliveries(emulated)] == pytest.approx([0.006, 0.007, 0.008])


def test_equal_rates_are_the_physics_of_the_wire() -> None:
    alpha, beta = 0.003, 1e-6
    emulated = switch(4, latency="3ms", rate="8mbit")
    wire: Wire[int] = Wire(Network(alpha=alpha, beta=beta), 4)
    sends = [(i * 0.0007, (i * 7) % 4, (i * 7 + 1 + i % 3) % 4, 200 + 37 * (i % 29)) for i in range(120)]
    for number, (time, src, dst, size) in enumerate(sends):
        emulated.enter(src, dst, number.to_bytes(2, "big") + bytes(size - 2), time)
        wire.send(src, dst, size, time, number)
    expected = {}
    while (event := wire.next()) is not None:
        assert isinstance(event[1], Arrival)
        expected[event[1].message] = event[0]
    got = {int.from_bytes(packet[:2], "big"): time for time, _, packet in deliveries(emulated)}
    assert got == pytest.approx(expected)


def test_a_slow_ingress_is_shared_by_its_senders() -> None:
    emulated = switch(3, latency="1ms", up="80mbit", down="8mbit")
    for src in (0, 1):
        for _ in range(10):
            emulated.enter(src, 2, bytes(1000), 0.0)
    times = [time for time, _, _ in deliveries(emulated)]
    assert times[-1] == pytest.approx(0.001 + 20 * 0.001)


def test_slow_senders_fill_a_fast_ingress_together() -> None:
    emulated = switch(5, latency="1ms", up="8mbit", down="32mbit")
    for src in range(4):
        for _ in range(10):
            emulated.enter(src, 4, bytes(1000), 0.0)
    times = [time for time, _, _ in deliveries(emulated)]
    # Each sender needs 10 ms; four at once just fill the ingress. The last packets may wait for each other.
    assert 0.011 <= times[-1] <= 0.011 + 3 * 0.00025 + 1e-9


def test_a_full_queue_drops_at_its_tail() -> None:
    emulated = switch(latency="1ms", rate="8mbit")
    for number in range(200):
        emulated.enter(0, 1, bytes([number]) * MTU, 0.0)
    kept = [packet[0] for _, _, packet in deliveries(emulated)]
    assert kept == list(range(LEAST_PACKETS + 1))  # and the one that is served
    assert emulated.counts["dropped_egress"] == 200 - LEAST_PACKETS - 1


def test_a_queue_holds_a_bandwidth_delay_product() -> None:
    emulated = switch(latency="50ms", rate="80mbit")  # 1 MB on a round trip of 100 ms
    for _ in range(1000):
        emulated.enter(0, 1, bytes(MTU), 0.0)
    assert emulated.counts["dropped_egress"] == 1000 - 1_000_000 // MTU - 1


def test_a_queue_can_be_given_in_packets() -> None:
    emulated = switch(latency="50ms", rate="80mbit", queue=10)
    for _ in range(100):
        emulated.enter(0, 1, bytes(MTU), 0.0)
    assert len(deliveries(emulated)) == 11  # ten that wait, and the one that is served


def test_the_line_of_a_site_is_shared_and_the_site_itself_is_fast() -> None:
    emulated = switch(4, site=[0, 0, 1, 1], latency="1ms", rate="80mbit")
    emulated.change(Change(values={"line": 1e6}), 0.0)
    for src in (0, 1):
        for _ in range(10):
            emulated.enter(src, 2, bytes(1000), 0.0)
    emulated.enter(0, 1, bytes(1000), 0.0)
    times = {host: time for time, host, _ in deliveries(emulated)}
    assert times[2] == pytest.approx(0.001 + 20 * 0.001 + 0.0001, rel=0.01)
    assert times[1] < 0.003


# --- chance


def test_loss_is_what_was_asked() -> None:
    emulated = switch(loss="5%", latency="1ms")
    for number in range(50_000):
        emulated.enter(0, 1, b"packet", number * 1e-5)
    assert emulated.counts["lost"] == pytest.approx(2500, rel=0.1)


def test_the_same_seed_loses_the_same_packets() -> None:
    runs = []
    for _ in range(2):
        emulated = switch(loss="10%", latency="1ms", seed=7)
        for number in range(100):
            emulated.enter(0, 1, bytes([number]), 0.0)
        runs.append([packet for _, _, packet in deliveries(emulated)])
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("distribution", "deviation"), [("uniform", 2 / math.sqrt(3)), ("normal", 2.0)])
def test_jitter_is_distributed_as_asked(distribution: str, deviation: float) -> None:
    emulated = switch(latency="20ms", jitter="2ms", distribution=distribution, reorder=True)
    for number in range(20_000):
        emulated.enter(0, 1, number.to_bytes(4, "big"), number * 0.001)
    delays = [(time - int.from_bytes(packet, "big") * 0.001) * 1e3 for time, _, packet in deliveries(emulated)]
    assert statistics.mean(delays) == pytest.approx(20, abs=0.05)
    assert statistics.stdev(delays) == pytest.approx(deviation, rel=0.03)
    if distribution == "uniform":
        assert 18 <= min(delays) and max(delays) <= 22


@pytest.mark.parametrize("reorder", [False, True])
def test_only_jitter_that_may_reorder_does(reorder: bool) -> None:
    emulated = switch(latency="20ms", jitter="5ms", reorder=reorder)
    for number in range(500):
        emulated.enter(0, 1, number.to_bytes(2, "big"), number * 0.0005)
    order = [packet for _, _, packet in deliveries(emulated)]
    assert (order == sorted(order)) is not reorder


# --- changes


def test_a_rate_that_falls_slows_what_waits() -> None:
    emulated = switch(latency="1ms", rate="8mbit")
    for _ in range(10):
        emulated.enter(0, 1, bytes(1000), 0.0)
    early = deliveries(emulated, until=0.006)
    emulated.change(change_from_words({"rate": "0.8mbit"}, 2), 0.006)
    late = [time for time, _, _ in deliveries(emulated)]
    assert len(early) == 5
    # At 6 ms the egress has sent 6 packets and the ingress has passed on 5; the rest takes ten times as long.
    assert late == pytest.approx([0.006 + 0.01 * n for n in range(1, 6)], abs=0.0021)


def test_a_rate_that_rises_frees_a_packet_that_would_have_taken_minutes() -> None:
    emulated = switch(latency="1ms", rate="80bit")
    emulated.enter(0, 1, bytes(1000), 0.0)
    assert deliveries(emulated, until=1.0) == []
    emulated.change(change_from_words({"rate": "1gbit"}, 2), 1.0)
    [(time, _, _)] = deliveries(emulated)
    assert time < 1.05


def test_a_latency_that_falls_brings_closer_what_is_in_flight_and_keeps_its_order() -> None:
    emulated = switch(latency="300ms")
    for number in range(5):
        emulated.enter(0, 1, bytes([number]), number * 0.01)
    emulated.change(change_from_words({"latency": "10ms"}, 2), 0.05)
    emulated.enter(0, 1, bytes([5]), 0.051)
    arrived = deliveries(emulated)
    assert [packet[0] for _, _, packet in arrived] == list(range(6))
    assert arrived[-1][0] == pytest.approx(0.061)


def test_a_packet_that_waits_is_sent_by_the_new_latency() -> None:
    emulated = switch(latency="10ms", rate="8mbit")
    for _ in range(3):
        emulated.enter(0, 1, bytes(1000), 0.0)
    emulated.change(change_from_words({"latency": "100ms"}, 2), 0.0005)
    assert [time for time, _, _ in deliveries(emulated)] == pytest.approx([0.011, 0.102, 0.103])


def test_a_partition_stops_both_ways_or_one_and_heals() -> None:
    emulated = switch(4, latency="10ms")
    emulated.change(partition("0,1|2", 4), 0.0)
    emulated.change(partition("3>0", 4), 0.0)
    for src, dst in emulated.conditions.all_pairs():
        emulated.enter(src, dst, bytes([src, dst]), 0.0)
    through = {(packet[0], packet[1]) for _, _, packet in deliveries(emulated)}
    cut = {(0, 2), (1, 2), (2, 0), (2, 1), (3, 0)}
    assert through == set(emulated.conditions.all_pairs()) - cut
    assert emulated.counts["blocked"] == len(cut)
    emulated.change(heal(), 1.0)
    emulated.enter(2, 0, b"again", 1.0)
    assert len(deliveries(emulated)) == 1


def test_a_cut_swallows_what_is_in_flight() -> None:
    emulated = switch(latency="200ms")
    emulated.enter(0, 1, b"packet", 0.0)
    emulated.change(partition("0|1", 2), 0.1)
    assert deliveries(emulated) == []


# --- words


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ({"latency": "5"}, "write it with one of"),
        ({"latency": 5}, "has no unit"),
        ({"latency": "-5ms"}, "is not a time"),
        ({"rate": "100"}, "is not a rate"),
        ({"rate": "0mbit"}, "use a partition"),
        ({"loss": "120%"}, "at most 100%"),
        ({"distribution": "pareto"}, "uniform, normal"),
        ({"latncy": "5ms"}, "Did you mean 'latency'?"),
    ],
)
def test_a_wrong_word_is_refused_with_the_way_out(words: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match="(?i)" + complaint.replace("?", r"\?").replace("'", "'")):
        read_values(words)


@pytest.mark.parametrize("text", ["0,1", "0|0", "0|9", "0>1>2", "a|b", ""])
def test_a_partition_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        partition(text, 4)


def test_a_change_of_a_host_touches_its_rates_and_all_its_routes() -> None:
    conditions = Conditions(3)
    conditions.apply(change_from_words({"latency": "9ms", "rate": "8mbit"}, 3, host=2))
    assert conditions.up == [math.inf, math.inf, 1e6]
    assert [conditions.routes[0][1].latency, conditions.routes[0][2].latency, conditions.routes[2][1].latency] == [
        0,
        0.009,
        0.009,
    ]


def test_a_pair_has_no_rate() -> None:
    with pytest.raises(ValueError, match="belongs to a host"):
        change_from_words({"rate": "8mbit"}, 3, pair="0:1")
