"""What two ranks measure of the path between them, with plain sockets and in bounded time.

The lower rank leads. They talk over one connection that only ever carries a few bytes at a time, so that it works where
large packets vanish, and measure beside it:
    round trips         over that connection; the least of a few
    sizes of packets    datagrams that may not be cut up, the largest first, each answered by a small one
    rates               a stream of a fraction of a second each way, timed where it comes in
    losses              numbered small datagrams, both ways at once

Two hosts' clocks are never compared. But each round trip also tells when the other end got it by its own clock, and
around a circle of three hosts the clocks cancel out (findings.py).
"""

from __future__ import annotations

import bisect
import itertools
import json
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from thinwire.link.meter import STAMP_BYTES, age_of, ask_for_stamps, fastest_part

PAIR_SECONDS = 5.0  # for all that two ranks do together
MEET_SECONDS = 2.0  # of these, until they are connected
HELLO_SECONDS = 0.5  # that a caller may take to say who it is
PINGS = 6
WINDOW_TRIPS, LEAST_WINDOW, MOST_WINDOW = 10, 0.12, 0.6  # round trips and seconds that a stream lasts
DRAIN_SECONDS = 0.6  # after which a stream that has not ended is cut off
WAITING_BYTES = 32 << 10  # that the kernel holds before it sends them: they come after the end of a stream
SUSPICIOUS = 2.5  # times faster one way than the other: measured again, because a busy machine looks like this too
SIZES = (576, 1280, 1400, 1420, 1450, 1480, 1492, 1500, 2000, 4000, 8000, 8900)  # bytes of packets that paths let pass
LARGEST_PACKET = 65_535
SIZE_TRIES, SIZE_SECONDS = 2, 0.1  # the time besides some round trips
LOSS_PACKETS, LOSS_BYTES, LOSS_SECONDS = 150, 100, 0.06
GRACE_SECONDS = 0.02  # for what comes late
LINE_BYTES = 4096  # the longest that one end says to the other

# Python has no names for these. With the last, packets may not be cut up, and no earlier experience counts.
_DISCOVER = {socket.AF_INET: (socket.IPPROTO_IP, 10), socket.AF_INET6: (socket.IPPROTO_IPV6, 23)}
_PATH_MTU = {socket.AF_INET: (socket.IPPROTO_IP, 14), socket.AF_INET6: (socket.IPPROTO_IPV6, 24)}
_DO_NOT_CUT_UP = 3
_HEADERS = {socket.AF_INET: 28, socket.AF_INET6: 48}  # of IP and UDP
_MARK = struct.Struct("!8scI")  # of a datagram: whose run, what for, and which
_SIZE, _ANSWER, _COUNTED = b"s", b"a", b"c"


class Place(NamedTuple):
    """Where a rank can be found: one address, a port for connections and one for datagrams."""

    rank: int
    address: str
    port: int
    datagram_port: int
    mtu: int | None
    machine: str

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.address else socket.AF_INET


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


class PairError(Exception):
    """The two did not come to an end together."""


class Post:
    """The sockets at which a rank can be found, for as long as a `with` block lasts."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.listener = socket.socket(family)
        self.datagrams = socket.socket(family, socket.SOCK_DGRAM)
        self.listener.bind((address, 0))
        self.listener.listen(64)
        self.datagrams.bind((address, 0))
        self.datagrams.setblocking(False)
        if sys.platform == "linux":
            self.datagrams.setsockopt(*_DISCOVER[family], _DO_NOT_CUT_UP)

    def __enter__(self) -> Post:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()
        self.datagrams.close()

    @property
    def ports(self) -> tuple[int, int]:
        return self.listener.getsockname()[1], self.datagrams.getsockname()[1]


class Line:
    """A connection over which two ranks say a few words at a time, until a deadline.

    Attributes:
        came_at: when the last words came to this host, however long it took until they were read.
    """

    def __init__(self, sock: socket.socket, peer: int, deadline: float) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ask_for_stamps(sock)
        self.sock, self.peer, self.deadline = sock, peer, deadline
        self.came_at = 0.0
        self._heard = b""

    def say(self, **words: Any) -> None:
        self._bound()
        try:
            self.sock.sendall(json.dumps(words).encode() + b"\n")
        except OSError as error:
            raise self._broken(error) from error

    def hear(self) -> dict[str, Any]:
        while b"\n" not in self._heard:
            self._bound()
            try:
                more, extras, _, _ = self.sock.recvmsg(LINE_BYTES, STAMP_BYTES)
            except OSError as error:
                raise self._broken(error) from error
            if not more or len(self._heard) > LINE_BYTES:
                raise PairError(f"rank {self.peer} hung up.")
            self.came_at = _time_of(extras)
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        words = json.loads(line)
        if not isinstance(words, dict):
            raise PairError(f"rank {self.peer} said what makes no sense.")
        return words

    @property
    def has_words(self) -> bool:
        return b"\n" in self._heard

    def _bound(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise PairError(f"rank {self.peer} was not heard from in time.")
        self.sock.settimeout(left)

    def _broken(self, error: OSError) -> PairError:
        if isinstance(error, TimeoutError):
            return PairError(f"rank {self.peer} was not heard from in time.")
        return PairError(f"the connection to rank {self.peer} broke ({error.strerror or error}).")


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
        self._token = bytes.fromhex(run)[:8]
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
            said = _first_line(sock, min(until, time.monotonic() + HELLO_SECONDS))
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
                self.seen = replace(self.seen, packet=max(passed), known=self._path_mtu())
        line.say(done=True)

    def _answered(self, sizes: list[int], wanted: int, patience: float) -> set[int]:
        """Which of these sizes reach the peer, by its answers; done when the wanted one has, or it takes too long."""
        passed: set[int] = set()
        for _ in range(SIZE_TRIES):
            for size in sizes:
                self._send(_SIZE, size, size - _HEADERS[self._me.family])
            until = time.monotonic() + patience
            while wanted not in passed and (left := until - time.monotonic()) > 0:
                select.select([self._post.datagrams], [], [], left)
                passed |= set(self._numbers(_ANSWER))
        return passed

    def _answer_sizes(self, line: Line) -> None:
        for size in self._numbers_until_words(line, _SIZE):
            self._send(_ANSWER, size, 0)
        line.hear()

    def _path_mtu(self) -> int | None:
        with socket.socket(self._peer.family, socket.SOCK_DGRAM) as probe:
            probe.connect((self._peer.address, self._peer.datagram_port))
            try:
                return probe.getsockopt(*_PATH_MTU[self._peer.family])
            except OSError:
                return None

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
        """For so long, as much as the path takes."""
        piece = bytes(WAITING_BYTES)
        try:
            with self._call("stream", time.monotonic() + MEET_SECONDS) as sock:
                if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, WAITING_BYTES)
                until = time.monotonic() + window
                while (left := until - time.monotonic()) > 0:
                    sock.settimeout(left)
                    sock.send(piece)
        except OSError:
            pass  # the time is over, or the peer has given up; it says what came

    def _take_stream(self, window: float) -> None:
        """What comes within the time that it should; a better measurement of before stays."""
        with ExitStack() as stack:
            sock = stack.enter_context(self._answer("stream", time.monotonic() + MEET_SECONDS))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # the rest may be forgotten
            arrivals = _arrivals(sock, time.monotonic() + window + DRAIN_SECONDS)
        rate, moved = _rates(arrivals, filled=window < MOST_WINDOW)
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
            while (left := start + number * pause - time.monotonic()) > 0:
                select.select([self._post.datagrams], [], [], left)
                came |= set(self._numbers(_COUNTED))
            self._send(_COUNTED, number, LOSS_BYTES - _HEADERS[self._me.family])
        line.say(sent=packets)
        came |= set(self._numbers_until_words(line, _COUNTED, grace=round_trip / 2 + GRACE_SECONDS))
        line.hear()
        self.seen = replace(self.seen, lost=1 - len(came) / packets if packets else None)

    # --- datagrams

    def _send(self, kind: bytes, number: int, nbytes: int) -> None:
        """One datagram of so many bytes. One that cannot leave is as good as lost."""
        try:
            data = _MARK.pack(self._token, kind, number).ljust(nbytes, b"\0")
            self._post.datagrams.sendto(data, (self._peer.address, self._peer.datagram_port))
        except OSError:
            pass

    def _numbers(self, kind: bytes) -> Iterator[int]:
        """The numbers of the peer's datagrams of this kind that have come."""
        while True:
            try:
                data, source = self._post.datagrams.recvfrom(LARGEST_PACKET)
            except OSError:  # no more
                return
            if len(data) >= _MARK.size and source[:2] == (self._peer.address, self._peer.datagram_port):
                token, what, number = _MARK.unpack_from(data)
                if (token, what) == (self._token, kind):
                    yield number

    def _numbers_until_words(self, line: Line, kind: bytes, grace: float = 0.0) -> Iterator[int]:
        """Those that come until the peer says something over the line, and a little longer."""
        while not line.has_words:
            left = max(0.0, self._deadline - time.monotonic())
            ready, _, _ = select.select([self._post.datagrams, line.sock], [], [], left)
            yield from self._numbers(kind)
            if line.sock in ready or not left:
                break
        until = time.monotonic() + grace
        while (left := until - time.monotonic()) > 0:
            select.select([self._post.datagrams], [], [], left)
            yield from self._numbers(kind)


def _first_line(sock: socket.socket, until: float) -> Any:
    """What a caller says first, byte by byte: the rest of its stream is to be timed."""
    said = b""
    while not said.endswith(b"\n") and len(said) < LINE_BYTES:
        sock.settimeout(max(0.01, until - time.monotonic()))
        more = sock.recv(1)
        if not more:
            break
        said += more
    return json.loads(said)


def _time_of(extras: list[tuple[int, int, bytes]]) -> float:
    """When what was read came to this host.

    Its age is asked for first: whoever has to wait for the processor between the two then finds it later than it was,
    as anything else would, and never earlier.
    """
    age = age_of(extras) or 0.0
    return time.monotonic() - age


def _arrivals(sock: socket.socket, until: float) -> list[tuple[float, int]]:
    """When bytes came and how many, to the end of the stream or of the time. The first entry is the beginning."""
    ask_for_stamps(sock)
    room = [memoryview(bytearray(1 << 20))]
    arrivals = [(time.monotonic(), 0)]
    while (left := until - time.monotonic()) > 0:
        sock.settimeout(left)
        try:
            received, extras, _, _ = sock.recvmsg_into(room, STAMP_BYTES)
        except OSError:
            break
        if not received:
            break
        arrivals.append((_time_of(extras), received))
    return arrivals


def _rates(arrivals: list[tuple[float, int]], filled: bool) -> tuple[float | None, float | None]:
    """What the path carries and what was moved over the whole stream; None if too little came to tell.

    The former is the rate of the second half of the bytes. On a path that TCP cannot fill in the time it is the rate at
    which they came fastest, if that is more.

    >>> [round(rate) for rate in _rates([(0.0, 0), (0.01, 500), (0.02, 1000), (0.03, 1000)], filled=True)]
    [100000, 83333]
    >>> _rates([(0.0, 0)], filled=True)
    (None, None)
    """
    times, came = [at for at, _ in arrivals], list(itertools.accumulate(nbytes for _, nbytes in arrivals))
    half = bisect.bisect_left(came, came[-1] / 2)
    if len(arrivals) < 3 or times[-1] <= times[half]:
        return None, None
    rate = (came[-1] - came[half]) / (times[-1] - times[half])
    if not filled:
        # The first bytes came in an unknown time.
        pieces = [(times[i - 1], max(times[i - 1], times[i]), arrivals[i][1]) for i in range(2, len(arrivals))]
        part = fastest_part(np.array(pieces, dtype=np.float64))
        rate = max(rate, part.nbytes / part.seconds) if part is not None else rate
    return rate, came[-1] / (times[-1] - times[0])
