"""What the paper says an exchange costs, and which one it says to take.

Reference: Tyagi & Swany 2023, "Flexible Communication for Optimal Distributed Learning over Unpredictable Networks":
its table of costs, Eqs. (4a), (4b) and (5a) to (5c), Fig. 3. N is `world_size`, M is `nbytes` (of the whole gradient),
c is `ratio`, log is to base 2; alpha and beta are those of `network`. What this implementation costs is in prices.py:
it has other codings, other collectives and pieces that are not equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from thinwire.types import Network

# Fig. 3, 8 workers, read from the plot to about 0.05: the gain of MSTopk at the end of training, by ratio. Of ResNet18
# at 0.001 it shows 0.08 to 0.10, of AlexNet 0.15 to 0.3, of ResNet50 0.1 to 0.3, of ViT 0.1 to 0.15: the middle.
GAINS: dict[str, dict[float, float]] = {
    "resnet18": {0.1: 0.73, 0.01: 0.25, 0.001: 0.09},
    "resnet50": {0.1: 0.97, 0.01: 0.68, 0.001: 0.2},
    "alexnet": {0.1: 0.95, 0.01: 0.9, 0.001: 0.22},
    "vit": {0.1: 0.95, 0.01: 0.73, 0.001: 0.12},
}

# --- one collective


def parameter_server(network: Network, nbytes: float, world_size: int) -> float:
    """PS (star): 2 alpha + 2 (N-1) M beta."""
    return 2 * network.alpha + 2 * (world_size - 1) * nbytes * network.beta


def ring(network: Network, nbytes: float, world_size: int) -> float:
    """Ring-AR: 2 (N-1) alpha + 2 (N-1)/N M beta."""
    hops = 2 * (world_size - 1)
    return hops * network.alpha + hops / world_size * nbytes * network.beta


def tree(network: Network, nbytes: float, world_size: int) -> float:
    """Tree-AR: 2 alpha log N + 2 log N M beta."""
    return 2 * math.log2(world_size) * (network.alpha + nbytes * network.beta)


def broadcast(network: Network, nbytes: float, world_size: int) -> float:
    """Broadcast: alpha log N + log N M beta."""
    return math.log2(world_size) * (network.alpha + nbytes * network.beta)


def allgather(network: Network, nbytes: float, world_size: int) -> float:
    """Allgather of M bytes from each: alpha log N + (N-1) M beta."""
    return math.log2(world_size) * network.alpha + (world_size - 1) * nbytes * network.beta


# --- one exchange


def compressed_allgather(network: Network, nbytes: float, ratio: float, world_size: int) -> float:
    """AG of values and indices, 2 M c bytes from each: alpha log N + 2 M c beta (N-1)."""
    return allgather(network, 2 * nbytes * ratio, world_size)


def art_ring(network: Network, nbytes: float, ratio: float, world_size: int) -> float:
    """ART-Ring, Eq. (4a): alpha [2(N-1) + log N] + M c beta [2(N-1)/N + log N].

    A broadcast of M c bytes of indices and a ring all-reduce of M c bytes of values.
    """
    return broadcast(network, nbytes * ratio, world_size) + ring(network, nbytes * ratio, world_size)


def art_tree(network: Network, nbytes: float, ratio: float, world_size: int) -> float:
    """ART-Tree, Eq. (4b): 3 alpha log N + 3 M c beta log N."""
    return broadcast(network, nbytes * ratio, world_size) + tree(network, nbytes * ratio, world_size)


COMPRESSED: dict[str, Callable[[Network, float, float, int], float]] = {
    "AG": compressed_allgather,
    "ART-Ring": art_ring,
    "ART-Tree": art_tree,
}
DENSE: dict[str, Callable[[Network, float, int], float]] = {
    "PS": parameter_server,
    "Ring-AR": ring,
    "Tree-AR": tree,
}


def seconds(network: Network, nbytes: float, ratio: float, world_size: int) -> dict[str, float]:
    """Every exchange's price by its name in the paper, compressed ones first.

    >>> prices = seconds(Network(alpha=1e-3, beta=8e-10), 4 * 11_689_512, 0.1, 8)  # ResNet18, 10 Gbit/s
    >>> {name: round(1e3 * price, 1) for name, price in prices.items() if name in COMPRESSED}
    {'AG': 55.4, 'ART-Ring': 34.8, 'ART-Tree': 42.7}
    """
    compressed = {name: price(network, nbytes, ratio, world_size) for name, price in COMPRESSED.items()}
    return compressed | {name: price(network, nbytes, world_size) for name, price in DENSE.items()}


# --- the rules
#
# Each is written here multiplied out: as printed, alpha/beta < M c (...), they divide by zero where N = 2 or beta = 0.


def ring_over_tree(network: Network, nbytes: float, ratio: float, world_size: int) -> bool:
    """Eq. (5a): alpha/beta < M c (log N - (N-1)/N) / (N - 1 - log N).

    With N = 2 the right-hand side is infinite: the ring is always better.
    """
    N, log = world_size, math.log2(world_size)
    return network.alpha * (N - 1 - log) < nbytes * ratio * network.beta * (log - (N - 1) / N)


def ring_over_allgather(network: Network, nbytes: float, ratio: float, world_size: int) -> bool:
    """Eq. (5b): alpha/beta < M c (1 - 1/N - log N / (2(N-1))). With N = 2 the right-hand side is 0: never."""
    N, log = world_size, math.log2(world_size)
    return network.alpha * (N - 1) < nbytes * ratio * network.beta * ((N - 1) * (1 - 1 / N) - log / 2)


def tree_over_allgather(network: Network, nbytes: float, ratio: float, world_size: int) -> bool:
    """Eq. (5c): alpha/beta < M c ((N-1) / log N - 3/2). The right-hand side is 0 with N = 4 and less below: never."""
    N, log = world_size, math.log2(world_size)
    return network.alpha * log < nbytes * ratio * network.beta * (N - 1 - 1.5 * log)


def choose(network: Network, nbytes: float, ratio: float, world_size: int) -> str:
    """The compressed exchange that Eqs. (5a) to (5c) name; of equal ones the all-gather, then the tree.

    >>> [choose(Network(alpha=1e-3, beta=8 / rate), 4 * 25_557_032, 0.01, 8) for rate in (1e10, 5e9, 1e9)]  # ResNet50
    ['AG', 'ART-Tree', 'ART-Ring']
    """
    case = network, nbytes, ratio, world_size
    if ring_over_tree(*case):
        return "ART-Ring" if ring_over_allgather(*case) else "AG"
    return "ART-Tree" if tree_over_allgather(*case) else "AG"


# --- the gain


def gain_curve(readings: Mapping[float, float]) -> Callable[[float], float]:
    """The gain at any ratio from readings at some, and 1 at ratio 1: power laws between neighbours and below the least.

    >>> curve = gain_curve({0.1: 0.7, 0.01: 0.2})
    >>> [round(curve(ratio), 3) for ratio in (1.0, 0.1, 0.01, 0.001)]
    [1.0, 0.7, 0.2, 0.057]
    """
    points = sorted({**readings, 1.0: 1.0}.items())
    if len(points) < 2 or any(not (0 < ratio <= 1 and 0 < gain <= 1) for ratio, gain in points):
        raise ValueError(f"gains must be in (0, 1], at ratios in (0, 1), got {dict(readings)}.")
    if any(higher[1] < lower[1] for lower, higher in zip(points, points[1:], strict=False)):
        raise ValueError(f"a gain cannot fall where the ratio rises, got {dict(readings)}.")
    logs = [(math.log(ratio), math.log(gain)) for ratio, gain in points]

    def gain(ratio: float) -> float:
        x = math.log(ratio)
        right = next((i for i in range(1, len(logs)) if x <= logs[i][0]), len(logs) - 1)
        (x0, y0), (x1, y1) = logs[right - 1], logs[right]
        return math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))

    return gain
