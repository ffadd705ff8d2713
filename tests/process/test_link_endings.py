"""Peers that fail, die or leave, and what the others read."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from multiprocessing import util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.process.launch import LoopbackStore, outcomes, run_ranks
from tests.process.links import number, others, raised_by, raw_socket, wait_all
from tests.timing import timing
from thinwire.link import connection, failure, tcp
from thinwire.link.process import ProcessLink
from thinwire.link.tcp import TcpLink
from thinwire.types import Moment

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


# --- peers that fail or die


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
        loss = failure.lost(1, 2, "the wire: it is cut")
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
    # From rank 1, or from rank 2, which has heard that it is lost and gives up rank 1, if that is there first.
    assert re.match(r"rank 0 lost rank [12]: the wire: it is cut;", text_0)
    assert text_2.startswith("rank 2 lost rank 1: ") or text_2.startswith("rank 2 lost rank 0: ")


# --- peers that leave


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
