"""What a lab could leave behind, counted."""

from __future__ import annotations

import time
from pathlib import Path

from thinwire.lab import namespaces


def relays_and_launchers() -> list[int]:
    found = []
    for pid in namespaces.all_processes():
        try:
            if b"thinwire.lab." in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def networks() -> set[int]:
    """The networks that any process lives in."""
    seen = {namespaces.network_of(pid) for pid in namespaces.all_processes()}
    return {network for network in seen if network is not None}


def left_behind(folder: Path) -> tuple[list[str], list[int]]:
    """Folders of labs and processes of labs. What is about to end by itself has 5 s to do so."""
    deadline = time.monotonic() + 5
    while (found := ([path.name for path in folder.iterdir()], relays_and_launchers())) != ([], []):
        if time.monotonic() > deadline:
            break
    return found
