"""The virtual clock and its wire."""

from __future__ import annotations

import pytest
import torch

from thinwire.errors import LinkTimeout, PlanMismatch
from thinwire.link.thread import ThreadLink, ThreadWorld
from thinwire.types import Moment, Network


def test_a_message_takes_alpha_and_beta_for_each_byte() -> None:
    def program(link: ThreadLink) -> float:
        if link.rank == 0:
            link.send(torch.zeros(25), 1).wait()
        else:
            link.post(torch.zeros(25), 0).wait()
        return link.now()

    assert ThreadWorld(2, Network(alpha=2.0, beta=0.5)).run(program) == [0.0, 2.0 + 0.5 * 100]


def test_messages_leave_a_host_one_after_the_other() -> None:
    def program(link: ThreadLink) -> float:
        piece = torch.zeros(10, dtype=torch.uint8)
        if link.rank == 0:
            for peer in (1, 2):
                link.send(piece, peer).wait()
        else:
            link.post(piece, 0).wait()
        return link.now()

    assert ThreadWorld(3, Network(alpha=1.0, beta=1.0)).run(program) == [0.0, 11.0, 21.0]


def test_messages_enter_a_host_in_the_order_their_first_bytes_come() -> None:
    def program(link: ThreadLink) -> tuple[float, ...]:
        piece = torch.zeros(10, dtype=torch.uint8)
        if link.rank == 2:
            first, second = link.post(piece, 0), link.post(piece.clone(), 1)
            second.wait()
            then = link.now()
            first.wait()
            return then, link.now()
        link.compute(5.0 if link.rank == 0 else 3.0)
        link.send(piece, 2).wait()
        return ()

    assert ThreadWorld(3, Network(alpha=1.0, beta=1.0)).run(program)[2] == (14.0, 24.0)


def test_messages_fill_receives_in_order_whether_posted_before_or_after() -> None:
    def program(link: ThreadLink) -> list[float]:
        if link.rank == 0:
            for i in range(6):
                link.send(torch.tensor([float(i)]), 1).wait()
            return []
        tensors = [torch.zeros(1) for _ in range(6)]
        ahead = [link.post(t, 0) for t in tensors[:3]]
        for work in reversed(ahead):
            work.wait()
        for t in tensors[3:]:
            link.post(t, 0).wait()
        return [t.item() for t in tensors]

    assert ThreadWorld(2, Network(alpha=1.0, beta=0.0)).run(program)[1] == [0, 1, 2, 3, 4, 5]


def test_a_wait_that_nothing_can_end_names_rank_peer_step_and_collective() -> None:
    def program(link: ThreadLink) -> None:
        link.moment = Moment(step=7, plan="p", collective="ring all-reduce")
        if link.rank == 1:
            link.post(torch.zeros(1), 0).wait()

    with pytest.raises(LinkTimeout, match=r"rank 1 heard nothing from rank 0 .* step 7 \(ring all-reduce") as caught:
        ThreadWorld(2).run(program)
    assert (caught.value.rank, caught.value.peer) == (1, 0)


def test_a_message_later_than_the_timeout_is_not_waited_for() -> None:
    def program(link: ThreadLink) -> None:
        if link.rank == 0:
            link.compute(10.0)
            link.send(torch.zeros(1), 1).wait()
        else:
            link.post(torch.zeros(1), 0).wait()

    with pytest.raises(LinkTimeout):
        ThreadWorld(2, timeout=9.0).run(program)
    ThreadWorld(2, timeout=11.0).run(program)


@pytest.mark.parametrize(
    ("field", "moment", "tensor"),
    [
        ("plan", Moment(3, "b", "c"), torch.zeros(2)),
        ("step", Moment(4, "a", "c"), torch.zeros(2)),
        ("collective", Moment(3, "a", "d"), torch.zeros(2)),
        ("dtype", Moment(3, "a", "c"), torch.zeros(1, dtype=torch.float64)),
        ("size in bytes", Moment(3, "a", "c"), torch.zeros(3)),
    ],
)
def test_a_message_of_another_plan_is_refused_by_field(field: str, moment: Moment, tensor: torch.Tensor) -> None:
    target = torch.full((2,), 9.0)

    def program(link: ThreadLink) -> None:
        if link.rank == 0:
            link.moment = moment
            link.send(tensor, 1).wait()
        else:
            link.moment = Moment(3, "a", "c")
            link.post(target, 0).wait()

    with pytest.raises(PlanMismatch, match=f"rank 0 sent rank 1 a message with {field}"):
        ThreadWorld(2).run(program)
    assert torch.equal(target, torch.full((2,), 9.0))


def test_the_first_rank_to_fail_is_the_one_that_is_heard() -> None:
    def program(link: ThreadLink) -> None:
        if link.rank == 2:
            raise KeyError("rank 2's own trouble")
        link.post(torch.zeros(1), 2).wait()

    with pytest.raises(KeyError, match="own trouble"):
        ThreadWorld(3).run(program)


@pytest.mark.parametrize("peer", [-1, 0, 2])
def test_a_peer_that_does_not_exist_is_the_callers_mistake(peer: int) -> None:
    with pytest.raises(ValueError, match=f"rank {peer}"):
        ThreadWorld(2).links[0].send(torch.zeros(1), peer)


def test_a_message_that_is_not_contiguous_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        ThreadWorld(2).links[0].send(torch.zeros(4, 4)[:, 0], 1)
