"""Packets and queues follow the rates of the moment."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.lab.networks import lab
from tests.timing import timing
from thinwire.lab import check
from thinwire.lab.lab import Lab
from thinwire.lab.network import Change, Conditions
from thinwire.lab.switch import LEAST_FULL_PACKETS, LEAST_PACKETS, Switch

pytestmark = pytest.mark.lab


@contextmanager
def stream(network: Lab) -> Iterator[Iterator[dict[str, Any]]]:
    """Host 0 sends to host 1 all it can; what host 1 got so far, four times a second."""
    with check.probing(network, 1, "sink", "0.25", serves=True) as sink:
        with check.probing(network, 0, "source", network.address(1)):
            yield sink.lines()


def carried(lines: Iterator[dict[str, Any]], seconds: float) -> float:
    """Mbit/s of payload from now on."""
    first = next(lines)
    last = next(line for line in lines if line["time"] > first["time"] + seconds)
    return float((last["bytes"] - first["bytes"]) / (last["time"] - first["time"]) * 8e-6)


@timing
def test_when_the_rate_falls_packets_and_queues_become_as_small_as_the_new_rate_wants_them() -> None:
    with lab(8, latency="5ms", rate="500mbit") as eight, stream(eight) as lines:
        carried(lines, 2)
        assert (
            eight.stats()["mtu"] == 65_000
        )  # the largest; eight times 500 Mbit/s in 7,000 packets per second would need more
        changed = eight.set(rate="20mbit")
        trips = check.round_trips(eight, number=40, interval=0.05)
        next(line for line in lines if line["time"] > eight.start_time + changed + 1)
        assert eight.stats()["mtu"] == 2_858
        assert carried(lines, 3) * 2858 / (2858 - check.HEADERS) == pytest.approx(20, rel=0.08)
    # 10 ms, and at worst 64 packets of 2,858 bytes that wait before us: 73 ms. What was sent before has gone.
    assert statistics.median(trips) < 0.08


@timing
def test_a_connection_that_began_with_small_packets_gets_large_ones_with_the_rate() -> None:
    with lab(8, latency="5ms", rate="20mbit") as eight, stream(eight) as lines:
        carried(lines, 1)
        eight.set(rate="500mbit")
        carried(lines, 1)
        before = eight.stats()
        carried(lines, 1)
        after = eight.stats()
    packets = after["packets"]["delivered"] - before["packets"]["delivered"]  # with an acknowledgement for each or two
    assert sum(after["bytes"]) - sum(before["bytes"]) > 20_000 * packets


def test_a_size_that_was_asked_for_stays() -> None:
    with lab(2, rate="1gbit", mtu=1400) as two:
        two.set(rate="1mbit")
        assert two.stats()["mtu"] == 1400


# --- the same without a clock


def full(rates: list[float], mtu: int | None = None) -> Switch:
    """A switch between hosts of these rates, in bytes per second, whose host 0 has just sent 1,000 full packets."""
    conditions = Conditions(len(rates))
    conditions.apply(Change(values={"latency": 0.0005}))
    for host, rate in enumerate(rates):
        conditions.apply(Change(values={"up": rate, "down": rate}, hosts=(host,)))
    switch = Switch(conditions, mtu)
    for _ in range(1000):
        switch.enter(0, 1, bytes(switch.mtu), 0.0)
    return switch


def test_a_queue_holds_64_packets_of_the_size_that_fits() -> None:
    switch = full([50e6, 50e6])
    assert switch.mtu == 14_286
    assert len(switch.advance(10.0)) == LEAST_PACKETS + 1  # and the one that was served


def test_a_slow_host_among_fast_ones_holds_fewer_of_their_large_packets() -> None:
    switch = full([1e6, *[125e6] * 7])
    assert switch.mtu == 65_000
    assert len(switch.advance(10.0)) == LEAST_FULL_PACKETS + 1


def test_a_queue_that_becomes_shorter_drops_its_tail_and_keeps_its_order() -> None:
    switch = full([50e6, 50e6], mtu=12_500)
    switch.advance(0.0)
    switch.change(Change(values={"queue": 10.0}), 0.0)
    assert switch.counts["dropped_egress"] == 1000 - 11
    switch.enter(0, 1, bytes(12_500), 0.0)  # finds the queue full
    delivered = switch.advance(11 * 12_500 / 50e6 + 0.0006)
    assert [len(data) for _, data in delivered] == [12_500] * 11
    switch.enter(0, 1, b"later", 0.01)
    assert [data for _, data in switch.advance(0.0106)] == [b"later"]  # and does not wait for what was dropped
