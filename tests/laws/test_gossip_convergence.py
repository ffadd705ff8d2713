"""How fast methods of decentralised training converge, and with which gamma."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from papers import rates
from tests.laws.nodes import SEED
from thinwire.compress.quantize import Exact, build
from thinwire.gossip import METHODS
from thinwire.gossip.choco import GAMMAS, tune
from thinwire.gossip.topology import build as topology_of
from thinwire.link.thread import ThreadLink, ThreadWorld
from thinwire.train.gossip import Gossip

# --- rates


@functools.cache
def convex_slope(run: str) -> float:
    return rates.slope(rates.descend(run, 1500, lambda t: 2 / (t + 20), 1.0, 9))


@pytest.mark.slow
@pytest.mark.parametrize("run", rates.FAITHFUL[1:])
def test_compressed_methods_converge_at_the_rate_of_the_uncompressed_one(run: str) -> None:
    """Strongly convex, gamma_t ~ 1/t: dpsgd's suboptimality falls as 1/T, the others' within 0.15 of that."""
    assert convex_slope("dpsgd none") == pytest.approx(-1, abs=0.2)
    assert convex_slope(run) == pytest.approx(convex_slope("dpsgd none"), abs=0.15)


@functools.cache
def net_curve(run: str) -> tuple[float, float]:
    """The slope of the loss, and the loss at the end."""
    T, values = rates.learn(run, 1000, seed=0)
    return rates.slope(values, T), rates.at_the_end(values)


@pytest.mark.slow
@pytest.mark.parametrize("run", rates.FAITHFUL[1:])
def test_so_does_a_small_net(run: str) -> None:
    assert net_curve("dpsgd none")[0] < -0.8
    assert net_curve(run)[0] == pytest.approx(net_curve("dpsgd none")[0], abs=0.15)


@pytest.mark.slow
def test_naive_compression_stalls_at_a_floor_set_by_its_bits() -> None:
    """Without any noise in the gradients. Each bit halves the error, so that two divide the floor by about 16."""
    floors = {}
    for bits in (4, 6, 8):
        late = np.array(rates.descend(f"naive int{bits}", 400, lambda t: 0.1, 0.0, 9)[200:])
        assert late[:100].mean() < 2 * late[100:].mean() < 4 * late[:100].mean()
        floors[bits] = float(late.mean())
    assert 8 < floors[4] / floors[6] < 32
    assert 8 < floors[6] / floors[8] < 32
    for run in ("dpsgd none", "dcd int8", "choco int8"):
        assert rates.descend(run, 400, lambda t: 0.1, 0.0, 9)[-1] < 1e-3 * floors[8], run


@pytest.mark.slow
def test_naive_compression_of_a_small_net_stalls_the_higher_the_fewer_its_bits() -> None:
    coarse, fine, faithful = (net_curve(run) for run in ("naive int4", "naive int5", "dpsgd none"))
    assert coarse[1] > 2 * fine[1] > 2.4 * faithful[1]
    assert coarse[0] > faithful[0] + 0.5


# --- gamma


@pytest.mark.parametrize("gamma", [0, -1, 1.5, "fast"])
def test_a_step_size_outside_its_range_is_refused(gamma: Any) -> None:
    link = ThreadWorld(2).links[0]
    for name in ("choco", "deepsqueeze"):
        with pytest.raises(ValueError, match="gamma must be in"):
            METHODS[name](link, topology_of("ring", 2), Exact(), torch.zeros(3), gamma=gamma)


def test_auto_chooses_smaller_steps_for_coarser_compressors() -> None:
    ring = topology_of("ring", 8)
    chosen = [tune(ring, build(spec).contraction()) for spec in ("none", "int8", "sign", "topk:0.1", "topk:0.01")]
    assert chosen[0] >= 0.8
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[-1] < 0.1
    assert all(gamma in GAMMAS for gamma in chosen)


@pytest.mark.slow
def test_auto_waits_until_a_coarse_compressor_shows_what_it_does() -> None:
    """Koloskova et al. found 0.01 for 1 % at random and 0.04 for the largest 1 %, on a ring of nine."""
    ring = topology_of("ring", 9)
    assert tune(ring, build("randk:0.01")) == pytest.approx(0.01, rel=1)
    assert tune(ring, build("topk:0.01")) == pytest.approx(0.04, rel=1)


@pytest.mark.parametrize("spec", ["int8", "int4", "int2", "sign", "topk:0.1", "randk:0.1"])
def test_auto_brings_nodes_together(spec: str) -> None:
    nodes, graph = 8, topology_of("ring", 8)
    start = torch.randn(nodes, 2000, generator=torch.Generator().manual_seed(5))

    def program(link: ThreadLink) -> torch.Tensor:
        method = METHODS["choco"](link, graph, build(spec), start[link.rank], SEED)
        x = start[link.rank].clone()
        for _ in range(100):
            method.step(x)
        return x

    end = torch.stack(ThreadWorld(nodes).run(program))
    assert (end - end.mean(0)).norm() < 0.5 * (start - start.mean(0)).norm()
    assert (end.mean(0) - start.mean(0)).norm() < 1e-4 * start.norm()


def test_auto_is_not_decided_by_rounding() -> None:
    """Where several gammas bring all together, ranks on other processors must choose the same: the largest."""
    assert tune(topology_of("complete", 4), Exact()) == 1.0
    assert tune(topology_of("ring", 2), Exact()) == 1.0


def test_choco_chooses_gamma_anew_for_another_compressor_unless_it_was_given() -> None:
    ring = topology_of("ring", 8)
    link = ThreadWorld(8).links[0]
    for gamma, expected in (("auto", tune(ring, build("topk:0.01"))), (0.7, 0.7)):
        method = METHODS["choco"](link, ring, build("int8"), torch.zeros(100), gamma=gamma)
        method.recompress(build("topk:0.01"))
        assert method.gamma == expected  # type: ignore[attr-defined]


def scatter(link: ThreadLink, compressor: str, gamma: float | str) -> float:
    """300 steps in which every node is pushed at random; what is left of consensus."""
    model = torch.nn.Linear(100, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    gossip = Gossip(model, optimizer, "choco", compressor=compressor, gamma=gamma, link=link)
    random = torch.Generator().manual_seed(link.rank)
    for _ in range(300):
        for p in model.parameters():
            p.grad = 1e-3 * torch.randn(p.shape, generator=random)
        optimizer.step()
    return gossip.consensus()


@pytest.mark.parametrize(("compressor", "gamma"), [("randk:0.1", 1.0), ("randk:0.1", 0.3), ("topk:0.01", 0.5)])
def test_a_gamma_that_is_too_large_is_told(compressor: str, gamma: float) -> None:
    words = f"neighbours drift apart: .* gamma of {gamma:g} may be too large for {compressor} on ring"
    with pytest.warns(UserWarning, match=words):
        ThreadWorld(8).run(functools.partial(scatter, compressor=compressor, gamma=gamma))


@pytest.mark.parametrize("compressor", ["randk:0.1", "topk:0.01", "sign", "qsgd2"])
def test_auto_is_not_too_large(compressor: str) -> None:
    """A warning would be an error."""
    assert max(ThreadWorld(8).run(functools.partial(scatter, compressor=compressor, gamma="auto"))) < 0.3
