"""What ends a connection: the error that every wait is to raise, and the farewell that the peers are to hear."""

from __future__ import annotations

from thinwire.errors import LinkError, PeerLost, RemoteError
from thinwire.link.frames import ABORT, LOST, Farewell, FrameError, decode_reason


class Failure(Exception):
    """This connection cannot go on: what every wait is to raise, and what the peers are to be told."""

    def __init__(self, error: LinkError, farewell: Farewell) -> None:
        super().__init__(str(error))
        self.error, self.farewell = error, farewell


def lost(rank: int, peer: int, reason: str) -> Failure:
    error = PeerLost(f"rank {rank} lost rank {peer}: {reason}", rank=rank, peer=peer)
    return Failure(error, Farewell(LOST, peer, reason))


def cut_off(rank: int, peer: int) -> Failure:
    return lost(rank, peer, f"its connection to rank {rank} ended without a goodbye")


def failed(rank: int, peer: int, reason: str) -> Failure:
    error = RemoteError(f"rank {peer} failed: {reason}", rank=rank, peer=peer)
    return Failure(error, Farewell(ABORT, peer, reason))


def refused(rank: int, peer: int, what: str) -> Failure:
    """The peer sent something that makes no sense."""
    text = f"rank {peer} sent rank {rank} {what}"
    return Failure(LinkError(text, rank=rank, peer=peer), Farewell(ABORT, rank, text))


def told(rank: int, world_size: int, peer: int, kind: int, raw: bytes) -> Failure:
    """The failure that the peer reports: its own, or one that it has heard of before us."""
    try:
        origin, text = decode_reason(raw)
    except FrameError as error:
        return refused(rank, peer, str(error))
    if origin >= world_size or origin == rank:  # if it has lost us, we have lost it
        origin = peer
    return lost(rank, origin, text) if kind == LOST else failed(rank, origin, text)
