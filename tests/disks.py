"""A disk that is soon full, and a training on it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.process.runs import is_training, thinwire, until


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """One of this size, as mount takes it, at a new folder; the test is skipped where none can be made."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    folder.mkdir()
    options = f"size={size}"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def fill(disk: Path) -> None:
    """Leave no room on it, whoever else writes there."""
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(b"x" * 4096)


class Told(NamedTuple):
    """What a training said of the disk on stderr, line by line, and what it said on stdout."""

    code: int
    lines: list[str]
    out: str


def filled_while_it_trains(disk: Path, name: str, *words: str, ends: int) -> Told:
    """Train on a disk, fill it, and wait until it is told that so many files end, which must not end the training."""
    where = ["--hosts", "2", "--name", name, "--out", str(disk), "--checkpoint-every", "0"]
    process = thinwire("train", "digits", *where, *words)
    said: list[str] = []
    try:
        until(lambda: is_training(disk / name, 2) or process.poll() is not None)
        fill(disk)
        assert process.stderr is not None
        while sum(_is_an_end(line) for line in said) < ends:
            said.append(process.stderr.readline().rstrip())
            assert said[-1], said
        assert process.poll() is None  # it is training on
        out, rest = process.communicate()
    finally:
        process.kill()
        process.communicate()
    lines = [line for line in (*said, *rest.splitlines()) if "could not be saved" in line or _is_an_end(line)]
    return Told(process.returncode, lines, out)


def _is_an_end(line: str) -> bool:
    return "end here: No space left" in line or "ends here: No space left" in line


# A network whose changes follow each other so closely that its truth ends with the disk.
RESTLESS = """
repeat = "100ms"

[network]
latency = "200us"
rate = "1gbit"

[[change]]
at = "50ms"
latency = "100us"
"""
