"""What an emulated network really was, written down change by change."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, TextIO

from thinwire.lab.network import Change, Conditions


class Truth:
    """A file with a JSON line per change: seconds, bytes per second, shares; null is no limit.

    A disk that is full ends the truth, and not the network that it tells of.

    Args:
        mode: "w" begins the file anew, "a" goes on with one that there is.
        say: told once if the truth ends before the network does.
    """

    def __init__(self, path: Path, mode: Literal["w", "a"], say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        whole = mode == "w" or _ends_a_line(path)
        self._file: TextIO = path.open(mode, buffering=1)
        if not whole:  # the disk was full then
            self._put("\n")

    def write(self, change: Change, elapsed: float, wall: float, conditions: Conditions) -> None:
        """This change came true so many seconds after the beginning, at this time on the wall, and led to that."""
        if self._file.closed:
            return
        record = {
            "time": round(elapsed, 6),
            "wall": round(wall, 6),
            "cause": change.cause,
            "hosts": change.hosts,
            "pairs": change.pairs,
            "set": {key: None if value == math.inf else value for key, value in change.values.items()},
            "now": conditions.summary(),
        }
        self._put(json.dumps(record) + "\n")

    def _put(self, line: str) -> None:
        try:
            self._file.write(line)
        except OSError as error:
            self.close()
            self._say(f"the truth in {self._path} ends here: {error.strerror}.")

    def close(self) -> None:
        with suppress(OSError):  # what could not be written is still waiting to be
            self._file.close()


def _ends_a_line(path: Path) -> bool:
    """Whether what is appended begins a line of its own."""
    if not path.exists() or not path.stat().st_size:
        return True
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"
