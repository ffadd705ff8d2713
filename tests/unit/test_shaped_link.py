"""A link with a latency and a rate, over any other."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.process.launch import run_ranks
from thinwire.collectives.ring import RingAllReduce
from thinwire.errors import PeerLost, ThinwireWarning
from thinwire.link.base import Done, Link, Work
from thinwire.link.shaped import ShapedLink
from thinwire.link.tcp import TcpLink
from thinwire.train.sync import Synchronizer
from thinwire.types import Moment, Network

WIRE = Network(alpha=0.02, beta=1e-6)
LATE = 0.015  # what a busy machine may add to a wait


class Recorder(Link):
    """Remembers what was sent, and when."""

    def __init__(self) -> None:
        super().__init__(rank=0, world_size=3, timeout=5.0)
        self.sent: list[tuple[float, int, int, Moment]] = []
        self.ended = ""

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        self.ended = "closed"

    def abort(self, reason: str) -> None:
        self.ended = reason

    def _send(self, tensor: torch.Tensor, dst: int) -> Work:
        if dst == 2:
            raise PeerLost("rank 2 is gone.", rank=0, peer=2)
        self.sent.append((time.monotonic(), int(tensor[0]), dst, self.moment))
        return Done()

    def _post(self, tensor: torch.Tensor, src: int) -> Work:
        self.sent.append((time.monotonic(), -1, src, self.moment))
        return Done()


def message(value: int, nbytes: int = 1000) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def test_a_message_takes_the_latency_and_its_bytes_over_the_rate() -> None:
    wire = Recorder()
    link = ShapedLink(wire, WIRE)
    begin = time.monotonic()
    link.send(message(1, 10_000), 1).wait()
    assert begin + 0.03 <= wire.sent[0][0] <= begin + 0.03 + LATE
    link.close()


def test_messages_leave_one_after_the_other_and_in_order() -> None:
    wire = Recorder()
    link = ShapedLink(wire, WIRE)
    begin = time.monotonic()
    works = [link.send(message(i, 5_000), 1) for i in range(10)]
    for work in works:
        work.wait()
    assert [value for _, value, _, _ in wire.sent] == list(range(10))
    for i, (moment, _, _, _) in enumerate(wire.sent):
        assert begin + 0.02 + 0.005 * (i + 1) <= moment <= begin + 0.02 + 0.005 * (i + 1) + LATE
    assert (link.sent_bytes, link.sent_messages) == (50_000, 10)
    link.close()


def test_a_send_does_not_block_and_carries_its_own_moment() -> None:
    wire = Recorder()
    link = ShapedLink(wire, WIRE)
    link.moment = Moment(step=7)
    sending = link.send(message(1), 1)
    link.moment = Moment(step=8)
    link.post(message(0), 1).wait()
    sending.wait()
    assert [(value, moment.step) for _, value, _, moment in wire.sent] == [(-1, 8), (1, 7)]
    link.close()


def test_order_is_kept_when_the_network_becomes_faster() -> None:
    wire = Recorder()
    link = ShapedLink(wire, WIRE)
    link.send(message(1), 1)
    link.network = Network(alpha=0.0, beta=0.0)
    link.send(message(2), 1).wait()
    assert [value for _, value, _, _ in wire.sent] == [1, 2]
    link.close()


def test_what_the_wrapped_link_raises_is_raised_by_wait() -> None:
    link = ShapedLink(Recorder(), WIRE)
    lost = link.send(message(1), 2)
    with pytest.raises(PeerLost):
        lost.wait()
    link.close()


def test_closing_sends_what_waits_and_closes_what_is_wrapped() -> None:
    wire = Recorder()
    link = ShapedLink(wire, WIRE)
    link.send(message(1), 1)
    link.close()
    link.close()
    assert len(wire.sent) == 1 and wire.ended == "closed"
    with pytest.raises(RuntimeError, match="closed"):
        link.send(message(1), 1)


def test_aborting_drops_what_waits() -> None:
    wire = Recorder()
    link = ShapedLink(wire, Network(alpha=30.0, beta=0.0))
    begin = time.monotonic()
    waiting = link.send(message(1), 1)
    link.abort("enough")
    assert (wire.sent, wire.ended) == ([], "enough")
    assert time.monotonic() - begin < 5
    with pytest.raises(RuntimeError, match="before the message was sent"):
        waiting.wait()


def reduce_over_a_slow_wire(rank: int) -> dict[str, Any]:
    link = ShapedLink(TcpLink(), Network(alpha=0.02, beta=1e-7))
    x = torch.full((10_000,), float(rank + 1))
    begin = time.monotonic()
    RingAllReduce().run(link, x)
    seconds = time.monotonic() - begin
    link.close()
    return {"sum": x[0].item(), "seconds": seconds}


@pytest.mark.process
def test_a_collective_over_real_connections_is_right_and_takes_its_price() -> None:
    for result in run_ranks(reduce_over_a_slow_wire, 2):
        assert result["sum"] == 3.0
        assert 0.04 <= result["seconds"] <= 0.04 + 4 * LATE + 0.02


def train_by_what_it_measures(rank: int, shaped: bool) -> tuple[list[str], str]:
    link: Link = ShapedLink(TcpLink(), Network(alpha=0.005, beta=1e-8)) if shaped else TcpLink()
    net = nn.Linear(20, 20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sync = Synchronizer(net, link=link)
    for _ in range(5):
        net(torch.ones(1, 20)).sum().backward()
        sync.average_gradients()
    sync.close()
    return [str(each.message) for each in caught if each.category is ThinwireWarning], str(sync.plan)


@pytest.mark.process
def test_that_adaptive_stays_dense_since_nothing_is_measured_over_it_is_said_once_on_every_rank() -> None:
    for words, plan in run_ranks(train_by_what_it_measures, 2, shaped=True):
        assert plan == "dense over torch" and len(words) == 1
        assert words[0].startswith("ShapedLink has measured nothing of the network, so adaptive has nothing to go by")
        assert "it stays with dense over torch" in words[0]
    assert [words for words, _ in run_ranks(train_by_what_it_measures, 2, shaped=False)] == [[], []]
