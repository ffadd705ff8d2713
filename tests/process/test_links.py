"""What both links promise between real processes, and what only `TcpLink` does when something goes wrong."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types
import zlib
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.process.launch import LoopbackStore, RankFailed, outcomes, run_ranks
from tests.timing import timing
from thinwire.errors import LinkError, LinkTimeout, PeerLost, PlanMismatch, RemoteError
from thinwire.link import address, connection, frames, rendezvous, tcp, transfer
from thinwire.link.base import Link
from thinwire.link.frames import (
    DTYPES,
    HEADER_BYTES,
    HELLO_BYTES,
    MAGIC,
    Header,
    Hello,
    decode_hello,
    digest,
    encode_header,
    encode_hello,
    encode_trailer,
)
from thinwire.link.process import ProcessLink
from thinwire.link.tcp import TcpLink
from thinwire.types import Moment

KINDS: dict[str, type[ProcessLink] | type[TcpLink]] = {"process": ProcessLink, "tcp": TcpLink}
both_links = pytest.mark.parametrize("kind", KINDS)

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


def others(link: Link) -> list[int]:
    return [peer for peer in range(link.world_size) if peer != link.rank]


def number(value: float = 0.0) -> torch.Tensor:
    return torch.tensor([float(value)])


def wait_all(works: list[Any]) -> None:
    for work in works:
        work.wait()


def raised_by(action: Any) -> tuple[str, str]:
    """The class and the text of what `action` raises."""
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


# --- the launcher itself


def fail_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise KeyError("the reason")


def test_the_launcher_raises_a_ranks_error_with_its_traceback() -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 1 of 2 .*fail_on_rank_1.*KeyError: 'the reason'"):
        run_ranks(fail_on_rank_1, 2)


# --- what both links promise


def example(dtype: torch.dtype, size: int, seed: int) -> torch.Tensor:
    """Arbitrary bits, as long as they are valid in that type."""
    width = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, (size * width,), dtype=torch.uint8, generator=generator).view(dtype)


def swap_every_dtype(rank: int, kind: str) -> None:
    link = KINDS[kind](timeout=20)
    for dtype in DTYPES:
        for size in (0, 1, 7, 1001):
            received = torch.zeros(size, dtype=dtype)
            works = [link.send(example(dtype, size, rank), 1 - rank), link.post(received, 1 - rank)]
            wait_all(works)
            sent = example(dtype, size, 1 - rank)
            assert torch.equal(received.view(torch.uint8), sent.view(torch.uint8)), (dtype, size)
    link.close()


@both_links
def test_every_dtype_arrives_bit_by_bit(kind: str) -> None:
    run_ranks(swap_every_dtype, 2, kind=kind)


def swap_shapes(rank: int, kind: str) -> None:
    link = KINDS[kind](timeout=20)
    for shape in ((), (3, 5), (5_000_001,)):
        received = torch.zeros(shape, dtype=torch.uint8)
        sent = torch.full(shape, 7 + rank, dtype=torch.uint8)
        wait_all([link.send(sent, 1 - rank), link.post(received, 1 - rank)])
        assert (received == 8 - rank).all()
    weights = torch.nn.Parameter(torch.full((3,), float(rank)))
    wait_all([link.send(weights, 1 - rank), link.post(received := torch.zeros(3), 1 - rank)])
    assert received.tolist() == [1.0 - rank] * 3
    link.close()


@both_links
def test_scalars_matrices_parameters_and_five_megabytes_arrive(kind: str) -> None:
    run_ranks(swap_shapes, 2, kind=kind)


def swap_single_elements(rank: int, kind: str) -> list[float]:
    link = KINDS[kind](timeout=20)
    sent = torch.arange(10.0)[rank::5][:1]
    room = torch.zeros(10)
    assert sent.is_contiguous() and sent.stride() == (5,)
    wait_all([link.send(sent, 1 - rank), link.post(room[3::5][:1], 1 - rank)])
    wait_all([link.send(sent[:0], 1 - rank), link.post(room[::5][:0], 1 - rank)])
    link.close()
    return room.tolist()


@both_links
def test_one_element_of_a_longer_stride_arrives(kind: str) -> None:
    assert run_ranks(swap_single_elements, 2, kind=kind) == [[0, 0, 0, 1 - rank, 0, 0, 0, 0, 0, 0] for rank in (0, 1)]


def count_up(rank: int, kind: str, ahead: bool) -> list[float]:
    link = KINDS[kind](timeout=20)
    numbers = [number(float(i)) for i in range(300)]
    received = [number(-1.0) for _ in numbers]
    works = []
    if rank == 1 and ahead:
        works = [link.post(tensor, 0) for tensor in received]
    dist.barrier()
    if rank == 0:
        works = [link.send(tensor, 1) for tensor in numbers]
    dist.barrier()
    if rank == 1 and not ahead:
        works = [link.post(tensor, 0) for tensor in received]
    wait_all(works)
    link.close()
    return [tensor.item() for tensor in received]


@both_links
@pytest.mark.parametrize("ahead", [True, False], ids=["posted ahead", "posted after"])
def test_many_messages_keep_their_order(kind: str, ahead: bool) -> None:
    assert run_ranks(count_up, 2, kind=kind, ahead=ahead)[1] == [float(i) for i in range(300)]


def flood(rank: int, kind: str) -> None:
    link = KINDS[kind](timeout=30)
    sent = torch.full((2_000_000,), float(rank))
    received = {peer: torch.zeros(2_000_000) for peer in others(link)}
    sends = [link.send(sent, peer) for peer in others(link)]
    receives = [link.post(tensor, peer) for peer, tensor in received.items()]
    wait_all(sends)
    wait_all(receives)
    assert all((tensor == peer).all() for peer, tensor in received.items())
    link.close()


@both_links
def test_everybody_sends_8_megabytes_to_everybody_at_once(kind: str) -> None:
    run_ranks(flood, 4, kind=kind)


def wait_for_nothing(rank: int, kind: str) -> tuple[str, str, float]:
    link = KINDS[kind](timeout=0.5)
    error = text = ""
    seconds = 0.0
    if rank == 0:
        link.moment = Moment(17, "dense", "ring")
        work, start = link.post(number(), 1), time.monotonic()
        error, text = raised_by(work.wait)
        seconds = time.monotonic() - start
    dist.barrier()
    link.close()
    return error, text, seconds


@both_links
@timing
def test_a_timeout_names_rank_peer_step_and_collective(kind: str) -> None:
    error, text, seconds = run_ranks(wait_for_nothing, 2, kind=kind)[0]
    assert error == "LinkTimeout"
    assert text == "rank 0 heard nothing from rank 1 for 0.5 s at step 17 (ring, plan dense)."
    assert 0.5 <= seconds < 1.5


def send_to_nobody(rank: int, kind: str) -> tuple[str, str]:
    connection.MAX_EARLY_BYTES = 0
    link = KINDS[kind](timeout=0.5)
    link.moment = Moment(17, "dense", "ring")
    result = raised_by(link.send(torch.ones(10_000_000), 1).wait) if rank == 0 else ("", "")
    dist.barrier()
    link.close()
    return result


NOT_TAKEN = {
    "process": "rank 1 did not take rank 0's message for 0.5 s at step 17 (ring, plan dense).",
    "tcp": "rank 1 took no byte from rank 0 for 0.5 s at step 17 (ring, plan dense).",
}


@both_links
def test_the_timeout_of_a_send_says_that_nothing_was_taken(kind: str) -> None:
    ended = outcomes(send_to_nobody, 2, kind=kind)  # after this, gloo's group may end as it likes
    assert ended[0].value == ("LinkTimeout", NOT_TAKEN[kind])


def is_waiting_in_a_link(frame: types.FrameType | None) -> bool:
    while frame is not None and not (frame.f_code.co_name == "wait" and "link" in Path(frame.f_code.co_filename).parts):
        frame = frame.f_back
    return frame is not None


def be_interrupted(rank: int, kind: str) -> float:
    link = KINDS[kind](timeout=30)
    seconds = 0.0
    if rank == 0:
        interrupted_at: list[float] = []
        work = link.post(number(), 1)
        main = threading.get_ident()

        def interrupt_when_blocked() -> None:
            while not is_waiting_in_a_link(sys._current_frames()[main]):
                time.sleep(0)
            interrupted_at.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt_when_blocked).start()
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        seconds = time.monotonic() - interrupted_at[0]
    dist.barrier()
    link.close()
    return seconds


@both_links
@timing
def test_ctrl_c_is_heard_within_a_second_of_waiting(kind: str) -> None:
    assert run_ranks(be_interrupted, 2, kind=kind)[0] < 1.0


def count_traffic(rank: int, kind: str) -> tuple[int, int]:
    link = KINDS[kind](timeout=20)
    for size in (0, 10, 1000):
        wait_all([link.send(torch.ones(size), 1 - rank), link.post(torch.ones(size), 1 - rank)])
    link.close()
    return link.sent_bytes, link.sent_messages


@both_links
def test_bytes_and_messages_are_counted(kind: str) -> None:
    assert run_ranks(count_traffic, 2, kind=kind) == [(4040, 3), (4040, 3)]


def talk_in_pairs(rank: int, kind: str) -> tuple[int, float]:
    groups = {members: dist.new_group(members) for members in ((0, 2), (1, 3))}
    group = groups[(0, 2) if rank % 2 == 0 else (1, 3)]
    everyone, pair, again = KINDS[kind](timeout=20), KINDS[kind](group, timeout=20), KINDS[kind](group, timeout=20)
    peer = 1 - pair.rank
    received = [number(), number(), number()]
    wait_all(
        [
            everyone.send(number(100.0 + rank), (rank + 1) % 4),
            pair.send(number(rank), peer),
            pair.post(received[0], peer),
            everyone.post(received[2], (rank - 1) % 4),
        ]
    )
    wait_all([again.send(number(10.0 + rank), peer), again.post(received[1], peer)])
    for link in (everyone, pair, again):
        link.close()
    return pair.rank, [tensor.item() for tensor in received]


@both_links
def test_links_of_subgroups_use_the_groups_own_ranks(kind: str) -> None:
    results = run_ranks(talk_in_pairs, 4, kind=kind)
    assert [rank for rank, _ in results] == [0, 0, 1, 1]
    assert [received for _, received in results] == [
        [2.0, 12.0, 103.0],
        [3.0, 13.0, 100.0],
        [0.0, 10.0, 101.0],
        [1.0, 11.0, 102.0],
    ]


def close_twice(rank: int, kind: str) -> None:
    link = KINDS[kind](timeout=20)
    wait_all([link.send(number(), 1 - rank), link.post(number(), 1 - rank)])
    link.close()
    link.close()


@both_links
def test_ranks_end_cleanly_and_silently(kind: str) -> None:
    ended = outcomes(close_twice, 2, kind=kind)
    assert [(outcome.exitcode, outcome.error, outcome.stderr) for outcome in ended] == [(0, "", "")] * 2


@both_links
def test_a_caller_without_a_process_group_is_told_so(kind: str) -> None:
    with pytest.raises(ValueError, match="process group"):
        KINDS[kind]()


@both_links
@pytest.mark.parametrize("timeout", [float("nan"), 0, -1.0])
def test_a_timeout_that_is_no_positive_number_is_refused_first_of_all(kind: str, timeout: float) -> None:
    with pytest.raises(ValueError, match=f"timeout must be a positive number of seconds, got {timeout}"):
        KINDS[kind](timeout=timeout)


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


def raw_socket(link: Link, peer: int) -> socket.socket:
    assert isinstance(link, TcpLink)
    return link._connections[peer].socket


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


def go_on_after_ctrl_c(rank: int, size: int) -> tuple[list[float], list[float]]:
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
        return came, []
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
    return [*certain, -1.0], []


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_whoever_goes_on_after_ctrl_c_has_sent_every_message_once_or_not_at_all(size: int) -> None:
    (certain, _), (came, _) = run_ranks(go_on_after_ctrl_c, 2, size=size)
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


# --- peers that fail, die, or are slow


def lose_rank_1(rank: int, with_child: bool) -> tuple[str, str, int, float, bool]:
    link = TcpLink(timeout=30)
    child = 0
    if rank == 1:
        if with_child and (child := os.fork()) == 0:
            signal.alarm(30)  # should the test fail before it ends this process
            signal.pause()
        for peer in (0, 2):
            link.send(number(child), peer).wait()
        for peer in (0, 2):
            link.post(number(), peer).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    link.post(pid := number(), 1).wait()
    from_survivor = link.post(number(), 2 - rank)  # which lives, but a collective needs everybody
    link.send(number(), 1)
    start = time.monotonic()
    error, text = raised_by(from_survivor.wait)
    seconds = time.monotonic() - start
    assert raised_by(link.send(number(), 2 - rank).wait) == (error, text)
    lived_on = with_child and Path(f"/proc/{int(pid.item())}").exists()
    link.close()
    dist.group.WORLD.get_group_store().set(f"seen by {rank}", "")
    if with_child and rank == 0:
        dist.group.WORLD.get_group_store().wait(["seen by 2"])
        os.kill(int(pid.item()), signal.SIGKILL)
    return error, text, rank, seconds, lived_on


@pytest.mark.parametrize("with_child", [False, True], ids=["alone", "with a forked child"])
@timing
def test_a_killed_rank_is_named_by_all_survivors_within_two_seconds(with_child: bool) -> None:
    ended = outcomes(lose_rank_1, 3, with_child=with_child)
    assert ended[1].exitcode == -signal.SIGKILL
    for survivor in (ended[0], ended[2]):
        error, text, rank, seconds, lived_on = survivor.value
        assert error == "PeerLost" and text.startswith(f"rank {rank} lost rank 1: ")
        assert "ended without a goodbye" in text and "at step 0" in text
        assert seconds < 2.0
        assert lived_on == with_child


def wait_again(rank: int, kind: str) -> tuple[str, float]:
    link = KINDS[kind](timeout=0.3)
    received, error = number(), ""
    if rank == 0:
        work = link.post(received, 1)
        error, _ = raised_by(work.wait)
    dist.barrier()
    if rank == 1:
        link.send(number(4.0), 0).wait()
    else:
        work.wait()
        work.wait()
    dist.barrier()
    link.close()
    return error, received.item()


@both_links
def test_after_a_timeout_one_may_wait_again(kind: str) -> None:
    assert run_ranks(wait_again, 2, kind=kind)[0] == ("LinkTimeout", 4.0)


def lose_rank_1_over_gloo(rank: int) -> tuple[str, str]:
    link = ProcessLink(timeout=20)
    if rank == 1:
        link.post(number(), 0).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    work = link.post(number(), 1)
    link.send(number(), 1).wait()
    return raised_by(work.wait)


def test_process_names_a_killed_rank_that_it_waits_for() -> None:
    ended = outcomes(lose_rank_1_over_gloo, 2)
    assert ended[1].exitcode == -signal.SIGKILL
    error, text = ended[0].value
    assert error == "PeerLost" and text.startswith("rank 0 lost rank 1 at step 0 ")


def talk_to_nobody(rank: int, kind: str) -> int:
    link = KINDS[kind](timeout=20)
    link.close()
    return link.world_size


@both_links
def test_a_world_of_one_is_a_world(kind: str) -> None:
    assert run_ranks(talk_to_nobody, 1, kind=kind) == [1]


def fork_and_go_on(rank: int) -> tuple[str, float]:
    link = TcpLink(timeout=20)
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, raised_by(link.send(number(), 1 - rank).wait)[1].encode())
        link.close()
        os._exit(0)
    os.wait()
    wait_all([link.send(number(rank), 1 - rank), link.post(received := number(), 1 - rank)])
    link.close()
    return os.read(reading, 1000).decode(), received.item()


def test_a_forked_child_neither_uses_nor_ends_its_parents_connections() -> None:
    (told, received), _ = run_ranks(fork_and_go_on, 2)
    assert "stayed with the parent" in told and received == 1.0


def abort_on_rank_2(rank: int) -> list[tuple[str, str]]:
    link = TcpLink(timeout=30)
    link.moment = Moment(5, "dense", "ring")
    if rank == 2:
        link.abort("the disk is full " + "é" * 2000)
        return [raised_by(link.post(number(), 0).wait)]
    works = [link.post(number(), peer) for peer in others(link)]
    return [raised_by(work.wait) for work in works]


def test_an_abort_reaches_every_wait_on_every_peer() -> None:
    *survivors, aborted = run_ranks(abort_on_rank_2, 3)
    for errors in survivors:
        for error, text in errors:
            assert error == "RemoteError"
            assert text.startswith("rank 2 failed: the disk is full é") and "at step 5 (ring, plan dense)" in text
            assert len(text) < 1200
    assert aborted[0][0] == "LinkError" and "rank 2 aborted" in aborted[0][1]


def hear_of_a_loss(rank: int) -> tuple[str, str]:
    link = TcpLink(timeout=20)
    if rank == 0:  # has seen nothing itself, and learns from rank 1 what happened to rank 2
        work = link.post(number(), 1)
        link.post(number(), 2).wait()
        link.send(number(), 1).wait()
        result = raised_by(work.wait)
    elif rank == 1:
        link.post(number(), 0).wait()
        loss = connection.lost(1, 2, "the wire: it is cut")
        link._fail(loss.error, loss.farewell)
        result = raised_by(link.post(number(), 0).wait)
    else:
        link.send(number(), 0).wait()
        result = raised_by(link.post(number(), 0).wait)
    dist.barrier()
    link.close()
    return result


def test_a_loss_that_one_rank_sees_is_known_to_all() -> None:
    (error_0, text_0), (error_1, _), (error_2, text_2) = run_ranks(hear_of_a_loss, 3)
    assert error_0 == error_1 == error_2 == "PeerLost"
    assert text_0.startswith("rank 0 lost rank 2: the wire: it is cut;")
    assert text_2.startswith("rank 2 lost rank 1: ") or text_2.startswith("rank 2 lost rank 0: ")


def leave_early(rank: int) -> tuple[str, str, float]:
    link = TcpLink(timeout=30)
    received = number()
    if rank == 1:
        for peer in (0, 2):
            link.send(number(7.0), peer)
        link.close()
        return "", "", 7.0
    link.post(received, 1).wait()
    error, text = raised_by(link.post(number(), 1).wait)
    wait_all([link.send(number(), 2 - rank), link.post(number(), 2 - rank)])  # a goodbye harms nobody else
    link.close()
    return error, text, received.item()


def test_a_goodbye_ends_only_the_waits_for_whoever_said_it() -> None:
    for error, text, received in run_ranks(leave_early, 3)[::2]:
        assert error == "PeerLost" and "rank 1 has closed its link" in text
        assert received == 7.0


def close_with_much_to_send(rank: int) -> bool:
    link = TcpLink(timeout=30)
    received = torch.zeros(4_000_000)
    if rank == 0:
        link.send(torch.ones(4_000_000), 1)
        link.close()
        return True
    link.post(received, 0).wait()
    link.close()
    return bool((received == 1).all())


def test_close_lets_queued_messages_leave() -> None:
    assert run_ranks(close_with_much_to_send, 2) == [True, True]


def speak_to_someone_who_leaves(rank: int) -> tuple[str, float, float]:
    connection.MAX_EARLY_BYTES = 0
    link = TcpLink(timeout=30)
    store = dist.group.WORLD.get_group_store()
    received = torch.zeros(250_000)
    if rank == 1:
        raw_socket(link, 0).setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    dist.barrier()
    start = time.monotonic()
    if rank == 0:
        link.send(torch.ones(250_000), 1).wait()  # the kernel has taken all of it, the peer hardly anything
        store.set("leaving", "")
        start = time.monotonic()
        link.close()
        return "", 0.0, time.monotonic() - start
    store.wait(["leaving"])
    time.sleep(0.2)  # a close that does not wait would be over
    link.send(number(), 0)
    time.sleep(0.2)  # and its answer would be here
    error, _ = raised_by(link.post(received, 0).wait)
    link.close()
    return error, received.sum().item(), time.monotonic() - start


def test_what_was_sent_arrives_even_if_the_peer_speaks_to_someone_who_leaves() -> None:
    (_, _, closing), (error, received, _) = run_ranks(speak_to_someone_who_leaves, 2)
    assert (error, received) == ("", 250_000)
    assert 0.2 < closing < 3


def leave_someone_who_does_not_listen(rank: int) -> float:
    connection.MAX_EARLY_BYTES = 0
    tcp.CLOSE_SECONDS = 0.5
    link = TcpLink(timeout=30)
    start = time.monotonic()
    if rank == 0:
        link.send(torch.ones(10_000_000), 1)
        link.close()
    seconds = time.monotonic() - start
    dist.barrier()
    link.close()
    return seconds


@timing
def test_close_gives_up_on_a_peer_that_takes_nothing() -> None:
    assert 0.5 <= run_ranks(leave_someone_who_does_not_listen, 2)[0] < 3


def close_in_turn(rank: int) -> list[float]:
    seconds = []
    for everybody_at_once in (True, False) * 5:
        link = TcpLink(timeout=20)
        wait_all([work for peer in others(link) for work in (link.send(number(), peer), link.post(number(), peer))])
        dist.barrier()
        for turn in range(link.world_size):
            if turn == rank or everybody_at_once:
                start = time.monotonic()
                link.close()
                seconds.append(time.monotonic() - start)
            if not everybody_at_once:
                dist.barrier()
    return seconds


@timing
def test_closing_takes_milliseconds_whoever_goes_first() -> None:
    for seconds in run_ranks(close_in_turn, 3):
        assert sorted(seconds)[len(seconds) // 2] < 0.1 and max(seconds) < 1.0


def build_many(rank: int) -> tuple[int, int]:
    counts = []
    for _ in range(5):
        TcpLink(timeout=20).close()
        counts.append(len(util._finalizer_registry))
    return counts[0], counts[-1]


def test_a_closed_link_leaves_nothing_behind_for_the_end_of_the_process() -> None:
    for first, last in run_ranks(build_many, 2):
        assert first == last


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


# --- coming together


def build_two_of_three(rank: int) -> tuple[str, str]:
    if rank == 2:
        return "", ""
    return raised_by(lambda: TcpLink(timeout=1.0))


def test_ranks_that_do_not_come_are_named() -> None:
    for error, text in run_ranks(build_two_of_three, 3)[:2]:
        assert error == "LinkTimeout" and text.endswith("missing rank 2.")


def call_a_stranger_first(rank: int) -> float:
    strangers = []
    if rank == 1:
        host, port = dist.group.WORLD.get_group_store().get("thinwire/tcp/1/address/0").decode().split()
        for words in (b"GET / HTTP/1.0\r\n\r\n" * 10, MAGIC, b"", os.urandom(5000), bytes(HELLO_BYTES)):
            strangers.append(socket.create_connection((host, int(port))))
            strangers[-1].sendall(words)
    link = TcpLink(timeout=20)
    wait_all([link.send(number(rank), 1 - rank), link.post(received := number(), 1 - rank)])
    link.close()
    for stranger in strangers:
        stranger.close()
    return received.item()


def test_strangers_at_the_listener_do_not_disturb() -> None:
    assert run_ranks(call_a_stranger_first, 2) == [1.0, 0.0]


class Listening:
    """Rank 0 of 3, waiting for ranks 1 and 2 in a thread."""

    hello = Hello(b"this-run", 0, 3)

    def __enter__(self) -> Listening:
        meeting = rendezvous._Meeting(self.hello, time.monotonic() + 20, 20)
        self.listener = rendezvous._listen("127.0.0.1", 3)
        self.sockets: dict[int, socket.socket] = {}
        self.thread = threading.Thread(target=rendezvous._accept, args=(self.listener, self.sockets, meeting))
        self.thread.start()
        return self

    def call(self, words: bytes) -> socket.socket:
        caller = socket.create_connection(self.listener.getsockname(), timeout=10)
        caller.sendall(words)
        return caller

    def rank_joins(self, rank: int) -> None:
        with self.call(encode_hello(self.hello._replace(rank=rank))) as caller:
            assert decode_hello(caller.recv(HELLO_BYTES)) == self.hello

    def __exit__(self, *_: object) -> None:
        self.rank_joins(2)
        self.thread.join()
        assert set(self.sockets) == {1, 2}
        for each in (self.listener, *self.sockets.values()):
            each.close()


STRANGERS = {
    "garbage": b"\xff" * HELLO_BYTES,
    "another version": MAGIC + b"\x63" + encode_hello(Listening.hello._replace(rank=2))[5:],
    "another run": encode_hello(Hello(b"that-run", 2, 3)),
    "another world size": encode_hello(Hello(b"this-run", 2, 4)),
    "a rank out of range": encode_hello(Hello(b"this-run", 3, 3)),
    "a rank that should be called": encode_hello(Hello(b"this-run", 0, 3)),
    "a rank that is there already": encode_hello(Hello(b"this-run", 1, 3)),
}


@pytest.mark.parametrize("words", STRANGERS.values(), ids=STRANGERS)
def test_a_caller_with_a_wrong_hello_is_hung_up_on(words: bytes) -> None:
    with Listening() as listening:
        listening.rank_joins(1)
        with listening.call(words) as stranger:
            assert stranger.recv(1) == b""


def test_a_silent_caller_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "HELLO_SECONDS", 0.1)
    with Listening() as listening:
        listening.rank_joins(1)
        with listening.call(MAGIC) as stranger:
            assert stranger.recv(1) == b""


def test_hundreds_of_silent_callers_keep_nobody_out() -> None:
    with Listening() as listening:
        callers = [listening.call(b"") for _ in range(400)]
        listening.rank_joins(1)
        for caller in callers:
            caller.close()


def test_an_unknown_interface_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0,lo")
    with pytest.raises(ValueError, match=r"'nowhere0'; this host has .*\blo\b"):
        address.own_address()


def test_the_interface_or_the_way_to_the_master_gives_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert address.own_address() == "127.0.0.1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert address.own_address() == "127.0.0.1"


def test_the_store_leads_to_the_peers_when_no_master_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    with LoopbackStore() as running:
        store = dist.PrefixStore("group", dist.PrefixStore("default", dist.TCPStore("127.0.0.1", running.port)))
        assert address.own_address(store) == "127.0.0.1"


def test_a_way_out_of_this_host_is_preferred_to_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(address, "_host_of", lambda store: store)
    monkeypatch.setattr(address, "_address_towards", {"localhost": "127.0.0.1", "a": "10.0.0.1", "b": "10.0.0.2"}.get)
    for store, master, chosen in (
        ("localhost", "a", "10.0.0.1"),
        ("a", "localhost", "10.0.0.1"),
        ("a", "b", "10.0.0.1"),
        ("localhost", "localhost", "127.0.0.1"),
    ):
        monkeypatch.setenv("MASTER_ADDR", master)
        assert address.own_address(store) == chosen


def test_a_rank_that_cannot_be_reached_is_named_with_its_address() -> None:
    meeting = rendezvous._Meeting(Hello(b"this-run", 1, 2), time.monotonic() + 0.2, 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
    with pytest.raises(LinkTimeout, match=rf"could not connect to {host} port {port} within 0\.2 s: missing rank 0\."):
        rendezvous._connect((host, port), 0, meeting)
    with rendezvous._listen("127.0.0.1", 2) as silent, pytest.raises(LinkTimeout) as caught:
        rendezvous._accept(silent, {}, meeting._replace(hello=Hello(b"this-run", 0, 2)))
    assert "was not called at 127.0.0.1 port " in str(caught.value) and str(caught.value).endswith("missing rank 1.")


def test_loopback_beside_a_real_address_is_refused_with_the_ranks_and_the_way_out() -> None:
    with pytest.raises(RuntimeError, match=r"ranks 0, 2 .*127\.0\.1\.1.* rank 1 .*GLOO_SOCKET_IFNAME"):
        address.refuse_mixed_loopback({0: "127.0.1.1", 1: "10.0.0.7", 2: "127.0.1.1"})
    address.refuse_mixed_loopback({0: "127.0.0.1", 1: "127.0.0.1"})
    address.refuse_mixed_loopback({0: "10.0.0.7", 1: "fd00::7"})


# --- the end of the interpreter

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from thinwire.link.tcp import TcpLink

torch.set_num_threads(1)
rank, port = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=2)
link = TcpLink(timeout=30)
link.send(torch.ones(3), 1 - rank).wait()
link.post(torch.ones(3), 1 - rank).wait()
"""


def run_programs(text: str) -> list[tuple[int, str]]:
    """Two interpreters of their own; their exit codes and what they wrote to stderr."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    with LoopbackStore() as store:
        programs = [
            subprocess.Popen(
                [sys.executable, "-c", text, str(rank), str(store.port)],
                stderr=subprocess.PIPE,
                env=environment,
                text=True,
            )
            for rank in range(2)
        ]
        errors = [program.communicate(timeout=60)[1] for program in programs]
    return [(program.returncode, error) for program, error in zip(programs, errors, strict=True)]


def test_a_link_that_nobody_closed_is_closed_silently_at_exit() -> None:
    assert run_programs(PROGRAM) == [(0, ""), (0, "")]


def test_an_exception_that_ends_one_rank_is_what_the_others_read() -> None:
    ending = textwrap.dedent("""
        if rank == 1:
            raise ValueError("no such file")
        link.post(torch.ones(3), 1).wait()
    """)
    (code_0, text_0), (code_1, _) = run_programs(PROGRAM + ending)
    assert code_0 == code_1 == 1
    assert "RemoteError: rank 1 failed: ValueError: no such file" in text_0


@pytest.mark.parametrize("leave", ["sys.exit()", "sys.exit(3)"])
def test_a_rank_that_exits_is_named_by_those_who_still_need_it(leave: str) -> None:
    ending = textwrap.dedent(f"""
        if rank == 1:
            {leave}
        link.post(torch.ones(3), 1).wait()
    """)
    (_, text_0), _ = run_programs(PROGRAM + ending)
    assert "PeerLost: rank 1 has closed its link" in text_0


def exit_on_rank_1(rank: int) -> tuple[str, str]:
    link = TcpLink(timeout=20)
    if rank == 1:
        raise SystemExit(5)
    return raised_by(link.post(number(), 1).wait)


def test_a_process_of_multiprocessing_tells_of_its_exit_too() -> None:
    error, text = outcomes(exit_on_rank_1, 2)[0].value
    assert error == "RemoteError" and text.startswith("rank 1 failed: SystemExit: ")


def test_every_link_error_is_a_link_error() -> None:
    for kind in (LinkTimeout, PeerLost, PlanMismatch, RemoteError):
        assert issubclass(kind, LinkError)
