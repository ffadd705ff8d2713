"""Laws of every collective, on the virtual clock."""

from __future__ import annotations

import math

import pytest
import torch

from thinwire.collectives import ALL_GATHERS, ALL_REDUCES, BROADCASTS, Collective, Leg, seconds
from thinwire.link.thread import ThreadWorld
from thinwire.types import Network

WORLD_SIZES = (1, 2, 3, 4, 6, 7, 8)
NUMELS = (0, 1, 5, 16, 1003)
NETWORKS = {
    "latency rules": Network(alpha=3e-3, beta=1e-9),
    "rate rules": Network(alpha=0.0, beta=1e-6),
    "both": Network(alpha=1e-4, beta=1e-7),
    "processors rule": Network(alpha=1e-5, beta=1e-9, overhead=2e-4),
    "all three": Network(alpha=1e-4, beta=1e-7, overhead=3e-5),
}
EVERY = [
    pytest.param(kind, collective, id=collective.name)
    for kind, family in (("reduce", ALL_REDUCES), ("gather", ALL_GATHERS), ("broadcast", BROADCASTS))
    for collective in family.values()
]


def run(
    collective: Collective, world_size: int, inputs: torch.Tensor, network: Network, root: int
) -> tuple[list[torch.Tensor], float, int]:
    """Every rank's result, the last rank's time, and the bytes sent."""
    world = ThreadWorld(world_size, network)
    results = world.run(lambda link: collective.run(link, inputs[link.rank].clone(), root=root))
    return results, max(link.now() for link in world.links), sum(link.sent_bytes for link in world.links)


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("kind", "collective"), EVERY)
def test_every_rank_ends_with_the_same_right_bits_in_the_time_and_bytes_priced(
    kind: str, collective: Collective, world_size: int, numel: int
) -> None:
    size = numel * world_size if kind == "gather" else numel
    inputs = torch.randn(world_size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(numel))
    root = world_size // 2
    expected = {
        "reduce": inputs.sum(0),
        "broadcast": inputs[root],
        "gather": torch.cat([inputs[r, r * numel : (r + 1) * numel] for r in range(world_size)]),
    }[kind]
    for network in NETWORKS.values():
        results, time, sent = run(collective, world_size, inputs, network, root)
        for result in results:
            assert torch.equal(result, results[0])
        torch.testing.assert_close(results[0], expected, rtol=1e-12, atol=1e-12)
        assert time == collective.seconds(network, size, 8, world_size, root)
        assert sent == collective.sent_bytes(size, 8, world_size, root)


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
def test_prices_are_the_papers_closed_forms_where_pieces_are_equal(world_size: int) -> None:
    network = Network(alpha=2e-3, beta=1e-8)
    numel, itemsize = 1024 * world_size, 4
    alpha, M, N = network.alpha, numel * itemsize * network.beta, world_size
    log = math.log2(N)
    forms = {
        ALL_REDUCES["ring"]: 2 * (N - 1) * alpha + 2 * (N - 1) / N * M,
        ALL_REDUCES["tree"]: 2 * log * (alpha + M),
        ALL_REDUCES["halving"]: 2 * log * alpha + 2 * (N - 1) / N * M,
        ALL_REDUCES["direct"]: 2 * alpha + 2 * (N - 1) / N * M,
        BROADCASTS["tree"]: log * (alpha + M),
        ALL_GATHERS["ring"]: (N - 1) * alpha + (N - 1) / N * M,
        ALL_GATHERS["tree"]: 2 * log * alpha + ((N - 1) / N + log) * M,
        ALL_GATHERS["halving"]: log * alpha + (N - 1) / N * M,
        ALL_GATHERS["direct"]: alpha + (N - 1) / N * M,
    }
    for collective, form in forms.items():
        assert collective.seconds(network, numel, itemsize, N) == pytest.approx(form, rel=1e-9), collective.name
    scatter = BROADCASTS["scatter"].seconds(network, numel, itemsize, N)
    assert scatter <= 2 * alpha + 2 * (N - 1) / N * M * (1 + 1e-9)


def test_overhead_is_paid_for_every_message_sent_and_again_for_every_one_received() -> None:
    """LogGP's time of a message is o + L + b G + o; whoever sends to many pays o for each before it leaves."""
    network, N, o = Network(alpha=1e-2, beta=1e-9, overhead=1e-4), 8, 1e-4
    bare = Network(alpha=network.alpha, beta=network.beta)
    extra = {
        ALL_REDUCES["ring"]: 2 * (N - 1) * 2 * o,  # every hop has a sender and a receiver
        ALL_REDUCES["tree"]: 2 * 3 * 2 * o,
        ALL_REDUCES["halving"]: 2 * 3 * 2 * o,
        ALL_GATHERS["direct"]: (N - 1) * o
        + o,  # all are sent before the first comes; the others' o is over by the last
        BROADCASTS["tree"]: 3 * 2 * o,
    }
    for collective, seconds_more in extra.items():
        cost = collective.seconds(network, 64, 4, N) - collective.seconds(bare, 64, 4, N)
        assert cost == pytest.approx(seconds_more, rel=1e-2), collective.name  # bytes hide behind o, or o behind them


@pytest.mark.parametrize("network", [NETWORKS["both"], NETWORKS["all three"]], ids=["without", "with overhead"])
def test_legs_in_a_row_cost_what_running_them_in_a_row_takes(network: Network) -> None:
    legs = [Leg(BROADCASTS["tree"], 5000, 1, 2), Leg(ALL_REDUCES["tree"], 999, 8), Leg(ALL_REDUCES["ring"], 17, 8)]

    def program(link):  # type: ignore[no-untyped-def]
        for leg in legs:
            dtype = torch.uint8 if leg.itemsize == 1 else torch.float64
            leg.collective.run(link, torch.zeros(leg.numel, dtype=dtype), root=leg.root)
        return link.now()

    for world_size in (2, 3, 5, 8):
        times = ThreadWorld(world_size, network).run(program)
        assert max(times) == seconds(network, world_size, legs)
        assert (
            max(times) <= sum(leg.collective.seconds(network, *leg[1:3], world_size, leg.root) for leg in legs) + 1e-12
        )


def test_a_reduction_adds_in_the_same_order_whatever_the_network_does() -> None:
    inputs = torch.randn(7, 1003, generator=torch.Generator().manual_seed(1))
    for collective in ALL_REDUCES.values():
        results = [run(collective, 7, inputs, network, 0)[0][0] for network in NETWORKS.values()]
        for result in results:
            assert torch.equal(result, results[0])
