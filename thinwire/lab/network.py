"""What the network is like at one moment, and one change of it.

Everything here is plain numbers in seconds and bytes per second. It is read by the relay, so it imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Value = float | bool | str
Pair = tuple[int, int]

DISTRIBUTIONS = ("uniform", "normal")
PACKETS_PER_SECOND = 7_000  # what the relay carries on less than half a core, with as many acknowledgements
LEAST_MTU, MOST_MTU = 1500, 65_000
# What belongs to a host, to a site's line, and to an ordered pair of hosts.
OF_HOST = ("up", "down", "queue")
OF_LINE = ("line",)
RATES = ("up", "down", "line")
OF_PATH = ("latency", "jitter", "distribution", "reorder", "loss", "max_packet", "blocked")


@dataclass(slots=True)
class Route:
    """From one host to another.

    Attributes:
        latency: seconds until a packet's first byte arrives.
        jitter: half the width of a uniform spread around it, or the standard deviation of a normal one.
        reorder: whether jitter may let a packet overtake another.
        loss: the share of packets that vanish on the way.
        max_packet: bytes of the largest packet that does not vanish, without a word to its sender; 0 for any.
        blocked: nothing passes.
    """

    latency: float = 0.0
    jitter: float = 0.0
    distribution: str = "uniform"
    reorder: bool = False
    loss: float = 0.0
    max_packet: float = 0.0
    blocked: bool = False

    @property
    def longest(self) -> float:
        """The longest that a packet is likely to take."""
        return self.latency + self.jitter * (1 if self.distribution == "uniform" else 4)


@dataclass(frozen=True, kw_only=True)
class Change:
    """At `at` seconds these values hold from now on.

    Attributes:
        hosts: whose `up`, `down` and `queue` change; None for all.
        pairs: between whom latency, jitter, loss and blocking change; None for all.
        cause: who wanted it, for the records.
    """

    values: Mapping[str, Value]
    at: float = 0.0
    hosts: tuple[int, ...] | None = None
    pairs: tuple[Pair, ...] | None = None
    cause: str = "schedule"

    def to_json(self) -> dict[str, Any]:
        return {
            "at": self.at,
            "values": dict(self.values),
            "hosts": self.hosts,
            "pairs": self.pairs,
            "cause": self.cause,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Change:
        hosts, pairs = data["hosts"], data["pairs"]
        return Change(
            at=data["at"],
            values=data["values"],
            hosts=None if hosts is None else tuple(hosts),
            pairs=None if pairs is None else tuple((src, dst) for src, dst in pairs),
            cause=data["cause"],
        )


class Conditions:
    """What the network between `hosts` hosts is like at one moment.

    Attributes:
        up, down: each host's egress and ingress rate.
        line: each site's rate to the other sites, shared by its hosts and the same in both directions.
        site: the site of each host.
        queue: how many full packets fit into a host's queues; 0 for one bandwidth-delay product.
    """

    def __init__(self, hosts: int, site: Iterable[int] | None = None) -> None:
        self.hosts = hosts
        self.site = list(site) if site is not None else [0] * hosts
        self.up = [math.inf] * hosts
        self.down = [math.inf] * hosts
        self.queue = [0.0] * hosts
        self.line = [math.inf] * (max(self.site) + 1)
        self.routes = [[Route() for _ in range(hosts)] for _ in range(hosts)]

    def apply(self, change: Change) -> None:
        """Let a change come true, whenever it was meant for."""
        hosts = range(self.hosts) if change.hosts is None else change.hosts
        pairs = self.all_pairs() if change.pairs is None else change.pairs
        for key, value in change.values.items():
            if key in OF_PATH:
                for src, dst in pairs:
                    setattr(self.routes[src][dst], key, value)
            elif key in OF_LINE:
                self.line[:] = [float(value)] * len(self.line)
            else:
                column = getattr(self, key)
                for host in hosts:
                    column[host] = value

    def all_pairs(self) -> list[Pair]:
        return [(src, dst) for src in range(self.hosts) for dst in range(self.hosts) if src != dst]

    def round_trip(self, host: int) -> float:
        """The longest round trip that starts at `host`."""
        others = (other for other in range(self.hosts) if other != host)
        routes = self.routes
        return max((routes[host][other].latency + routes[other][host].latency for other in others), default=0.0)

    def rate(self, src: int, dst: int) -> float:
        """The most bytes per second from one host to another: the slowest of what lies between."""
        here, there = self.site[src], self.site[dst]
        lines = () if here == there else (self.line[here], self.line[there])
        return min(self.up[src], *lines, self.down[dst])

    def peak(self) -> float:
        """The most bytes per second that all hosts together can send and take."""
        return min(sum(self.up), sum(self.down))

    def summary(self) -> dict[str, float | None]:
        """The network in four numbers, the mean over hosts and pairs; an unlimited rate is None.

        A host's rate is that of its narrower direction, since in an exchange it sends as much as it takes.
        """
        routes = [self.routes[src][dst] for src, dst in self.all_pairs()]
        return {
            "latency": _mean(route.latency for route in routes),
            "rate": _finite(_mean(map(min, self.up, self.down))),
            "loss": _mean(route.loss for route in routes),
            "blocked": _mean(route.blocked for route in routes),
        }


def fitting_mtu(peak: float) -> int:
    """Packets large enough that the relay can carry so many bytes per second, and no larger.

    >>> fitting_mtu(2.5e6), fitting_mtu(250e6), fitting_mtu(math.inf)
    (1500, 35715, 65000)
    """
    wanted = math.inf if math.isinf(peak) else math.ceil(peak / PACKETS_PER_SECOND)
    return int(min(max(wanted, LEAST_MTU), MOST_MTU))


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value
