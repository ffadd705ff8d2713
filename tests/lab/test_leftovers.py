"""However a lab ends, nothing stays behind, and nobody else is hit."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import thinwire
from tests.lab.leftovers import left_behind, processes_of
from tests.lab.networks import lab
from tests.process.runs import until
from thinwire.lab import namespaces, registry
from thinwire.lab.relay import CONTROL

pytestmark = pytest.mark.lab

MAIN = """
import sys, types
thinwire = types.ModuleType("thinwire")
thinwire.__path__ = [sys.argv[1]]
sys.modules["thinwire"] = thinwire
from subprocess import PIPE
from thinwire.lab.lab import Lab
with Lab(3) as lab:
    script = "sleep 600 & sleep 600 & echo up; wait"
    started = [lab.start(host, ["sh", "-c", script], stdout=PIPE) for host in range(3)]
    for process in started:
        process.stdout.readline()
    print(lab.relay.pid, flush=True)
    started[0].wait()
"""


def start_main() -> subprocess.Popen[str]:
    """A process with a lab and nine processes in it, without torch, so that it starts fast."""
    command = [sys.executable, "-I", "-S", "-c", MAIN, str(Path(thinwire.__file__).parent)]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def end(main: subprocess.Popen[str], number: int) -> None:
    """By this signal; once more if nothing came of it: Python drops an interrupt that comes in one of its callbacks."""
    for _ in range(10):
        main.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            main.wait(timeout=10)
            return


@pytest.mark.parametrize("seed", range(50))
def test_a_killed_lab_leaves_nothing(seed: int, folder: Path) -> None:
    with start_main() as main:
        time.sleep(random.Random(seed).uniform(0, 0.35))  # not to wait for anything: any moment is a good one to die
        end(main, [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT][seed % 4])
    registry.clean()
    assert left_behind(folder) == ([], [])


def test_a_process_that_comes_when_the_lab_is_ending_does_not_stay() -> None:
    with lab(1) as ending:
        Path(ending._names).unlink()  # what closing does first
        assert ending.start(0, ["sleep", "600"]).wait(timeout=30) == 1


def test_a_lab_and_its_relay_killed_together_are_cleaned_by_the_next_call(folder: Path) -> None:
    with start_main() as main:
        assert main.stdout is not None
        relay = int(main.stdout.readline())
        entry = registry.read(folder / str(main.pid))
        assert entry is not None and entry.relay == relay
        until(lambda: len(processes_of(folder)) == 11)  # the lab's own, its relay, three in each host
        os.kill(relay, signal.SIGKILL)
        main.kill()
    networks = dict(entry.networks)
    assert len(namespaces.inhabitants(networks)) == 9
    assert "whose process had died" in registry.clean()[0]
    assert namespaces.inhabitants(networks) == []
    assert left_behind(folder) == ([], [])


def test_a_reused_inode_or_number_never_hits_a_stranger(folder: Path) -> None:
    with lab(1) as stranger:
        living = stranger.start(0, ["sleep", "600"])
        entry, place = registry.register(hosts=1, network="test", truth="")
        inode = os.fstat(stranger._networks[0]).st_ino
        dead = subprocess.Popen(["true"])
        dead.wait()
        # A dead lab whose network had the inode that the stranger's has now, and whose relay had our own number.
        facts = {**entry.__dict__, "main": dead.pid, "main_start": 1, "relay": os.getpid(), "relay_start": 1}
        registry.write(place, registry.Entry(**{**facts, "networks": [(inode, 12345)]}))
        registry.clean()
        assert not place.exists()
        assert living.poll() is None


def test_a_lab_of_before_the_last_boot_is_only_forgotten(folder: Path) -> None:
    entry, place = registry.register(hosts=1, network="test", truth="")
    registry.write(place, registry.Entry(**{**entry.__dict__, "boot": "another"}))
    assert registry.clean() == [f"removed lab {entry.id}, of before the last boot"]


def test_what_a_relay_writes_while_its_lab_is_removed_is_removed_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lab that is killed while its relay begins: nobody knows of that relay yet, so nobody waits for it."""
    entry, place = registry.register(hosts=1, network="test", truth="")
    registry.write(place, registry.Entry(**{**entry.__dict__, "main_start": 1}))
    rmdir, late = os.rmdir, iter([CONTROL])

    def rmdir_after_a_late_word(path: object, **where: int) -> None:
        for name in late:
            (place / name).touch()
        rmdir(path, **where)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "rmdir", rmdir_after_a_late_word)
    assert registry.clean() == [f"removed lab {entry.id}, whose process had died; ended 0 processes"]
    assert left_behind(folder) == ([], [])


def test_a_block_that_raises_leaves_nothing(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), lab(2) as two:
        two.start(1, ["sh", "-c", "sleep 600 & wait"])
        _ = 1 / 0
    assert left_behind(folder) == ([], [])


@pytest.mark.parametrize("moment", ["lab.json", CONTROL])
def test_an_interrupt_while_a_lab_begins_ends_it_at_once(
    moment: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the relay has read what to do, and after it has made the hosts but not told us."""

    def interrupted(*_: object) -> None:
        while not list(folder.glob(f"*/{moment}")):
            pass
        raise KeyboardInterrupt

    monkeypatch.setattr(socket, "recv_fds", interrupted)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt), lab(2):
        pass
    assert time.monotonic() - begin < 3  # 5 s is how long the relay waits for a process that is dying
    assert left_behind(folder) == ([], [])
