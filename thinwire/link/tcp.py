"""Ranks are processes with connections of our own: self-describing frames, checked before a byte of them is used.

A full mesh, and one I/O thread that moves bytes both ways while the caller computes. A small message leaves in the
caller's own thread. Handing a received message to the waiting thread costs a few microseconds; letting the waiting
thread read the sockets itself would save them, and was not worth a second reader (bare sockets on loopback without
this link's own work: 14 against 8 microseconds one way).

A failure belongs to the whole link, because a collective needs everybody: once a peer is lost, has failed, or has sent
what it should not, every wait raises, on any peer.
"""

from __future__ import annotations

import atexit
import os
import selectors
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from multiprocessing.util import Finalize

import torch
import torch.distributed as dist

from thinwire.errors import LinkError, PlanMismatch
from thinwire.link.base import LOOK_UP_SECONDS, Link, Reading, Stretch, Work, check_timeout, where
from thinwire.link.connection import Connection
from thinwire.link.egress import Egress
from thinwire.link.failure import Failure
from thinwire.link.frames import ABORT, FRAME_BYTES, GOODBYE, Farewell
from thinwire.link.meter import QUIET_SECONDS, Meter
from thinwire.link.rendezvous import connect_mesh
from thinwire.link.tcp_info import Deliveries, TcpInfo, connections, tcp_info
from thinwire.types import Moment

CLOSE_SECONDS = 5.0  # close() gives up on a peer that takes no byte for so long
CLOSE_POLL_SECONDS = 0.002  # between looks at what a peer has taken: nothing wakes us when its last byte is there
LINGER_SECONDS, LINGER_POLL_SECONDS = 0.05, 0.005  # after a message, for probes that nobody has woken us for
DRAIN_POLL_SECONDS = 0.0003
NATIVE_SHARE = 0.1  # of what torch's collectives sent, over one connection: a ring sends it all to one neighbour
PROBING_SECONDS = 0.2  # for which a probe waits for a moment at which nothing else is on its way


class TcpLink(Link):
    """One rank of a process group, with a TCP connection to every other.

    Build it on every rank of the group, in the same order if there are several. It lives until `close()`, or until
    the interpreter ends, which closes it: with a goodbye, or, if an exception ended the program, by telling the peers
    which one.

    Waiting for a send before posting a receive is safe up to 64 MiB per peer; beyond that both ends must post first.

    Args:
        group: the process group whose ranks this link connects; None for all.
        timeout: seconds of silence after which a wait gives up, and the time that all ranks have to come together.
    """

    header_bytes = FRAME_BYTES

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = 300.0) -> None:
        check_timeout(timeout)
        group = group or dist.group.WORLD
        if group is None or dist.get_rank(group) < 0:
            raise ValueError("a TcpLink needs an initialised process group that this rank is a member of.")
        mesh = connect_mesh(group, timeout)
        super().__init__(mesh.rank, mesh.world_size, timeout)
        self.group = group
        self.meter = Meter()
        self.failure: LinkError | None = None
        self._to_probe: deque[int] = deque(maxlen=mesh.world_size)
        self._probing_until = self._served_at = 0.0
        self._probe_bytes_read = self._native_bytes_read = 0
        self._native_deliveries = Deliveries()
        self._own_sockets = {os.fstat(sock.fileno()).st_ino for sock in mesh.sockets.values()}
        self._other_hosts = {str(sock.getpeername()[0]) for sock in mesh.sockets.values()}
        self._other_hosts -= {str(sock.getsockname()[0]) for sock in mesh.sockets.values()}
        self._failing = threading.Lock()
        self._closing = False
        self._leaving_since: float | None = None  # all goodbyes are queued: the I/O thread may end when they are out
        self._connections = {
            peer: Connection(self, peer, sock, mesh.run_id) for peer, sock in sorted(mesh.sockets.items())
        }
        self._egress = Egress(mesh.sockets)
        self._selector = selectors.DefaultSelector()
        self._alarm, self._waker = socket.socketpair()
        self._alarm.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._alarm, selectors.EVENT_READ)
        self._watched: dict[int, int] = {}
        for connection in self._connections.values():
            self._watch(connection)
        _live_links.add(self)
        _watch_for_the_end()
        self._thread = threading.Thread(target=self._pump, name=f"thinwire-tcp-{self.rank}", daemon=True)
        self._thread.start()

    def now(self) -> float:
        return time.monotonic()

    def drain(self) -> None:
        """No longer than twice of what it should take at the rate that was last seen."""
        now = time.monotonic()
        deadline = now + 2 * self.meter.sends_for(now)
        while self.failure is None and now < deadline and any(c.has_unsent() for c in self._connections.values()):
            time.sleep(DRAIN_POLL_SECONDS)
            now = time.monotonic()

    def _send_together(self, messages: Sequence[tuple[torch.Tensor, int]]) -> list[Work]:
        nbytes = sum(tensor.nbytes for tensor, _ in messages)
        self._egress.share([dst for _, dst in messages], nbytes, self.moment.step)
        return super()._send_together(messages)

    def _send(self, tensor: torch.Tensor, dst: int) -> Work:
        if self.failure is not None:
            return _Doomed(self)
        connection = self._connections[dst]
        try:
            return connection.send_tensor(tensor, self.moment)
        finally:  # also when Ctrl-C comes after the message was queued
            if connection.wants_to_send:
                self._wake()

    def _post(self, tensor: torch.Tensor, src: int) -> Work:
        if self.failure is not None:
            return _Doomed(self)
        connection = self._connections[src]
        try:
            receiving = connection.post(tensor, self.moment)
        except PlanMismatch as error:
            self._fail(error, Farewell(ABORT, self.rank, str(error)))
            return _Doomed(self)
        if connection.is_held:
            self._wake()
        return receiving

    def probe(self, peers: Iterable[int], at_once: bool = True) -> None:
        """Have the I/O thread ping each peer, one after the other, as soon as no payload is on its way.

        Where there is always some, the next is asked all the same now and then, and its round trip is one of those that
        were delayed. What an earlier call has left undone is dropped. In a forked child, and after a failure, nothing
        happens.
        """
        if self.failure is None and not self._closing:
            wanted = [peer for peer in peers if peer in self._connections]
            if wanted:
                if not self._to_probe:
                    self._probing_until = time.monotonic() + PROBING_SECONDS
                self._to_probe.clear()
                self._to_probe.extend(wanted)
            if at_once:  # otherwise it is looked for a while after the last message, and nobody has to let it run now
                self._wake()

    def read_out(self) -> Reading:
        probe_bytes = self.probe_bytes
        since, self._probe_bytes_read = probe_bytes - self._probe_bytes_read, probe_bytes
        stretches = self.meter.stretches()
        if stretches:
            self._egress.note(self.meter.rate, sum(info.retransmitted for info in self.tcp_infos().values()))
        if self.native_bytes > self._native_bytes_read:
            stretches += self._native_stretches(NATIVE_SHARE * (self.native_bytes - self._native_bytes_read))
            self._native_bytes_read = self.native_bytes
        meter = self.meter
        return Reading(meter.round_trips(), stretches, since, meter.delayed(), meter.echoes())

    def _native_stretches(self, least: float) -> tuple[Stretch, ...]:
        """What the kernel knows of torch's own connections to our peers, over which nothing of ours has gone.

        Args:
            least: bytes that one must have delivered to speak for what torch sent; the store's, say, do not.
        """
        if not self._other_hosts:
            return ()
        theirs = [each for each in connections() if each.host in self._other_hosts]
        stretch = self._native_deliveries.since([t for t in theirs if t.inode not in self._own_sockets], least)
        return () if stretch is None else (stretch,)

    @property
    def probe_bytes(self) -> int:
        """Sent so far in pings and in answers to them. They are neither in `sent_bytes` nor in `sent_messages`."""
        return sum(connection.probe_bytes for connection in self._connections.values())

    def tcp_infos(self) -> dict[int, TcpInfo]:
        """What the kernel knows about the connection to each peer; nothing where it does not tell."""
        infos = {} if self._closing else {peer: tcp_info(c.socket) for peer, c in self._connections.items()}
        return {peer: info for peer, info in infos.items() if info is not None}

    def raise_failure(self, moment: Moment) -> None:
        """Raise what has ended this link, if anything has, and say what this rank was doing meanwhile."""
        failure = self.failure
        if failure is None:
            return
        text = str(failure)
        if not isinstance(failure, PlanMismatch):  # which says so itself
            text = f"{text.removesuffix('.')}; rank {self.rank} was {where(moment)}."
        # A new exception each time: one that is raised by several waits would collect all their tracebacks.
        raise type(failure)(text, rank=failure.rank, peer=failure.peer)

    def abort(self, reason: str) -> None:
        """Tell every peer that this rank has failed and why: their waits raise `RemoteError`, ours `LinkError`."""
        self._fail(self._own_failure(f"rank {self.rank} aborted: {reason}"), Farewell(ABORT, self.rank, reason))

    def close(self) -> None:
        """Say goodbye, let what is queued arrive, and close the connections. Closing twice is fine."""
        if self._closing:  # looked at without the lock, which may be held for ever in a forked child
            return
        with self._failing:
            if self._closing:
                return
            self._closing = True
        for connection in self._connections.values():
            connection.farewell(GOODBYE, b"", self.moment)
        try:
            self._leaving_since = time.monotonic()
            self._wake()
            while self._thread.is_alive():
                self._thread.join(LOOK_UP_SECONDS)
        finally:
            self._fail(self._own_failure(f"rank {self.rank} has closed its link"))
            self._drop_descriptors()
            _live_links.discard(self)

    # --- the I/O thread

    def _pump(self) -> None:
        try:
            while not self._finished():
                ready = self._selector.select(self._patience())
                if ready:
                    self._served_at = time.monotonic()
                for key, events in ready:
                    if key.data is None:
                        self._answer_alarm()
                    else:
                        self._serve(key.data, events)
                if self._to_probe:
                    self._probe_in_the_quiet()
        except Exception as error:  # ours, and nobody may wait for ever because of it
            failure = self._own_failure(f"rank {self.rank}'s link broke: {error!r}")
            self._fail(failure, Farewell(ABORT, self.rank, repr(error)))

    def _patience(self) -> float | None:
        """How long to wait for something to happen."""
        if self._leaving_since is not None:
            return CLOSE_POLL_SECONDS
        if self._to_probe:
            return QUIET_SECONDS
        return LINGER_POLL_SECONDS if time.monotonic() < self._served_at + LINGER_SECONDS else None

    def _probe_in_the_quiet(self) -> None:
        """Ping the next peer, unless payload is on its way: who waits behind that measures a queue."""
        now = time.monotonic()
        delayed = self.meets_payload(now)
        if delayed and now < self._probing_until:
            return
        self._probing_until = now + PROBING_SECONDS
        try:
            connection = self._connections[self._to_probe.popleft()]
        except IndexError:  # another thread has just begun anew
            return
        connection.ping(delayed)
        self._watch(connection)

    def meets_payload(self, at: float) -> bool:
        """Whether a probe that comes or leaves at that time shares this host's way in or out with payload.

        How long the kernel's bytes take to leave is a guess by the last rate, which may have been far too low; what the
        peers have confirmed is known to have left.
        """
        connections = self._connections.values()
        return (
            self.meter.was_receiving(at)
            or any(connection.has_unsent() for connection in connections)
            or (self.meter.sends_for(at) > 0 and any(connection.has_unacknowledged() for connection in connections))
        )

    def _serve(self, connection: Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                connection.flush()
            if events & selectors.EVENT_READ:
                connection.read()
        except Failure as failure:
            connection.give_up()
            self._fail_unless_leaving(failure.error, failure.farewell)
        except PlanMismatch as error:
            connection.give_up()
            self._fail_unless_leaving(error, Farewell(ABORT, self.rank, str(error)))
        self._watch(connection)

    def _answer_alarm(self) -> None:
        try:
            self._alarm.recv(4096)
        except BlockingIOError:
            pass
        for connection in self._connections.values():
            # A receive was posted for a frame that had to wait. If it does not belong it is refused now: the bytes that
            # it promises may never come.
            self._serve(connection, selectors.EVENT_READ if connection.is_held and connection.wants_to_read else 0)

    def _watch(self, connection: Connection) -> None:
        """Let the selector look for exactly what this connection can make use of."""
        wanted = selectors.EVENT_READ if connection.wants_to_read else 0
        wanted |= selectors.EVENT_WRITE if connection.wants_to_send else 0
        watched = self._watched.get(connection.peer, 0)
        if wanted == watched:
            return
        self._watched[connection.peer] = wanted
        if not wanted:
            self._selector.unregister(connection.socket)
        elif not watched:
            self._selector.register(connection.socket, wanted, connection)
        else:
            self._selector.modify(connection.socket, wanted, connection)

    def _finished(self) -> bool:
        """Closing, and nothing is on its way any more that a peer might still take."""
        if self._leaving_since is None:
            return False
        earliest = time.monotonic() - min(self.timeout, CLOSE_SECONDS)
        return not any(
            # A list: whoever is looked at first must not keep the others from being shut down.
            [
                connection.still_leaving() and max(connection.accepted_at, self._leaving_since) > earliest
                for connection in self._connections.values()
            ]
        )

    def _wake(self) -> None:
        try:
            self._waker.send(b"\0")
        except BlockingIOError:
            pass  # it has been woken more often than it had time to look
        except OSError:
            if not self._closing:
                raise

    # --- failing and leaving

    def _fail_unless_leaving(self, failure: LinkError, farewell: Farewell) -> None:
        """Whoever has heard our goodbye may hang up, and whoever has said goodbye has nothing to complain about."""
        if not self._closing:
            self._fail(failure, farewell)

    def _fail(self, failure: LinkError, farewell: Farewell | None = None) -> None:
        """End every wait, now and later, with the first failure, and tell the peers.

        They are told of a lost or failed rank too, although it has a connection to each of them: what we say when we
        leave because of it may come to them first, and they would think that it began with us.
        """
        if self.failure is not None:
            return
        with self._failing:
            if self.failure is not None:
                return
            self.failure = failure
            # Still under the lock: a wait that fails now may lead to close(), whose goodbye must not overtake this.
            for connection in self._connections.values():
                if farewell is not None:
                    connection.drop_unsent()
                    connection.farewell(farewell.kind, farewell.encode(), self.moment)
                connection.wake_all()
        self._wake()

    def _own_failure(self, text: str) -> LinkError:
        return LinkError(text, rank=self.rank, peer=self.rank)

    def _drop_descriptors(self) -> None:
        for connection in self._connections.values():
            connection.socket.close()  # no shutdown() here: a child's would reach through to its parent's connection
        self._selector.close()
        self._alarm.close()
        self._waker.close()

    def _forget_in_child(self) -> None:
        """A forked child must not keep its parent's connections open: nobody would see the parent die.

        No lock is taken: whoever held it does not exist here.
        """
        self._closing = True
        self.failure = self._own_failure(f"rank {self.rank}'s link stayed with the parent of this process")
        self._drop_descriptors()


class _Doomed(Work):
    """Asked for after the link had failed. It touches no lock: in a forked child, nobody might ever release it."""

    def __init__(self, link: TcpLink) -> None:
        self._link, self._moment = link, link.moment

    def wait(self) -> None:
        self._link.raise_failure(self._moment)


# --- the end of the process

_live_links: weakref.WeakSet[TcpLink] = weakref.WeakSet()
_watched_pid: int | None = None


def _watch_for_the_end() -> None:
    """Once per process; a forked child that builds a link of its own is another."""
    global _watched_pid
    if _watched_pid == os.getpid():
        return
    # Processes that multiprocessing has started end without atexit, but with this.
    Finalize(None, _close_all, exitpriority=100)
    _watched_pid = os.getpid()


def _close_all() -> None:
    reason = _what_ended_us()
    for link in list(_live_links):
        if reason is not None:
            link.abort(reason)
        link.close()


def _what_ended_us() -> str | None:
    """The exception that nobody caught, if there was one: being raised, or printed already. None if all is well.

    Of a `sys.exit` nothing is left by now, except in a process of multiprocessing; peers then see that we have left.
    """
    if hasattr(sys, "ps1"):  # at a prompt, where the last exception was only a mistake in typing
        return None
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return None
    return f"{type(error).__name__}: {error}"


def _forget_all_in_child() -> None:
    for link in list(_live_links):
        link._forget_in_child()
    _live_links.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all_in_child)
