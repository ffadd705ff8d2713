"""What each connection of a link may send, as the kernel is asked; here by sockets that only note it."""

from __future__ import annotations

import math
import struct

import pytest

from thinwire.link.egress import BURST_BYTES, CAREFUL, FASTER, LOOK, LOOK_EVERY, LOSSES, MORE, REMEMBERED, Egress

MUCH = 10 * BURST_BYTES
USUAL = 1  # a step that does not look whether more comes through
RATE = 1e6
LOST = LOSSES  # so far: enough to be careful


class Asked:
    """A socket with a peer that remembers the rate it was last asked to keep to."""

    def __init__(self, host: str = "10.77.0.2", refuses: bool = False) -> None:
        self.host, self.refuses = host, refuses
        self.rates: list[float] = []

    def getpeername(self) -> tuple[str, int]:
        return self.host, 1

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        if self.refuses:
            raise OSError("not here")
        (rate,) = struct.unpack("=Q", value)
        self.rates.append(math.inf if rate == 2**60 else rate)


def an_egress(*sockets: Asked) -> Egress:
    return Egress(dict(enumerate(sockets)))  # type: ignore[arg-type]


def test_no_connection_is_paced_before_a_rate_is_known() -> None:
    sockets = Asked(), Asked()
    egress = an_egress(*sockets)
    egress.share([0, 1], MUCH, USUAL)
    assert [socket.rates for socket in sockets] == [[], []]


def test_nor_where_next_to_nothing_is_lost() -> None:
    sockets = Asked(), Asked()
    egress = an_egress(*sockets)
    for lost in range(0, 10 * (LOSSES - 1), LOSSES - 1):
        egress.note(RATE, lost)
        egress.share([0, 1], MUCH, USUAL)
    assert [socket.rates for socket in sockets] == [[], []]


def test_after_a_long_time_without_losses_it_is_tried_whether_it_goes_without_pacing() -> None:
    sockets = Asked(), Asked()
    egress = an_egress(*sockets)
    egress.note(RATE, LOST)
    for _ in range(CAREFUL - 1):
        egress.note(RATE, LOST)
    egress.share([0, 1], MUCH, USUAL)
    assert sockets[0].rates[-1] < math.inf
    egress.note(RATE, LOST)
    egress.share([0, 1], MUCH, USUAL)
    assert sockets[0].rates[-1] == math.inf
    egress.note(RATE, 2 * LOST)
    egress.share([0, 1], MUCH, USUAL)
    assert sockets[0].rates[-1] < math.inf


def test_nothing_is_asked_while_only_one_message_or_a_few_small_ones_are_sent_at_a_time() -> None:
    sockets = Asked(), Asked()
    egress = an_egress(*sockets)
    egress.note(RATE, LOST)
    egress.share([0], MUCH, USUAL)
    egress.share([0, 1], BURST_BYTES, USUAL)
    assert [socket.rates for socket in sockets] == [[], []]


def test_several_messages_get_equal_shares_of_what_came_in() -> None:
    sockets = Asked(), Asked(), Asked()
    egress = an_egress(*sockets)
    egress.note(RATE, LOST)
    egress.share([0, 2], MUCH, USUAL)
    assert sockets[0].rates[-1] == sockets[2].rates[-1] == int(MORE * RATE / 2)
    assert sockets[1].rates == []


def test_one_message_alone_and_a_few_small_ones_go_freely_again_after_that() -> None:
    sockets = Asked(), Asked()
    egress = an_egress(*sockets)
    egress.note(RATE, LOST)
    for peers, nbytes in (([0], MUCH), ([0, 1], BURST_BYTES)):
        egress.share([0, 1], MUCH, USUAL)
        assert sockets[0].rates[-1] < math.inf
        egress.share(peers, nbytes, USUAL)
        assert sockets[0].rates[-1] == math.inf


def test_the_kernel_is_asked_only_for_what_is_new() -> None:
    sockets = Asked(), Asked()
    egress = an_egress(*sockets)
    egress.note(RATE, LOST)
    for _ in range(5):
        egress.share([0, 1], MUCH, USUAL)
    assert len(sockets[0].rates) == 1


@pytest.mark.parametrize(("slow_ones", "rate"), [(1, RATE), (REMEMBERED, RATE / 10)])
def test_a_lower_rate_is_a_process_that_was_not_let_run_and_several_are_a_slower_line(
    slow_ones: int, rate: float
) -> None:
    sockets = Asked(), Asked()
    egress = an_egress(*sockets)
    egress.note(RATE, LOST)
    for _ in range(slow_ones):
        egress.note(RATE / 10, LOST)
    egress.share([0, 1], MUCH, USUAL)
    assert sockets[0].rates[-1] == int(MORE * rate / 2)


def test_one_step_of_every_few_lets_go_of_more() -> None:
    sockets = Asked(), Asked()
    egress = an_egress(*sockets)
    egress.note(RATE, LOST)
    looking = []
    for step in range(2 * LOOK_EVERY):
        egress.share([0, 1], MUCH, step)
        looking.append(sockets[0].rates[-1] == int(LOOK * RATE / 2))
    assert looking == 2 * ([True] + [False] * (LOOK_EVERY - 1))


def test_when_more_comes_in_than_before_all_goes_freely_until_it_is_known_how_much() -> None:
    sockets = Asked(), Asked()
    egress = an_egress(*sockets)
    egress.note(RATE, LOST)
    egress.share([0, 1], MUCH, USUAL)
    egress.note(1.01 * FASTER * RATE, LOST)
    egress.share([0, 1], MUCH, USUAL)
    assert sockets[0].rates[-1] == math.inf
    egress.note(25 * RATE, LOST)
    egress.share([0, 1], MUCH, USUAL)
    assert sockets[0].rates[-1] == int(MORE * 25 * RATE / 2)


@pytest.mark.parametrize("sock", [Asked("127.0.0.1"), Asked("::1"), Asked(refuses=True)])
def test_within_a_host_and_where_the_kernel_cannot_pace_nothing_happens(sock: Asked) -> None:
    other = Asked("fe80::1%wire0")
    egress = an_egress(sock, other)
    egress.note(RATE, LOST)
    egress.share([0, 1], MUCH, USUAL)
    assert sock.rates == [] and len(other.rates) == 1
