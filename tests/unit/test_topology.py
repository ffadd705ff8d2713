"""Graphs and mixing matrices: what they are, what they refuse, and what is left when nodes are lost."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from thinwire.cli.topology import topology as command
from thinwire.gossip.topology import NAMES, Topology, TopologyError, build, components, metropolis, of_weights

SIZES = (1, 2, 3, 4, 5, 8, 12, 16)


def admitted() -> list[tuple[str, int]]:
    found = []
    for name in NAMES:
        for nodes in SIZES:
            if name == "hypercube" and nodes & (nodes - 1):
                continue
            if name == "random-regular" and nodes > 1 and (nodes <= 3 or 3 * nodes % 2):
                continue
            found.append((name, nodes))
    return found


@pytest.mark.parametrize(("name", "nodes"), admitted())
def test_every_topology_mixes_and_keeps_the_mean(name: str, nodes: int) -> None:
    topology = build(name, nodes)
    X = np.random.default_rng(0).standard_normal((7, nodes))
    mixed = X
    for step in range(400 * topology.period):
        mixed = mixed @ topology.weights(step).T
    np.testing.assert_allclose(mixed, np.repeat(X.mean(1, keepdims=True), nodes, 1), atol=1e-5)
    assert 0 <= topology.rho < 1
    assert topology.spectral_gap == 1 - topology.rho


@pytest.mark.parametrize(("name", "nodes"), admitted())
def test_whom_a_node_hears_also_sends_to_it(name: str, nodes: int) -> None:
    topology = build(name, nodes)
    for step in range(topology.period):
        for rank in range(nodes):
            for source in topology.sources(rank, step):
                assert rank in topology.destinations(source, step)
            assert rank not in topology.sources(rank, step)
            assert len(topology.destinations(rank, step)) <= topology.degree


def test_a_ring_has_the_numbers_of_the_papers() -> None:
    """Tang et al.'s condition and Koloskova et al.'s spectral gaps, to the digits that they give."""
    assert build("ring", 8).rho == pytest.approx(0.805, abs=5e-4)
    assert build("ring", 8).mu == pytest.approx(4 / 3)
    assert build("ring", 8).dcd_alpha == pytest.approx(0.073, abs=5e-4)
    assert build("ring", 16).rho == pytest.approx(0.949, abs=5e-4)
    assert build("ring", 16).dcd_alpha == pytest.approx(0.019, abs=5e-4)
    assert build("ring", 32).dcd_alpha == pytest.approx(0.0048, abs=5e-5)
    for nodes, ring_gap, torus_gap in ((4, 0.67, 0.67), (16, 0.05, 0.4), (36, 0.01, 0.2)):
        assert build("ring", nodes).spectral_gap == pytest.approx(ring_gap, abs=6e-3)
        assert build("torus", nodes).spectral_gap == pytest.approx(torus_gap, abs=6e-3)


def test_weights_are_a_third_on_a_ring_and_a_fifth_on_a_torus() -> None:
    assert set(build("ring", 5).weights()[0].round(12)) == {0.0, round(1 / 3, 12)}
    assert set(build("torus", 16).weights()[3].round(12)) == {0.0, 0.2}


@pytest.mark.parametrize("nodes", [2, 4, 8, 16, 32])
def test_one_peer_averages_exactly_after_log_n_steps_with_one_message_each(nodes: int) -> None:
    topology = build("one-peer-exponential", nodes)
    X = np.random.default_rng(1).standard_normal((3, nodes))
    mixed = X
    for step in range(topology.period):
        mixed = mixed @ topology.weights(step).T
    assert topology.period == nodes.bit_length() - 1
    assert topology.degree == 1
    assert topology.rho == 0
    np.testing.assert_allclose(mixed, np.repeat(X.mean(1, keepdims=True), nodes, 1), rtol=1e-12, atol=1e-15)


def test_one_peer_of_another_number_of_nodes_still_mixes() -> None:
    assert 0 < build("one-peer-exponential", 6).rho < 1


def test_complete_averages_in_one_step_and_allows_dcd_any_compressor_but_for_its_mu() -> None:
    assert build("complete", 6).rho < 1e-12
    assert build("complete", 6).dcd_alpha == pytest.approx(0.5)
    assert build("ring", 1).dcd_alpha == float("inf")


@pytest.mark.parametrize(
    ("W", "words"),
    [
        ([[0.5, 0.5], [0.4, 0.6]], "not doubly stochastic: column 1 adds up to 1.1"),
        ([[0.5, 0.6], [0.5, 0.5]], "not doubly stochastic: row 0"),
        ([[0.2, 0.5, 0.3], [0.3, 0.2, 0.5], [0.5, 0.3, 0.2]], "not symmetric"),
        ([[1.5, -0.5], [-0.5, 1.5]], "negative"),
        ([[float("nan"), 1.0], [1.0, 0.0]], "negative"),
        ([[1.0, 0.0], [0.0, 1.0]], r"not connected: 0 \| 1"),
        ([[0.0, 1.0], [1.0, 0.0]], "swap their models for ever"),
        ([[0.5, 0.5]], "square"),
    ],
)
def test_a_matrix_that_does_not_mix_is_refused(W: list[list[float]], words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        of_weights(np.array(W))


def test_an_error_of_a_trillionth_is_allowed_and_ten_are_not() -> None:
    W = metropolis(3, [(0, 1), (1, 2)])
    W[0, 0] += 5e-13
    of_weights(W)
    W[0, 0] += 1e-11
    with pytest.raises(TopologyError, match="not doubly stochastic"):
        of_weights(W)


@pytest.mark.parametrize(
    ("spec", "nodes", "words"),
    [
        ("rnig", 4, "unknown topology 'rnig'. Known are: ring"),
        ("hypercube", 6, "1, 2, 4, 8, 16 ... nodes, not 6"),
        ("torus:3x3", 8, "cannot be '3x3'"),
        ("random-regular:3", 5, "degree x nodes must be even"),
        ("random-regular:x", 6, "takes a number"),
        ("erdos-renyi:2", 5, "probability"),
        ("erdos-renyi:0.001", 20, "none of 100"),
        ("ring", 0, "at least one node"),
        ([(0, 1), (2, 3)], 4, r"not connected: 0, 1 \| 2, 3"),
        ([(0, 4)], 4, r"\(0, 4\) is not an edge"),
        ([(1, 1)], 4, r"\(1, 1\) is not an edge"),
    ],
)
def test_what_cannot_be_built_says_why(spec: str, nodes: int, words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        build(spec, nodes)


def test_given_weights_must_lie_on_the_graph() -> None:
    path = np.array([[2, 1, 0], [1, 1, 1], [0, 1, 2]]) / 3
    assert build([(0, 1), (1, 2)], 3, weights=path).weights().tolist() == path.tolist()
    with pytest.raises(TopologyError, match="not a matrix on the graph of ring"):
        build("ring", 3, weights=path)


def test_a_random_graph_is_the_same_for_the_same_seed() -> None:
    for name in ("random-regular:3", "erdos-renyi:0.5"):
        assert build(name, 12, seed=4).edges == build(name, 12, seed=4).edges
        assert build(name, 12, seed=4).edges != build(name, 12, seed=5).edges


@pytest.mark.parametrize(("name", "nodes"), [("ring", 9), ("torus:3x4", 12), ("exponential", 12), ("complete", 7)])
def test_whoever_is_left_rebuilds_a_mixing_matrix_after_up_to_three_losses(name: str, nodes: int) -> None:
    topology = build(name, nodes)
    for count in (1, 2, 3):
        for lost in itertools.combinations(range(nodes), count):
            kept = [(i, j) for i, j in topology.edges if i not in lost and j not in lost]
            whole = len(components(nodes, kept, [r for r in range(nodes) if r not in lost])) == 1
            if whole or topology.family is not None:
                left = topology.without(lost)
                assert left.world_size == nodes - count
                assert left.rho < 1
            else:
                with pytest.raises(TopologyError, match="falls apart"):
                    topology.without(lost)


def test_a_ring_stays_a_ring_and_a_hypercube_becomes_what_is_left_of_it() -> None:
    assert build("ring", 6).without([2]).edges == build("ring", 5).edges
    left = build("hypercube", 8).without([7])
    assert left.world_size == 7
    assert left.edges == [edge for edge in build("hypercube", 8).edges if 7 not in edge]


def test_a_topology_for_another_number_of_nodes_is_refused() -> None:
    ring = build("ring", 4)
    assert build(ring, 4) is ring
    with pytest.raises(TopologyError, match="is for 4 nodes, there are 5"):
        build(ring, 5)


def test_weights_for_a_topology_that_has_its_own_are_refused() -> None:
    with pytest.raises(TopologyError, match="has its weights already"):
        build(build("ring", 3), 3, weights=np.full((3, 3), 1 / 3))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("random-regular:2.7", "takes a number of neighbours, as in random-regular:3, got '2.7'"),
        ("random-regular:inf", "takes a number of neighbours"),
        ("random-regular:-2", "takes a number of neighbours"),
        ("ring:5", "ring takes nothing after its name, got '5'"),
        ("one-peer-exponential:2", "one-peer-exponential takes nothing after its name"),
        (5, "pairs of ranks .* got 5"),
        ([(0, 1, 0.5)], "pairs of ranks"),
        ([(0.5, 1)], "pairs of ranks"),
        ([0, 1], "pairs of ranks"),
    ],
)
def test_a_graph_that_is_misspelt_is_refused(spec: Any, words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        build(spec, 6)


def test_edges_may_be_numbers_of_numpy() -> None:
    assert build(np.array([[0, 1], [1, 2]]), 3).edges == [(0, 1), (1, 2)]


def test_every_matrix_is_checked_when_several_take_turns() -> None:
    eye, swap = np.eye(2), np.array([[0.5, 0.5], [0.5, 0.5]])
    assert Topology("turns", (eye, swap)).period == 2
    with pytest.raises(TopologyError, match="not connected"):
        Topology("turns", (eye, eye))


# --- the command


def ask(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    return result.output if result.exit_code == 0 else f"exit code {result.exit_code}: {result.output}"


def test_the_command_prints_graph_spectrum_and_what_may_be_compressed() -> None:
    printed = ask("ring", "--nodes", "16")
    assert "ring, 16 nodes, 16 edges" in printed
    assert "0.9493" in printed  # rho
    assert "0.0190" in printed  # what dcd allows
    rows = {line.split()[1]: line for line in printed.splitlines() if line.startswith("│ ")}
    assert "yes" in rows["int8"]
    assert "no" in rows["int4"]
    assert "biased" in rows["sign"]


def test_the_command_prints_every_turn_of_a_graph_that_changes() -> None:
    printed = ask("one-peer-exponential", "--nodes", "4")
    assert "hears at step 1 (weight)" in printed
    assert "graph changes" in printed


def test_the_command_says_what_is_wrong_with_a_graph() -> None:
    assert "exit code 2" in ask("hypercube", "--nodes", "6")
    assert "1, 2, 4, 8, 16" in ask("hypercube", "--nodes", "6")


def test_the_command_draws_the_graph(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ask("torus", "--nodes", "9", "--png", str(tmp_path / "torus.png"))
    assert (tmp_path / "torus.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("place", ["nowhere/ring.png", "ring.notapicture"])
def test_the_command_says_when_it_cannot_draw(tmp_path: Path, place: str) -> None:
    pytest.importorskip("matplotlib")
    said = ask("ring", "--png", str(tmp_path / place))
    assert said.startswith("exit code 2") and "cannot draw into" in said
    assert "spectrum" not in said and "Traceback" not in said
