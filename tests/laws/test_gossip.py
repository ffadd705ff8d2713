"""Laws of every method of decentralised training, on the virtual clock."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from papers import choco_table1, fashion
from papers.columns import Columns
from tests.laws.nodes import NUMEL, SEED, SETTINGS, Problem, every_method, make
from thinwire.compress.quantize import Exact, build
from thinwire.gossip import METHODS, Method
from thinwire.gossip.base import play
from thinwire.gossip.topology import NAMES, Topology, TopologyError
from thinwire.gossip.topology import build as topology_of
from thinwire.link.thread import ThreadLink, ThreadWorld
from thinwire.train.gossip import Gossip
from thinwire.types import Network

STEPS = 200
NETWORK = Network(alpha=1e-3, beta=1e-7, overhead=1e-5)
EARLY = [name for name, method in METHODS.items() if method.says_early]


class History(NamedTuple):
    models: np.ndarray  # (step, entry, node)
    methods: list[Method]
    seconds: float
    sent_bytes: int


def admits(method: str, topology: str, nodes: int) -> bool:
    try:
        return topology_of(topology, nodes).static or not METHODS[method].needs_fixed_graph
    except TopologyError:
        return False


@functools.cache
def run(name: str, topology: str, nodes: int, steps: int = STEPS) -> History:
    problem, graph = Problem(nodes), topology_of(topology, nodes)
    world = ThreadWorld(nodes, NETWORK)

    def program(link: ThreadLink) -> tuple[Method, np.ndarray]:
        method = make(link, name, graph, problem.start)
        x, seen = problem.first(), []
        for _ in range(steps):
            method.step(problem.descend(x, link.rank))
            seen.append(x.numpy().copy())
        return method, np.stack(seen)

    methods, models = zip(*world.run(program), strict=True)
    seconds = max(link.now() for link in world.links)
    sent = sum(link.sent_bytes for link in world.links)
    return History(np.stack(models, 2), list(methods), seconds, sent)


def graphs() -> list[tuple[str, int]]:
    """Every topology with 1, 2, 3 and 8 nodes, as far as it admits them; of several that are the same W, the first."""
    found: dict[bytes, tuple[str, int]] = {}
    for nodes in (1, 2, 3, 8):
        for topology in NAMES:
            if admits("dpsgd", topology, nodes):
                same = b"".join(W.tobytes() for W in topology_of(topology, nodes).matrices)
                found.setdefault(same, (topology, nodes))
    return list(found.values())


CASES = [(m, t, n) for m in METHODS for t, n in graphs() if admits(m, t, n)]
FEW = [
    (m, t, n) for m, t, n in CASES if (t, n) in {("ring", 1), ("ring", 3), ("torus", 8), ("one-peer-exponential", 8)}
]


@pytest.mark.parametrize(("name", "topology", "nodes"), CASES)
def test_every_method_is_the_papers_matrix_equation(name: str, topology: str, nodes: int) -> None:
    """To 1e-10 over 200 steps in double precision: sums are in another order, which costs 1e-16 each."""
    problem, graph, history = Problem(nodes), topology_of(topology, nodes), run(name, topology, nodes)
    compressor, options = SETTINGS[name]
    X = np.repeat(problem.start[:, None], nodes, 1)
    oracle = Columns(graph.weights, METHODS[name].prepared(build(compressor)), X, SEED, **options)
    for step in range(STEPS):
        U = np.stack([problem.update(oracle.X[:, i], i) for i in range(nodes)], 1)
        oracle.step(name, U)
        np.testing.assert_allclose(history.models[step], oracle.X, rtol=1e-10, atol=1e-10)


def mean_drift(history: History, nodes: int) -> float:
    """The most that the mean moved in a step besides the mean of the updates, relative to its size."""
    problem = Problem(nodes)
    before = np.concatenate([np.repeat(problem.start[:, None], nodes, 1)[None], history.models[:-1]])
    updates = np.stack([[problem.update(X[:, i], i) for i in range(nodes)] for X in before]).transpose(0, 2, 1)
    drift = history.models.mean(2) - before.mean(2) - updates.mean(2)
    return float((np.linalg.norm(drift, axis=1) / np.linalg.norm(before.mean(2), axis=1)).max())


@pytest.mark.parametrize(
    ("name", "topology", "nodes"), [case for case in CASES if case[0] in ("dpsgd", "choco", "deepsqueeze")]
)
def test_mixing_keeps_the_mean(name: str, topology: str, nodes: int) -> None:
    """Of dpsgd, choco and deepsqueeze, whatever the compressor does."""
    assert mean_drift(run(name, topology, nodes), nodes) < 1e-12


@pytest.mark.parametrize(
    ("name", "compressor", "settings"),
    [
        ("dpsgd", "none", {}),
        ("choco", "int8", {"gamma": 0.8}),
        ("choco", "sign", {"gamma": 0.4}),
        ("deepsqueeze", "int8", {"gamma": 0.5}),
    ],
)
def test_the_mean_is_not_carried_away_by_the_rounding_of_float32(
    name: str, compressor: str, settings: dict[str, Any]
) -> None:
    nodes, steps = 3, 1000
    start = torch.randn(256, generator=torch.Generator().manual_seed(0))

    def program(link: ThreadLink) -> torch.Tensor:
        method = METHODS[name](link, topology_of("ring", nodes), build(compressor), start, SEED, **settings)
        x, expected = start.clone(), start.double()
        noise = torch.Generator().manual_seed(1 + link.rank)
        for _ in range(steps):
            before = x.double()
            x += 1e-3 * torch.randn(256, generator=noise)
            expected += x.double() - before
            method.step(x)
        return x.double() - expected

    drift = torch.stack(ThreadWorld(nodes).run(program)).mean(0)
    assert drift.norm() / start.norm() < 5e-5


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_dcd_moves_the_mean_by_the_compressors_error_only(nodes: int) -> None:
    """mean(x_{t+1}) = mean(x_t) + mean(C(z_t)) and mean(z_t) = mean(u): what is kept exactly is the mean of z.

    With a compressor that loses nothing the mean of the models is kept to rounding.
    """
    problem, graph = Problem(nodes), topology_of("ring", nodes)

    def program(link: ThreadLink, compressor: str) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        x = problem.first()
        method = METHODS["dcd"](link, graph, build(compressor), x, SEED)
        seen = []
        for _ in range(50):
            u = torch.from_numpy(problem.update(x.numpy(), link.rank))
            x += u
            z = method.difference(x).numpy().copy()  # type: ignore[attr-defined]
            method.step(x)
            seen.append((u.numpy().copy(), z, x.numpy().copy()))
        return seen

    for compressor in ("int8", "none"):
        nodes_seen = ThreadWorld(nodes).run(functools.partial(program, compressor=compressor))
        for step in zip(*nodes_seen, strict=True):
            u, z, x = (np.mean([part[k] for part in step], 0) for k in range(3))
            assert np.linalg.norm(z - u) <= 1e-12 * np.linalg.norm(x)
    problem_start = np.repeat(problem.start[:, None], nodes, 1)
    models = np.stack([[s[2] for s in seen] for seen in nodes_seen], 2)
    assert mean_drift(History(models, [], 0, 0), nodes) < 1e-12
    assert models.shape[1:] == problem_start.shape


@pytest.mark.parametrize("topology", [t for t in NAMES if admits("dcd", t, 8)])
def test_dcds_replicas_are_the_originals_bit_for_bit(topology: str) -> None:
    methods = run("dcd", topology, 8).methods
    for method in methods:
        for j, replica in method.replicas.items():  # type: ignore[attr-defined]
            assert torch.equal(replica, methods[j].x)


@pytest.mark.parametrize(("name", "topology", "nodes"), FEW)
def test_seconds_and_bytes_are_those_priced(name: str, topology: str, nodes: int) -> None:
    history, graph = run(name, topology, nodes), topology_of(topology, nodes)
    compressor, _ = SETTINGS[name]
    priced = METHODS[name].seconds(NETWORK, graph, build(compressor), NUMEL, torch.float64, STEPS)
    assert history.seconds == priced
    nbytes = METHODS[name].message_bytes(build(compressor), NUMEL, torch.float64)
    messages = sum(len(graph.destinations(rank, step)) for rank in range(nodes) for step in range(STEPS))
    assert history.sent_bytes == messages * nbytes


def test_a_step_costs_one_latency_and_a_message_per_neighbour() -> None:
    network = Network(alpha=2e-3, beta=1e-8)
    for name in ("ring", "torus", "hypercube", "exponential", "complete", "one-peer-exponential"):
        graph = topology_of(name, 16)
        least, message = network.alpha + graph.degree * 1000 * network.beta, 1000 * network.beta
        found = play(network, graph, 1000, 1)
        if name in ("torus", "hypercube"):  # where messages may meet
            assert least <= found + 1e-15 <= least + graph.degree * message
        else:
            assert found == pytest.approx(least, rel=1e-12), name


@pytest.mark.parametrize(("name", "topology", "nodes"), FEW)
def test_a_run_that_is_resumed_has_the_same_bits(name: str, topology: str, nodes: int) -> None:
    problem, graph, whole = Problem(nodes), topology_of(topology, nodes), run(name, topology, nodes)

    def steps(method: Method, x: torch.Tensor, rank: int, count: int) -> None:
        for _ in range(count):
            method.step(problem.descend(x, rank))

    def program(link: ThreadLink) -> np.ndarray:
        x = problem.first()
        method = make(link, name, graph, problem.start)
        steps(method, x, link.rank, 77)
        saved = {key: tensor.clone() for key, tensor in method.tensors().items()}, method.numbers()
        again = make(link, name, graph, 0 * problem.start)
        again.load(*saved)
        x = again.x.clone()
        steps(again, x, link.rank, STEPS - 77)
        return x.numpy()

    models = ThreadWorld(nodes).run(program)
    assert np.array_equal(np.stack(models, 1), whole.models[-1])


@pytest.mark.parametrize("name", EARLY)
def test_overlapping_changes_the_time_and_not_the_bits(name: str) -> None:
    """With as much computing as travelling in a step, half of the time is saved, but for the first step."""
    nodes, steps, compute = 3, 20, 0.05
    problem, graph, network = Problem(nodes), topology_of("ring", nodes), Network(alpha=0.05, beta=0.0)

    def program(link: ThreadLink, overlap: bool) -> tuple[np.ndarray, float, dict[str, Any]]:
        method, x = make(link, name, graph, problem.start), problem.first()
        method.overlap = overlap
        for _ in range(steps):
            u = torch.from_numpy(problem.update(x.numpy(), link.rank))
            link.compute(compute)
            method.step(x.add_(u))
        return x.numpy(), link.now(), method.numbers()

    apart = ThreadWorld(nodes, network).run(functools.partial(program, overlap=False))
    together = ThreadWorld(nodes, network).run(functools.partial(program, overlap=True))
    for (ours, soon, numbers), (theirs, late, expected) in zip(together, apart, strict=True):
        assert np.array_equal(ours, theirs)
        assert numbers == expected
        assert late == pytest.approx(steps * (compute + network.alpha))
        assert soon == pytest.approx(steps * compute + network.alpha)


@pytest.mark.parametrize("name", EARLY)
def test_a_run_that_overlaps_is_resumed_with_the_same_bits(name: str) -> None:
    problem, graph, whole = Problem(3), topology_of("ring", 3), run(name, "ring", 3)

    def steps(method: Method, x: torch.Tensor, rank: int, count: int) -> None:
        method.overlap = True
        for _ in range(count):
            method.step(problem.descend(x, rank))

    def first(link: ThreadLink) -> tuple[Any, Any]:
        method = make(link, name, graph, problem.start)
        steps(method, problem.first(), link.rank, 77)
        with pytest.raises(RuntimeError, match="under way"):
            method.load(method.tensors(), method.numbers())
        return method.tensors(), method.numbers()

    saved = ThreadWorld(3).run(first)

    def second(link: ThreadLink) -> np.ndarray:
        method = make(link, name, graph, 0 * problem.start)
        method.load(*saved[link.rank])
        x = method.x.clone()
        steps(method, x, link.rank, STEPS - 77)
        return x.numpy()

    assert np.array_equal(np.stack(ThreadWorld(3).run(second), 1), whole.models[-1])


HAS_FASHION = any(Path(place).is_dir() for place in fashion.PLACES)


@pytest.mark.skipif(not HAS_FASHION, reason="needs Debian's dataset-fashion-mnist")
@pytest.mark.parametrize(
    ("name", "compressor"), [("dpsgd", "none"), ("dcd", "int8"), ("ecd", "int16"), ("choco", "topk:0.1")]
)
def test_the_table_of_compressors_is_of_what_gossip_computes(name: str, compressor: str) -> None:
    """papers/choco_table1.py makes all nodes' steps at once; here they are made by nodes, with torch's optimizer."""
    wanted, steps, mine = choco_table1.Run(name, compressor, 0), 8, choco_table1.shares(0, 10)
    images, labels = fashion.load("train")

    def program(link: ThreadLink) -> np.ndarray:
        torch.manual_seed(0)
        model = fashion.net(choco_table1.CHANNELS)
        decay, momentum = choco_table1.DECAY, choco_table1.MOMENTUM
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum, weight_decay=decay)
        Gossip(model, optimizer, name, compressor=compressor, link=link)
        random = torch.Generator().manual_seed(link.rank)
        for step in range(steps):
            batch = mine[link.rank][torch.randint(len(mine[link.rank]), (choco_table1.BATCH,), generator=random)]
            optimizer.param_groups[0]["lr"] = choco_table1.rate(step, steps)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(fashion.pixels(images[batch])), labels[batch]).backward()
            optimizer.step()
        return torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()

    ours = np.stack(ThreadWorld(choco_table1.NODES).run(program), 1)
    columns, _ = choco_table1.descend(wanted, steps)
    moved = np.linalg.norm(columns.X - choco_table1.first_model(0)[:, None])
    assert np.linalg.norm(ours - columns.X) < 1e-3 * moved


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.needs_fixed_graph])
def test_replicas_need_neighbours_that_stay(name: str) -> None:
    graph = topology_of("one-peer-exponential", 2)
    graph = Topology("turns", (graph.matrices[0], np.eye(2)))
    with pytest.raises(ValueError, match="neighbours must not change"):
        METHODS[name](ThreadWorld(2).links[0], graph, Exact(), torch.zeros(3))


# --- another compressor on the way

CHANGES = {20: "topk:0.3", 50: "int8", 51: "random:0.5"}


@pytest.mark.parametrize("overlap", [False, True])
@every_method
def test_the_compressor_may_change_between_any_two_steps(name: str, overlap: bool) -> None:
    """A message that is under way when it changes is still the old one."""
    if overlap and name not in EARLY:
        return
    nodes, steps = 3, 80
    problem, graph, (first, options) = Problem(nodes), topology_of("ring", nodes), SETTINGS[name]
    prepared = METHODS[name].prepared

    def program(link: ThreadLink) -> tuple[np.ndarray, dict[str, int]]:
        method, x = make(link, name, graph, problem.start), problem.first()
        method.overlap = overlap
        seen = []
        for step in range(steps):
            if step in CHANGES:
                method.recompress(build(CHANGES[step]))
            method.step(problem.descend(x, link.rank))
            seen.append(x.numpy().copy())
        return np.stack(seen), dict(method.mail.counts)

    results = ThreadWorld(nodes).run(program)
    oracle = Columns(
        graph.weights, prepared(build(first)), np.repeat(problem.start[:, None], nodes, 1), SEED, **options
    )
    for step in range(steps):
        changed = CHANGES.get(step - overlap)
        if changed is not None:
            oracle.compressor = prepared(build(changed))
        oracle.step(name, np.stack([problem.update(oracle.X[:, i], i) for i in range(nodes)], 1))
        ours = np.stack([seen[step] for seen, _ in results], 1)
        np.testing.assert_allclose(ours, oracle.X, rtol=1e-9, atol=1e-9)
    assert all(counts == {} for _, counts in results)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["dpsgd", "dcd", "ecd", "choco", "adagossip"])
def test_nodes_that_met_stay_together_until_something_moves_them(name: str, overlap: bool) -> None:
    if overlap and name not in EARLY:
        return
    problem, graph = Problem(3), topology_of("ring", 3)

    def program(link: ThreadLink) -> tuple[torch.Tensor, torch.Tensor]:
        method, x = make(link, name, graph, problem.start), problem.first()
        method.overlap = overlap
        for _ in range(10):
            method.step(problem.descend(x, link.rank))
        method.meet(torch.ones_like(x))
        x.fill_(1.0)
        for _ in range(5):
            method.step(x)
        return x, method.x

    tolerance = 1e-3 if name == "ecd" else 1e-12  # it compresses the model itself, to 16 bits
    for x, kept in ThreadWorld(3).run(program):
        assert (x - 1).abs().max() <= tolerance
        assert torch.equal(x, kept)
