"""Messages that do not belong, are damaged, early or slow, or are interrupted while they are sent."""

from __future__ import annotations

import socket
import sys
import threading
import time
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.process.launch import outcomes, run_ranks
from tests.process.links import KINDS, number, others, raised_by, raw_socket, wait_all
from thinwire.link import connection, frames, transfer
from thinwire.link.base import Link
from thinwire.link.frames import DTYPES, HEADER_BYTES, Header, digest, encode_header, encode_trailer
from thinwire.link.tcp import TcpLink
from thinwire.types import Moment

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


# --- messages that do not belong

MISMATCHES = {
    "plan": (Moment(3, "top-k", "ring"), torch.ones(4)),
    "step": (Moment(4, "dense", "ring"), torch.ones(4)),
    "collective": (Moment(3, "dense", "tree"), torch.ones(4)),
    "dtype": (Moment(3, "dense", "ring"), torch.ones(4, dtype=torch.int32)),
    "size in bytes": (Moment(3, "dense", "ring"), torch.ones(5)),
}


def disagree(rank: int, kind: str, field: str, ahead: bool, timeout: float) -> tuple[str, str]:
    link = KINDS[kind](timeout=timeout)
    moment, message = MISMATCHES[field]
    works = []
    if rank == 1:
        link.moment = moment
        if ahead:
            dist.barrier()
        works = [link.send(message, 0), link.post(torch.ones(4), 0)]
        if not ahead:
            dist.barrier()
    else:
        link.moment = Moment(3, "dense", "ring")
        if not ahead:
            dist.barrier()
        works = [link.post(torch.ones(4), 1)]
        if ahead:
            dist.barrier()
    result = raised_by(works[-1].wait)
    store = torch.distributed.group.WORLD.get_group_store()
    store.set(f"rank {rank} has seen its end", "")
    store.get(f"rank {1 - rank} has seen its end")  # or the first to leave would be lost to the other
    link.close()
    return result


@pytest.mark.parametrize("field", MISMATCHES)
@pytest.mark.parametrize("ahead", [True, False], ids=["posted ahead", "posted after"])
def test_tcp_refuses_a_foreign_message_on_both_ranks_at_once(field: str, ahead: bool) -> None:
    start = time.monotonic()
    (error_0, text_0), (error_1, text_1) = run_ranks(disagree, 2, kind="tcp", field=field, ahead=ahead, timeout=30.0)
    assert error_0 == "PlanMismatch" and error_1 == "RemoteError"
    assert f"rank 1 sent rank 0 a message with {field} " in text_0 and "at step 3 (ring, plan dense)" in text_0
    assert text_0.removesuffix(".") in text_1 and text_1.startswith("rank 0 failed: ")
    assert ".;" not in text_1
    assert time.monotonic() - start < 15


@pytest.mark.parametrize("field", MISMATCHES)
def test_process_never_matches_a_foreign_message(field: str) -> None:
    ended = outcomes(disagree, 2, kind="process", field=field, ahead=True, timeout=1.0)
    assert [outcome.exitcode for outcome in ended] == [0, 0], ended
    assert ended[0].value[0] == ended[1].value[0] == "LinkTimeout"
    assert "from rank 1" in ended[0].value[1] and "from rank 0" in ended[1].value[1]


def frame(link: TcpLink, sequence: int, nbytes: int, **changes: Any) -> bytes:
    run_id = link._connections[others(link)[0]]._run_id
    header = Header(0, DTYPES.index(torch.float32), run_id, sequence, 0, digest(""), digest(""), nbytes)
    return encode_header(header._replace(**changes))


BAD_FRAMES = {
    "do not start a frame": lambda good: b"x" * HEADER_BYTES,
    "protocol version": lambda good: good[:4] + b"\x63" + good[5:],
    "header that was damaged": lambda good: good[:20] + bytes([good[20] ^ 1]) + good[21:],
}
BAD_FIELDS = {
    "another run": {"run_id": b"elsewher"},
    "frame 5 where frame 0 was due": {"sequence": 5},
    "unknown kind": {"kind": 9},
    "farewell of 100000 bytes": {"kind": 2, "nbytes": 100_000},
    "damaged on the way": {},  # its checksum says so
}


def send_a_bad_frame(rank: int, complaint: str) -> tuple[str, str]:
    link = TcpLink(timeout=20)
    work = link.post(number(), 1 - rank)
    if rank == 1:
        if complaint in BAD_FRAMES:
            bad = BAD_FRAMES[complaint](frame(link, 0, 4))
        else:
            bad = frame(link, **{"sequence": 0, "nbytes": 4, **BAD_FIELDS[complaint]})
        raw_socket(link, 0).send(bad + bytes(4) + encode_trailer(12345))
    result = raised_by(work.wait)
    link.close()
    return result


@pytest.mark.parametrize("complaint", [*BAD_FRAMES, *BAD_FIELDS])
def test_a_damaged_or_foreign_frame_ends_both_ranks_with_a_clear_message(complaint: str) -> None:
    (error_0, text_0), (error_1, text_1) = run_ranks(send_a_bad_frame, 2, complaint=complaint)
    assert (error_0, error_1) == ("LinkError", "RemoteError")
    assert "rank 1 sent rank 0 " in text_0 and complaint in text_0
    assert complaint in text_1


def claim_an_exabyte(rank: int) -> tuple[str, str, int]:
    link = TcpLink(timeout=20)
    if rank == 1:
        raw_socket(link, 0).send(frame(link, 0, 2**60))
        result = raised_by(link.post(number(), 0).wait)
    else:
        while not link._connections[1].is_held:
            time.sleep(0.001)
        result = raised_by(link.post(number(), 1).wait)
    link.close()
    early = link._connections[1 - rank]._early_cost
    return (*result, early)


def test_a_claimed_length_is_never_allocated() -> None:
    (error_0, text_0, kept), (error_1, _, _) = run_ranks(claim_an_exabyte, 2)
    assert (error_0, error_1, kept) == ("PlanMismatch", "RemoteError", 0)
    assert f"size in bytes {2**60}" in text_0


# --- what travels, and when


def send_more_than_is_kept(rank: int) -> int:
    connection.MAX_EARLY_BYTES = 20_000
    link = TcpLink(timeout=20)
    sizes = [1000, 3000, 10_000, 0, 1, 0, 200_000, 5]
    most = 0
    if rank == 0:
        wait_all([link.send(torch.full((size,), float(size)), 1) for size in sizes])
    else:
        while not link._connections[0].is_held:
            time.sleep(0.001)
        for size in sizes:
            most = max(most, link._connections[0]._early_cost)
            link.post(received := torch.zeros(size), 0).wait()
            assert (received == size).all()
    dist.barrier()
    link.close()
    return most


def test_early_messages_are_kept_within_a_bound_and_then_wait_in_the_kernel() -> None:
    assert 0 < run_ranks(send_more_than_is_kept, 2)[1] <= 20_000


class CountedSocket:
    """A socket that counts what the kernel takes."""

    def __init__(self, real: socket.socket) -> None:
        self._real, self.taken = real, 0

    def sendmsg(self, pieces: Any) -> int:
        taken = self._real.sendmsg(pieces)
        self.taken += taken
        return taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def watch_the_wire(rank: int) -> tuple[int, int]:
    link = TcpLink(timeout=20)
    link._connections[1 - rank].socket = counted = CountedSocket(raw_socket(link, 1 - rank))  # type: ignore[assignment]
    for size in (0, 10, 1_000_000):
        wait_all([link.send(torch.ones(size), 1 - rank), link.post(torch.ones(size), 1 - rank)])
    taken = counted.taken
    link.close()
    return taken, link.sent_bytes + link.sent_messages * link.header_bytes


def test_payload_and_headers_are_all_that_travels() -> None:
    for travelled, counted in run_ranks(watch_the_wire, 2):
        assert travelled == counted


def sum_while_sending(rank: int) -> tuple[int, int]:
    link = TcpLink(timeout=30)
    summed = {"caller": 0, "others": 0}
    crc32, main = zlib.crc32, threading.get_ident()

    class Watched:
        @staticmethod
        def crc32(data: memoryview, value: int = 0) -> int:
            summed["caller" if threading.get_ident() == main else "others"] += len(data)
            return crc32(data, value)

    transfer.zlib = Watched  # type: ignore[assignment]
    received = link.post(torch.zeros(16_000_000), 1 - rank)
    wait_all([link.send(torch.ones(16_000_000), 1 - rank), received])
    link.close()
    return summed["caller"], summed["others"]


def test_the_checksum_of_a_large_message_is_not_computed_by_the_caller() -> None:
    for by_caller, by_others in run_ranks(sum_while_sending, 2):
        assert by_caller <= connection.SEND_BYTES
        assert by_caller + by_others == 64_000_000


def test_names_are_forgotten_but_never_those_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_NAMES", 10)
    for i in range(100):
        assert frames.name_of(digest("in use")) == "in use"
        assert frames.name_of(digest(f"plan {i}")) == f"plan {i}"
        assert len(frames._NAMES) <= 10


def trickle(rank: int) -> tuple[float, float]:
    link = TcpLink(timeout=0.5)
    received, start = number(), time.monotonic()
    if rank == 0:
        link.post(received, 1).wait()
    else:
        payload = number(3.0).numpy().tobytes()
        whole = frame(link, 0, 4) + payload + encode_trailer(zlib.crc32(payload))
        for i in range(0, len(whole), 10):  # the pace is the subject here
            raw_socket(link, 0).send(whole[i : i + 10])
            time.sleep(0.2)
    dist.barrier()
    link.close()
    return received.item(), time.monotonic() - start


def test_slow_is_not_dead() -> None:
    received, seconds = run_ranks(trickle, 2)[0]
    assert received == 3.0 and seconds > 2 * 0.5


# --- Ctrl-C while something is being sent


class InterruptAt:
    """Ctrl-C at the n-th place at which the interpreter looks for signals inside of a link: after a call into C has
    returned, and where a function begins. `places` counts them."""

    def __init__(self, n: int) -> None:
        self.n, self.places = n, 0

    def _count(self, frame: types.FrameType, event: str, _: object) -> None:
        if event not in ("call", "c_return") or "link" not in Path(frame.f_code.co_filename).parts:
            return
        self.places += 1
        if self.places == self.n:
            raise KeyboardInterrupt

    def during(self, action: Callable[[], object]) -> bool:
        """Was `action` interrupted?"""
        try:
            sys.setprofile(self._count)
            action()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False


def places_of_a_send(link: Link, size: int) -> int:
    """At how many places a send to rank 1 can be interrupted. Costs one message, and tells rank 1."""
    watch = InterruptAt(-1)
    watch.during(lambda: link.send(torch.zeros(size), 1))
    dist.broadcast(places := torch.tensor(watch.places), 0)
    return int(places)


SIZES = {"small": 10, "in several pieces": 700_000}


def go_on_after_ctrl_c(rank: int, size: int) -> list[float]:
    link = TcpLink(timeout=20)
    if rank == 1:
        link.post(torch.zeros(size), 0).wait()
        dist.broadcast(torch.tensor(0), 0)
        came: list[float] = []
        received = torch.zeros(size)
        while not came or came[-1] >= 0:
            link.post(received, 0).wait()
            assert (received == received[0]).all()
            came.append(received[0].item())
        dist.barrier()
        link.close()
        return came
    certain = []
    for n in range(1, places_of_a_send(link, size) + 1):
        message = torch.full((size,), float(n))
        if not InterruptAt(n).during(lambda message=message: link.send(message, 1)):
            certain.append(float(n))
        again = torch.full((size,), n + 0.5)
        link.send(again, 1)
        certain.append(n + 0.5)
    link.send(torch.full((size,), -1.0), 1).wait()
    dist.barrier()
    link.close()
    return [*certain, -1.0]


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_whoever_goes_on_after_ctrl_c_has_sent_every_message_once_or_not_at_all(size: int) -> None:
    certain, came = run_ranks(go_on_after_ctrl_c, 2, size=size)
    assert len(certain) > 20
    assert sorted(came[:-1]) == came[:-1] and len(set(came)) == len(came)
    assert set(certain) <= set(came)


def abort_after_ctrl_c(rank: int, size: int) -> list[tuple[str, str]]:
    link = TcpLink(timeout=20)
    if rank == 0:
        places = places_of_a_send(link, size)
    else:
        link.post(torch.zeros(size), 0).wait()
        dist.broadcast(told := torch.tensor(0), 0)
        places = int(told)
    link.close()
    results = []
    for n in range(1, places + 1):
        link = TcpLink(timeout=20)
        if rank == 0:
            link.send(torch.zeros(size), 1)
            InterruptAt(n).during(lambda link=link: link.send(torch.zeros(size), 1))
            link.abort("KeyboardInterrupt")
        else:
            results.append(raised_by(lambda link=link: receive_for_ever(link, size)))
        link.close()
    return results


def receive_for_ever(link: Link, size: int) -> None:
    while True:
        link.post(torch.zeros(size), 0).wait()


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_wherever_ctrl_c_ends_a_send_the_peers_read_why(size: int) -> None:
    results = run_ranks(abort_after_ctrl_c, 2, size=size)[1]
    assert len(results) > 20
    for error, text in results:
        assert error == "RemoteError" and text.startswith("rank 0 failed: KeyboardInterrupt;"), text
