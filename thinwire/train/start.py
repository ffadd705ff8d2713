"""What every training begins with: a link, ranks that agree on what they are about to do, and the same model on all."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.collectives import ALL_GATHERS, BROADCASTS
from thinwire.errors import PlanMismatch
from thinwire.link.base import Link
from thinwire.link.process import ProcessLink
from thinwire.link.tcp import TcpLink
from thinwire.records import Records
from thinwire.types import Moment

_LINKS = {"tcp": TcpLink, "process": ProcessLink}
_START = Moment(plan="start")


def open_link(link: str | Link, group: dist.ProcessGroup | None, timeout: float) -> Link:
    """A link by its name; one that is open already is taken as it is."""
    if isinstance(link, Link):
        return link
    if link not in _LINKS:
        raise ValueError(f"unknown link {link!r}. Known are: {', '.join(_LINKS)}.")
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "there is no process group. Start the script with torchrun and call "
            "torch.distributed.init_process_group() first."
        )
    return _LINKS[link](group, timeout=timeout)


def agree(link: Link, facts: dict[str, str], moment: Moment = _START) -> None:
    """Refuse to start, or to go on, unless every rank has the same facts."""
    link.moment = moment
    digests = torch.zeros(link.world_size, len(facts), 32, dtype=torch.uint8)
    for i, fact in enumerate(facts.values()):
        digests[link.rank, i] = torch.tensor(list(hashlib.sha256(fact.encode()).digest()))
    ALL_GATHERS["direct"].run(link, digests.view(-1))
    for rank in range(link.world_size):
        for i, (name, fact) in enumerate(facts.items()):
            if not torch.equal(digests[rank, i], digests[link.rank, i]):
                raise PlanMismatch(
                    f"rank {rank} has another {name} than rank {link.rank}, whose {name} is: {fact[:500]}.",
                    rank=link.rank,
                    peer=rank,
                )


def spread(link: Link, tensors: list[torch.Tensor]) -> None:
    """Make all tensors rank 0's, in one message for each type."""
    link.moment = _START
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        same = [t.detach() for t in tensors if t.dtype == dtype]
        flat = torch.cat([t.reshape(-1) for t in same])
        BROADCASTS["tree"].run(link, flat)
        for tensor, part in zip(same, torch.split(flat, [t.numel() for t in same]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def begin_records(link: Link, path: Path | str | None, **run: Any) -> Records | None:
    """On rank 0 only, so the others must be told if it cannot: they would wait for it."""
    if path is None or link.rank != 0:
        return None
    try:
        return Records(path, **run)
    except OSError as error:
        link.abort(f"{type(error).__name__}: {error}")
        raise
