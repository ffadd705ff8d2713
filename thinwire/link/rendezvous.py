"""How the ranks of a `TcpLink` find each other, and who may stay on the line.

Every rank listens on one address of one interface and writes it into the process group's store. A rank calls all lower
ranks and is called by all higher ones. Both ends say hello first; a caller that does not is hung up on.
"""

from __future__ import annotations

import ipaddress
import secrets
import selectors
import socket
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from thinwire.errors import LinkTimeout
from thinwire.link.address import named, own_address, refuse_mixed_loopback
from thinwire.link.base import LOOK_UP_SECONDS
from thinwire.link.frames import HELLO_BYTES, RUN_ID_BYTES, Hello, decode_hello, encode_hello

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Address = tuple[str, int]

HELLO_SECONDS = 5.0  # how long a caller may take to say hello
MAX_GUESTS = 256  # callers that have not said hello yet; beyond that the oldest makes room
POLL_SECONDS = 0.01  # between looks into the store: a blocking get would not hear Ctrl-C


class Mesh(NamedTuple):
    """This rank and a connected, non-blocking socket to every other rank."""

    rank: int
    world_size: int
    run_id: bytes
    sockets: dict[int, socket.socket]


class _Meeting(NamedTuple):
    """What every step of the rendezvous needs to know."""

    hello: Hello
    deadline: float
    timeout: float

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def missing(self, ranks: Iterable[int], what: str) -> LinkTimeout:
        absent = sorted(ranks)
        return LinkTimeout(
            f"rank {self.hello.rank} of {self.hello.world_size} {what} within {self.timeout:g} s: "
            f"missing {named(absent)}.",
            rank=self.hello.rank,
            peer=absent[0],
        )


def connect_mesh(group: dist.ProcessGroup, timeout: float) -> Mesh:
    """Connect this rank with every other rank of the group, or say which ranks did not come."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    store = group.get_group_store()
    # Every rank counts its own links of this group. All build them in the same order, so all come to the same number.
    prefix = f"thinwire/tcp/{store.add(f'thinwire/tcp/built/{rank}', 1)}"
    meeting = _Meeting(Hello(bytes(RUN_ID_BYTES), rank, world_size), time.monotonic() + timeout, timeout)
    with _listen(own_address(store), world_size) as listener:
        host, port = listener.getsockname()[:2]
        if rank == 0:
            store.set(f"{prefix}/run", secrets.token_hex(RUN_ID_BYTES))
        store.set(f"{prefix}/address/{rank}", f"{host} {port}")
        addresses = _collect_addresses(store, prefix, meeting)
        refuse_mixed_loopback({peer: host for peer, (host, _) in addresses.items()})
        run_id = bytes.fromhex(store.get(f"{prefix}/run").decode())
        meeting = meeting._replace(hello=meeting.hello._replace(run_id=run_id))
        sockets = _meet_everyone(listener, addresses, meeting)
    for connection in sockets.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
    return Mesh(rank, world_size, run_id, sockets)


def _meet_everyone(
    listener: socket.socket, addresses: dict[int, Address], meeting: _Meeting
) -> dict[int, socket.socket]:
    """Call the lower ranks, then answer the higher ones: rank 0 answers at once, so nobody waits in a circle."""
    sockets: dict[int, socket.socket] = {}
    try:
        for peer in range(meeting.hello.rank):
            sockets[peer] = _connect(addresses[peer], peer, meeting)
        _accept(listener, sockets, meeting)
    except BaseException:
        for connection in sockets.values():
            connection.close()
        raise
    return sockets


# --- who listens where


def _listen(host: str, world_size: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.bind((host, 0))
        listener.listen(world_size + MAX_GUESTS)
    except BaseException:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _collect_addresses(store: Store, prefix: str, meeting: _Meeting) -> dict[int, Address]:
    """Every rank's address. Rank 0 writes the run id first, so whoever has its address finds that too."""
    keys = {rank: f"{prefix}/address/{rank}" for rank in range(meeting.hello.world_size)}
    while not store.check(list(keys.values())):
        if meeting.seconds_left() <= 0:
            absent = [rank for rank, key in keys.items() if not store.check([key])]
            raise meeting.missing(absent or keys, "did not find every rank's address in the store")
        time.sleep(POLL_SECONDS)
    return {rank: _parse_address(store.get(key).decode()) for rank, key in keys.items()}


def _parse_address(text: str) -> Address:
    host, port = text.split(" ")
    return str(ipaddress.ip_address(host)), int(port)


# --- making connections: the place for TLS, and for more than one connection to a peer


def _connect(address: Address, peer: int, meeting: _Meeting) -> socket.socket:
    """Call a lower rank until it answers as the rank that it should be."""
    while (left := meeting.seconds_left()) > 0:
        try:
            connection = socket.create_connection(address, timeout=min(left, HELLO_SECONDS))
        except OSError:
            time.sleep(POLL_SECONDS)
            continue
        try:
            if _introduce(connection, meeting) == meeting.hello._replace(rank=peer):
                return connection
        except OSError:
            pass
        except BaseException:
            connection.close()
            raise
        connection.close()
        time.sleep(POLL_SECONDS)
    raise meeting.missing([peer], f"could not connect to {address[0]} port {address[1]}")


def _introduce(connection: socket.socket, meeting: _Meeting) -> Hello | None:
    connection.sendall(encode_hello(meeting.hello))
    answer = b""
    while len(answer) < HELLO_BYTES:
        if meeting.seconds_left() <= 0:
            return None
        connection.settimeout(LOOK_UP_SECONDS)
        try:
            more = connection.recv(HELLO_BYTES - len(answer))
        except TimeoutError:  # it may still be busy with the ranks below it
            continue
        if not more:
            return None
        answer += more
    return decode_hello(answer)


class _Guest:
    """Somebody who called and has not said hello yet."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.deadline = time.monotonic() + HELLO_SECONDS
        self.said = b""

    def listen(self) -> bool:
        """Hear a little more; False when the guest has hung up."""
        try:
            more = self.connection.recv(HELLO_BYTES - len(self.said))
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.said += more
        return bool(more)


class _Reception:
    """The listening socket and its guests. Strangers cost a descriptor for a few seconds and nothing else."""

    def __init__(self, listener: socket.socket, sockets: dict[int, socket.socket], meeting: _Meeting) -> None:
        self._listener, self._sockets, self._meeting = listener, sockets, meeting
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._guests: list[_Guest] = []  # the oldest first

    def close(self) -> None:
        for guest in self._guests:
            guest.connection.close()
        self._selector.close()

    def serve(self) -> None:
        """Wait a moment for callers, hear them, and hang up on those who have been silent for too long."""
        for key, _ in self._selector.select(timeout=min(LOOK_UP_SECONDS, self._next_deadline())):
            if key.data is None:
                self._welcome()
            else:
                self._hear(key.data)
        now = time.monotonic()
        for guest in [guest for guest in self._guests if guest.deadline < now]:
            self._hang_up(guest)

    def _next_deadline(self) -> float:
        """Seconds until somebody's time is over: the oldest guest's, or ours."""
        left = self._meeting.seconds_left()
        if self._guests:
            left = min(left, self._guests[0].deadline - time.monotonic())
        return max(left, 0.0)

    def _welcome(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # gone again, or no descriptor left for a stranger
            return
        if len(self._guests) >= MAX_GUESTS:
            self._hang_up(self._guests[0])
        guest = _Guest(connection)
        self._guests.append(guest)
        self._selector.register(connection, selectors.EVENT_READ, guest)

    def _hear(self, guest: _Guest) -> None:
        if guest.connection.fileno() < 0:  # hung up on a moment ago, to make room
            return
        if not guest.listen():
            self._hang_up(guest)
        elif len(guest.said) == HELLO_BYTES:
            self._admit(guest, decode_hello(guest.said))

    def _admit(self, guest: _Guest, hello: Hello | None) -> None:
        ours = self._meeting.hello
        expected = range(ours.rank + 1, ours.world_size)
        if (
            hello is None
            or hello != ours._replace(rank=hello.rank)
            or hello.rank not in expected
            or hello.rank in self._sockets
        ):
            self._hang_up(guest)
            return
        try:
            guest.connection.sendall(encode_hello(ours))  # a few bytes into an empty buffer: never blocks
        except OSError:
            self._hang_up(guest)
            return
        self._forget(guest)
        self._sockets[hello.rank] = guest.connection

    def _hang_up(self, guest: _Guest) -> None:
        self._forget(guest)
        guest.connection.close()

    def _forget(self, guest: _Guest) -> None:
        self._selector.unregister(guest.connection)
        self._guests.remove(guest)


def _accept(listener: socket.socket, sockets: dict[int, socket.socket], meeting: _Meeting) -> None:
    """Answer until every higher rank is on the line."""
    reception = _Reception(listener, sockets, meeting)
    try:
        while missing := set(range(meeting.hello.rank + 1, meeting.hello.world_size)) - set(sockets):
            if meeting.seconds_left() <= 0:
                host, port = listener.getsockname()[:2]
                raise meeting.missing(missing, f"was not called at {host} port {port} by every higher rank")
            reception.serve()
    finally:
        reception.close()
