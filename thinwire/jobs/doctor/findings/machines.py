"""What there is to say about machines: interfaces, processors, versions, limits, and how their TCP is set up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from thinwire.jobs.doctor.findings.base import NOTE, OK, PROBLEM, Finding
from thinwire.jobs.doctor.findings.paths import Paths, way
from thinwire.jobs.doctor.host import Choice, Host
from thinwire.link.address import named

OURS, GLOO, BOTH = "thinwire", "gloo", "thinwire and gloo"
LEAST_FILES = 256  # besides those of connections
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies", "xen")


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
    return Finding(PROBLEM, "buffers", text, way(src, dst), advice)


def _in_flight(src: Host, dst: Host) -> float:
    receive = dst.buffers[0] if dst.buffers else float("inf")
    send = src.buffers[1] if src.buffers else float("inf")
    return max(1.0, min(receive, send) / 2)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.3g} MB"
