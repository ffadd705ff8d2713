"""How workers meet, also where others like them have met before.

When torchrun starts workers again, its store still has the addresses of those before. It tells each machine only how
often it failed there, so the workers find out by themselves what belongs to this start.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from thinwire.jobs.job import Job

LOOK_SECONDS = 0.02
_START = "thinwire/start"


def meet(job: Job) -> Store | None:
    """Make the process group of all workers. Gives the store of the agent that starts them, if it has one.

    What one start leaves there the next one finds, as long as it is the same torchrun's.
    """
    timeout = timedelta(seconds=job.timeout)
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            dist.init_process_group("gloo", timeout=timeout)
            return None
        store: Store
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        own = of_this_start(store, rank, world_size, job.timeout)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size, timeout=timeout)
        return store
    except dist.DistNetworkError as error:
        port = os.environ.get("MASTER_PORT")
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            raise ValueError(f"port {port} is in use: choose another --port, or none for one that is free.") from error
        raise ValueError(f"no worker is to be met at port {port}: {str(error).splitlines()[0]}") from error
    except dist.DistStoreError as error:
        came = re.search(r"(\d+)/(\d+) clients joined", str(error))
        who = f"only {came[1]} of {came[2]}" if came else f"not all {os.environ.get('WORLD_SIZE')}"
        raise ValueError(f"{who} workers came within {job.timeout:g} s.") from error


def of_this_start(store: Store, rank: int, world_size: int, seconds: float) -> Store:
    """A part of the store that no start before this one has used, the same for all ranks. Call on all of them.

    Rank 0 makes up a name for the start. Whoever finds one says a word of his own under it, and it is right if rank 0
    repeats that word: under an old name there can only be an old one.
    """
    if rank == 0:
        name = secrets.token_hex(8)
        store.set(_START, name)
        for peer in range(1, world_size):
            store.set(f"thinwire/{name}/to-{peer}", store.get(f"thinwire/{name}/from-{peer}").decode())
        return PrefixStore(name, store)
    word, deadline = secrets.token_hex(8), time.monotonic() + seconds
    while time.monotonic() < deadline:
        name = store.get(_START).decode()
        store.set(f"thinwire/{name}/from-{rank}", word)
        answer = f"thinwire/{name}/to-{rank}"
        if store.check([answer]) and store.get(answer).decode() == word:
            return PrefixStore(name, store)
        time.sleep(LOOK_SECONDS)
    raise ValueError(f"rank {rank} was not met by rank 0 within {seconds:.0f} s.")
