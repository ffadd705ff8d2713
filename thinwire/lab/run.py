"""One command on every host: outputs with a prefix, one end for all."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

from thinwire.lab.lab import Lab
from thinwire.lab.namespaces import DEVICE

MASTER_PORT = 29500  # torchrun's; every lab has networks of its own, so labs do not get into each other's way
FAILURE_GRACE, INTERRUPT_GRACE = 3.0, 0.5  # seconds from asking to end to SIGKILL


def run(lab: Lab, command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """Run a command once per host, as torchrun would on as many machines, and give its exit code.

    That is 0 when all ended well, otherwise the code of the first that did not; 128 + n for signal n. Then the others
    are ended too. An interrupt or SIGTERM ends all.
    """
    with _Interrupts() as interrupts:
        team = _Team(lab, interrupts)
        for host in range(lab.hosts):
            team.start(host, command, environment(lab, host, env if env is not None else os.environ))
        return team.attend()


def environment(lab: Lab, host: int, env: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would set, and what makes gloo talk over the lab's wire. The user's own threads and port win."""
    return {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",  # lines appear when they are written, although they go through us
        "MASTER_PORT": str(MASTER_PORT),
        **env,
        "MASTER_ADDR": lab.address(0),
        "RANK": str(host),
        "WORLD_SIZE": str(lab.hosts),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(host),
        "GLOO_SOCKET_IFNAME": DEVICE,
        "TP_SOCKET_IFNAME": DEVICE,
        "THINWIRE_LAB": lab.id,
    }


class _Interrupts:
    """Ctrl-C and SIGTERM as something that can be waited for, while this is open."""

    def __init__(self) -> None:
        self.seen: int | None = None
        self.reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: dict[int, object] = {}

    def __enter__(self) -> _Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self.reader)
        os.close(self._writer)

    def _note(self, number: int, frame: object) -> None:
        self.seen = self.seen or number


class _Stream:
    """A host's output, given on line by line."""

    def __init__(self, host: int, width: int, source: BinaryIO, target: BinaryIO) -> None:
        self.source = source
        self._prefix = f"[{host}]".ljust(width + 3).encode()
        self._target = target
        self._rest = b""
        os.set_blocking(source.fileno(), False)

    def pump(self) -> bool:
        """Give on what has come; False at the end."""
        if self.source.closed:  # its host ended in the same moment
            return True
        while piece := self._read():
            *lines, self._rest = (self._rest + piece).split(b"\n")
            self._write(lines)
        return piece is None

    def finish(self) -> None:
        """Give on what is left, even if it is no whole line."""
        self.pump()
        if self._rest:
            self._write([self._rest])
        self.source.close()

    def _read(self) -> bytes | None:
        try:
            return os.read(self.source.fileno(), 1 << 16)
        except BlockingIOError:
            return None

    def _write(self, lines: list[bytes]) -> None:
        if lines:
            self._target.write(b"".join(self._prefix + line + b"\n" for line in lines))
            self._target.flush()


class _Team:
    """The processes of one command."""

    def __init__(self, lab: Lab, interrupts: _Interrupts) -> None:
        self._lab = lab
        self._interrupts = interrupts
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._streams: dict[int, list[_Stream]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(interrupts.reader, selectors.EVENT_READ, self._interrupted)
        self._relay = os.pidfd_open(lab.relay.pid)
        self._selector.register(self._relay, selectors.EVENT_READ, self._relay_ended)
        self._selector.register(lab, selectors.EVENT_READ, self._tell_notes)
        self._code = 0
        self._deadline: float | None = None

    def start(self, host: int, command: Sequence[str], env: Mapping[str, str]) -> None:
        process = self._lab.start(host, command, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None and process.stderr is not None
        width = len(str(self._lab.hosts - 1))
        self._running[host] = process
        self._streams[host] = []
        for source, target in ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer)):
            stream = _Stream(host, width, source, target)  # type: ignore[arg-type]
            self._streams[host].append(stream)
            self._selector.register(stream.source, selectors.EVENT_READ, self._pumping(stream))
        ended = os.pidfd_open(process.pid)
        self._selector.register(ended, selectors.EVENT_READ, self._ending(host, ended))

    def attend(self) -> int:
        """Until all have ended."""
        while self._running:
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            for key, _ in self._selector.select(left):
                key.data()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._signal_all(signal.SIGKILL)
                self._deadline = None
        self._tell_notes()  # those that came with an answer too
        os.close(self._relay)
        self._selector.close()
        return self._code

    # --- what can happen

    def _pumping(self, stream: _Stream) -> Callable[[], None]:
        def pump() -> None:
            if not stream.pump():
                self._selector.unregister(stream.source)

        return pump

    def _ending(self, host: int, ended: int) -> Callable[[], None]:
        def end() -> None:
            self._selector.unregister(ended)
            os.close(ended)
            code = self._running.pop(host).wait()
            for stream in self._streams.pop(host):
                if stream.source in self._selector.get_map():
                    self._selector.unregister(stream.source)
                stream.finish()
            if code != 0 and self._code == 0:
                self._fail(f"host {host} {how_it_ended(code)}", code if code > 0 else 128 - code)

        return end

    def _interrupted(self) -> None:
        os.read(self._interrupts.reader, 64)
        number = self._interrupts.seen
        if number is not None and self._code == 0:
            self._code = 128 + number
            self._end_all(signal.Signals(number), INTERRUPT_GRACE)

    def _tell_notes(self) -> None:
        for note in self._lab.notes():
            print(f"thinwire lab: {note}", file=sys.stderr, flush=True)

    def _relay_ended(self) -> None:
        self._selector.unregister(self._relay)
        self._selector.unregister(self._lab)
        if self._code == 0:
            self._fail(f"the lab's relay {how_it_ended(self._lab.relay.wait())}", 1)

    def _fail(self, what: str, code: int) -> None:
        self._code = code
        others = f"; ending {len(self._running)} others" if self._running else ""
        print(f"thinwire lab: {what}{others}.", file=sys.stderr, flush=True)
        self._end_all(signal.SIGTERM, FAILURE_GRACE)

    def _end_all(self, number: signal.Signals, grace: float) -> None:
        self._signal_all(number)
        self._deadline = time.monotonic() + grace

    def _signal_all(self, number: signal.Signals) -> None:
        """To the whole group of each process: a script that started others is not asked alone."""
        for process in self._running.values():
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                pass


def how_it_ended(code: int) -> str:
    """
    >>> how_it_ended(3), how_it_ended(-9), how_it_ended(-40)
    ('ended with exit code 3', 'was ended by SIGKILL', 'was ended by signal 40')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # most real-time signals have no name
        return f"was ended by signal {-code}"
