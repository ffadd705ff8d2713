"""What the kernel tells of a connection is taken apart as it is meant, whatever it is."""

from __future__ import annotations

import socket
import struct
import sys
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.link import tcp_info
from thinwire.link.base import Stretch


def test_a_tcp_info_of_an_old_kernel_or_cut_short_is_nothing() -> None:
    for size in range(168):
        assert tcp_info.parse(bytes(size)) is None


@given(st.binary(min_size=168, max_size=300))
def test_any_tcp_info_is_taken_apart_without_an_error(raw: bytes) -> None:
    info = tcp_info.parse(raw)
    assert info is not None
    assert all(number >= 0 for number in info)


def test_the_fields_of_a_tcp_info_are_where_the_kernel_puts_them() -> None:
    raw = bytearray(168)
    raw[0], raw[7] = 1, 1
    for offset, form, number in [
        (68, "=I", 20_000),
        (72, "=I", 500),
        (100, "=I", 7),
        (120, "=Q", 10**12),
        (128, "=Q", 99),
        (144, "=I", 1234),
        (148, "=I", 10_000),
        (160, "=Q", 12_500_000),
    ]:
        struct.pack_into(form, raw, offset, number)
    assert tcp_info.parse(bytes(raw)) == tcp_info.TcpInfo(
        state=1,
        round_trip=0.02,
        round_trip_variation=0.0005,
        least_round_trip=0.01,
        delivery_rate=12.5e6,
        app_limited=True,
        retransmitted=7,
        bytes_acked=10**12,
        bytes_received=99,
        not_sent=1234,
    )


class Kernel:
    """A socket whose kernel gives so many bytes of tcp_info."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def getsockopt(self, level: int, option: int, most: int) -> bytes:
        return self._raw[:most]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_packets_that_came_before_earlier_ones_are_counted_where_the_kernel_tells() -> None:
    raw = bytes(224) + struct.pack("=I", 5) + bytes(20)
    assert tcp_info.out_of_order(cast(socket.socket, Kernel(raw))) == 5
    assert tcp_info.out_of_order(cast(socket.socket, Kernel(raw[:200]))) == 0  # Linux before 5.4


def a_connection(inode: int, acked: int, rate: float, app_limited: bool = False) -> tcp_info.Seen:
    known = tcp_info.TcpInfo(
        state=tcp_info.ESTABLISHED,
        round_trip=0.01,
        round_trip_variation=0.0,
        least_round_trip=0.01,
        delivery_rate=rate,
        app_limited=app_limited,
        retransmitted=0,
        bytes_acked=acked,
        bytes_received=0,
        not_sent=0,
    )
    return tcp_info.Seen("10.77.0.2", inode, known)


def test_the_fastest_connection_that_delivered_enough_since_the_last_look_tells_the_rate() -> None:
    deliveries = tcp_info.Deliveries()
    first = deliveries.since([a_connection(1, acked=10**6, rate=2e6), a_connection(2, acked=10**6, rate=1e6)])
    assert first == Stretch(10**6, 0.5)
    little = a_connection(1, acked=10**6 + 100, rate=9e9)  # the store's, say
    limited = a_connection(3, acked=10**8, rate=9e9, app_limited=True)
    second = deliveries.since([little, limited, a_connection(2, acked=3 * 10**6, rate=1e6)], least=10_000)
    assert second == Stretch(2 * 10**6, 2.0)
    assert deliveries.since([little, limited], least=1) is None
