"""What there is to say about the ways between machines: which are closed, slow, lossy, narrow, or late."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from thinwire.jobs.doctor.datagrams import LARGEST_PACKET
from thinwire.jobs.doctor.findings.base import NOTE, OK, PROBLEM, Finding
from thinwire.jobs.doctor.findings.paths import Pair, Paths, way, ways, where
from thinwire.jobs.doctor.pair import SIZES
from thinwire.lab.units import format_rate, format_seconds
from thinwire.link.address import named

SLOW = 0.25  # of the others' rate: a host that has less is held to be slow
ASYMMETRIC = 3.0  # times slower one way than the other
EXPLAINED = 0.5  # of the best that a host does with anybody: then it is the host and not the pair
LATER_SECONDS, LATER_SHARE = 0.002, 1 / 3  # one way longer than the other by so much, and by this share of both
LOSS = 0.02  # of the packets


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
    best = {i: max((rate for pair, rate in paths.rate.items() if i in pair), default=0.0) for i in paths.ranks}
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


def _fraction(times: float) -> str:
    """
    >>> _fraction(9.8), _fraction(20.2)
    ('a tenth', '1/20')
    """
    words = {4: "a quarter", 5: "a fifth", 6: "a sixth", 7: "a seventh", 8: "an eighth", 9: "a ninth", 10: "a tenth"}
    return words.get(round(times), f"1/{times:.0f}")


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
            way(i, j),
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
            way(i, j),
            "Look at the cables, ports and Wi-Fi on that way; until then congestion control bbr bears losses best.",
        )
        for (i, j), share in one_way.items()
    ]
    both = {pair: share for pair, share in lossy.items() if pair not in one_way}
    if both:
        worst = max(both, key=lambda pair: both[pair])
        text = f"{where(both, paths)} loses packets, at worst {both[worst]:.0%} ({way(*worst)})"
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
        text = f"{where(holes, paths)} swallows large packets: {passed} bytes pass, {min(larger, full)} do not, "
        text += f"and the interface says {full}, so small messages pass and large ones stall"
        advice = (
            f"ip link set dev {device} mtu {passed} on these hosts, or let every switch on the way carry {full}; "
            "sysctl -w net.ipv4.tcp_mtu_probing=1 is a stopgap."
        )
        found.append(Finding(PROBLEM, "mtu", text, ways(holes), advice))
    if told:
        text = f"{where(told, paths)} carries smaller packets than the interface, and the kernel knows"
        found.append(Finding(NOTE, "mtu", text, ways(told)))
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
        return [Finding(PROBLEM, "asymmetric-latency", text, ways(candidates), advice)]
    return [
        Finding(
            PROBLEM,
            "asymmetric-latency",
            f"rank {src} to rank {dst} seems {format_seconds(abs(by))} longer than the way back "
            f"(both together: {format_seconds(paths.round_trip[i, j])})",
            way(src, dst),
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
