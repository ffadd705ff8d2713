"""Linux's part of the lab: namespaces, TUN devices, and what processes live in which. No tool is called for it.

A host is a network namespace without a name: it lives as long as a process or a descriptor does, so nothing has to be
removed. `os.unshare` and `os.setns` came with Python 3.12, so they are called through ctypes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Container, Iterable
from pathlib import Path

from thinwire.lab.errors import unavailable

DEVICE, NETMASK = "wire0", "255.255.255.0"
TUN_PATH = "/dev/net/tun"
HOSTS_FILE = "/etc/hosts"
TUN_VARIABLE = "THINWIRE_TUN"  # another path of the TUN device, where users may not open the common one

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x00020000, 0x10000000, 0x40000000
MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 0x80000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
SIOCADDRT, RTF_UP, RTF_MTU = 0x890B, 0x0001, 0x0040
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFMTU, SIOCSIFTXQLEN = 0x8914, 0x8916, 0x891C, 0x8922, 0x8943
IFF_UP, IFF_RUNNING = 0x1, 0x40
SO_NETNS_COOKIE = 71

_SYSCTLS = {
    # A wire of 1 Gbit/s and a round trip of 100 ms holds 12 MB, more than many kernels give a connection by default.
    "net/ipv4/tcp_rmem": "4096 131072 67108864",
    "net/ipv4/tcp_wmem": "4096 65536 67108864",
    # A new connection begins anew: what an earlier one met may be of a network that is no more.
    "net/ipv4/tcp_no_metrics_save": "1",
    # Nothing here speaks IPv6, and its announcements would only be dropped.
    "net/ipv6/conf/all/disable_ipv6": "1",
    "net/ipv6/conf/default/disable_ipv6": "1",
}

_libc = ctypes.CDLL(None, use_errno=True)


def address(host: int) -> str:
    """
    >>> address(0)
    '10.77.0.1'
    """
    return str(ipaddress.IPv4Address("10.77.0.0") + host + 1)


def names(hosts: int) -> str:
    """What /etc/hosts says in a lab: what it says outside, and the hosts of the lab."""
    try:
        outside = Path(HOSTS_FILE).read_text()
    except OSError:
        outside = "127.0.0.1 localhost\n"
    # A socket for both kinds of IP, as torch's store has, knows an address of ours by its longer form.
    ours = [f"{form}{address(host)} host-{host}\n" for form in ("", "::ffff:") for host in range(hosts)]
    return outside.rstrip("\n") + "\n" + "".join(ours)


def unshare(flags: int) -> None:
    """Leave namespaces for new ones."""
    _checked(_libc.unshare(flags))


def setns(descriptor: int, flags: int) -> None:
    """Enter a namespace."""
    _checked(_libc.setns(descriptor, flags))


def show_instead(source: str, target: str) -> None:
    """Let this process and its descendants see a file in the place of another. Nobody else does, and it goes with them.

    What is mounted outside later is seen here too.
    """
    unshare(CLONE_NEWNS)
    _checked(_libc.mount(None, b"/", None, MS_REC | MS_SLAVE, None))
    _checked(_libc.mount(source.encode(), target.encode(), None, MS_BIND, None))


def ask_for_short_turns() -> None:
    """Ask the scheduler for short turns, which come sooner. Anybody may, on Linux 6.12 and later.

    Who asks for a tenth of a millisecond at a time has to wait for a turn less than those who want milliseconds.
    """
    number = {"x86_64": 314, "aarch64": 274}.get(os.uname().machine)
    if number is not None:
        # Size, policy, flags, nice value, priority, and the length of a turn in nanoseconds; deadline, period.
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        attributes = struct.pack("IIQiIQQQ", 48, os.SCHED_OTHER, 0, nice, 0, 100_000, 0, 0)
        _libc.syscall(number, 0, attributes, 0)


def _checked(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def new_host(host: int, mtu: int, tun_path: str) -> tuple[int, int, socket.socket]:
    """Leave for a new network with one device that carries packets of at most `mtu` bytes.

    Gives descriptors of the network and of the device's other end, and a socket for `set_mtu`.
    """
    unshare(CLONE_NEWNET)
    _tune()
    tun = open_tun(tun_path)
    control = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    _flag_up(control, "lo")
    with contextlib.suppress(PermissionError):  # in a user namespace; 500 packets must do there
        _ioctl(control, SIOCSIFTXQLEN, DEVICE, struct.pack("i", 10_000))
    _ioctl(control, SIOCSIFADDR, DEVICE, _sockaddr(address(host)))
    _ioctl(control, SIOCSIFNETMASK, DEVICE, _sockaddr(NETMASK))
    set_mtu(control, mtu)
    _flag_up(control, DEVICE)
    _accept_packets_up_to(mtu, control)
    return os.open("/proc/self/ns/net", os.O_RDONLY), tun, control


def set_mtu(control: socket.socket, mtu: int) -> None:
    """Let a host send packets of at most so many bytes from now on. TCP follows at once, up or down."""
    _ioctl(control, SIOCSIFMTU, DEVICE, struct.pack("i", mtu))


def _accept_packets_up_to(mtu: int, control: socket.socket) -> None:
    """Let TCP tell its peers that packets may be so large, whatever the device's size is when a connection begins.

    Otherwise connections that began while packets were small would have small ones for ever.
    """
    device = ctypes.create_string_buffer(DEVICE.encode())
    places = (_sockaddr(address(-1)), _sockaddr("0.0.0.0"), _sockaddr(NETMASK))  # the network, no gateway
    name = ctypes.addressof(device)
    route = struct.pack("L16s16s16sHhLPhPLLH", 0, *places, RTF_UP | RTF_MTU, 0, 0, 0, 0, name, mtu, 0, 0)
    fcntl.ioctl(control, SIOCADDRT, route)


def open_tun(path: str) -> int:
    """A new TUN device in the present network: bare IP packets, one per read and write."""
    try:
        tun = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    except OSError as error:
        raise unavailable(
            f"{path} cannot be opened ({error.strerror}): the lab needs the TUN device. If it exists, an administrator "
            f"can open it to users (mode 0666, as most distributions do), or set {TUN_VARIABLE} to one that is open."
        ) from error
    try:
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    except OSError as error:
        os.close(tun)
        raise unavailable(f"{path} gives no TUN device ({error.strerror}).") from error
    return tun


def enter_user_namespace() -> None:
    """Leave for a user namespace in which we may make networks, and are the same user as before."""
    user, group = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")  # the kernel asks for this before an ordinary user may map groups
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def cookie() -> int:
    """A number of the present network that the kernel gives to no other until it boots again; 0 if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anything:
        try:
            return int(struct.unpack("Q", anything.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8))[0])
        except OSError:  # Linux before 5.14
            return 0


def _tune() -> None:
    # Users may ping, as on most distributions: in a user namespace only the one group that exists there.
    groups = {"net/ipv4/ping_group_range": f"{os.getegid()} {os.getegid()}"}
    for name, value in (_SYSCTLS | groups).items():
        try:
            Path("/proc/sys", name).write_text(value)
        except OSError:  # not ours to set here, or not in this kernel: the host is then a little less well tuned
            continue


def _ioctl(control: socket.socket, request: int, device: str, argument: bytes) -> None:
    fcntl.ioctl(control, request, struct.pack("16s24s", device.encode(), argument))


def _sockaddr(ip: str) -> bytes:
    return struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(ip))


def _flag_up(control: socket.socket, device: str) -> None:
    _ioctl(control, SIOCSIFFLAGS, device, struct.pack("H", IFF_UP | IFF_RUNNING))


# --- who lives where


def network_of(pid: int) -> int | None:
    """The inode of a process's network namespace; None when it has gone or is not ours to see."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def inhabitants(networks: Container[int]) -> list[int]:
    """The processes that live in any of these networks, given by inode."""
    return [pid for pid in all_processes() if network_of(pid) in networks]


def all_processes() -> Iterable[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def kill_inhabitants(networks: Container[int], limit: float = 5.0) -> bool:
    """Kill whoever lives in these networks, and whoever they start meanwhile; False if some are left at the limit.

    The caller holds descriptors of the networks, so the inodes cannot have come to mean others.
    """
    deadline = time.monotonic() + limit
    while found := inhabitants(networks):
        for pid in found:
            kill_if(pid, lambda pid: network_of(pid) in networks)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def kill_if(pid: int, is_the_one: Callable[[int], bool]) -> None:
    """Kill a process after a look at it through a descriptor, so that the number cannot come to mean another."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if is_the_one(pid):
            signal.pidfd_send_signal(process, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(process)


def start_time(pid: int) -> int | None:
    """When a process started, in the kernel's ticks since boot; with its number this names a process for good."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
