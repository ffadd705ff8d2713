"""Ranks are processes of a torch.distributed group, and messages travel point to point over it. Nothing to configure.

Two things about gloo shape this file. A pending operation never reports that it has finished: somebody has to block in
its wait, where Ctrl-C is not heard, so a helper thread does, and the caller waits for that thread. And gloo matches
messages by tag and believes their size: a longer message than expected kills the process. So the tag is made of
everything that both ends must agree on, and a message that they do not agree on is never matched: it ends in a
`LinkTimeout` that names the peer.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from functools import lru_cache

import torch
import torch.distributed as dist

from thinwire.errors import LinkError, LinkTimeout, PeerLost
from thinwire.link.address import own_address
from thinwire.link.base import LOOK_UP_SECONDS, Link, Reading, Work, check_timeout, where
from thinwire.link.tcp_info import Deliveries, Seen, connections
from thinwire.types import Moment

_TAGS = 2**31
_READINGS_BETWEEN_QUESTIONS = 16  # to the store, for which host each rank is on


class ProcessLink(Link):
    """One rank of a torch.distributed group.

    gloo does not tell when the last byte came, so a wait gives up `timeout` seconds after it began, however much has
    come by then. After that the process group may be unusable.

    Hold on to every work until it was waited on: gloo cancels a send that nobody remembers.

    With NCCL, tensors on GPUs go the same way and their waits order the GPU's stream instead of blocking. NCCL has no
    tags, so it checks nothing. Untested.

    Args:
        group: the process group; None for all ranks.
        timeout: seconds after which a wait gives up.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = 300.0) -> None:
        check_timeout(timeout)
        if not dist.is_initialized() or dist.get_rank(group) < 0:
            raise ValueError("a ProcessLink needs an initialised process group that this rank is a member of.")
        super().__init__(dist.get_rank(group), dist.get_world_size(group), timeout)
        self.group = group or dist.group.WORLD
        self._sent_to = [0] * self.world_size
        self._posted_from = [0] * self.world_size
        self._idle_waiters: list[_Waiter] = []
        self._rank_on: dict[str, int] | None = None  # by address; None until all ranks have told theirs
        self._readings = 0
        self._deliveries = Deliveries()
        self._tell_address()

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        """Let the helper threads go. The process group is not ours to close."""
        while self._idle_waiters:
            self._idle_waiters.pop().dismiss()

    # --- measuring

    def read_out(self) -> Reading:
        """What the kernel knows of this process's connections, gloo's among them, by the peer's host. Linux only."""
        if self._rank_on is None and self._readings % _READINGS_BETWEEN_QUESTIONS == 0:
            self._rank_on = self._ask_addresses()
        self._readings += 1
        seen = connections()
        trips = self._round_trips(seen)
        to_peers = [each for each in seen if each.host in (self._rank_on or {})]
        stretch = self._deliveries.since(to_peers or seen)
        return Reading(tuple(trips.items()), (stretch,) if stretch else ())

    def _round_trips(self, seen: list[Seen]) -> dict[int, float]:
        """Of the connection to each peer that had to wait least; rank -1 where several ranks are on one host."""
        trips: dict[int, float] = {}
        for host, _, info in seen:
            peer = (self._rank_on or {}).get(host, -1)
            if info.round_trip > 0:
                trips[peer] = min(info.round_trip, trips.get(peer, info.round_trip))
        if any(peer >= 0 for peer in trips):
            trips.pop(-1, None)
        return trips

    def _tell_address(self) -> None:
        """Measuring is optional, so whatever keeps us from it is not an error."""
        assert self.group is not None, "or this rank would not be a member"
        try:
            store = self.group.get_group_store()
            store.set(f"thinwire/process/address/{self.rank}", own_address(store))
        except (AttributeError, OSError, RuntimeError, ValueError):
            self._rank_on = {}

    def _ask_addresses(self) -> dict[str, int] | None:
        assert self.group is not None
        keys = [f"thinwire/process/address/{rank}" for rank in range(self.world_size)]
        try:
            store = self.group.get_group_store()
            if not store.check(keys):
                return None
            hosts = [host.decode() for host in store.multi_get(keys)]
        except RuntimeError:
            return {}
        return {host: rank for rank, host in enumerate(hosts) if Counter(hosts)[host] == 1 and rank != self.rank}

    # --- messages

    def _send(self, tensor: torch.Tensor, dst: int) -> Work:
        tag = _tag(self.moment, tensor, self._sent_to[dst])
        self._sent_to[dst] += 1
        try:
            pending = dist.isend(tensor.detach(), group=self.group, group_dst=dst, tag=tag)
        except RuntimeError as error:
            raise self._translated(error, dst, self.moment, is_send=True) from error
        return _Transfer(self, pending, tensor, dst, self.moment, is_send=True)

    def _post(self, tensor: torch.Tensor, src: int) -> Work:
        tag = _tag(self.moment, tensor, self._posted_from[src])
        self._posted_from[src] += 1
        try:
            pending = dist.irecv(tensor.detach(), group=self.group, group_src=src, tag=tag)
        except RuntimeError as error:
            raise self._translated(error, src, self.moment, is_send=False) from error
        return _Transfer(self, pending, tensor, src, self.moment, is_send=False)

    def _translated(self, error: RuntimeError, peer: int, moment: Moment, is_send: bool) -> LinkError:
        """gloo tells what happened only in words."""
        if "timed out" in str(error).lower():
            return self._not_taken(peer, moment) if is_send else self._timed_out(peer, moment)
        return PeerLost(
            f"rank {self.rank} lost rank {peer} {where(moment)}: {str(error).splitlines()[0]}",
            rank=self.rank,
            peer=peer,
        )

    def _not_taken(self, peer: int, moment: Moment) -> LinkTimeout:
        return LinkTimeout(
            f"rank {peer} did not take rank {self.rank}'s message for {self.timeout:g} s {where(moment)}.",
            rank=self.rank,
            peer=peer,
        )


@lru_cache(maxsize=4096)
def _kind(moment: Moment, dtype: torch.dtype, nbytes: int) -> int:
    facts = repr((*moment, str(dtype), nbytes)).encode()
    return int.from_bytes(hashlib.blake2b(facts, digest_size=4).digest(), "big")


def _tag(moment: Moment, tensor: torch.Tensor, sequence: int) -> int:
    """Added rather than hashed in, so that messages of one kind under way at the same time never share a tag."""
    return (_kind(moment, tensor.dtype, tensor.nbytes) + sequence) % _TAGS


class _Transfer(Work):
    def __init__(
        self,
        link: ProcessLink,
        pending: dist.Work | None,
        tensor: torch.Tensor,
        peer: int,
        moment: Moment,
        is_send: bool,
    ) -> None:
        assert pending is not None, "this rank is a member of the group"
        self._link, self._peer, self._moment, self._is_send = link, peer, moment, is_send
        self._pending: dist.Work | None = pending
        self._waiter: _Waiter | None = None  # gloo allows one wait per operation: whoever began it must end it
        self._tensor = tensor  # gloo knows its address and nothing else

    def wait(self) -> None:
        if self._pending is None:
            return
        try:
            if self._tensor.is_cpu:
                self._wait_in_helper(self._pending)
            else:
                self._pending.wait()  # orders the stream of the thread that calls it, so it must be this one
        except RuntimeError as error:
            raise self._link._translated(error, self._peer, self._moment, self._is_send) from error
        self._pending = None

    def _wait_in_helper(self, pending: dist.Work) -> None:
        """Wait where Ctrl-C is heard. What gloo raises is raised here."""
        idle = self._link._idle_waiters
        if self._waiter is None:
            self._waiter = idle.pop() if idle else _Waiter()
            self._waiter.ask(pending)
        try:
            if not self._waiter.answers_within(self._link.timeout):
                late = self._link._not_taken if self._is_send else self._link._timed_out
                raise late(self._peer, self._moment)
        except BaseException:
            self._waiter.dismiss()
            raise
        if not self._waiter.dismissed:
            idle.append(self._waiter)
        if self._waiter.error is not None:
            raise self._waiter.error


class _Waiter:
    """A thread that blocks so that the caller need not. One that is dismissed while it blocks ends with its work."""

    def __init__(self) -> None:
        self.error: RuntimeError | None = None
        self.dismissed = False
        self._pending: dist.Work | None = None
        self._asked = threading.Semaphore(0)
        self._answered = threading.Event()
        threading.Thread(target=self._run, name="thinwire-waiter", daemon=True).start()

    def ask(self, pending: dist.Work) -> None:
        self._answered.clear()
        self.error, self._pending = None, pending
        self._asked.release()

    def answers_within(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while not self._answered.is_set() and (left := deadline - time.monotonic()) > 0:
            self._answered.wait(min(left, LOOK_UP_SECONDS))
        return self._answered.is_set()

    def dismiss(self) -> None:
        self.dismissed = True
        self._asked.release()

    def _run(self) -> None:
        while True:
            self._asked.acquire()
            pending, self._pending = self._pending, None
            if pending is None:
                return
            try:
                pending.wait()
            except RuntimeError as error:
                self.error = error
            # The last to let go of a work ends it, which takes the interpreter's lock in the middle of C++. This thread
            # may outlive the interpreter, and would then bring down the process; the caller holds it for longer.
            del pending
            self._answered.set()
