"""Which labs there are, in one folder each: so that a command can find them, and find what a killed one left."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import stat
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from errno import ENOTEMPTY
from itertools import count
from pathlib import Path
from typing import Any

from thinwire.lab import light, namespaces
from thinwire.lab.errors import LabError

FOLDER_VARIABLE = "THINWIRE_LAB_DIR"
RELAY_SECONDS = 8.0  # more than the relay gives itself to end what a lab left

_numbers = count()


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is known of a lab from outside.

    Attributes:
        main, main_start: the process that the lab belongs to; a number alone could come to mean another process.
        relay, relay_start: the process that carries its packets; 0 while it is being started.
        boot: the boot of the machine that all these numbers belong to.
        networks: (inode, cookie) of each host's network. An inode may come to mean another network, a cookie never.
    """

    id: str
    main: int
    main_start: int
    boot: str
    hosts: int
    network: str
    truth: str
    relay: int = 0
    relay_start: int = 0
    networks: list[tuple[int, int]] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.boot == namespaces.boot_id() and namespaces.start_time(self.main) == self.main_start


def root() -> Path:
    """The folder of all labs of this user, private to them."""
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return _private(Path(chosen))
    candidates = [Path("/run/thinwire-lab")] if os.geteuid() == 0 else []
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        candidates.append(Path(runtime, "thinwire-lab"))
    for candidate in candidates:
        if os.access(candidate.parent, os.W_OK):
            return _private(candidate)
    return _private(Path(tempfile.gettempdir(), f"thinwire-lab-{os.geteuid()}"))


def _private(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise LabError(f"{folder} must be a folder that belongs to you alone (mode 0700); remove it or change it.")
    return folder


def register(**facts: Any) -> tuple[Entry, Path]:
    """A new lab of this process, and its folder."""
    number, main = next(_numbers), os.getpid()
    start = namespaces.start_time(main)
    assert start is not None, "we are alive"
    identity = f"{main}-{number}" if number else str(main)
    folder = root() / identity
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)  # of a process that had our number before us
    folder.mkdir(mode=0o700)
    entry = Entry(id=identity, main=main, main_start=start, boot=namespaces.boot_id(), **facts)
    if not entry.truth:
        entry = replace(entry, truth=str(folder / "truth.jsonl"))
    write(folder, entry)
    return entry, folder


def write(folder: Path, entry: Entry) -> None:
    """Whole or not at all, whenever we are killed."""
    draft = folder / "lab.json.new"
    draft.write_text(json.dumps(asdict(entry)))
    draft.replace(folder / "lab.json")


def read(folder: Path) -> Entry | None:
    """A lab's entry; None if there is none, or none that is whole."""
    try:
        facts = json.loads((folder / "lab.json").read_text())
        facts["networks"] = [(int(inode), int(cookie)) for inode, cookie in facts["networks"]]
        return Entry(**facts)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def forget(identity: str) -> None:
    """A lab has ended in peace. Its relay has removed the folder already, if it ever came to life."""
    shutil.rmtree(root() / identity, ignore_errors=True)


def folders() -> list[Path]:
    return sorted(path for path in root().iterdir() if path.is_dir())


def running() -> list[tuple[Entry, Path]]:
    """The labs whose process is alive and whose relay has begun."""
    entries = [(read(folder), folder) for folder in folders()]
    return [(entry, folder) for entry, folder in entries if entry is not None and entry.alive and entry.relay]


def find(identity: str | None) -> tuple[Entry, Path]:
    """The lab of that name, or the only one there is."""
    labs = running()
    names = ", ".join(entry.id for entry, _ in labs)
    chosen = [(entry, folder) for entry, folder in labs if identity in (None, entry.id)]
    if len(chosen) == 1:
        return chosen[0]
    if not labs:
        raise LabError("no lab is running: start one with `thinwire lab run`.")
    if identity is None:
        raise LabError(f"{len(labs)} labs are running: choose one of {names} with --lab.")
    raise LabError(f"no lab {identity!r} is running; there are {names}.")


# --- what dead labs left


def clean() -> list[str]:
    """End and remove what labs left whose process is dead; say what was done, a line for each lab."""
    return [line for folder in folders() if (line := _clean_one(folder))]


def _clean_one(folder: Path) -> str:
    entry = read(folder)
    if entry is None:
        return "" if _may_be_new(folder) else _remove(folder, "which had hardly begun")
    if entry.alive:
        return ""
    if entry.boot != namespaces.boot_id():
        return _remove(folder, "of before the last boot")
    _end_relay(entry)
    killed, spared = _kill_inhabitants(entry)
    if spared:
        return f"lab {entry.id}: processes {spared} may be its own, but this kernel cannot tell; please look at them."
    return _remove(folder, f"whose process had died; ended {len(killed)} processes")


def _may_be_new(folder: Path) -> bool:
    """A folder without an entry is a lab that begins right now, or one that was killed while it began."""
    try:
        age = time.time() - folder.stat().st_mtime
    except OSError:
        return True
    main = folder.name.partition("-")[0]
    return age < 60 and main.isdigit() and namespaces.start_time(int(main)) is not None


def _end_relay(entry: Entry) -> None:
    """The relay sees for itself that its lab's process died. Let it finish; kill it only if it does not."""
    try:
        relay = os.pidfd_open(entry.relay) if entry.relay else -1
    except OSError:
        return
    if relay < 0:
        return
    try:
        if namespaces.start_time(entry.relay) == entry.relay_start:
            ended, _, _ = select.select([relay], [], [], RELAY_SECONDS)
            if not ended:
                namespaces.kill_if(entry.relay, lambda pid: namespaces.start_time(pid) == entry.relay_start)
    finally:
        os.close(relay)


def _kill_inhabitants(entry: Entry) -> tuple[list[int], list[int]]:
    """Kill what lives in the networks of a lab without a relay; say who was killed, and who could not be told."""
    cookies = dict(entry.networks)
    killed: list[int] = []
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        # Looked at once: one that dies meanwhile has no network any more, and is none that could not be told.
        inodes = {pid: namespaces.network_of(pid) for pid in namespaces.all_processes()}
        found = {pid: inode for pid, inode in inodes.items() if inode in cookies}
        if spared := [pid for pid, inode in found.items() if not cookies[inode]]:
            return killed, spared
        ours = [pid for pid in found if _lives_in(pid, cookies)]
        if not ours:
            break
        for pid in ours:
            namespaces.kill_if(pid, lambda pid: _lives_in(pid, cookies))
        killed += ours
    return sorted(set(killed)), []


def _lives_in(pid: int, cookies: dict[int, int]) -> bool:
    """Whether a process lives in the very network that had this inode when the lab made it."""
    inode = namespaces.network_of(pid)
    if inode not in cookies:
        return False
    answer = subprocess.run(light.command("thinwire.lab.enter", "cookie", str(pid)), capture_output=True, text=True)
    return answer.returncode == 0 and int(answer.stdout) == cookies[inode]


def _remove(folder: Path, what: str) -> str:
    while folder.exists():
        try:
            shutil.rmtree(folder)
            return f"removed lab {folder.name}, {what}"
        except FileNotFoundError:  # somebody else is removing it too
            pass
        except OSError as error:  # a relay that had just begun wrote into it; it ends as it has lost its lab
            if error.errno != ENOTEMPTY:
                raise
    return ""  # somebody else was faster
