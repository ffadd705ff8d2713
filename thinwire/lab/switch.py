"""The physics of the lab: packets and times in, packets and times out. Knows no clock and no descriptor.

A packet passes servers, each with a rate and a bounded queue: its host's egress, then (between sites) its site's line
out and the other site's line in, then the other host's ingress. A server takes packets in the order in which their
first bytes come. One of b bytes that meets a server at time t
    starts at           s = max(t, when the server is free), and the server is free again at s + b / rate,
    meets the next at   s + delay,                            (bytes are handed through as they come)
where the delay is the route's latency between the sending and the receiving side and nothing elsewhere. Behind a slower
server it meets the next one late enough that its bytes never run dry. On equal rates this is `thinwire.link.wire`: an
idle route takes latency + b / rate.

All of this is known as soon as a packet meets a server, and is worked out then. When a rate changes, whatever is still
to happen at that server takes so many times longer or shorter, which is exact for a queue that is served in order.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from heapq import heapify, heappop, heappush

from thinwire.lab.network import Change, Conditions, Pair, fitting_mtu

# However short its bandwidth-delay product is, a queue holds so many packets of the size that fits its rate, and so
# many full ones, without which TCP cannot keep it busy.
LEAST_PACKETS, LEAST_FULL_PACKETS = 64, 16


class Server:
    """A rate and the queue in front of it.

    Attributes:
        free: when the last byte of what it has taken so far is through. The queue is what lies between now and then.
        patience: seconds that a packet may need from its arrival to its last byte; one that needs longer is dropped.
    """

    __slots__ = ("rate", "free", "patience", "drop_cause")

    def __init__(self, drop_cause: str) -> None:
        self.rate = math.inf
        self.free = 0.0
        self.patience = math.inf
        self.drop_cause = drop_cause


class Packet:
    """Some bytes on their way from one host to another.

    Attributes:
        servers: what it has to pass, half of them on the sending side.
        hop: how many of them it has met.
        start: when its first byte left, or will leave, the last of these.
    """

    __slots__ = ("src", "dst", "size", "data", "servers", "hop", "start")

    def __init__(self, src: int, dst: int, data: bytes, servers: tuple[Server, ...]) -> None:
        self.src = src
        self.dst = dst
        self.size = len(data)
        self.data = data
        self.servers = servers
        self.hop = 0
        self.start = 0.0

    @property
    def flies(self) -> bool:
        """Whether it is, or will next be, between the sending and the receiving side."""
        return self.hop * 2 == len(self.servers)


# When a packet meets its next server, or has arrived. The number keeps what happens together in order.
Event = tuple[float, int, Packet]


class Switch:
    """Everything between the hosts.

    Args:
        conditions: what the network is like; changed only through `change`.
        mtu: bytes of a full packet, in which queues are measured; None for what fits the present rates.
        seed: of the random numbers behind loss and jitter.

    Attributes:
        mtu: bytes of a full packet at present.
        counts: packets by what became of them.
        carried: bytes delivered to each host.
    """

    def __init__(self, conditions: Conditions, mtu: int | None, seed: int = 0) -> None:
        self.conditions = conditions
        self.counts: Counter[str] = Counter()
        self.carried = [0] * conditions.hosts
        self._fixed_mtu = mtu
        self._random = random.Random(seed)
        self._meetings: list[Event] = []
        self._arrivals: list[Event] = []
        self._order = 0
        self._latest: dict[Pair, float] = {}
        hosts, sites = range(conditions.hosts), range(len(conditions.line))
        self._egress = [Server("dropped_egress") for _ in hosts]
        self._ingress = [Server("dropped_ingress") for _ in hosts]
        self._line_out = [Server("dropped_line") for _ in sites]
        self._line_in = [Server("dropped_line") for _ in sites]
        self._servers = [[self._servers_between(src, dst) for dst in hosts] for src in hosts]
        self._settle(0.0)

    # --- the interface: `advance` to now, then `enter` packets or `change` things at that time

    def enter(self, src: int, dst: int, data: bytes, time: float) -> None:
        """A host sends a packet to another."""
        servers = self._servers[src][dst]
        self._meet(servers[0], Packet(src, dst, data, servers), time)

    def advance(self, now: float) -> list[tuple[int, bytes]]:
        """Let everything happen that is due; give what is delivered, in order, as (host, packet)."""
        meetings, arrivals, routes = self._meetings, self._arrivals, self.conditions.routes
        while meetings and meetings[0][0] <= now:
            time, _, packet = heappop(meetings)
            if routes[packet.src][packet.dst].blocked and packet.flies:
                self.counts["blocked"] += 1  # the route was cut with the packet on it
            else:
                self._meet(packet.servers[packet.hop], packet, time)
        delivered = []
        while arrivals and arrivals[0][0] <= now:
            _, _, packet = heappop(arrivals)
            delivered.append((packet.dst, packet.data))
            self.carried[packet.dst] += packet.size
        if delivered:
            self.counts["delivered"] += len(delivered)
        return delivered

    def next_time(self) -> float:
        """A time before which nothing can be delivered; infinity when nothing is under way."""
        meeting = self._meetings[0][0] if self._meetings else math.inf
        return min(meeting, self._arrivals[0][0]) if self._arrivals else meeting

    def change(self, change: Change, time: float) -> None:
        """Let a change come true now: also for packets under way, so that a slow past does not outlive it."""
        self.conditions.apply(change)
        self._settle(time)

    # --- a packet's way

    def _servers_between(self, src: int, dst: int) -> tuple[Server, ...]:
        here, there = self.conditions.site[src], self.conditions.site[dst]
        lines = () if here == there else (self._line_out[here], self._line_in[there])
        return (self._egress[src], *lines, self._ingress[dst])

    def _meet(self, server: Server, packet: Packet, time: float) -> None:
        """A packet's first byte comes to a server: find out when it leaves, and send it on."""
        start = server.free if server.free > time else time
        free = start + packet.size / server.rate
        if free - time > server.patience:
            self.counts[server.drop_cause] += 1
            return
        server.free = free
        packet.start = start
        packet.hop += 1
        self._order += 1
        if packet.hop == len(packet.servers):
            heappush(self._arrivals, (free, self._order, packet))
        elif (landing := self._landing(packet)) is not None:
            heappush(self._meetings, (_without_a_gap(packet, landing), self._order, packet))

    def _landing(self, packet: Packet) -> float | None:
        """When a packet's first byte can be at its next server; None if it never gets there."""
        if not packet.flies:
            return packet.start
        route = self.conditions.routes[packet.src][packet.dst]
        if route.blocked:
            self.counts["blocked"] += 1
            return None
        if 0 < route.max_packet < packet.size:
            self.counts["too_large"] += 1
            return None
        if route.loss and self._random.random() < route.loss:
            self.counts["lost"] += 1
            return None
        return self._flight(packet)

    def _flight(self, packet: Packet) -> float:
        """When a packet's first byte comes to the receiving side."""
        route = self.conditions.routes[packet.src][packet.dst]
        if not route.jitter:
            delay = route.latency
        elif route.distribution == "uniform":
            delay = max(0.0, route.latency + self._random.uniform(-route.jitter, route.jitter))
        else:
            delay = max(0.0, self._random.gauss(route.latency, route.jitter))
        landing = packet.start + delay
        return landing if route.reorder else self._in_order(packet, landing)

    def _in_order(self, packet: Packet, landing: float) -> float:
        """Not before anything that its route carries already."""
        pair = (packet.src, packet.dst)
        landing = max(landing, self._latest.get(pair, 0.0))
        self._latest[pair] = landing
        return landing

    # --- when conditions change

    def _settle(self, time: float) -> None:
        """Give every server its rate and bound, and hasten or slow down what is under way."""
        self.mtu = self._fixed_mtu or fitting_mtu(self.conditions.peak())
        stretch = {}
        for server, rate, bound in self._wanted():
            if rate != server.rate:
                stretch[server] = server.rate / rate
                server.free = _moved(server.free, time, stretch[server])
            server.rate = rate
            # One packet is not in the queue but being served; a nanosecond is for rounding.
            server.patience = (bound + self.mtu) / rate + 1e-9 if math.isfinite(rate) else math.inf
        for _, _, packet in (*self._meetings, *self._arrivals):
            packet.start = _moved(packet.start, time, stretch.get(packet.servers[packet.hop - 1], 1.0))
        self._drop_excess(time)
        self._arrivals = [
            (_moved(at, time, stretch.get(packet.servers[-1], 1.0)), order, packet)
            for at, order, packet in self._arrivals
        ]
        heapify(self._arrivals)
        self._retime_meetings(time)

    def _wanted(self) -> list[tuple[Server, float, float]]:
        """Every server, its rate, and how many bytes fit into it, by the present conditions."""
        conditions, hosts = self.conditions, range(self.conditions.hosts)
        trips = [conditions.round_trip(host) for host in hosts]
        sides = ((self._egress, conditions.up), (self._ingress, conditions.down))
        ends = [
            (servers[host], rates[host], self._bound(rates[host], trips[host], conditions.queue[host]))
            for servers, rates in sides
            for host in hosts
        ]
        lines = [
            (server, rate, self._bound(rate, max(trips), 0))
            for servers in (self._line_out, self._line_in)
            for server, rate in zip(servers, conditions.line, strict=True)
        ]
        return ends + lines

    def _bound(self, rate: float, round_trip: float, packets: float) -> float:
        """Bytes that fit into a queue.

        A slow host among fast ones gets packets that are large for it. It holds fewer of those, or it would hold
        seconds.
        """
        if packets:
            return packets * self.mtu
        if math.isinf(rate):
            return math.inf
        fitting = min(fitting_mtu(rate * self.conditions.hosts), self.mtu)
        return max(rate * round_trip, LEAST_PACKETS * fitting, LEAST_FULL_PACKETS * self.mtu)

    def _drop_excess(self, time: float) -> None:
        """Where the queue has become shorter, drop its tail, as a router does. Full packets may have been larger."""
        servers = (*self._egress, *self._line_out, *self._line_in, *self._ingress)
        too_full = {server for server in servers if server.free - time > server.patience}
        if not too_full:
            return
        for server in too_full:
            server.free = time
        self._meetings = [event for event in self._meetings if self._still_fits(event[2], time, too_full)]
        self._arrivals = [event for event in self._arrivals if self._still_fits(event[2], time, too_full)]

    def _still_fits(self, packet: Packet, time: float, too_full: set[Server]) -> bool:
        """Whether a packet keeps its place in its queue. If so, the server is busy until it is through."""
        server = packet.servers[packet.hop - 1]
        if server not in too_full:
            return True
        end = packet.start + packet.size / server.rate
        if packet.start > time and end - time > server.patience:
            self.counts[server.drop_cause] += 1
            return False
        server.free = max(server.free, end)
        return True

    def _retime_meetings(self, time: float) -> None:
        """What has not left yet leaves by the new rules; what is in flight is never further away than that.

        In the order of their starts, so that what must not overtake does not.
        """
        meetings = sorted(self._meetings, key=lambda event: (event[2].start, event[1]))
        self._latest.clear()
        self._meetings = []
        for at, order, packet in meetings:
            if packet.start > time:
                at = _without_a_gap(packet, self._flight(packet) if packet.flies else packet.start)
            elif packet.flies:
                at = self._hastened(packet, at, time)
            self._meetings.append((at, order, packet))
        heapify(self._meetings)

    def _hastened(self, packet: Packet, at: float, now: float) -> float:
        """When a packet in flight lands, if its route has become shorter."""
        route = self.conditions.routes[packet.src][packet.dst]
        at = min(at, now + route.longest + packet.size / packet.servers[packet.hop - 1].rate)
        return at if route.reorder else self._in_order(packet, at)


def _without_a_gap(packet: Packet, landing: float) -> float:
    """When a packet meets its next server: late enough that its other bytes follow without a gap."""
    behind, ahead = packet.servers[packet.hop - 1].rate, packet.servers[packet.hop].rate
    return landing if behind >= ahead else landing + packet.size / behind - packet.size / ahead


def _moved(event: float, now: float, stretch: float) -> float:
    """When something happens whose remaining time is stretched. At an unlimited rate nothing remains."""
    if event <= now or math.isinf(stretch):
        return event
    return now + (event - now) * stretch
