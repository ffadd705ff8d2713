"""What two ranks measure of the path between them, with plain sockets and in bounded time.

The lower rank leads. They talk over one connection that only ever carries a few bytes at a time, so that it works where
large packets vanish, and measure beside it:
    round trips         over that connection; the least of a few
    sizes of packets    datagrams that may not be cut up, the largest first, each answered by a small one
    rates               a stream of a fraction of a second each way, timed where it comes in
    losses              numbered small datagrams, both ways at once

Two hosts' clocks are never compared. But each round trip also tells when the other end got it by its own clock, and
around a circle of three hosts the clocks cancel out (findings/network.py).
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from thinwire.jobs.doctor import stream
from thinwire.jobs.doctor.datagrams import ANSWER, COUNTED, LARGEST_PACKET, SIZE, Datagrams, open_socket
from thinwire.jobs.doctor.line import Line, PairError, first_line

PAIR_SECONDS = 5.0  # for all that two ranks do together
MEET_SECONDS = 2.0  # of these, until they are connected
HELLO_SECONDS = 0.5  # that a caller may take to say who it is
PINGS = 6
WINDOW_TRIPS, LEAST_WINDOW, MOST_WINDOW = 10, 0.12, 0.6  # round trips and seconds that a stream lasts
DRAIN_SECONDS = 0.6  # after which a stream that has not ended is cut off
SUSPICIOUS = 2.5  # times faster one way than the other: measured again, because a busy machine looks like this too
SIZES = (576, 1280, 1400, 1420, 1450, 1480, 1492, 1500, 2000, 4000, 8000, 8900)  # bytes of packets that paths let pass
SIZE_TRIES, SIZE_SECONDS = 2, 0.1  # the time besides some round trips
LOSS_PACKETS, LOSS_BYTES, LOSS_SECONDS = 150, 100, 0.06
GRACE_SECONDS = 0.02  # for what comes late


class Place(NamedTuple):
    """Where a rank can be found: one address, a port for connections and one for datagrams."""

    rank: int
    address: str
    port: int
    datagram_port: int
    mtu: int | None
    machine: str


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank found out about the path between it and a peer; None where it did not.

    Attributes:
        failure: why there is no more, as a sentence.
        round_trip: seconds. Only the lower rank of the two measures it.
        ahead: seconds that the way to the peer seems longer than the way back, with the clocks' difference in it twice.
        rate: bytes per second at which the peer's bytes came once TCP had filled the path: what it carries.
        moved: bytes per second over the whole stream: what TCP made of it.
        packet: bytes of the largest packet that reached the peer, at most the interface's.
        known: bytes of the largest packet by which the kernel goes on this path.
        lost: the share of the peer's small packets that did not come.
    """

    peer: int
    failure: str = ""
    round_trip: float | None = None
    ahead: float | None = None
    rate: float | None = None
    moved: float | None = None
    packet: int | None = None
    known: int | None = None
    lost: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Seen:
        return cls(**data)


class Post:
    """The sockets at which a rank can be found, for as long as a `with` block lasts."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.listener = socket.socket(family)
        self.listener.bind((address, 0))
        self.listener.listen(64)
        self.datagrams = open_socket(address, family)

    def __enter__(self) -> Post:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()
        self.datagrams.close()

    @property
    def ports(self) -> tuple[int, int]:
        return self.listener.getsockname()[1], self.datagrams.getsockname()[1]


def examine(post: Post, me: Place, peer: Place, run: str) -> Seen:
    """Measure the path between two ranks; both call this at about the same time. Never raises, and never hangs."""
    meeting = _Meeting(post, me, peer, run, time.monotonic() + PAIR_SECONDS)
    try:
        with meeting.line() as line:
            meeting.measure(line)
    except (PairError, OSError, ValueError, KeyError, TypeError) as error:
        return replace(meeting.seen, failure=f"rank {me.rank} and rank {peer.rank}: {error}")
    return meeting.seen


class _Meeting:
    """What two ranks do together, from the side of one of them."""

    def __init__(self, post: Post, me: Place, peer: Place, run: str, deadline: float) -> None:
        self.seen = Seen(peer=peer.rank)
        self._post, self._me, self._peer, self._run, self._deadline = post, me, peer, run, deadline
        self._datagrams = Datagrams(post.datagrams, (peer.address, peer.datagram_port), bytes.fromhex(run))
        self._leads = me.rank < peer.rank

    def measure(self, line: Line) -> None:
        round_trip = self._ping(line) if self._leads else self._be_pinged(line)
        for mine in (self._leads, not self._leads):
            self._try_sizes(line, round_trip) if mine else self._answer_sizes(line)
        window = min(max(WINDOW_TRIPS * round_trip, LEAST_WINDOW), MOST_WINDOW)
        if self._stream_both_ways(line, window):
            self._stream_both_ways(line, window)
        self._count_losses(line, round_trip)
        line.say(done=True)
        line.hear()

    # --- coming together

    @contextmanager
    def line(self) -> Iterator[Line]:
        until = time.monotonic() + MEET_SECONDS
        with self._call("talk", until) if self._leads else self._answer("talk", until) as sock:
            yield Line(sock, self._peer.rank, self._deadline)

    def _call(self, what: str, until: float) -> socket.socket:
        """Connect to the peer and say who we are."""
        target = (self._peer.address, self._peer.port)
        try:
            sock = socket.create_connection(target, timeout=max(0.01, until - time.monotonic()))
        except OSError as error:
            how = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
            raise PairError(
                f"rank {self._me.rank} cannot connect to rank {self._peer.rank} at {target[0]} port {target[1]}: {how}."
            ) from error
        try:
            Line(sock, self._peer.rank, until).say(run=self._run, rank=self._me.rank, what=what)
        except PairError:
            sock.close()
            raise
        return sock

    def _answer(self, what: str, until: float) -> socket.socket:
        """Wait for the peer's call; hang up on anybody else."""
        while (left := until - time.monotonic()) > 0:
            self._post.listener.settimeout(left)
            try:
                sock, _ = self._post.listener.accept()
            except TimeoutError:
                break
            if self._is_the_one(sock, what, until):
                return sock
            sock.close()
        raise PairError(
            f"rank {self._me.rank} was not called by rank {self._peer.rank} at {self._me.address} port {self._me.port}."
        )

    def _is_the_one(self, sock: socket.socket, what: str, until: float) -> bool:
        try:
            said = first_line(sock, min(until, time.monotonic() + HELLO_SECONDS))
        except (OSError, ValueError):
            return False
        return bool(said == {"run": self._run, "rank": self._peer.rank, "what": what})

    # --- round trips

    def _ping(self, line: Line) -> float:
        trips, ways = [], []
        for number in range(PINGS):
            sent = time.monotonic()
            line.say(ping=number)
            answer = line.hear()
            back = line.came_at
            heard, said = float(answer["heard"]), float(answer["said"])
            trips.append(back - sent - (said - heard))
            ways.append((heard - sent, back - said))
        there, back = (min(column) for column in zip(*ways, strict=True))
        line.say(round_trip=min(trips))
        self.seen = replace(self.seen, round_trip=min(trips), ahead=there - back)
        return min(trips)

    def _be_pinged(self, line: Line) -> float:
        for _ in range(PINGS):
            line.hear()
            line.say(heard=line.came_at, said=time.monotonic())
        return float(line.hear()["round_trip"])

    # --- sizes of packets

    def _try_sizes(self, line: Line, round_trip: float) -> None:
        """The interface's size first: where that passes, as it should, nothing else is sent."""
        full = min(self._me.mtu or 0, LARGEST_PACKET)
        if full and sys.platform == "linux" and self._me.machine != self._peer.machine:
            patience = SIZE_SECONDS + 3 * round_trip
            passed = self._answered([full, SIZES[0]], full, patience)
            if full not in passed:
                passed |= self._answered([*(size for size in SIZES if size < full), full], full, patience)
            if passed:
                self.seen = replace(self.seen, packet=max(passed), known=self._datagrams.path_mtu())
        line.say(done=True)

    def _answered(self, sizes: list[int], wanted: int, patience: float) -> set[int]:
        """Which of these sizes reach the peer, by its answers; done when the wanted one has, or it takes too long."""
        passed: set[int] = set()
        for _ in range(SIZE_TRIES):
            for size in sizes:
                self._datagrams.send(SIZE, size, size)
            until = time.monotonic() + patience
            while wanted not in passed and self._datagrams.wait(until):
                passed |= set(self._datagrams.numbers(ANSWER))
        return passed

    def _answer_sizes(self, line: Line) -> None:
        for size in self._datagrams.numbers_until_words(SIZE, line):
            self._datagrams.send(ANSWER, size)
        line.hear()

    # --- rates

    def _stream_both_ways(self, line: Line, window: float) -> bool:
        """One way after the other; say whether they differ so much that it should be done again."""
        for mine in (self._leads, not self._leads):
            if mine:
                line.hear()
                self._send_stream(window)
            else:
                line.say(ready=True)
                self._take_stream(window)
        line.say(moved=self.seen.moved)
        both = (self.seen.moved or 0.0, line.hear()["moved"] or 0.0)
        return max(both) > SUSPICIOUS * min(both)

    def _send_stream(self, window: float) -> None:
        try:
            with self._call("stream", time.monotonic() + MEET_SECONDS) as sock:
                stream.send(sock, window)
        except OSError:
            pass  # the time is over, or the peer has given up; it says what came

    def _take_stream(self, window: float) -> None:
        """What comes within the time that it should; a better measurement of before stays."""
        with self._answer("stream", time.monotonic() + MEET_SECONDS) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # the rest may be forgotten
            arrivals = stream.take(sock, time.monotonic() + window + DRAIN_SECONDS)
        rate, moved = stream.rates(arrivals, filled=window < MOST_WINDOW)
        if moved is not None and moved > (self.seen.moved or 0.0):
            self.seen = replace(self.seen, rate=rate, moved=moved)

    # --- losses

    def _count_losses(self, line: Line, round_trip: float) -> None:
        """Both send at an even pace, at most a quarter of what the way carries, and count what comes."""
        line.say(rate=self.seen.rate)
        pace = min(self.seen.rate or 0.0, line.hear()["rate"] or 0.0) / 4
        packets = min(LOSS_PACKETS, int(4 * pace * LOSS_SECONDS / LOSS_BYTES))
        pause = max(LOSS_SECONDS / LOSS_PACKETS, LOSS_BYTES / pace) if packets else 0.0
        came: set[int] = set()
        start = time.monotonic()
        for number in range(packets):
            came |= set(self._datagrams.numbers_until(COUNTED, start + number * pause))
            self._datagrams.send(COUNTED, number, LOSS_BYTES)
        line.say(sent=packets)
        came |= set(self._datagrams.numbers_until_words(COUNTED, line, grace=round_trip / 2 + GRACE_SECONDS))
        line.hear()
        self.seen = replace(self.seen, lost=1 - len(came) / packets if packets else None)
