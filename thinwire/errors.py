"""Everything that thinwire raises of its own.

    ThinwireError
    ├── LinkError               the wire, or what came over it
    │   ├── LinkTimeout         nothing was heard from a peer for too long
    │   ├── PeerLost            a peer's connection ended without a goodbye
    │   ├── RemoteError         a peer failed and told us why
    │   └── PlanMismatch        a peer's message belongs to another plan, step or size
    └── CheckpointError         a checkpoint that is missing, damaged or foreign

A caller's mistake is a plain ValueError, TypeError or RuntimeError. What it warns of is a ThinwireWarning.
"""

from __future__ import annotations


class ThinwireError(Exception):
    """Base of everything below."""


class ThinwireWarning(UserWarning):
    """Something that goes on, and may not go well."""


class LinkError(ThinwireError):
    """Something went wrong between this rank and a peer."""

    def __init__(self, message: str, *, rank: int, peer: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer


class LinkTimeout(LinkError):
    """Nothing was heard from a peer, or taken by it, for longer than the link's timeout."""


class PeerLost(LinkError):
    """A peer's connection ended although it had not said goodbye."""


class RemoteError(LinkError):
    """A peer failed and said why before it left."""


class PlanMismatch(LinkError):
    """A peer sent a message of another plan, step, type or size than this rank expects."""


class CheckpointError(ThinwireError):
    """A checkpoint is missing, damaged, or was written by something else."""
