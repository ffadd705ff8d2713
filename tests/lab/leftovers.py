"""What a lab could leave behind, counted."""

from __future__ import annotations

import time
from pathlib import Path

from thinwire.lab import namespaces, registry


def left_behind(folder: Path) -> tuple[list[str], list[str]]:
    """Folders of labs, and processes that a lab of this folder started. What is about to end has 5 s to do so.

    A network and its device live exactly as long as a process in it or a relay that holds it, and all of those have the
    folder's name in their environment.
    """
    deadline = time.monotonic() + 5
    while (found := ([path.name for path in folder.iterdir()], processes_of(folder))) != ([], []):
        if time.monotonic() > deadline:
            break
    return found


def processes_of(folder: Path) -> list[str]:
    """Relays, hosts' processes, and whatever else was started with this folder, by number and command."""
    mark = f"{registry.FOLDER_VARIABLE}={folder}\0".encode()
    return [f"{pid} {_command(pid)}" for pid in namespaces.all_processes() if mark in _environment(pid)]


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[-200:]
    except OSError:
        return ""
