"""What this machine is, as far as it matters to training over a network: interfaces, cores, versions, limits.

Everything is read from the kernel or from the environment; nothing is sent. What cannot be read is None.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import math
import os
import platform
import resource
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from thinwire.link.address import interface_address, own_address

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

HOSTS_FILE = Path("/etc/hosts")
SIOCGIFCONF, SIOCGIFFLAGS, SIOCGIFMTU, IFF_UP = 0x8912, 0x8913, 0x8921, 0x1
_ADDRESSES = 128  # of this host that are looked at
_ENTRY = 40  # bytes of a `struct ifreq`


class Choice(NamedTuple):
    """An interface that somebody would use, and the reason.

    Attributes:
        interface: None if the address is on none of them.
        address: "" if there is none, and then `why` says what is wrong.
    """

    interface: str | None
    address: str
    why: str

    @property
    def is_loopback(self) -> bool:
        return bool(self.address) and ipaddress.ip_address(self.address).is_loopback


@dataclass(frozen=True, kw_only=True)
class Host:
    """One rank's machine.

    Attributes:
        machine: the same for two ranks exactly if they share a machine and its network.
        ours: what thinwire's own links use.
        gloo: what torch.distributed uses with gloo.
        mtu: bytes of a full packet on the interface of `ours`.
        tunnel: that interface encrypts, as WireGuard's do.
        others: interfaces that are up and lead out of the host, with their addresses; the default route's first.
        tensorpipe: the interface in TP_SOCKET_IFNAME, if it is another than gloo's.
        named_locally: the address that /etc/hosts gives this host's own name, if it is a loopback address.
        cores: that this process may use.
        threads: of torch in one process.
        threads_are_set: by OMP_NUM_THREADS, and not by torch's own choice.
        buffers: the most bytes of a TCP connection's receive and send buffer.
    """

    rank: int
    name: str
    machine: str
    ours: Choice
    gloo: Choice
    mtu: int | None
    tunnel: bool
    others: tuple[tuple[str, str], ...]
    tensorpipe: str | None
    named_locally: str | None
    cores: int
    threads: int
    threads_are_set: bool
    versions: Mapping[str, str]
    has_gloo: bool
    has_numba: bool
    congestion: str | None
    buffers: tuple[int, int] | None
    open_files: int
    clock: str | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Host:
        exact = {
            "ours": Choice(*data["ours"]),
            "gloo": Choice(*data["gloo"]),
            "others": tuple((str(name), str(address)) for name, address in data["others"]),
            "buffers": None if data["buffers"] is None else tuple(data["buffers"]),
        }
        return cls(**{**data, **exact})


def this_host(rank: int = 0, store: Store | None = None) -> Host:
    """Look at this machine. With the store of a process group the interface is exactly what a link would use."""
    table = interfaces()
    ours = our_choice(table, store)
    return Host(
        rank=rank,
        name=socket.gethostname(),
        machine=_machine(),
        ours=ours,
        gloo=gloos_choice(table),
        mtu=mtu_of(ours.interface) if ours.interface else None,
        tunnel=_encrypts(ours.interface),
        others=_ways_out(table),
        tensorpipe=_only_of_tensorpipe(),
        named_locally=_named_locally(socket.gethostname()),
        cores=cores(),
        threads=torch.get_num_threads(),
        threads_are_set="OMP_NUM_THREADS" in os.environ,
        versions={
            "thinwire": metadata.version("thinwire"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        has_gloo=torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        has_numba=importlib.util.find_spec("numba") is not None,
        congestion=_read("/proc/sys/net/ipv4/tcp_congestion_control"),
        buffers=_buffers(),
        open_files=_open_files(),
        clock=_read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
    )


# --- which interface


def our_choice(table: Mapping[str, str], store: Store | None = None) -> Choice:
    """What `thinwire.link.address` would offer to the other ranks, and why."""
    try:
        address = own_address(store)
    except (OSError, ValueError) as error:
        return Choice(None, "", str(error))
    master = os.environ.get("MASTER_ADDR")
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        why = "GLOO_SOCKET_IFNAME names it"
    elif master and _resolves(master):
        why = f"it leads to MASTER_ADDR {master}"
    else:
        why = f"the host name {socket.gethostname()} stands for it"
    return Choice(table.get(address), address, why)


def gloos_choice(table: Mapping[str, str]) -> Choice:
    """What gloo would use: the named interface, else the first address of the host's name that is ours, else loopback.

    It does not look at MASTER_ADDR, so it may choose differently from our own links.
    """
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        try:
            address = interface_address(names.split(",")[0].strip())
        except (OSError, ValueError) as error:
            return Choice(None, "", str(error))
        return Choice(table.get(address), address, "GLOO_SOCKET_IFNAME names it")
    name = socket.gethostname()
    for address in _resolves(name):
        if _can_bind(address):
            return Choice(table.get(address), address, f"the host name {name} stands for it")
    return Choice(table.get("127.0.0.1"), "127.0.0.1", f"the host name {name} stands for no address of this host")


def _only_of_tensorpipe() -> str | None:
    name = os.environ.get("TP_SOCKET_IFNAME")
    return None if name == os.environ.get("GLOO_SOCKET_IFNAME") else name


def _resolves(name: str) -> list[str]:
    """The addresses behind a name; none if it has none."""
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def is_here(name: str) -> bool:
    """Whether a name stands for this host, or for nothing that is known here."""
    addresses = _resolves(name)
    return not addresses or any(_can_bind(address) for address in addresses)


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def interfaces() -> dict[str, str]:
    """Every address of this host, and the interface that it is on."""
    return {**_ipv4_addresses(), **_ipv6_addresses()}


def _ipv4_addresses() -> dict[str, str]:
    if sys.platform != "linux":
        return {}
    import array
    import fcntl

    room = array.array("B", bytes(_ENTRY * _ADDRESSES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, SIOCGIFCONF, struct.pack("iL", len(room), room.buffer_info()[0]))
    used, _ = struct.unpack("iL", answer)
    entries = [room[start : start + _ENTRY].tobytes() for start in range(0, used, _ENTRY)]
    addresses = {socket.inet_ntoa(entry[20:24]): _name(entry) for entry in entries}
    # All of 127.0.0.0/8 is this host, whatever the interface says; 127.0.1.1 is what Debian gives the host's name.
    return {"127.0.1.1": addresses["127.0.0.1"], **addresses} if "127.0.0.1" in addresses else addresses


def _name(entry: bytes) -> str:
    """Of an interface; an alias such as eth0:1 is the interface."""
    return entry[:16].partition(b"\0")[0].decode(errors="replace").partition(":")[0]


def _ipv6_addresses() -> dict[str, str]:
    rows = [line.split() for line in (_read("/proc/net/if_inet6") or "").splitlines()]
    return {str(ipaddress.IPv6Address(bytes.fromhex(row[0]))): row[-1] for row in rows}


def _ways_out(table: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """IPv4 before IPv6, the interface of the default route before others."""
    default = _default_interface()
    found: dict[str, str] = {}
    for address, name in sorted(table.items(), key=lambda item: (item[1] != default, ":" in item[0])):
        ip = ipaddress.ip_address(address)
        if not ip.is_loopback and not ip.is_link_local and is_up(name):
            found.setdefault(name, address)
    return tuple(found.items())


def _default_interface() -> str | None:
    rows = [line.split() for line in (_read("/proc/net/route") or "").splitlines()[1:]]
    return next((row[0] for row in rows if row[1] == "00000000"), None)


def _named_locally(name: str) -> str | None:
    try:
        lines = [line.partition("#")[0].split() for line in HOSTS_FILE.read_text().splitlines()]
    except OSError:
        return None
    mine = [words[0] for words in lines if name in words[1:]]
    return next((address for address in mine if address.startswith("127.") or address == "::1"), None)


def mtu_of(interface: str) -> int | None:
    """Bytes of the largest packet that an interface sends; None if nobody says."""
    answer = _ask_about(interface, SIOCGIFMTU)
    return None if answer is None else int(struct.unpack_from("i", answer, 16)[0])


def is_up(interface: str) -> bool:
    answer = _ask_about(interface, SIOCGIFFLAGS)
    return answer is not None and bool(struct.unpack_from("H", answer, 16)[0] & IFF_UP)


def _ask_about(interface: str, request: int) -> bytes | None:
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return fcntl.ioctl(probe, request, struct.pack("40s", interface.encode()[:15]))
        except OSError:
            return None


def _encrypts(interface: str | None) -> bool:
    return "DEVTYPE=wireguard" in (_read(f"/sys/class/net/{interface}/uevent") or "")


# --- the rest of the machine


def _machine() -> str:
    """Two containers of one machine are two hosts to each other, so the network's name belongs to it."""
    try:
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        network = 0
    return f"{_read('/proc/sys/kernel/random/boot_id') or socket.gethostname()} {network}"


def cores() -> int:
    """Those that this process may run on, and no more than its control group pays for."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = (_read("/sys/fs/cgroup/cpu.max") or "max").partition(" ")
    return min(allowed, math.ceil(int(quota) / int(period))) if quota.isdigit() and period.isdigit() else allowed


def _buffers() -> tuple[int, int] | None:
    rows = [(_read(f"/proc/sys/net/ipv4/tcp_{side}mem") or "").split() for side in "rw"]
    return (int(rows[0][2]), int(rows[1][2])) if all(len(row) == 3 for row in rows) else None


def _open_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else sys.maxsize


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
