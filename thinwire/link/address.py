"""Which of this host's addresses a rank offers to the others."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def own_address(store: Store | None = None) -> str:
    """Of the interface in GLOO_SOCKET_IFNAME, else of the one that leads to the group's master, else the host name's.

    The master is the store's host, to which this rank has a connection, or MASTER_ADDR. One of them may be a name for
    this host itself, so a way that leads out of the host is preferred.
    """
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return interface_address(names.split(",")[0].strip())
    ways = []
    for master in (_host_of(store), os.environ.get("MASTER_ADDR")):
        try:
            ways += [_address_towards(master)] if master else []
        except OSError:
            pass  # a master that does not resolve here is for others to complain about
    if ways:
        return min(ways, key=_is_loopback)
    return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])


def _host_of(store: Store | None) -> str | None:
    """Where the ranks' store lives, if it is one that lives on a host."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore  # not in every build of torch

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else None


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def interface_address(name: str) -> str:
    """The IPv4 address of an interface, or its IPv6 address if it has no other."""
    known = [each for _, each in socket.if_nameindex()]
    if name not in known:
        raise ValueError(f"GLOO_SOCKET_IFNAME names the interface {name!r}; this host has {', '.join(known)}.")
    address = _ipv4_of(name) or _ipv6_of(name)
    if address is None:
        raise ValueError(f"GLOO_SOCKET_IFNAME names the interface {name!r}, which has no address.")
    return address


def _ipv4_of(name: str) -> str | None:
    import fcntl  # not on every platform, and needed only when an interface is named

    SIOCGIFADDR = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6_of(name: str) -> str | None:
    """From the kernel's table. Link-local addresses are left out: they mean nothing without a scope."""
    table = Path("/proc/net/if_inet6")
    rows = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
    addresses = [ipaddress.IPv6Address(bytes.fromhex(row[0])) for row in rows if row[-1] == name]
    return next((str(address) for address in addresses if not address.is_link_local), None)


def _address_towards(host: str) -> str:
    """The local address from which packets to `host` would leave. Connecting a datagram socket sends nothing."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def refuse_mixed_loopback(hosts: dict[int, str]) -> None:
    """An address such as Debian's 127.0.1.1 leads every other host to itself: say so instead of waiting for nobody."""
    local = [rank for rank, host in sorted(hosts.items()) if _is_loopback(host)]
    if local and len(local) < len(hosts):
        others = [rank for rank in sorted(hosts) if rank not in local]
        raise RuntimeError(
            f"{named(local)} offer(s) a loopback address ({hosts[local[0]]}) that {named(others)} cannot reach. Set "
            "GLOO_SOCKET_IFNAME to the interface that leads to the other hosts, e.g. GLOO_SOCKET_IFNAME=eth0."
        )


def named(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
