"""What tests of links have in common: which there are, small messages, and looks behind them."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch

from thinwire.link.base import Link
from thinwire.link.process import ProcessLink
from thinwire.link.tcp import TcpLink

KINDS: dict[str, type[ProcessLink] | type[TcpLink]] = {"process": ProcessLink, "tcp": TcpLink}
both_links = pytest.mark.parametrize("kind", KINDS)


def others(link: Link) -> list[int]:
    return [peer for peer in range(link.world_size) if peer != link.rank]


def number(value: float = 0.0) -> torch.Tensor:
    return torch.tensor([float(value)])


def wait_all(works: list[Any]) -> None:
    for work in works:
        work.wait()


def raised_by(action: Any) -> tuple[str, str]:
    """The class and the text of what `action` raises."""
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def raw_socket(link: Link, peer: int) -> socket.socket:
    assert isinstance(link, TcpLink)
    return link._connections[peer].socket
