"""What a message costs on each link, between processes on this machine: latency, throughput, processor time.

Loopback has no latency and no limit of its own, so this measures the software alone. On a real wire its share shrinks.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from thinwire.bench.launch import on_ranks
from thinwire.bench.machine import describe_machine
from thinwire.link.base import Link
from thinwire.link.process import ProcessLink
from thinwire.link.tcp import TcpLink

LINKS: dict[str, Callable[[], Link]] = {"process": ProcessLink, "tcp": TcpLink}
SMALL, MEGABYTE = 256, 10**6


def measure(world_sizes: Sequence[int] = (2, 4, 8), rounds: int = 3) -> dict[str, dict[str, float]]:
    """The figures of each link: between two ranks, and an all-to-all of 1 MB among each number of ranks.

    The links take turns and each figure is the median over the rounds, so that a busy machine is unfair to neither.
    """
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in LINKS}
    for _ in range(rounds):
        for name, figures in taken.items():
            figures.append({**on_ranks(_program, 2, name=name, program="pair"), **_all_to_all_times(name, world_sizes)})
    return {
        name: {key: statistics.median(each[key] for each in figures) for key in figures[0]}
        for name, figures in taken.items()
    }


def _all_to_all_times(name: str, world_sizes: Sequence[int]) -> dict[str, float]:
    return {f"all_to_all_{n}_ms": on_ranks(_program, n, name=name, program="all_to_all")["ms"] for n in world_sizes}


# --- what each rank runs


def _program(rank: int, name: str, program: str) -> dict[str, float]:
    programs: dict[str, Callable[[Link], dict[str, float]]] = {"pair": _pair, "all_to_all": _all_to_all}
    link = LINKS[name]()
    figures = programs[program](link)
    link.close()
    return figures


def _pair(link: Link) -> dict[str, float]:
    figures = {
        "latency_us": _latency(link, ahead=True) * 1e6,
        "latency_not_ahead_us": _latency(link, ahead=False) * 1e6,
    }
    for megabytes, repeats in ((1, 200), (16, 20)):
        seconds, busy = _stream(link, megabytes * MEGABYTE, repeats)
        gigabytes = megabytes * repeats / 1000
        figures[f"mb_per_s_{megabytes}mb"] = gigabytes * 1000 / seconds
        figures[f"cpu_s_per_gb_{megabytes}mb"] = busy / gigabytes
    return figures


def _latency(link: Link, ahead: bool, repeats: int = 2000) -> float:
    """Half the median round trip of a small message; its receive is posted before it can come, or when it is needed."""
    ping, pong, peer = torch.zeros(SMALL, dtype=torch.uint8), torch.zeros(SMALL, dtype=torch.uint8), 1 - link.rank
    times = []
    coming = link.post(pong, peer) if ahead else None
    for _ in range(repeats):
        start = time.perf_counter()
        if link.rank == 0:
            link.send(ping, peer).wait()
        (coming or link.post(pong, peer)).wait()
        coming = link.post(pong, peer) if ahead else None
        if link.rank == 1:
            link.send(ping, peer).wait()
        times.append(time.perf_counter() - start)
    if coming is not None:  # one receive is left over on each side
        last = link.send(ping, peer)
        coming.wait()
        last.wait()
    return statistics.median(times) / 2


def _stream(link: Link, nbytes: int, repeats: int) -> tuple[float, float]:
    """Seconds for so many messages from rank 0 to rank 1, two at a time, and both ranks' processor seconds."""
    buffers = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(2)]
    start_one = link.send if link.rank == 0 else link.post
    _meet(link)
    busy, start = time.process_time(), time.perf_counter()
    under_way = [start_one(buffer, 1 - link.rank) for buffer in buffers]
    for i in range(repeats):
        under_way[i % 2].wait()
        if i + 2 < repeats:
            under_way[i % 2] = start_one(buffers[i % 2], 1 - link.rank)
    _meet(link)  # rank 0's last bytes have come
    seconds = time.perf_counter() - start
    mine, theirs = torch.tensor([time.process_time() - busy]), torch.zeros(1)
    coming = link.post(theirs, 1 - link.rank)
    link.send(mine, 1 - link.rank).wait()
    coming.wait()
    return seconds, (mine + theirs).item()


def _all_to_all(link: Link) -> dict[str, float]:
    others = [peer for peer in range(link.world_size) if peer != link.rank]
    piece = torch.ones(MEGABYTE, dtype=torch.uint8)
    rooms = {peer: torch.zeros(MEGABYTE, dtype=torch.uint8) for peer in others}
    times = []
    for _ in range(12):
        _meet(link)
        start = time.perf_counter()
        coming = [link.post(room, peer) for peer, room in rooms.items()]
        for work in [*(link.send(piece, peer) for peer in others), *coming]:
            work.wait()
        times.append(time.perf_counter() - start)
    return {"ms": statistics.median(times[2:]) * 1e3}


def _meet(link: Link) -> None:
    """A barrier: everybody hears from everybody."""
    others = [peer for peer in range(link.world_size) if peer != link.rank]
    coming = [link.post(torch.zeros(1), peer) for peer in others]
    for work in [*(link.send(torch.zeros(1), peer) for peer in others), *coming]:
        work.wait()


ROWS = {
    "one way, 256 bytes, posted ahead (us)": "latency_us",
    "one way, 256 bytes, posted when needed (us)": "latency_not_ahead_us",
    "1 MB messages (MB/s)": "mb_per_s_1mb",
    "16 MB messages (MB/s)": "mb_per_s_16mb",
    "processor seconds per GB, 1 MB messages": "cpu_s_per_gb_1mb",
    "processor seconds per GB, 16 MB messages": "cpu_s_per_gb_16mb",
}


def main(as_json: bool, world_sizes: Sequence[int] = (2, 4, 8)) -> None:
    """Print the figures, and with `as_json` all of them again as one JSON line at the end."""
    figures = measure(world_sizes)
    rows = {**ROWS, **{f"all-to-all of 1 MB, {n} ranks (ms)": f"all_to_all_{n}_ms" for n in world_sizes}}
    table = Table(title="links between processes on loopback")
    for column in ("", *figures):
        table.add_column(column, justify="right" if column else "left")
    for label, key in rows.items():
        table.add_row(label, *(f"{each[key]:.4g}" for each in figures.values()))
    Console().print(table)
    if as_json:
        rounded: dict[str, Any] = {
            name: {key: round(value, 4) for key, value in each.items()} for name, each in figures.items()
        }
        print(json.dumps({**rounded, **describe_machine()}))
