"""The process between the hosts: it makes them, carries their packets, and ends them when their lab's process dies.

One thread, one loop, all TUN devices. Runs in a bare interpreter (see `light`), in a session and a network of its own.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from errno import EPERM
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.lab import namespaces, registry
from thinwire.lab.errors import LabError, LabUnavailable, unavailable
from thinwire.lab.network import MOST_MTU, Change, Conditions
from thinwire.lab.switch import Switch
from thinwire.lab.truth import Truth

CONTROL = "control"  # the name of the socket in a lab's folder
BATCH = 64  # packets taken from one host before the others have their turn
WAKE_UPS_PER_SECOND, SAVED_WAKE_UPS = 2000.0, 50.0
REST_SECONDS = 350e-6
DYING_SECONDS = 5.0
LONGEST_SLEEP, MOST_LATENESS = 2e-3, 200e-6
MOST_ALLOWED, ALLOWED_STEP = 50e-6, 0.3e-6
PR_SET_TIMERSLACK = 29
WAKING_LATENCY = "/dev/cpu_dma_latency"  # what is written there holds while it is open


class Hosts(NamedTuple):
    """Descriptors: of the user namespace (-1 for none), of each network, of each device.

    And a socket in each network, to change its device; and each network's names.
    """

    user: int
    networks: list[int]
    devices: list[int]
    controls: list[socket.socket]
    names: list[tuple[int, int]]


def main(arguments: Sequence[str]) -> None:
    """Serve the lab whose process is at the other end of this descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the lab's process, which then ends us
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    owner = socket.socket(fileno=int(arguments[0]))
    first, _, more = _line_of(owner).partition(b"\n")
    if more or not first:
        return  # the lab was ended, or its process died, before we began
    setup = json.loads(first)
    folder = Path(setup["folder"])
    hosts: Hosts | None = None
    relay: Relay | None = None
    try:
        hosts = make_hosts(setup["hosts"], setup["mtu"] or MOST_MTU, setup["tun"])
        ready = Relay(setup, hosts, owner, folder)
        _announce(folder, hosts)
        socket.send_fds(owner, [_line({"start": ready.start})], [fd for fd in (hosts.user, *hosts.networks) if fd >= 0])
        relay = ready  # from now on somebody may live in a host
        _prefer_us()
        with _machine_kept_awake():
            relay.run()
    except LabError as error:
        owner.sendall(_line({"error": str(error), "unavailable": isinstance(error, LabUnavailable)}))
    except (BrokenPipeError, ConnectionResetError):
        pass  # the lab's process has died
    finally:
        if hosts is not None:
            if relay is not None and not relay.dismissed:
                _await_death(setup["main"])
            namespaces.kill_inhabitants({inode for inode, _ in hosts.names})
        shutil.rmtree(folder, ignore_errors=True)


def _await_death(main: int) -> None:
    """Wait until the lab's process is dead, if it is dying.

    Its connection to us ends a moment before its children lose their parent. One that is just becoming a process of a
    host must see that its parent has gone if we do not find it there any more.
    """
    try:
        process = os.pidfd_open(main)
    except OSError:
        return
    select.select([process], [], [], DYING_SECONDS)
    os.close(process)


def make_hosts(number: int, mtu: int, tun_path: str) -> Hosts:
    """So many networks with a device each; then leave for a network with nothing in it."""
    user = _enter_a_place_where_we_may()
    hosts = Hosts(user, [], [], [], [])
    for host in range(number):
        network, device, control = namespaces.new_host(host, mtu, tun_path)
        hosts.networks.append(network)
        hosts.devices.append(device)
        hosts.controls.append(control)
        hosts.names.append((os.fstat(network).st_ino, namespaces.cookie()))
    namespaces.unshare(namespaces.CLONE_NEWNET)
    return hosts


def _enter_a_place_where_we_may() -> int:
    """Make sure that we may make networks, in a new user namespace if need be; give its descriptor, or -1."""
    try:
        namespaces.unshare(namespaces.CLONE_NEWNET)
        return -1
    except OSError as error:
        if error.errno != EPERM:
            raise unavailable(f"this kernel makes no network namespaces ({error.strerror}).") from error
    try:
        namespaces.enter_user_namespace()
    except OSError as error:
        raise unavailable(
            "the lab needs root, or a kernel that lets users make user namespaces; this one does not "
            f"({error.strerror}). See the sysctls user.max_user_namespaces, kernel.unprivileged_userns_clone and "
            "kernel.apparmor_restrict_unprivileged_userns."
        ) from error
    return os.open("/proc/self/ns/user", os.O_RDONLY)


def _announce(folder: Path, hosts: Hosts) -> None:
    """Write down what exists now, before the first process can live in it."""
    entry, me = registry.read(folder), os.getpid()
    if entry is None:
        raise LabError(f"{folder} has vanished.")
    registry.write(folder, replace(entry, relay=me, relay_start=namespaces.start_time(me) or 0, networks=hosts.names))


def _prefer_us() -> None:
    """Ask to be woken on time, before processes that compute; where that is not allowed, be one of many."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    namespaces.ask_for_short_turns()
    with suppress(OSError):
        os.nice(-10)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    gc.collect()
    gc.freeze()
    gc.disable()  # packets make no circles


@contextmanager
def _machine_kept_awake() -> Iterator[None]:
    """Ask the kernel to let idle processors wait with open eyes; where that is not allowed, they sleep.

    One that sleeps needs 0.1 ms to wake up for a packet, on each way, and a virtual machine's needs more.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(open(WAKING_LATENCY, "wb", buffering=0)).write(bytes(4))  # noqa: PTH123
        yield


class Relay:
    """Packets from device to device, through the `Switch`.

    Attributes:
        start: when the lab's clock was 0, on the machine's monotonic clock.
        dismissed: the lab's process has said that it ends the lab; otherwise it has died.
    """

    def __init__(self, setup: dict[str, Any], hosts: Hosts, owner: socket.socket, folder: Path) -> None:
        self.start = time.monotonic()
        self._waits = setup["waits"]  # for somebody to begin, until when it is always the start
        self._hosts = hosts
        self._changes = _timeline([Change.from_json(change) for change in setup["changes"]], setup["repeat"])
        self._switch = Switch(Conditions(setup["hosts"], setup["site"] or None), setup["mtu"], setup["seed"])
        self._notes: list[str] = []  # for the lab's process: what is not well, though it goes on
        self._truth = _begin_truth(Path(setup["truth"]), self._notes.append)
        self._host_of = {device: host for host, device in enumerate(hosts.devices)}
        self._by_address = {socket.inet_aton(namespaces.address(host)): host for host in range(setup["hosts"])}
        self._largest = setup["mtu"] or MOST_MTU
        self._mtu = self._largest
        self._owner = owner
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / CONTROL))
        self._listener.listen()
        self._visitors: dict[int, socket.socket] = {owner.fileno(): owner, self._listener.fileno(): self._listener}
        self._read_from = [*hosts.devices, *self._visitors]
        self._upcoming: Change | None = next(self._changes, None)
        self._ended = False
        self.dismissed = False
        self._handover = Allowance(3e-5)
        self._make_due_changes(self.start)

    def run(self) -> None:
        """Until the lab's process has gone."""
        switch, devices, alarm = self._switch, self._host_of, Alarm(self._read_from)
        while not self._ended:
            readable, since = alarm.wait(min(switch.next_time() - self._handover.seconds, self._next_change()))
            self._make_due_changes(time.monotonic())
            reached = self._deliver_due()
            for descriptor in readable:
                if descriptor in devices:
                    self._take(descriptor, since, alarm.waking.seconds)
                else:
                    self._hear(descriptor)
            # A host answers what it is given at once, so its answer is taken before we sleep.
            for device in reached:
                self._take(device, time.monotonic(), 0.0)
            while self._notes:
                self._owner.sendall(_line({"note": self._notes.pop(0)}))

    # --- packets

    def _take(self, device: int, since: float, waking: float) -> None:
        """Read what a host sent since then. What is not for one of our hosts is not for us.

        Each packet was sent before it is read, by what waking up for it costs at best. While we read, or wait for the
        processor to read, more are sent; those must not be taken for older than they are.
        """
        source = self._host_of[device]
        enter, by_address, largest = self._switch.enter, self._by_address, self._largest
        try:
            for _ in range(BATCH):
                packet = os.read(device, largest)
                target = by_address.get(packet[16:20]) if packet[0] >> 4 == 4 else None
                if target is None or target == source:
                    self._switch.counts["foreign"] += 1
                else:
                    enter(source, target, packet, max(since, time.monotonic() - waking))
        except BlockingIOError:
            pass
        except OSError:  # somebody with the right to do so removed the device
            self._read_from.remove(device)

    def _deliver_due(self) -> set[int]:
        """A packet is there when it has been handed over, so that begins a little before its time."""
        begin = time.monotonic()
        packets = self._switch.advance(begin + self._handover.seconds)
        reached = self._deliver(packets)
        if len(packets) == 1:
            self._handover.saw(time.monotonic() - begin)
        return reached

    def _deliver(self, packets: list[tuple[int, bytes]]) -> set[int]:
        """Give packets to their hosts; name the devices that were reached."""
        devices, reached = self._hosts.devices, set()
        for host, packet in packets:
            device = devices[host]
            try:
                os.write(device, packet)
                reached.add(device)
            except OSError:
                self._switch.counts["refused"] += 1
        return reached

    # --- changes

    def _next_change(self) -> float:
        return self.start + self._upcoming.at if self._upcoming is not None and not self._waits else math.inf

    def _make_due_changes(self, now: float) -> None:
        now = self.start if self._waits else now
        while self._upcoming is not None and self.start + self._upcoming.at <= now:
            self._change(self._upcoming, self.start + self._upcoming.at)
            self._upcoming = next(self._changes, None)

    def _change(self, change: Change, moment: float) -> None:
        """All that happens before a change happens by the old rules."""
        self._deliver(self._switch.advance(moment))
        self._switch.change(change, moment)
        self._resize_packets()
        wall = time.time() - (time.monotonic() - moment)
        self._truth.write(change, self._schedule_time(moment), wall, self._switch.conditions)

    def _resize_packets(self) -> None:
        """Let the hosts send packets of the size that fits the present rates."""
        if self._switch.mtu == self._mtu:
            return
        self._mtu = self._switch.mtu
        for control in self._hosts.controls:
            with suppress(OSError):  # somebody with the right to do so removed the device
                namespaces.set_mtu(control, self._mtu)

    # --- control

    def _hear(self, descriptor: int) -> None:
        """Take one request from whoever asks, and answer it."""
        visitor = self._visitors[descriptor]
        if visitor is self._listener:
            guest = visitor.accept()[0]
            guest.settimeout(0.2)  # a request is one line that comes at once
            self._visitors[guest.fileno()] = guest
            self._read_from.append(guest.fileno())
            return
        try:
            request = _line_of(visitor)
            if request:
                self._answer(visitor, json.loads(request))
                return
        except (OSError, ValueError):
            pass
        self._part_with(descriptor)

    def _part_with(self, descriptor: int) -> None:
        self._ended |= self._visitors[descriptor] is self._owner
        self._read_from.remove(descriptor)
        self._visitors.pop(descriptor).close()

    def _answer(self, visitor: socket.socket, request: dict[str, Any]) -> None:
        answers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "begin": self._answer_begin,
            "change": self._answer_change,
            "stats": self._answer_stats,
        }
        if request["do"] == "end":
            self._ended = self.dismissed = visitor is self._owner
        elif request["do"] == "enter":
            network = self._hosts.networks[request["host"]]
            own = [self._hosts.user] if self._hosts.user >= 0 else []
            socket.send_fds(visitor, [_line({"user": bool(own)})], [network, *own])
        else:
            visitor.sendall(_line(answers[request["do"]](request)))

    def _answer_begin(self, request: dict[str, Any]) -> dict[str, Any]:
        self.start, self._waits = time.monotonic() if self._waits else self.start, False
        return {"start": self.start}

    def _answer_change(self, request: dict[str, Any]) -> dict[str, Any]:
        now = time.monotonic()
        at = self._schedule_time(now)
        self._change(Change.from_json({**request["change"], "at": at}), now)
        return {"time": at}

    def _schedule_time(self, now: float) -> float:
        return 0.0 if self._waits else now - self.start

    def _answer_stats(self, request: dict[str, Any]) -> dict[str, Any]:
        return {
            "time": self._schedule_time(time.monotonic()),
            "cpu": time.process_time(),
            "packets": dict(self._switch.counts),
            "bytes": self._switch.carried,
            "mtu": self._switch.mtu,
        }


class Allowance:
    """What some work of ours costs at best, which is not the network's time.

    A packet that is late because the machine is busy is what such machines do; one that comes before its time is what
    no network does. So this is a low quantile of what was seen, not a mean: one in four lies below it, because each of
    those moves it down three times as far as one of the others moves it up. And it is small, whatever was seen.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def saw(self, seconds: float) -> None:
        """It took so long this time."""
        step = ALLOWED_STEP if seconds > self.seconds else -3 * ALLOWED_STEP
        self.seconds = min(max(self.seconds + step, 0.0), MOST_ALLOWED)


class Alarm:
    """Sleep until a time or until there is something to read.

    Being woken takes some 50 to 100 microseconds, longer than a packet. That is not the network's time: it is measured,
    alarms are set earlier by its mean and the rest is watched, and what woke us is taken to have been sent earlier by
    what it costs at best. And it costs processor time, here and in the host that is woken by a delivery: under load we
    rest instead, and take packets in handfuls.

    Attributes:
        waking: what it costs at best.
    """

    def __init__(self, read_from: list[int]) -> None:
        self.waking = Allowance(3e-5)
        self._read_from = read_from
        self._lateness = 5e-5
        self._saved = SAVED_WAKE_UPS
        self._last = time.monotonic()

    def wait(self, due: float) -> tuple[list[int], float]:
        """What can be read at `due` or earlier, and a time before which it was not there, or not seen."""
        self._rest_if_tired()
        begin = time.monotonic()
        sleep = min(due - begin - self._lateness, LONGEST_SLEEP)
        readable = select.select(self._read_from, [], [], max(sleep, 0.0))[0]
        now = time.monotonic()
        if readable:
            return readable, begin
        if 0 < sleep < LONGEST_SLEEP:
            self.waking.saw(now - begin - sleep)
            self._lateness += 0.1 * (min(now - begin - sleep, MOST_LATENESS) - self._lateness)
        if self._saved > 0 and now < due < now + MOST_LATENESS:
            readable = self._watch_until(due)
        return readable, time.monotonic()

    def _watch_until(self, due: float) -> list[int]:
        """The rest of the way with open eyes."""
        while time.monotonic() < due:
            if readable := select.select(self._read_from, [], [], 0)[0]:
                return readable
        return []

    def _rest_if_tired(self) -> None:
        now = time.monotonic()
        self._saved = min(self._saved + (now - self._last) * WAKE_UPS_PER_SECOND, SAVED_WAKE_UPS) - 1
        self._last = now
        if self._saved < 0:
            time.sleep(REST_SECONDS)


def _begin_truth(path: Path, say: Callable[[str], None]) -> Truth:
    try:
        return Truth(path, "w", say)
    except OSError as error:
        raise LabError(f"the truth cannot be written to {path}: {error.strerror}.") from error


def _timeline(changes: list[Change], repeat: float) -> Iterator[Change]:
    """The changes in order of time, again and again if they repeat."""
    changes = sorted(changes, key=lambda change: change.at)
    yield from changes
    begin = repeat
    while repeat:
        yield from (replace(change, at=begin + change.at) for change in changes)
        begin += repeat


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _line_of(peer: socket.socket) -> bytes:
    """One line, or nothing at the end. Requests come whole and one at a time, so this does not wait for long."""
    line = b""
    while not line.endswith(b"\n"):
        piece = peer.recv(1 << 20)
        if not piece:
            return b""
        line += piece
    return line
