"""Where workers meet that torchrun has started again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from tests.process.runs import until
from thinwire.jobs.meeting import of_this_start

pytestmark = pytest.mark.process

RANKS = 3


@pytest.mark.parametrize("first", range(RANKS))
def test_what_an_earlier_start_left_is_not_found_whoever_comes_first(first: int) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(rank: int) -> dist.Store:
        client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
        return of_this_start(client, rank, RANKS, 60.0)

    with ThreadPoolExecutor(RANKS) as pool:
        before = list(pool.map(start, range(RANKS)))
        before[0].set("where", "of the first start")
        assert [store.get("where") for store in before] == [b"of the first start"] * RANKS
        name = server.get("thinwire/start").decode()
        word = f"thinwire/{name}/from-{first}"
        old = server.get(word) if first else b""
        come_first = pool.submit(start, first)
        if first:  # it finds the earlier start, and says its word there
            until(lambda: server.get(word) != old)
        others = [pool.submit(start, rank) for rank in range(RANKS) if rank != first]
        stores = [come_first.result(), *(each.result() for each in others)]
    assert not any(store.check(["where"]) for store in stores)
    stores[0].set("where", "of the second")
    assert [store.get("where") for store in stores] == [b"of the second"] * RANKS
