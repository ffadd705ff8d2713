"""What a link notices of the network between real processes, and that measuring disturbs nothing."""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable

import pytest
import torch

from tests.process.launch import outcomes, run_ranks
from tests.timing import timing
from thinwire.errors import LinkError
from thinwire.link import connection, frames, pace
from thinwire.link.base import Reading
from thinwire.link.frames import FRAME_BYTES, PING, PONG, FrameError, Header, decode_header, encode_header
from thinwire.link.process import ProcessLink
from thinwire.link.tcp import TcpLink
from thinwire.link.tcp_info import connections

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells when a byte came, and TCP_INFO")


def tensor(size: int = 1, value: float = 0.0) -> torch.Tensor:
    return torch.full((size,), float(value))


def swap(link: TcpLink | ProcessLink, size: int = 1) -> None:
    """A message to and from every other rank; after it, all have come this far."""
    others = [peer for peer in range(link.world_size) if peer != link.rank]
    works = [link.post(tensor(size), peer) for peer in others]
    works += [link.send(tensor(size), peer) for peer in others]
    for work in works:
        work.wait()


def trips_to(link: TcpLink, peer: int, number: int, pause: float = 0.005, limit: float = 10.0) -> list[float]:
    """At least so many round trips, one after the other."""
    found: list[float] = []
    deadline = time.monotonic() + limit
    while len(found) < number and time.monotonic() < deadline:
        link.probe([peer])
        time.sleep(pause)
        found += [seconds for _, seconds in link.read_out().round_trips]
    return found


# --- round trips


def probe_a_computing_peer(rank: int, compute: Callable[[float], None], number: int, pause: float) -> list[float]:
    link = TcpLink(timeout=20)
    swap(link)
    if rank == 0:
        found = trips_to(link, 1, number, pause)
        link.send(tensor(), 1).wait()
    else:
        found = []
        done = link.post(tensor(), 0)
        compute(1.0)
        done.wait()
    link.close()
    return found


def compute_in_python(seconds: float) -> None:
    end, total = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        total += sum(i * i for i in range(100))


def compute_without_letting_go(seconds: float) -> None:
    """Nothing else in this process runs for some 20 ms at a time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1_000_000))


@timing
def test_a_peer_that_computes_answers() -> None:
    found, _ = run_ranks(probe_a_computing_peer, 2, compute=compute_in_python, number=20, pause=0.005)
    assert len(found) >= 20
    assert min(found) < 0.003


@linux
@timing
def test_the_time_for_which_a_probe_lay_with_a_busy_peer_is_left_out() -> None:
    found, _ = run_ranks(probe_a_computing_peer, 2, compute=compute_without_letting_go, number=5, pause=0.2)
    assert len(found) >= 5
    assert sorted(found)[2] < 0.01  # each lay there for several turns of 20 ms


def probe_after_a_wrong_rate(rank: int) -> list[float]:
    link = TcpLink(timeout=20)
    swap(link)
    link.meter.rate = 1.0  # byte per second: by that, what follows would take days to leave
    swap(link, 10_000)
    found = trips_to(link, 1 - rank, number=5)
    swap(link)
    link.close()
    return found


@linux
def test_a_rate_that_was_far_too_low_does_not_end_the_probing() -> None:
    for found in run_ranks(probe_after_a_wrong_rate, 2):
        assert len(found) >= 5


def probe_without_stamps(rank: int) -> list[float]:
    connection.ask_for_stamps = lambda sock: False
    connection.age_of = lambda extras: None
    link = TcpLink(timeout=20)
    for _ in range(3):
        swap(link, 1_000_000)
    found = trips_to(link, 1 - rank, number=5)
    link.read_out()
    swap(link)
    link.close()
    return found


@timing
def test_round_trips_are_seen_where_the_kernel_tells_no_times() -> None:
    for found in run_ranks(probe_without_stamps, 2):
        assert len(found) >= 5 and min(found) < 0.005


# --- messages there and back


def talk_and_think(rank: int, thinks: float) -> tuple[list[tuple[int, float, int]], float]:
    """Messages to and fro, of which rank 1 answers each after a while; what rank 0 saw, and how long that took."""
    link = TcpLink(timeout=20)
    start = time.monotonic()
    for _ in range(5):
        if rank == 1:
            work = link.post(tensor(100), 0)
            work.wait()
            time.sleep(thinks)
            link.send(tensor(100), 0).wait()
        else:
            work = link.post(tensor(100), 1)
            link.send(tensor(100), 1).wait()
            work.wait()
    took = time.monotonic() - start
    echoes = list(link.read_out().echoes)
    assert link.read_out().echoes == () and link.probe_bytes == 0
    swap(link)
    link.close()
    return echoes, took


@timing
def test_messages_tell_how_long_a_round_trip_takes_without_the_time_for_which_the_other_side_thinks() -> None:
    (echoes, took), (others, _) = run_ranks(talk_and_think, 2, thinks=0.05)
    assert took >= 0.25 and [(peer, nbytes) for peer, _, nbytes in echoes] == [(1, 2 * (400 + FRAME_BYTES))] * 5
    assert 0 < min(seconds for _, seconds, _ in echoes) <= max(seconds for _, seconds, _ in echoes) < 0.02
    assert len(others) == 4 and max(seconds for _, seconds, _ in others) < 0.02  # the first answered nothing


def talk_and_think_for_long(rank: int) -> list[tuple[int, float, int]]:
    pace.LAY_UNIT = 0.05 / pace.NEVER  # longer than this is long
    return talk_and_think(rank, thinks=0.1)[0]


def test_what_lay_for_long_tells_nothing_since_two_hosts_clocks_do_not_run_alike() -> None:
    echoes, _ = run_ranks(talk_and_think_for_long, 2)
    assert echoes == []


def talk_alone(rank: int) -> tuple[list[int], int]:
    """More messages than are remembered, and then one back; how many bytes the one had that this tells of."""
    link = TcpLink(timeout=20)
    connection = link._connections[1 - rank]
    connection._frames_sent = connection._frames_begun = frames.SEQUENCES - 5  # of which some come after the last
    for size in range(1, 2 * pace.MOST_SENT):
        if rank == 0:
            link.send(tensor(size), 1).wait()
        else:
            link.post(tensor(size), 0).wait()
    if rank == 0:
        link.post(tensor(), 1).wait()
    else:
        link.send(tensor(), 0).wait()
    found = [nbytes for _, _, nbytes in link.read_out().echoes]
    swap(link)
    link.close()
    return found, len(connection.echoes._sent)


@timing
def test_of_a_monologue_the_newest_messages_are_remembered() -> None:
    (found, remembered), _ = run_ranks(talk_alone, 2)
    last = 2 * pace.MOST_SENT - 1
    assert found == [4 * last + 4 + 2 * FRAME_BYTES] and remembered <= 1


# --- what it costs


def count_probes(rank: int) -> tuple[int, int, int, int, int]:
    link = TcpLink(timeout=20)
    swap(link)
    before = link.sent_bytes, link.sent_messages
    noted = 0
    for _ in range(5):
        link.probe(range(link.world_size))  # itself left out
        time.sleep(0.05)
        noted += link.read_out().probe_bytes
    swap(link)
    noted += link.read_out().probe_bytes
    total = link.probe_bytes
    link.close()
    return link.sent_bytes - before[0], link.sent_messages - before[1], noted, total, link.header_bytes


def test_probes_are_counted_apart_from_messages() -> None:
    for sent_bytes, sent_messages, noted, total, header_bytes in run_ranks(count_probes, 3):
        assert (sent_bytes, sent_messages) == (8, 2)
        assert noted == total and total % header_bytes == 0
        assert 0 < total <= 5 * 2 * 2 * FRAME_BYTES  # five times two pings, and as many answers


def probe_between_messages(rank: int) -> bool:
    link = TcpLink(timeout=20)
    peer = 1 - rank
    right = True
    for i in range(300):
        received = tensor(1 + 50 * i)
        work = link.post(received, peer)
        link.probe([peer])
        sent = link.send(tensor(1 + 50 * i, value=i), peer)
        link.probe([peer])
        work.wait()
        sent.wait()
        right &= bool((received == i).all())
        if i % 10 == 0:
            time.sleep(0.003)
        link.read_out()
    link.close()
    return right and link.probe_bytes > 0


def test_probes_between_messages_disturb_none_of_them() -> None:
    assert run_ranks(probe_between_messages, 2) == [True, True]


def receive_much(rank: int) -> Reading:
    link = TcpLink(timeout=20)
    for _ in range(5):
        swap(link, 8_000_000)
    reading = link.read_out()
    assert link.read_out() == Reading()
    link.close()
    return reading


def test_what_comes_in_has_a_rate_that_a_machine_can_have() -> None:
    for reading in run_ranks(receive_much, 2):
        assert reading.stretches and reading.probe_bytes == 0
        for nbytes, seconds in reading.stretches:
            assert 0 < nbytes <= 5 * 32_000_000
            assert 1e7 < nbytes / seconds < 1e11


# --- when something ends


def close_with_probes_on_the_way(rank: int) -> list[str]:
    errors = []
    for i in range(20):
        link = TcpLink(timeout=10)
        swap(link)
        link.probe([peer for peer in range(3) if peer != rank])
        if i % 2:
            time.sleep(0.001 * rank)
        link.close()
        link.probe([(rank + 1) % 3])
        link.read_out()
        if "has closed its link" not in str(link.failure):
            errors.append(str(link.failure))
    return errors


def test_links_close_in_peace_with_probes_on_the_way() -> None:
    assert run_ranks(close_with_probes_on_the_way, 3) == [[], [], []]


def last_words_after_probes(rank: int) -> float:
    """Rank 1 is probed, sends something large and leaves at once; rank 0 must still get all of it."""
    link = TcpLink(timeout=10)
    swap(link)
    received = tensor(2_000_000)
    if rank == 1:
        link.send(tensor(2_000_000, value=7), 0)
    else:
        for _ in range(10):
            link.probe([1])
            time.sleep(0.002)
        link.post(received, 1).wait()
    link.close()
    return float(received.min())


def test_what_a_leaving_rank_has_sent_arrives_although_it_is_being_probed() -> None:
    assert run_ranks(last_words_after_probes, 2)[0] == 7


def be_killed_while_probed(rank: int) -> tuple[str, float]:
    link = TcpLink(timeout=30)
    swap(link)
    if rank == 1:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        while time.monotonic() < start + 5:
            link.probe([1])
            link.read_out()
            if link.failure is not None:
                link.post(tensor(), 1).wait()
            time.sleep(0.002)
    except LinkError as error:
        return type(error).__name__, time.monotonic() - start
    return "", 0.0


@timing
def test_a_killed_peer_is_found_by_the_next_wait_and_never_by_a_probe() -> None:
    survivor, killed = outcomes(be_killed_while_probed, 2)
    assert killed.exitcode == -signal.SIGKILL
    name, seconds = survivor.value
    assert name == "PeerLost" and seconds < 2


def wait_for_a_rank_that_only_probes(rank: int) -> str:
    link = TcpLink(timeout=0.7)
    swap(link)
    if rank == 1:
        end = time.monotonic() + 2
        while time.monotonic() < end:
            link.probe([0])
            time.sleep(0.005)
        return ""
    try:
        link.post(tensor(), 1).wait()
    except LinkError as error:
        return type(error).__name__
    return "a message"


def test_probes_do_not_make_a_silent_rank_look_alive() -> None:
    assert run_ranks(wait_for_a_rank_that_only_probes, 2)[0] == "LinkTimeout"


def fork_while_probing(rank: int) -> tuple[int, int]:
    link = TcpLink(timeout=20)
    swap(link)
    link.probe([1 - rank])
    child = os.fork()
    if child == 0:
        link.probe([1 - rank])
        os._exit(0 if link.read_out().stretches == () and link.tcp_infos() == {} else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found = trips_to(link, 1 - rank, number=3)
    swap(link)
    link.close()
    return code, len(found)


def test_a_forked_child_measures_nothing_and_its_parent_goes_on() -> None:
    for code, found in run_ranks(fork_while_probing, 2):
        assert code == 0 and found >= 3


# --- frames


def header(kind: int, nbytes: int = 0) -> bytes:
    return encode_header(Header(kind, 0, bytes(8), 0, 1, bytes(8), bytes(8), nbytes))


@pytest.mark.parametrize("kind", [PING, PONG])
def test_a_probe_with_a_payload_is_refused(kind: int) -> None:
    assert decode_header(header(kind), bytes(8), 0).kind == kind
    with pytest.raises(FrameError, match="a probe of 1 bytes"):
        decode_header(header(kind, nbytes=1), bytes(8), 0)


def test_the_time_for_which_a_probe_was_held_survives_the_way() -> None:
    for seconds in (0.0, 1.5e-6, 0.25, 1e4):
        answer = Header(PONG, 0, bytes(8), 0, 1, frames.encode_held(seconds), bytes(8), 0)
        assert frames.decode_held(answer) == pytest.approx(seconds, abs=1e-9)
    assert frames.encode_held(-1.0) == frames.encode_held(0.0)


# --- what the kernel knows


def ask_the_kernel(rank: int) -> tuple[list[int], bool, int]:
    link = TcpLink(timeout=20)
    for _ in range(5):
        swap(link, 100_000)
    infos = link.tcp_infos()
    sane = all(0 < info.least_round_trip <= info.round_trip < 1 and info.bytes_acked > 0 for info in infos.values())
    swap(link)
    link.close()
    return sorted(infos), sane, len(link.tcp_infos())


@linux
def test_a_tcp_link_tells_what_the_kernel_knows_of_each_peer() -> None:
    assert run_ranks(ask_the_kernel, 3) == [([1, 2], True, 0), ([0, 2], True, 0), ([0, 1], True, 0)]


def read_out_gloo(rank: int) -> tuple[Reading, int, bool]:
    link = ProcessLink(timeout=20)
    swap(link, 1_000_000)
    first = link.read_out()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        link.read_out()
    left = len(os.listdir("/proc/self/fd")) - before
    swap(link)
    works = link.read_out().probe_bytes == 0
    link.close()
    return first, left, works


@linux
def test_gloos_connections_are_looked_at_and_left_as_they_were() -> None:
    for first, left, works in run_ranks(read_out_gloo, 2):
        assert [peer for peer, _ in first.round_trips] == [-1], (
            "both ranks are on this host, so nobody knows whose it is"
        )
        assert 0 < first.round_trips[0][1] < 1
        assert left == 0 and works


@linux
def test_only_connections_are_found_among_the_descriptors() -> None:
    before = {seen.inode for seen in connections()}
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as other:
        with socket.create_connection(server.getsockname()) as caller:
            found = [seen for seen in connections() if seen.inode not in before]
            assert [seen.host for seen in found] == ["127.0.0.1"]
            assert caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
            assert not struct.unpack("i", other.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR, 4))[0]


@linux
def test_a_default_timeout_keeps_us_from_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        assert connections()
        monkeypatch.setattr(socket, "getdefaulttimeout", lambda: 5.0)
        assert connections() == []
