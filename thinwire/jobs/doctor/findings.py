"""From what was read and measured to what is well, worth knowing or wrong. Pure: numbers in, words out.

A problem always comes with advice. What cannot be known is not claimed: see `later_one_way`.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from thinwire.jobs.doctor.host import Choice, Host
from thinwire.jobs.doctor.pair import LARGEST_PACKET, SIZES, Seen
from thinwire.lab.units import format_rate, format_seconds
from thinwire.link.address import named

OK, NOTE, PROBLEM = "ok", "note", "problem"
OURS, GLOO, BOTH = "thinwire", "gloo", "thinwire and gloo"

SLOW = 0.25  # of the others' rate: a host that has less is held to be slow
ASYMMETRIC = 3.0  # times slower one way than the other
EXPLAINED = 0.5  # of the best that a host does with anybody: then it is the host and not the pair
LATER_SECONDS, LATER_SHARE = 0.002, 1 / 3  # one way longer than the other by so much, and by this share of both
LOSS = 0.02  # of the packets
LEAST_FILES = 256  # besides those of connections
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies", "xen")

Pair = tuple[int, int]
Matrix = list[list[float | None]]


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
        mark: ok, note or problem.
        kind: a word for programs.
        text: a sentence.
        where: which ranks or which way.
    """

    mark: str
    kind: str
    text: str
    where: str = ""
    advice: str = ""


class Paths:
    """What all pairs of some ranks measured; directions are (from, to).

    Args:
        ranks: in the order of the matrices' rows.
        seen: by rank and peer.
    """

    def __init__(self, ranks: Sequence[int], seen: Mapping[Pair, Seen]) -> None:
        self.ranks = tuple(ranks)
        self.pairs = [(i, j) for i in ranks for j in ranks if i < j]
        self.directions = [(i, j) for i in ranks for j in ranks if i != j]
        self._seen = seen
        self.rate = self._known(lambda i, j: self._of(j, i).rate)
        self.moved = self._known(lambda i, j: self._of(j, i).moved)
        self.lost = self._known(lambda i, j: self._of(j, i).lost)
        self.packet = self._known(lambda i, j: self._of(i, j).packet)
        self.known_packet = self._known(lambda i, j: self._of(i, j).known)
        self.round_trip = {p: s for p in self.pairs if (s := self._of(*p).round_trip) is not None}
        self.ahead = {p: s for p in self.pairs if (s := self._of(*p).ahead) is not None}

    def latency(self, i: int, j: int) -> float | None:
        """Half the round trip."""
        trip = self.round_trip.get((min(i, j), max(i, j)))
        return None if trip is None else trip / 2

    def failures(self) -> dict[Pair, str]:
        """Why pairs came to no end, in the words of whoever has any."""
        told = {(i, j): self._of(i, j).failure or self._of(j, i).failure for i, j in self.pairs}
        return {pair: text for pair, text in told.items() if text}

    def matrix(self, value: Callable[[int, int], float | None], scale: float) -> Matrix:
        """A row for each rank that sends, None where nothing is known."""

        def cell(i: int, j: int) -> float | None:
            found = None if i == j else value(i, j)
            return None if found is None else round(found * scale, 4)

        return [[cell(i, j) for j in self.ranks] for i in self.ranks]

    def _known(self, value: Callable[[int, int], float | None]) -> dict[Pair, float]:
        return {pair: found for pair in self.directions if (found := value(*pair)) is not None}

    def _of(self, rank: int, peer: int) -> Seen:
        return self._seen.get((rank, peer), Seen(peer=peer))


# --- machines


def interface(hosts: Sequence[Host], several: bool) -> list[Finding]:
    """Which interface, why, and whether it leads anywhere. `several`: the ranks are, or will be, on many machines."""
    alike = all(host.ours[:2] == host.gloo[:2] for host in hosts)
    found = [finding for who in ((BOTH,) if alike else (OURS, GLOO)) for finding in _chosen(who, hosts, several)]
    sizes = sorted({host.mtu for host in hosts if host.mtu is not None and not host.ours.is_loopback})
    if sizes:
        text = f"packets of up to {' to '.join(map(str, sizes))} bytes leave it (MTU)"
        found.append(Finding(OK, "mtu", text + (", not the same on all hosts" if len(sizes) > 1 else "")))
    if hosts[0].tensorpipe:
        text = f"TP_SOCKET_IFNAME={hosts[0].tensorpipe} is for torch's RPC alone, and is not looked at here"
        found.append(Finding(NOTE, "tensorpipe", text))
    return [*found, _encryption(hosts[0])]


def _chosen(who: str, hosts: Sequence[Host], several: bool) -> list[Finding]:
    choices = {host.rank: _choice(who, host) for host in hosts}
    by_rank = {host.rank: host for host in hosts}
    found = [
        Finding(PROBLEM, "interface", choice.why.removesuffix("."), f"rank {rank}", _name_one(by_rank[rank]))
        for rank, choice in choices.items()
        if not choice.address
    ]
    local = [rank for rank, choice in choices.items() if choice.is_loopback]
    if local and several:
        _, address, why = choices[local[0]]
        text = f"{who} would use loopback ({address}) on {named(local)}, where no other machine can reach it: {why}"
        found.append(Finding(PROBLEM, "loopback", text, named(local), _name_one(by_rank[local[0]])))
    elif not found:
        name, address, why = choices[hosts[0].rank]
        text = f"{name or 'no interface'} ({address}) is used by {who}: {why}"
        found.append(_alone_on_loopback(text, hosts[0]) if local else Finding(OK, "interface", text))
    return found


def _choice(who: str, host: Host) -> Choice:
    if who == BOTH and host.ours.why != host.gloo.why:
        return host.ours._replace(why=f"{host.ours.why}, and {host.gloo.why}")
    return host.gloo if who == GLOO else host.ours


def _alone_on_loopback(text: str, host: Host) -> Finding:
    text += "; it is loopback, which no other machine can reach"
    return Finding(NOTE, "loopback", text, advice=f"Fine for ranks on one machine, not on several. {_name_one(host)}")


def _name_one(host: Host) -> str:
    """What to set so that the right interface is used."""
    if not host.others:
        return "No other interface of this host is up: bring one up first."
    name, address = host.others[0]
    others = "".join(f", or {other} ({ip})" for other, ip in host.others[1:3])
    advice = f"Set GLOO_SOCKET_IFNAME={name} ({address}){others}"
    if host.named_locally:
        advice += f", or give {host.name} its real address in /etc/hosts instead of {host.named_locally}"
    return advice + "."


def _encryption(host: Host) -> Finding:
    if host.tunnel:
        return Finding(OK, "encryption", f"{host.ours.interface} is a WireGuard tunnel: what it carries is encrypted")
    return Finding(
        NOTE,
        "encryption",
        "nothing is encrypted, neither by thinwire nor by gloo in this torch",
        advice="Over a network that others can read, use a VPN and name its interface: GLOO_SOCKET_IFNAME=wg0.",
    )


def machine(hosts: Sequence[Host], world_size: int, local_ranks: int) -> list[Finding]:
    """Cores, threads, versions, limits."""
    first = hosts[0]
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    found = [_threads(host, _ranks_beside(host, hosts, local_ranks)) for host in hosts]
    worst = min(found, key=lambda finding: (PROBLEM, NOTE, OK).index(finding.mark))
    return [worst, *_versions(hosts, versions), *_limits(first, world_size)]


def _ranks_beside(host: Host, hosts: Sequence[Host], local_ranks: int) -> int:
    return max(local_ranks, sum(other.machine == host.machine for other in hosts))


def _threads(host: Host, ranks: int) -> Finding:
    fair, here = max(1, host.cores // ranks), f"rank {host.rank}"
    text = f"{_count(host.cores, 'core')} for {_count(ranks, 'rank')} of {_count(host.threads, 'thread')} each"
    if ranks * host.threads > host.cores and host.threads > 1:
        return Finding(PROBLEM, "threads", f"{text}: they get in each other's way", here, _set_threads(fair))
    if host.threads < fair:
        return Finding(NOTE, "threads", f"{text}: {fair} would fit", here, _set_threads(fair))
    return Finding(OK, "threads", text)


def _set_threads(number: int) -> str:
    return f"Set OMP_NUM_THREADS={number} (torchrun sets it to 1 unless you do)."


def _versions(hosts: Sequence[Host], shown: str) -> list[Finding]:
    gloo = all(host.has_gloo for host in hosts)
    found = [Finding(OK, "versions", f"{shown}; gloo is the one inside torch")] if gloo else []
    if not gloo:
        without = named([host.rank for host in hosts if not host.has_gloo])
        found.append(Finding(PROBLEM, "gloo", f"{shown}: this torch has no gloo", without, "Install torch from PyPI."))
    for package in ("torch", "thinwire"):
        kinds: defaultdict[str, list[int]] = defaultdict(list)
        for host in hosts:
            kinds[host.versions[package]].append(host.rank)
        if len(kinds) > 1:
            which = "; ".join(f"{version} on {named(ranks)}" for version, ranks in kinds.items())
            text, advice = f"not all ranks have the same {package}: {which}", f"Install one {package} everywhere."
            found.append(Finding(PROBLEM, "versions", text, which, advice))
    return found


def _limits(host: Host, world_size: int) -> list[Finding]:
    found = []
    needed = LEAST_FILES + 4 * world_size  # gloo and our own links have a connection to each rank, and more to begin
    if host.open_files < needed:
        text = f"only {host.open_files} files may be open, and connections are files; {world_size} ranks need {needed}"
        found.append(Finding(PROBLEM, "files", text, "this host", f"ulimit -n {max(needed, 4096)}"))
    else:
        found.append(Finding(OK, "files", f"{host.open_files} files may be open"))
    if host.clock in SLOW_CLOCKS:
        text = f"the clock is {host.clock}, which is slow to read, so times are less exact"
        found.append(Finding(NOTE, "clock", text, advice="Boot with clocksource=tsc if the processor allows it."))
    if not host.has_numba:
        text = "numba is missing: choosing a plan takes much longer"
        found.append(Finding(NOTE, "numba", text, advice="pip install numba"))
    return found


def tcp(hosts: Sequence[Host], paths: Paths | None) -> list[Finding]:
    """Congestion control, and buffers against what the paths hold."""
    first = hosts[0]
    found = []
    if first.congestion is not None:
        found.append(Finding(OK, "congestion", f"congestion control is {first.congestion}"))
    if first.buffers is not None:
        found.append(_buffers({host.rank: host for host in hosts}, paths))
    return found


def _buffers(hosts: Mapping[int, Host], paths: Paths | None) -> Finding:
    """A connection holds about half of its buffers' bytes in flight; the rest is the kernel's own."""
    limits = {pair: _in_flight(hosts[pair[0]], hosts[pair[1]]) for pair in (paths.rate if paths else ())}
    own = hosts[min(hosts)].buffers or (0, 0)
    text = f"a connection may hold {_megabytes(min(own) / 2)} in flight"
    if paths is None or not limits:
        return Finding(OK, "buffers", text)
    product = {(i, j): paths.rate[i, j] * 2 * (paths.latency(i, j) or 0.0) for i, j in limits}
    src, dst = max(limits, key=lambda pair: product[pair] / limits[pair])
    text = f"the way from rank {src} to rank {dst} holds {_megabytes(product[src, dst])}, "
    text += f"a connection may have {_megabytes(limits[src, dst])} in flight"
    if product[src, dst] <= limits[src, dst]:
        return Finding(OK, "buffers", text)
    wanted = int(4 * product[src, dst])
    advice = f"sysctl -w net.ipv4.tcp_rmem='4096 131072 {wanted}' net.ipv4.tcp_wmem='4096 65536 {wanted}'"
    return Finding(PROBLEM, "buffers", text, _way(src, dst), advice)


def _in_flight(src: Host, dst: Host) -> float:
    receive = dst.buffers[0] if dst.buffers else float("inf")
    send = src.buffers[1] if src.buffers else float("inf")
    return max(1.0, min(receive, send) / 2)


# --- paths


def reachability(paths: Paths, skipped: Iterable[Pair] = ()) -> list[Finding]:
    """Pairs that could not finish. Those that were not tried are told of elsewhere."""
    found = [
        Finding(
            PROBLEM,
            "unreachable",
            text.removesuffix("."),
            f"ranks {i} and {j}",
            "Look for a firewall between the two, and whether both offer an address that the other has a route to.",
        )
        for (i, j), text in paths.failures().items()
        if (i, j) not in set(skipped)
    ]
    return found or ([Finding(OK, "unreachable", "every rank reaches every other")] if paths.pairs else [])


def rates(paths: Paths) -> list[Finding]:
    """Hosts that are much slower than the others, and ways that are much slower than the way back."""
    if not paths.rate:
        return []
    sends = {i: max((rate for (src, _), rate in paths.rate.items() if src == i), default=None) for i in paths.ranks}
    takes = {i: max((rate for (_, dst), rate in paths.rate.items() if dst == i), default=None) for i in paths.ranks}
    best = {i: max(x for x in (sends[i], takes[i], 0.0) if x is not None) for i in paths.ranks}
    found = [finding for i in paths.ranks if (finding := _slow_host(i, best)) is not None]
    found += _slower_one_way(paths)
    if not found:
        rate = format_rate(statistics.median(paths.rate.values()))
        text = f"no host is much slower than the others, and no way than the way back ({rate})"
        found.append(Finding(OK, "rates", text))
    return found


def _slow_host(i: int, best: Mapping[int, float]) -> Finding | None:
    """With two hosts nobody can say which of them is slow."""
    others = [rate for j, rate in best.items() if j != i and rate]
    if len(others) < 2 or not best[i] or best[i] >= SLOW * statistics.median(others):
        return None
    usual = statistics.median(others)
    text = f"rank {i} has {format_rate(best[i])} where the others have {format_rate(usual)} "
    text += f"({_fraction(usual / best[i])} of it), and everybody waits for it"
    return Finding(
        PROBLEM,
        "slow-host",
        text,
        f"rank {i}",
        "Look at its cable, duplex mode, Wi-Fi or the plan of its line, and for other programs that use it.",
    )


def _slower_one_way(paths: Paths) -> list[Finding]:
    """By what TCP moved, where both ways were measured. A host that is slow to all, one way, is told of once."""
    slow = [(i, j) for i, j in paths.moved if paths.moved.get((j, i), 0.0) > ASYMMETRIC * paths.moved[i, j]]
    senders = {i for i, j in slow if _explains([paths.moved.get((i, k)) for k in paths.ranks], paths.moved[i, j])}
    takers = {j for i, j in slow if _explains([paths.moved.get((k, j)) for k in paths.ranks], paths.moved[i, j])}
    found = [_one_way_host(i, "sends", "receives", paths) for i in sorted(senders)]
    found += [_one_way_host(j, "receives", "sends", paths) for j in sorted(takers - senders)]
    return found + [
        Finding(
            PROBLEM,
            "asymmetric-pair",
            f"rank {i} to rank {j} moves {format_rate(paths.moved[i, j])}, the way back "
            f"{format_rate(paths.moved[j, i])}{_losing(paths, i, j)}",
            _way(i, j),
            "The two ways may take different routes, or one loses packets: look at both with mtr or traceroute.",
        )
        for i, j in slow
        if i not in senders and j not in takers
    ]


def _explains(all_of_it: Sequence[float | None], this: float) -> bool:
    """Whether this is about the best that a host does with anybody. With only one other host it says nothing."""
    known = [value for value in all_of_it if value is not None]
    return len(known) > 1 and this >= EXPLAINED * max(known)


def _one_way_host(i: int, slow: str, fast: str, paths: Paths) -> Finding:
    out = max(rate for (src, _), rate in paths.moved.items() if src == i)
    into = max(rate for (_, dst), rate in paths.moved.items() if dst == i)
    less, more = (out, into) if slow == "sends" else (into, out)
    text = f"rank {i} {slow} at {format_rate(less)}, but {fast} at {format_rate(more)}, whoever the other is"
    advice = "Usual for home lines (ADSL, cable); everybody waits for the slower way, so count on that one."
    return Finding(PROBLEM, "asymmetric-host", text, f"rank {i}", advice)


def _losing(paths: Paths, i: int, j: int) -> str:
    lost = paths.lost.get((i, j), 0.0)
    return f"; {lost:.0%} of its packets are lost" if lost >= LOSS else ""


def losses(paths: Paths) -> list[Finding]:
    """Small packets that did not come."""
    lossy = {pair: share for pair, share in paths.lost.items() if share >= LOSS}
    one_way = {(i, j): s for (i, j), s in lossy.items() if paths.lost.get((j, i), 1.0) < s / ASYMMETRIC}
    found = [
        Finding(
            PROBLEM,
            "asymmetric-pair",
            f"rank {i} to rank {j} loses {share:.0%} of its packets, the way back {paths.lost[j, i]:.0%}",
            _way(i, j),
            "Look at the cables, ports and Wi-Fi on that way; until then congestion control bbr bears losses best.",
        )
        for (i, j), share in one_way.items()
    ]
    both = {pair: share for pair, share in lossy.items() if pair not in one_way}
    if both:
        worst = max(both, key=lambda pair: both[pair])
        text = f"{_where(both, paths)} loses packets, at worst {both[worst]:.0%} ({_way(*worst)})"
        found.append(Finding(NOTE, "losses", text, advice="Congestion control bbr bears losses best."))
    if not lossy and paths.lost:
        found.append(Finding(OK, "losses", "no way loses small packets"))
    return found


def packets(paths: Paths, mtus: Mapping[int, int | None], device: str = "INTERFACE") -> list[Finding]:
    """Ways on which packets of the interface's size vanish: small messages pass, large ones stall for ever."""
    wanted = {(i, j): min(mtus[i] or 0, LARGEST_PACKET) for i, j in paths.packet}
    smaller = {pair for pair, passed in paths.packet.items() if passed < wanted[pair]}
    told = {pair for pair in smaller if paths.known_packet.get(pair, LARGEST_PACKET + 1) <= paths.packet[pair]}
    found = []
    if holes := smaller - told:
        passed, full = min(int(paths.packet[pair]) for pair in holes), max(wanted[pair] for pair in holes)
        larger = next((size for size in SIZES if size > passed), full)
        text = f"{_where(holes, paths)} swallows large packets: {passed} bytes pass, {min(larger, full)} do not, "
        text += f"and the interface says {full}, so small messages pass and large ones stall"
        advice = (
            f"ip link set dev {device} mtu {passed} on these hosts, or let every switch on the way carry {full}; "
            "sysctl -w net.ipv4.tcp_mtu_probing=1 is a stopgap."
        )
        found.append(Finding(PROBLEM, "mtu", text, _ways(holes), advice))
    if told:
        text = f"{_where(told, paths)} carries smaller packets than the interface, and the kernel knows"
        found.append(Finding(NOTE, "mtu", text, _ways(told)))
    if paths.packet and not smaller:
        sizes = sorted(set(wanted.values()))
        found.append(Finding(OK, "mtu", f"packets of {' to '.join(map(str, sizes))} bytes pass whole on every way"))
    return found


def later_one_way(paths: Paths) -> list[Finding]:
    """Pairs whose latency seems longer one way than the other.

    Clocks of different hosts cannot be compared, so for a pair alone this cannot be known. Around a circle of three
    hosts the clocks cancel out: what is left is how much longer the circle is one way round. If most pairs are alike
    both ways, as they usually are, the odd one is found with four hosts or more; with three it is one of three. A host
    that is later to all others, one way, looks exactly like a host whose clock is wrong, and is not found.
    """
    circles = {rank: _odd_ones(paths, rank) for rank in paths.ranks if _knows_all(paths, rank)}
    fewest = min((len(odd) for odd in circles.values()), default=0)
    if not fewest or fewest > len(paths.pairs) // 3:
        return []
    likely = [odd for odd in circles.values() if len(odd) == fewest]
    candidates = {pair: by for odd in likely for pair, by in odd.items()}
    advice = (
        "The two ways may take different routes: look at both with mtr or traceroute. This is a guess that most pairs "
        "are alike both ways; clocks of hosts cannot be compared."
    )
    if len(candidates) > fewest:
        text = f"of the ways between {named(sorted({i for pair in candidates for i in pair}))} one seems "
        text += f"{format_seconds(abs(next(iter(candidates.values()))))} longer than the way back"
        return [Finding(PROBLEM, "asymmetric-latency", text, _ways(candidates), advice)]
    return [
        Finding(
            PROBLEM,
            "asymmetric-latency",
            f"rank {src} to rank {dst} seems {format_seconds(abs(by))} longer than the way back "
            f"(both together: {format_seconds(paths.round_trip[i, j])})",
            _way(src, dst),
            advice,
        )
        for (i, j), by in candidates.items()
        for src, dst in [(i, j) if by > 0 else (j, i)]
    ]


def _knows_all(paths: Paths, rank: int) -> bool:
    return len(paths.ranks) > 2 and all((min(rank, k), max(rank, k)) in paths.ahead for k in paths.ranks if k != rank)


def _odd_ones(paths: Paths, rank: int) -> dict[Pair, float]:
    """The pairs that are not alike both ways, and by how much, if all of this rank's own are.

    `ahead` of (i, j) is the difference of the two ways and twice that of the clocks, j's minus i's.
    """
    clock = {k: _signed(paths, rank, k) / 2 for k in paths.ranks if k != rank} | {rank: 0.0}
    differences = {(i, j): ahead - 2 * (clock[j] - clock[i]) for (i, j), ahead in paths.ahead.items()}
    return {
        pair: by
        for pair, by in differences.items()
        if abs(by) > max(LATER_SECONDS, LATER_SHARE * paths.round_trip[pair])
    }


def _signed(paths: Paths, i: int, j: int) -> float:
    return paths.ahead[i, j] if i < j else -paths.ahead[j, i]


# --- words


def _way(src: int, dst: int) -> str:
    return f"rank {src} -> rank {dst}"


def _ways(pairs: Iterable[Pair]) -> str:
    return ", ".join(_way(*pair) for pair in sorted(pairs))


def _where(pairs: Iterable[Pair], paths: Paths) -> str:
    """Some ways in as few words as possible.

    >>> paths = Paths([0, 1, 2], {})
    >>> _where([(0, 1), (1, 0), (2, 0), (0, 2)], paths), _where([(1, 2)], paths), _where(paths.directions, paths)
    ('every way to and from rank 0', 'the way rank 1 -> rank 2', 'every way')
    """
    some = set(pairs)
    if some == set(paths.directions):
        return "every way"
    for rank in paths.ranks:
        if some == {pair for pair in paths.directions if rank in pair}:
            return f"every way to and from rank {rank}"
    return f"the way {_ways(some)}" if len(some) == 1 else f"each of the ways {_ways(some)}"


def _fraction(times: float) -> str:
    """
    >>> _fraction(9.8), _fraction(20.2)
    ('a tenth', '1/20')
    """
    words = {4: "a quarter", 5: "a fifth", 6: "a sixth", 7: "a seventh", 8: "an eighth", 9: "a ninth", 10: "a tenth"}
    return words.get(round(times), f"1/{times:.0f}")


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.3g} MB"
