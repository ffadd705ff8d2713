"""Lab: hosts behind an emulated network, for as long as a `with` block lasts.

with Lab(hosts=2, network="cross-region") as lab:
    process = lab.start(0, ["python", "train.py"])
    lab.set(latency="200ms")
    process.wait()
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from thinwire.lab import light, namespaces, profiles, registry, settings
from thinwire.lab.errors import LabError, LabUnavailable
from thinwire.lab.network import MOST_MTU, PACKETS_PER_SECOND, Change, fitting_mtu
from thinwire.lab.relay import CONTROL
from thinwire.lab.schedule import Schedule

MOST_HOSTS = 200
NAMES = "hosts"  # the file in a lab's folder that is /etc/hosts in its hosts


class Lab:
    """Hosts, the network between them, and the relay that is both.

    Args:
        hosts: how many.
        network: the network and how it changes: a `Schedule`, a profile's name, or a TOML file; None for no limits.
        mtu: bytes of a full packet; None for what fits the rates of the moment, so that the relay can carry them.
        seed: of loss and jitter.
        truth: the file that tells what the network was when; None for one that goes with the lab.
        waits: the network stays as its schedule begins until `begin` is called.
        tun: the TUN device.

    Attributes:
        id: the name by which `thinwire lab` commands know it.
        mtu: bytes of a full packet when the schedule's rates are at their peak.
    """

    def __init__(
        self,
        hosts: int = 2,
        network: Schedule | str | None = None,
        *,
        mtu: int | None = None,
        seed: int = 0,
        truth: str | os.PathLike[str] | None = None,
        waits: bool = False,
        tun: str | None = None,
    ) -> None:
        if not 1 <= hosts <= MOST_HOSTS:
            raise ValueError(f"a lab has 1 to {MOST_HOSTS} hosts, got {hosts}.")
        self.hosts = hosts
        self.schedule = network if isinstance(network, Schedule) else profiles.schedule(network, hosts)
        self._mtu = mtu
        self.mtu = mtu if mtu is not None else fitting_mtu(self.schedule.peak(hosts))
        if not 576 <= self.mtu <= MOST_MTU:
            raise ValueError(f"the MTU must be from 576 to {MOST_MTU} bytes, got {self.mtu}.")
        self.id = ""
        self._seed = seed
        self._truth = str(Path(truth).absolute()) if truth is not None else ""
        self._waits = waits
        self._tun = tun or os.environ.get(namespaces.TUN_VARIABLE) or namespaces.TUN_PATH
        self._asking = threading.Lock()
        self._relay: subprocess.Popen[bytes] | None = None
        self._owner: socket.socket | None = None
        self._notes: list[str] = []
        self._user = -1
        self._networks: list[int] = []
        self._names = ""
        self._started: list[subprocess.Popen[bytes]] = []
        self._start = 0.0

    def __enter__(self) -> Lab:
        if self._relay is not None:
            raise RuntimeError("this lab is open already: it is one `with` block's.")
        registry.clean()
        entry, folder = registry.register(hosts=self.hosts, network=self.schedule.name, truth=self._truth)
        self.id, self._truth = entry.id, entry.truth
        self._names = str(folder / NAMES)
        setup = {
            "main": os.getpid(),
            "hosts": self.hosts,
            "mtu": self._mtu,
            "seed": self._seed,
            "site": self.schedule.site,
            "changes": [change.to_json() for change in self.schedule.changes],
            "repeat": self.schedule.repeat,
            "folder": str(folder),
            "truth": self._truth,
            "waits": self._waits,
            "tun": self._tun,
        }
        try:
            Path(self._names).write_text(namespaces.names(self.hosts))
            self._start_relay(setup)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything that runs in the hosts, and the hosts. Closing twice is fine."""
        # An interrupt may have come while a process was being started, of which nobody knows then: see enter.py.
        if self._names:
            Path(self._names).unlink(missing_ok=True)
        if self._owner is not None:
            with contextlib.suppress(OSError):  # it has gone already
                self._owner.sendall(b'{"do": "end"}\n')
            self._owner.close()  # the relay sees this, or our death, and ends
            self._owner = None
        if self._relay is not None:
            try:
                self._relay.wait(registry.RELAY_SECONDS)
            except subprocess.TimeoutExpired:
                self._relay.kill()  # what it was to end is ended below
                self._relay.wait()
            self._relay = None
            namespaces.kill_inhabitants(self._inodes())  # nobody is left unless the relay itself was killed
        while self._started:
            process = self._started.pop()
            process.kill()  # one that is not in its host yet was not found there
            process.wait()
        for descriptor in (self._user, *self._networks):
            if descriptor >= 0:
                os.close(descriptor)
        self._user, self._networks = -1, []
        if self.id:
            registry.forget(self.id)

    @property
    def truth(self) -> Path:
        """The file that tells what the network was when."""
        return Path(self._truth)

    @property
    def relay(self) -> subprocess.Popen[bytes]:
        """The relay's process."""
        if self._relay is None:
            raise RuntimeError("the lab is not open: use it in a `with` block.")
        return self._relay

    @property
    def overloaded(self) -> bool:
        """Whether the hosts together may send more than the relay can carry."""
        peak = self.schedule.peak(self.hosts)
        return self.hosts > 1 and math.isfinite(peak) and peak > 2 * PACKETS_PER_SECOND * self.mtu

    # --- processes

    def start(
        self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host. `options` go to `subprocess.Popen`; it is a session of its own, without stdin."""
        settings.check_host(host, self.hosts)
        _ = self.relay
        own, user = self._networks[host], self._user
        command = light.command("thinwire.lab.enter", "run", str(user), str(own), self._names, str(os.getpid()), *argv)
        inherited = (own,) if user < 0 else (own, user)
        options = {"stdin": subprocess.DEVNULL, "start_new_session": True, **options}
        process = subprocess.Popen(command, env=env, pass_fds=inherited, **options)
        self._started.append(process)
        return process

    def address(self, host: int) -> str:
        """The IP address of a host."""
        return namespaces.address(host)

    def inhabitants(self) -> list[int]:
        """The processes that live in the hosts."""
        return namespaces.inhabitants(self._inodes())

    def _inodes(self) -> set[int]:
        return {os.fstat(descriptor).st_ino for descriptor in self._networks}

    # --- the network

    def set(self, *, host: int | None = None, pair: str | None = None, **words: Any) -> float:
        """Change the network now, for all, one host or one pair: `lab.set(latency="50ms", rate="1gbit", host=3)`.

        Gives the lab's time at which it came true.
        """
        return self.change(settings.change_from_words(words, self.hosts, host=host, pair=pair))

    def partition(self, text: str) -> float:
        """Block what a partition separates: `0,1|2,3`, or one way `0,1>2,3`."""
        return self.change(settings.partition(text, self.hosts))

    def heal(self) -> float:
        """Unblock everything."""
        return self.change(settings.heal())

    def change(self, change: Change) -> float:
        """Let a change come true now."""
        return float(self._ask({"do": "change", "change": change.to_json()})["time"])

    def begin(self) -> None:
        """Of a lab that waits, let the schedule begin now. Once is enough, and more often does nothing."""
        self._start = self._ask({"do": "begin"})["start"]

    @property
    def start_time(self) -> float:
        """When the lab's schedule began, on the machine's monotonic clock."""
        return self._start

    def now(self) -> float:
        """Seconds since the lab's schedule began; of one that waits and has not, since the lab was opened."""
        return time.monotonic() - self._start

    def stats(self) -> dict[str, Any]:
        """What the relay counted: packets by their fate, bytes delivered to each host, its processor seconds.

        And `mtu`, the bytes of a full packet at present.
        """
        return self._ask({"do": "stats"})

    # --- the relay

    def _start_relay(self, setup: dict[str, Any]) -> None:
        self._owner, theirs = socket.socketpair()
        with theirs:
            self._relay = subprocess.Popen(
                light.command("thinwire.lab.relay", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._owner.sendall(json.dumps(setup).encode() + b"\n")
        line, descriptors, _, _ = socket.recv_fds(self._owner, 1 << 16, self.hosts + 1)
        if not line:
            raise LabError(f"the relay ended with code {self._relay.wait()}; its error is above.")
        answer = json.loads(line)
        if "error" in answer:
            raise (LabUnavailable if answer["unavailable"] else LabError)(answer["error"])
        self._start = answer["start"]
        if len(descriptors) > self.hosts:
            self._user = descriptors.pop(0)
        self._networks = descriptors

    def fileno(self) -> int:
        """Can be read from when there may be `notes`, and when the relay has gone."""
        return self._to_relay().fileno()

    def notes(self) -> list[str]:
        """What the relay has said by itself since this was last asked: what is not well, though it goes on."""
        relay = self._to_relay()
        with self._asking, contextlib.suppress(LabError):  # who has gone says nothing more
            while select.select([relay], [], [], 0)[0]:
                self._notes.append(_heard(relay)["note"])
        notes, self._notes = self._notes, []
        return notes

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        relay = self._to_relay()
        with self._asking:
            answer = ask(relay, request)
            while "note" in answer:
                self._notes.append(answer["note"])
                answer = _heard(relay)
            return answer

    def _to_relay(self) -> socket.socket:
        if self._owner is None:
            raise RuntimeError("the lab is not open: use it in a `with` block.")
        return self._owner


def ask(relay: socket.socket, request: dict[str, Any]) -> dict[str, Any]:
    """One question and the relay's answer. Of its owner's connection: a note may come before it."""
    try:
        relay.sendall(json.dumps(request).encode() + b"\n")
    except OSError as error:
        raise LabError(f"the relay does not answer ({error.strerror}).") from error
    return _heard(relay)


def _heard(relay: socket.socket) -> dict[str, Any]:
    """The next line of the relay's, and not a byte of the one after it."""
    try:
        line = relay.makefile("rb", buffering=0).readline()
    except OSError as error:
        raise LabError(f"the relay does not answer ({error.strerror}).") from error
    if not line:
        raise LabError("the relay has gone.")
    heard: dict[str, Any] = json.loads(line)
    return heard


def visit(folder: Path) -> socket.socket:
    """A connection to the relay of any lab of this user."""
    relay = socket.socket(socket.AF_UNIX)
    try:
        relay.connect(str(folder / CONTROL))
    except OSError as error:
        relay.close()
        raise LabError(f"the relay of lab {folder.name} does not answer ({error.strerror}).") from error
    return relay
