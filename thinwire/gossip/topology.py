"""Who mixes with whom, and how much: graphs, their mixing matrices, and what a spectrum says about them.

W[i, j] is the weight that node i gives to node j. Mixing is X W with nodes as columns (Lian et al. 2017); W symmetric
and doubly stochastic is what Tang et al. 2018 assume.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Edges = Iterable[tuple[int, int]]

TOLERANCE = 1e-12
_TRIES = 100  # of a random graph, until one is connected


class TopologyError(ValueError):
    """A graph or a mixing matrix that decentralised training cannot use."""


@dataclass(frozen=True, eq=False)
class Topology:
    """A mixing matrix, or several that take turns.

    Args:
        name: as a user spells it.
        matrices: at step t, W is `matrices[t % period]`. A single one is symmetric. Where several take turns each has
            to be doubly stochastic only, and their graphs connected taken together.
        family: makes a topology of the same kind for another number of nodes; None for a graph that was given.
    """

    name: str
    matrices: tuple[Array, ...]
    family: Callable[[int], Topology] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check(self.matrices)

    @property
    def world_size(self) -> int:
        return len(self.matrices[0])

    @property
    def period(self) -> int:
        return len(self.matrices)

    @property
    def static(self) -> bool:
        """Whether the neighbours are the same at every step, which methods that keep replicas need."""
        return self.period == 1

    @property
    def digest(self) -> str:
        """Of W, rounded: the same W may be computed otherwise to the last bit on another machine."""
        rounded = [matrix.astype("<f8").round(9) + 0.0 for matrix in self.matrices]
        return hashlib.sha256(b"".join(W.tobytes() for W in rounded)).hexdigest()[:16]

    def weights(self, step: int = 0) -> Array:
        """W at this step."""
        return self.matrices[step % self.period]

    def sources(self, rank: int, step: int = 0) -> list[int]:
        """Whom `rank` hears at this step, the nearest below it first: in the order in which messages come."""
        n = self.world_size
        return sorted(_others(self.weights(step)[rank], rank), key=lambda j: (rank - j) % n)

    def destinations(self, rank: int, step: int = 0) -> list[int]:
        """Who hears `rank` at this step, the nearest above it first: so that not all begin with the same one."""
        n = self.world_size
        return sorted(_others(self.weights(step)[:, rank], rank), key=lambda j: (j - rank) % n)

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Pairs that ever exchange anything, the lower first."""
        return _edges(self.matrices)

    @property
    def degree(self) -> int:
        """The most messages that a node sends in a step."""
        return max(int(np.count_nonzero(W, axis=0).max()) - 1 for W in self.matrices)

    @cached_property
    def eigenvalues(self) -> Array:
        """Of W, descending; where several take turns, the singular values of their product."""
        if self.static:
            return np.linalg.eigvalsh(self.matrices[0])[::-1]
        return np.linalg.svd(_product(self.matrices), compute_uv=False)

    @cached_property
    def rho(self) -> float:
        """max(|lambda_2|, |lambda_n|): how much of the disagreement is left after a step (Tang et al. 2018).

        Where several take turns: the same for their product, per step.
        """
        others = np.abs(self.eigenvalues[1:])
        whole = float(others.max()) if len(others) else 0.0
        return float((0.0 if whole < TOLERANCE else whole) ** (1 / self.period))

    @property
    def spectral_gap(self) -> float:
        """1 - rho."""
        return 1 - self.rho

    @cached_property
    def mu(self) -> float:
        """max over i >= 2 of |lambda_i - 1| (Tang et al. 2018, Theorem 1). NaN where several take turns."""
        if not self.static:
            return math.nan
        return float(np.abs(self.eigenvalues[1:] - 1).max()) if self.world_size > 1 else 0.0

    @property
    def beta(self) -> float:
        """||I - W||_2 (Koloskova et al. 2020), which for a symmetric W is mu."""
        return self.mu

    @property
    def dcd_alpha(self) -> float:
        """DCD's bound on the compressor: (1 - rho)^2 - 4 mu^2 alpha^2 > 0 (Tang et al. 2018, Theorem 1).

        >>> round(build("ring", 8).dcd_alpha, 4)
        0.0732
        """
        return math.inf if self.mu == 0 else (1 - self.rho) / (2 * self.mu)

    def choco_gamma(self, delta: float) -> float:
        """The consensus step size that CHOCO's theory asks for (Koloskova et al. 2020): safe, and small.

        >>> f"{build('ring', 8).choco_gamma(0.01):.1e}"
        '3.5e-05'
        """
        gap, beta = self.spectral_gap, self.beta
        return gap**2 * delta / (16 * gap + gap**2 + 4 * beta**2 + 2 * gap * beta**2 - 8 * gap * delta)

    def without(self, lost: Collection[int]) -> Topology:
        """The topology of those that are left, in their old order, so that every one of them builds the same.

        The same kind of graph if that many nodes admit one; otherwise what is left of this one, if it is still
        connected, with Metropolis-Hastings weights.
        """
        alive = [rank for rank in range(self.world_size) if rank not in set(lost)]
        if not alive:
            raise TopologyError(f"no node of {self.world_size} is left.")
        if self.family is not None:
            try:
                return self.family(len(alive))
            except TopologyError:
                pass
        place = {rank: i for i, rank in enumerate(alive)}
        kept = [(i, j) for i, j in self.edges if i in place and j in place]
        pieces = components(self.world_size, kept, alive)
        if len(pieces) > 1:
            parts = " | ".join(", ".join(map(str, piece)) for piece in pieces)
            raise TopologyError(f"without rank {', '.join(map(str, sorted(lost)))} the graph falls apart: {parts}.")
        edges = [(place[i], place[j]) for i, j in kept]
        return Topology(f"{self.name} without {len(lost)}", (metropolis(len(alive), edges),))


# --- W


def metropolis(nodes: int, edges: Edges) -> Array:
    """Metropolis-Hastings weights: w_ij = 1 / (1 + max(deg_i, deg_j)), the rest stays with the node.

    With degrees that count the node itself this is the 1 / max(deg_i, deg_j) of Koloskova et al.: 1/3 on a ring.
    """
    W = np.zeros((nodes, nodes))
    pairs = sorted({(min(edge), max(edge)) for edge in edges})
    degree = np.bincount(np.array(pairs, dtype=int).reshape(-1), minlength=nodes)
    for i, j in pairs:
        W[i, j] = W[j, i] = 1 / (1 + max(degree[i], degree[j]))
    np.fill_diagonal(W, 1 - W.sum(1))
    return W


def check(matrices: tuple[Array, ...]) -> None:
    """Refuse what does not mix: not square, not doubly stochastic, not symmetric where it must be, not connected."""
    if not matrices:
        raise TopologyError("a topology needs at least one mixing matrix.")
    n = len(matrices[0])
    for W in matrices:
        if W.shape != (n, n) or n == 0:
            raise TopologyError(f"W must be square and not empty, got shape {W.shape}.")
        if not np.isfinite(W).all() or W.min() < -TOLERANCE:
            raise TopologyError(f"W must have no negative weight, got {W.min():g}.")
        for axis, sums in (("row", W.sum(1)), ("column", W.sum(0))):
            worst = int(np.abs(sums - 1).argmax())
            if abs(sums[worst] - 1) > TOLERANCE:
                raise TopologyError(
                    f"W is not doubly stochastic: {axis} {worst} adds up to {sums[worst]:.15g}, not 1 to {TOLERANCE:g}."
                )
        if len(matrices) == 1 and np.abs(W - W.T).max() > TOLERANCE:
            i, j = np.unravel_index(int(np.abs(W - W.T).argmax()), W.shape)
            raise TopologyError(f"W is not symmetric: W[{i}, {j}] is {W[i, j]:.15g} and W[{j}, {i}] is {W[j, i]:.15g}.")
    pieces = components(n, _edges(matrices), range(n))
    if len(pieces) > 1:
        parts = " | ".join(", ".join(map(str, piece)) for piece in pieces)
        raise TopologyError(f"the graph is not connected: {parts}. Nodes would never agree.")
    if len(matrices) == 1 and np.linalg.eigvalsh(matrices[0])[0] < TOLERANCE - 1:
        raise TopologyError("W has the eigenvalue -1: nodes would swap their models for ever. Let them keep a share.")


def components(nodes: int, edges: Edges, among: Iterable[int]) -> list[list[int]]:
    """The connected pieces, each ascending.

    >>> components(4, [(0, 2)], range(4))
    [[0, 2], [1], [3]]
    """
    root = list(range(nodes))

    def find(i: int) -> int:
        while root[i] != i:
            i = root[i]
        return i

    for i, j in edges:
        low, high = sorted((find(i), find(j)))
        root[high] = low
    pieces: dict[int, list[int]] = {}
    for i in among:
        pieces.setdefault(find(i), []).append(i)
    return list(pieces.values())


def _edges(matrices: tuple[Array, ...]) -> list[tuple[int, int]]:
    joined = sum(((W != 0) | (W.T != 0) for W in matrices[1:]), start=(matrices[0] != 0) | (matrices[0].T != 0))
    return [(int(i), int(j)) for i, j in zip(*np.nonzero(np.triu(joined, 1)), strict=True)]


def _others(weights: Array, rank: int) -> list[int]:
    return [int(j) for j in np.flatnonzero(weights) if j != rank]


def _product(matrices: tuple[Array, ...]) -> Array:
    product = matrices[0]
    for W in matrices[1:]:
        product = W @ product
    return product


# --- graphs


def ring(nodes: int) -> list[tuple[int, int]]:
    """Everyone has the next and the previous: weights 1/3."""
    return [(i, (i + 1) % nodes) for i in range(nodes) if nodes > 1]


def torus(rows: int, columns: int) -> list[tuple[int, int]]:
    """A grid whose sides are joined: weights 1/5."""

    def at(row: int, column: int) -> int:
        return row % rows * columns + column % columns

    places = [(r, c) for r in range(rows) for c in range(columns)]
    steps = [(at(r, c), at(r + down, c + 1 - down)) for r, c in places for down in (0, 1)]
    return [(i, j) for i, j in steps if i != j]


def hypercube(nodes: int) -> list[tuple[int, int]]:
    """Neighbours differ in one bit of their number."""
    if nodes & (nodes - 1) or nodes < 1:
        raise TopologyError(f"a hypercube has 1, 2, 4, 8, 16 ... nodes, not {nodes}.")
    return [(i, i ^ bit) for i in range(nodes) for bit in _powers(nodes)]


def exponential(nodes: int) -> list[tuple[int, int]]:
    """Neighbours are 1, 2, 4, 8 ... places away.

    Ying et al. 2021 have arrows that way only; both ways make W symmetric, which the methods with replicas need.
    """
    return [(i, (i + hop) % nodes) for i in range(nodes) for hop in _powers(nodes)]


def star(nodes: int) -> list[tuple[int, int]]:
    """Everyone has rank 0."""
    return [(0, i) for i in range(1, nodes)]


def complete(nodes: int) -> list[tuple[int, int]]:
    """Everyone has everyone: one step averages exactly."""
    return [(i, j) for i in range(nodes) for j in range(i)]


def one_peer_exponential(nodes: int) -> tuple[Array, ...]:
    """At step k everyone hears the one that is 2^(k mod ceil(log2 n)) places on: one message per node and step.

    W[i, j] is 1/2 for j = i and for that j (Ying et al. 2021). After ceil(log2 n) steps the average is exact if n is
    a power of two. The arrows go one way, so W is doubly stochastic but not symmetric.
    """
    hops = _powers(nodes)
    eye = np.eye(nodes)
    return tuple((eye + np.roll(eye, hop, axis=1)) / 2 for hop in hops) or (eye,)


def random_regular(nodes: int, degree: int, seed: int) -> list[tuple[int, int]]:
    """Every node has `degree` neighbours, drawn at random (Steger and Wormald 1999, as networkx does it)."""
    if nodes == 1:
        return []
    if not 0 < degree < nodes or degree * nodes % 2:
        raise TopologyError(f"no graph of {nodes} nodes has {degree} neighbours at each: degree x nodes must be even.")
    import networkx  # type: ignore[import-untyped, unused-ignore]

    return _connected(nodes, lambda i: networkx.random_regular_graph(degree, nodes, seed=seed + i).edges)


def erdos_renyi(nodes: int, p: float, seed: int) -> list[tuple[int, int]]:
    """Every pair is joined with probability p; drawn again until all are connected."""
    if not 0 < p <= 1:
        raise TopologyError(f"the probability of an edge must be in (0, 1], got {p}.")
    import networkx  # type: ignore[import-untyped, unused-ignore]

    return _connected(nodes, lambda i: networkx.gnp_random_graph(nodes, p, seed=seed + i).edges)


def _connected(nodes: int, draw: Callable[[int], Edges]) -> list[tuple[int, int]]:
    for i in range(_TRIES):
        edges = [(int(a), int(b)) for a, b in draw(i)]
        if len(components(nodes, edges, range(nodes))) == 1:
            return edges
    raise TopologyError(f"none of {_TRIES} random graphs of {nodes} nodes was connected; ask for more edges.")


def _powers(nodes: int) -> list[int]:
    """1, 2, 4 ... below `nodes`."""
    return [1 << k for k in range((nodes - 1).bit_length())]


def _sides(nodes: int, given: str) -> tuple[int, int]:
    if given:
        rows, _, columns = given.partition("x")
        if not (rows.isdigit() and columns.isdigit() and int(rows) * int(columns) == nodes):
            raise TopologyError(f"a torus of {nodes} nodes cannot be {given!r}; write rows x columns, as in torus:2x4.")
        return int(rows), int(columns)
    side = next(i for i in range(math.isqrt(nodes), 0, -1) if nodes % i == 0)
    return side, nodes // side


def _number(name: str, given: str, default: float) -> float:
    try:
        return float(given) if given else default
    except ValueError:
        raise TopologyError(f"{name} takes a number, as in {name}:{default:g}, got {given!r}.") from None


def _degree(given: str) -> int:
    if given and not given.isdecimal():
        raise TopologyError(f"random-regular takes a number of neighbours, as in random-regular:3, got {given!r}.")
    return int(given or 3)


_GRAPHS: dict[str, Callable[[int, str, int], list[tuple[int, int]]]] = {
    "ring": lambda n, _, seed: ring(n),
    "torus": lambda n, given, seed: torus(*_sides(n, given)),
    "hypercube": lambda n, _, seed: hypercube(n),
    "exponential": lambda n, _, seed: exponential(n),
    "star": lambda n, _, seed: star(n),
    "complete": lambda n, _, seed: complete(n),
    "random-regular": lambda n, given, seed: random_regular(n, _degree(given), seed),
    "erdos-renyi": lambda n, given, seed: erdos_renyi(n, _number("erdos-renyi", given, 0.5), seed),
}
NAMES = (*_GRAPHS, "one-peer-exponential")
_TAKE_MORE = ("torus", "random-regular", "erdos-renyi")


def build(spec: str | Edges | Topology, nodes: int, *, weights: Array | None = None, seed: int = 0) -> Topology:
    """A topology from its name, or from a list of edges.

    Args:
        spec: ring, torus (torus:2x4 for given sides), hypercube, exponential, one-peer-exponential, star, complete,
            random-regular:degree, erdos-renyi:probability, pairs of ranks, or a Topology.
        weights: W itself, whose graph must then be that of `spec`; None for Metropolis-Hastings weights.
        seed: of random graphs, the same on all ranks.

    >>> build("ring", 4).weights()[0].round(2).tolist()
    [0.33, 0.33, 0.0, 0.33]
    """
    if nodes < 1:
        raise TopologyError(f"a topology needs at least one node, got {nodes}.")
    if isinstance(spec, Topology):
        if spec.world_size != nodes:
            raise TopologyError(f"this topology is for {spec.world_size} nodes, there are {nodes}.")
        if weights is not None:
            raise TopologyError("a Topology has its weights already; give weights with a name or a list of edges.")
        return spec
    topology = _named(spec, nodes, seed) if isinstance(spec, str) else _given(spec, nodes)
    if weights is None:
        return topology
    given = Topology(f"{topology.name}, given weights", (np.asarray(weights, np.float64),))
    if given.world_size != nodes or given.edges != topology.edges:
        raise TopologyError(f"the given W is not a matrix on the graph of {topology.name} with {nodes} nodes.")
    return given


def of_weights(weights: Array) -> Topology:
    """The topology that a mixing matrix describes."""
    return Topology("given weights", (np.asarray(weights, np.float64),))


def _named(spec: str, nodes: int, seed: int) -> Topology:
    name, _, given = spec.partition(":")
    if name not in NAMES:
        raise TopologyError(f"unknown topology {name!r}. Known are: {', '.join(NAMES)}.")
    if given and name not in _TAKE_MORE:
        raise TopologyError(f"{name} takes nothing after its name, got {given!r}.")
    family = None if name == "torus" and given else lambda n: _named(spec, n, seed)
    if name == "one-peer-exponential":
        return Topology(spec, one_peer_exponential(nodes), family)
    return Topology(spec, (metropolis(nodes, _GRAPHS[name](nodes, given, seed)),), family)


def _given(edges: Edges, nodes: int) -> Topology:
    try:
        pairs = [(operator.index(i), operator.index(j)) for i, j in edges]
    except (TypeError, ValueError):
        raise TopologyError(
            f"a topology is a name, a list of pairs of ranks as in [(0, 1), (1, 2)], or a Topology, got {edges!r}."
        ) from None
    for i, j in pairs:
        if not (0 <= i < nodes and 0 <= j < nodes) or i == j:
            raise TopologyError(f"({i}, {j}) is not an edge between two of {nodes} nodes.")
    return Topology(f"{len(pairs)} edges", (metropolis(nodes, pairs),))
