"""The meter: the rate in an arrival curve, and the stamps that say when bytes came."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.link import meter as meters
from thinwire.link.meter import Meter, age_of, busy_periods

# --- the curve


def flow(rate: float, seconds: float, start: float = 0.0, piece: float = 0.0005) -> Iterator[tuple[float, float, int]]:
    for i in range(round(seconds / piece)):
        yield start + i * piece, start + (i + 1) * piece, round(rate * piece)


def measured(*flows: Iterator[tuple[float, float, int]]) -> list[float]:
    meter = Meter()
    for pieces in flows:
        for piece in pieces:
            meter.note(*piece)
    return [nbytes / seconds for nbytes, seconds in meter.stretches()]


def test_a_steady_flow_has_its_rate() -> None:
    assert measured(flow(1e6, 0.05)) == [pytest.approx(1e6, rel=0.01)]


def test_flows_that_come_at_once_add_up() -> None:
    assert measured(flow(1e6, 0.05), flow(3e6, 0.05, start=0.0002)) == [pytest.approx(4e6, rel=0.03)]


def test_flows_one_after_the_other_do_not() -> None:
    assert measured(flow(1e6, 0.05), flow(3e6, 0.05, start=0.06)) == [
        pytest.approx(3e6, rel=0.01),
        pytest.approx(1e6, rel=0.01),
    ]


def test_a_sender_that_pauses_does_not_look_like_a_slow_network() -> None:
    def halting() -> Iterator[tuple[float, float, int]]:
        """TCP's slow start: every round trip twice as much as before, at the full rate."""
        last = 0.0
        for i in range(5):
            for start, end, nbytes in flow(1e7, 0.001 * 2**i, start=0.1 * i):
                yield min(last, start), end, nbytes
                last = end

    assert measured(halting()) == [pytest.approx(1e7, rel=0.02)]


def test_pieces_that_were_read_late_keep_their_rate() -> None:
    assert measured(flow(1e6, 0.1, piece=0.02), flow(1e6, 0.1, piece=0.025)) == [pytest.approx(2e6, rel=0.03)]


def train_of_packets(rate: float, number: int, start: float, nbytes: int = 1500) -> Iterator[tuple[float, float, int]]:
    """A message of so many packets, each of which comes at once; the first together with the header."""
    spacing = nbytes / rate
    yield start, start, nbytes
    for i in range(1, number):
        yield start + (i - 1) * spacing, start + i * spacing, nbytes


def test_the_first_packet_of_a_message_counts_if_it_comes_while_another_does() -> None:
    rate, packets = 2.5e6, 4
    spacing = 1500 / rate
    # Six messages of four packets over a wire of that rate: the packets of two at a time take turns.
    messages = [train_of_packets(rate / 2, packets, start=(8 * (i // 2) + i % 2) * spacing) for i in range(6)]
    assert measured(*messages) == pytest.approx([rate] * meters.MAX_STRETCHES, rel=0.1)


def test_the_first_packet_of_a_busy_period_was_on_its_way_before() -> None:
    assert measured(train_of_packets(1e6, 8, start=1.0)) == [pytest.approx(1e6, rel=0.01)]
    assert measured(train_of_packets(1e6, 3, start=1.0)) == [pytest.approx(1e6, rel=0.01)]
    assert measured(train_of_packets(1e6, 1, start=1.0)) == []


def test_what_is_over_in_a_moment_tells_nothing() -> None:
    assert measured(flow(1e9, meters.BRIEF_SECONDS / 2)) == []
    assert Meter().stretches() == () == Meter().round_trips()


def test_a_brief_flow_counts_only_for_want_of_a_longer_one() -> None:
    assert measured(flow(1e6, 0.002)) == pytest.approx([1e6])
    longer = [(start + 1, end + 1, nbytes) for start, end, nbytes in flow(2e6, 0.05)]
    assert measured([*flow(1e6, 0.002), *longer]) == pytest.approx([2e6])


def test_a_meter_remembers_a_bounded_number_of_pieces() -> None:
    meter = Meter()
    for i in range(3 * meters.MAX_PIECES):
        meter.note(i * 0.001, (i + 1) * 0.001, 1000)
        meter.note_round_trip(1, 0.001)
    assert len(meter._pieces) == meters.MAX_PIECES
    assert len(meter.round_trips()) == meters.MAX_ROUND_TRIPS
    ((nbytes, seconds),) = meter.stretches()
    assert nbytes / seconds == pytest.approx(1e6, rel=0.01)


def test_a_meter_may_be_read_while_it_is_filled() -> None:
    meter, stop = Meter(), threading.Event()

    def fill() -> None:
        time = 0.0
        while not stop.is_set():
            meter.note(time, time + 0.001, 1000)
            time += 0.001

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        for _ in range(200):
            for nbytes, seconds in meter.stretches():
                assert nbytes / seconds == pytest.approx(1e6, rel=0.01)
    finally:
        stop.set()
        thread.join()


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.floats(0, 1), st.integers(1, 10**9)).map(lambda p: (p[0], p[0] + p[1], p[2])),
        min_size=1,
        max_size=50,
    )
)
def test_no_piece_is_lost_between_busy_periods_and_no_stretch_has_more_than_came(
    pieces: list[tuple[float, float, int]],
) -> None:
    periods = busy_periods(np.array(pieces, dtype=np.float64))
    assert sum(len(period) for period in periods) == len(pieces)
    for before, after in zip(periods, periods[1:], strict=False):
        assert before[:, 1].max() < after[:, 0].min()
    for period in periods:
        stretch = meters.fastest_part(period)
        if stretch is not None:
            assert 0 <= stretch.nbytes <= period[:, 2].sum() * (1 + 1e-9) + 1
            assert stretch.seconds >= meters.BRIEF_SECONDS * (1 - 1e-9)


# --- stamps


def stamp(age: float, now_ns: int) -> list[tuple[int, int, bytes]]:
    seconds, nanoseconds = divmod(now_ns - round(age * 1e9), 1_000_000_000)
    return [(socket.SOL_SOCKET, 35, struct.pack("@ll", seconds, nanoseconds))]


@pytest.mark.parametrize(("age", "believed"), [(0.25, True), (0.0, True), (-3600.0, False), (3600.0, False)])
def test_a_stamp_is_believed_unless_somebody_has_set_the_clock(
    age: float, believed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = 1_700_000_000_123_456_789
    monkeypatch.setattr(meters.time, "time_ns", lambda: now_ns)
    assert age_of(stamp(age, now_ns)) == (pytest.approx(age) if believed else None)


@pytest.mark.parametrize("extras", [[], [(socket.SOL_SOCKET, 35, b"short")], [(99, 1, bytes(16))]])
def test_what_is_not_a_stamp_tells_no_age(extras: list[tuple[int, int, bytes]]) -> None:
    assert age_of(extras) is None
