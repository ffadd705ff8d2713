"""What both links promise between real processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.process.launch import RankFailed, outcomes, run_ranks
from tests.process.links import KINDS, both_links, number, others, raised_by, wait_all
from tests.timing import timing
from thinwire.errors import LinkError, LinkTimeout, PeerLost, PlanMismatch, RemoteError
from thinwire.link import connection
from thinwire.link.frames import DTYPES
from thinwire.types import Moment

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


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


def talk_to_nobody(rank: int, kind: str) -> int:
    link = KINDS[kind](timeout=20)
    link.close()
    return link.world_size


@both_links
def test_a_world_of_one_is_a_world(kind: str) -> None:
    assert run_ranks(talk_to_nobody, 1, kind=kind) == [1]


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


def test_every_link_error_is_a_link_error() -> None:
    for kind in (LinkTimeout, PeerLost, PlanMismatch, RemoteError):
        assert issubclass(kind, LinkError)
