"""Run a function on N new processes of this machine, with a process group on loopback."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

LIMIT = timedelta(seconds=120)  # of silence in the process group


def on_ranks(function: Callable[..., dict[str, Any]], world_size: int, **arguments: Any) -> dict[str, Any]:
    """What `function(rank, **arguments)` returned on rank 0, as JSON can carry it. Raises when any rank fails."""
    listener = socket.create_server(("127.0.0.1", 0))  # bound by hand: the store would listen on every interface
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=LIMIT, master_listen_fd=listener.detach()
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    ranks = [
        context.Process(target=_rank, args=(rank, world_size, port, function, arguments), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    try:
        while running := [process.sentinel for process in ranks if process.is_alive()]:
            wait(running)
            for rank, process in enumerate(ranks):
                if process.exitcode:
                    raise RuntimeError(
                        f"rank {rank} of {world_size} ended with exit code {process.exitcode}; its error is above."
                    )
    finally:
        for process in ranks:
            process.kill()
    result: dict[str, Any] = json.loads(store.get("result"))
    return result


def _rank(
    rank: int, world_size: int, port: int, function: Callable[..., dict[str, Any]], arguments: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=LIMIT)
    result = function(rank, **arguments)
    if rank == 0:
        store.set("result", json.dumps(result))
    dist.destroy_process_group()
