"""A connection over which two ranks say a few words at a time, and when those came."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from thinwire.link.meter import STAMP_BYTES, age_of, ask_for_stamps

LINE_BYTES = 4096  # the longest that one end says to the other


class PairError(Exception):
    """The two did not come to an end together."""


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
            self.came_at = time_of(extras)
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


def first_line(sock: socket.socket, until: float) -> Any:
    """What a caller says first, byte by byte: the rest of its stream is to be timed."""
    said = b""
    while not said.endswith(b"\n") and len(said) < LINE_BYTES:
        sock.settimeout(max(0.01, until - time.monotonic()))
        more = sock.recv(1)
        if not more:
            break
        said += more
    return json.loads(said)


def time_of(extras: list[tuple[int, int, bytes]]) -> float:
    """When what was read came to this host.

    Its age is asked for first: whoever has to wait for the processor between the two then finds it later than it was,
    as anything else would, and never earlier.
    """
    age = age_of(extras) or 0.0
    return time.monotonic() - age
