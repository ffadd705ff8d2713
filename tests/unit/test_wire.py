"""The physics of the wire: what leaves together shares the way out."""

from __future__ import annotations

from thinwire.link.wire import Arrival, Parcel, Wire
from thinwire.types import Network

NETWORK = Network(alpha=5.0, beta=1.0)


def arrivals(wire: Wire[str]) -> dict[str, float]:
    found = {}
    while (event := wire.next()) is not None:
        time, what = event
        assert isinstance(what, Arrival)
        found[what.message] = time
    return found


def test_one_message_takes_the_latency_and_its_bytes() -> None:
    wire: Wire[str] = Wire(NETWORK, 2)
    wire.send(0, 1, 10, 0.0, "alone")
    assert arrivals(wire) == {"alone": 15.0}


def test_messages_one_after_the_other_have_the_whole_way_out_in_turn() -> None:
    wire: Wire[str] = Wire(NETWORK, 3)
    wire.send(0, 1, 10, 0.0, "first")
    wire.send(0, 2, 10, 0.0, "second")
    assert arrivals(wire) == {"first": 15.0, "second": 25.0}


def test_messages_together_share_the_way_out_and_all_arrive_when_the_last_byte_has_left() -> None:
    wire: Wire[str] = Wire(NETWORK, 3)
    wire.send_together(0, [Parcel(1, 10, 0.0, "one"), Parcel(2, 10, 0.0, "other")])
    assert arrivals(wire) == {"one": 25.0, "other": 25.0}


def test_what_follows_them_waits_until_both_have_left() -> None:
    wire: Wire[str] = Wire(NETWORK, 3)
    wire.send_together(0, [Parcel(1, 10, 0.0, "one"), Parcel(2, 4, 0.0, "small")])
    wire.send(0, 2, 1, 0.0, "next")
    assert arrivals(wire) == {"one": 25.0, "small": 13.0, "next": 26.0}


def test_shares_from_several_hosts_fill_a_way_in_exactly() -> None:
    wire: Wire[str] = Wire(NETWORK, 3)
    for src in range(3):
        others = [dst for dst in range(3) if dst != src]
        wire.send_together(src, [Parcel(dst, 10, 0.0, f"{src} to {dst}") for dst in others])
    assert max(arrivals(wire).values()) == 25.0
