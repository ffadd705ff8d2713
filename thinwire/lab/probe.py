"""Small programs that measure a network from inside its hosts. They run in a bare interpreter, with plain sockets.

Each says `ready` when others may talk to it, and what it measured as JSON lines.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TextIO

PORT = 7007
ICMP = struct.Struct("!BBHHH")  # type, code, checksum and identity (both filled in by the kernel), number
ECHO_REQUEST = 8
SO_RCVBUFFORCE = 33
SO_TIMESTAMPNS, TIMESTAMP = 35, struct.Struct("qq")
DATAGRAM = struct.Struct("!Qdd")  # number, time sent on the monotonic and on the wall's clock
PING_BYTES = 56  # of payload; with the ICMP or UDP and the IP header 84 on the wire
CHUNK = bytes(1 << 18)


def main(arguments: Sequence[str]) -> None:
    programs: dict[str, Callable[..., None]] = {
        "ping": ping,
        "count": count,
        "flood": flood,
        "sink": sink,
        "source": source,
        "mesh": mesh,
    }
    name, *rest = arguments
    with suppress(OSError):  # only root may ask for it
        os.nice(-10)  # what is measured is the network, not how long a busy machine lets us wait
    try:
        programs[name](*rest)
    except (BrokenPipeError, ConnectionResetError):  # whoever was there has gone: the measurement is over
        sys.stderr.close()


def say(fact: object) -> None:
    print(json.dumps(fact), flush=True)


# --- round trips


def ping(address: str, number: str, interval: str) -> None:
    """Say every round trip in seconds, one at a time, `interval` seconds between two; null after 2 s of silence.

    As `ping` does it: the other host's kernel answers, and ours notes when the answer came, so how long a program takes
    to wake up is not measured.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP) as here:
        here.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        here.connect((address, 0))
        for i in range(int(number)):
            begin, sent = time.monotonic(), time.time()
            here.send(ICMP.pack(ECHO_REQUEST, 0, 0, 0, i % 65536) + bytes(PING_BYTES))
            answered = _answered(here, i % 65536, deadline=begin + 2.0)
            say({"time": begin, "rtt": None if answered is None else answered - sent})
            time.sleep(max(0.0, begin + float(interval) - time.monotonic()))


def _answered(here: socket.socket, number: int, deadline: float) -> float | None:
    """When the answer to this ping came, on the wall's clock. An earlier one that comes late is not it."""
    while (left := deadline - time.monotonic()) > 0:
        here.settimeout(left)
        try:
            answer, notes, _, _ = here.recvmsg(65536, 64)
        except (TimeoutError, ConnectionError):
            return None
        if ICMP.unpack(answer[: ICMP.size])[-1] == number:
            return _noted(notes)
    return None


def _noted(notes: list[tuple[int, int, bytes]]) -> float:
    """When the kernel says that a datagram came, on the wall's clock."""
    seconds, nanoseconds = TIMESTAMP.unpack(notes[0][2])
    return float(seconds + nanoseconds / 1e9)


# --- one way, datagrams


def count(seconds: str) -> None:
    """Say which datagrams came, when each was sent and how long it took.

    The end is `seconds` of silence after a line has come in, which says that all are sent.
    The hosts are on one machine and share its clock. As with `ping`, it is the kernel that notes when they came.
    """
    seen: list[tuple[int, float, float]] = []
    with _datagrams() as here:
        here.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        say("ready")
        sources: list[socket.socket | TextIO] = [here, sys.stdin]
        while ready := select.select(sources, [], [], None if sys.stdin in sources else float(seconds))[0]:
            if here in ready:
                data, notes, _, _ = here.recvmsg(65536, 64)
                number, sent, sent_by_wall = DATAGRAM.unpack(data[: DATAGRAM.size])
                seen.append((number, sent, _noted(notes) - sent_by_wall))
            else:
                sources.remove(sys.stdin)
    say(seen)


def flood(address: str, number: str, per_second: str) -> None:
    """Send so many datagrams, evenly over time; say when half of them are sent, and all."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
        here.connect((address, PORT))
        start = time.monotonic()
        for i in range(int(number)):
            while (left := start + i / float(per_second) - time.monotonic()) > 0:
                time.sleep(left)
            here.send(DATAGRAM.pack(i, time.monotonic(), time.time()).ljust(PING_BYTES, b"."))
            if i == int(number) // 2:
                say("half")
    say("all")


# --- streams


def sink(interval: str) -> None:
    """Take one stream and say, every `interval` seconds, how many bytes have come."""
    with socket.create_server(("", PORT)) as listener:
        say("ready")
        stream, _ = listener.accept()
    room, total = bytearray(1 << 20), 0
    with stream:
        due = time.monotonic()
        while taken := stream.recv_into(room):
            total += taken
            if (now := time.monotonic()) >= due:
                say({"time": now, "bytes": total})
                due += float(interval)


def source(address: str) -> None:
    """Send a stream for as long as it is taken."""
    with socket.create_connection((address, PORT)) as stream:
        while True:
            stream.sendall(CHUNK)


def mesh(mine: str, interval: str, *addresses: str) -> None:
    """Send to all others and take from them; say every `interval` seconds how many bytes have come from each.

    Connects when a line comes in, because then all are ready, and begins at the next, because then all are connected.
    """
    with selectors.DefaultSelector() as selector, socket.create_server((mine, PORT)) as listener:
        say("ready")
        sys.stdin.readline()
        selector.register(listener, selectors.EVENT_READ)
        for other in addresses:
            stream = socket.create_connection((other, PORT))
            stream.setblocking(False)
            selector.register(stream, selectors.EVENT_WRITE)
        say("connected")
        sys.stdin.readline()
        _exchange(selector, listener, float(interval))


def _exchange(selector: selectors.BaseSelector, listener: socket.socket, interval: float) -> None:
    room, came = bytearray(1 << 18), dict[str, int]()
    due = time.monotonic() + interval
    while True:
        for key, _ in selector.select(max(0.0, due - time.monotonic())):
            stream = key.fileobj
            assert isinstance(stream, socket.socket)
            if stream is listener:
                incoming, _ = listener.accept()
                incoming.setblocking(False)
                selector.register(incoming, selectors.EVENT_READ, data=incoming.getpeername()[0])
            elif key.data is None:
                stream.send(CHUNK)
            else:
                came[key.data] = came.get(key.data, 0) + stream.recv_into(room)
        if (now := time.monotonic()) >= due:
            say({"time": now, "bytes": came})
            due += interval


def _datagrams() -> socket.socket:
    here = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        here.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 24)
    except PermissionError:  # for root alone; others get what the machine allows
        here.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    here.bind(("", PORT))
    return here
