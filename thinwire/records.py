"""One JSON line per step and per decision: written while training, read by whoever wants to know.

A line is an object with `kind` and `time` (seconds since the file was begun). The first is of kind "run" and says what
is needed to run it again. Numbers that are not finite are written as null, so that any JSON reader takes every line.
"""

from __future__ import annotations

import json
import logging
import math
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FORMAT = 1

log = logging.getLogger("thinwire")


class Records:
    """A file of records that is being written. Every line is there once `write` has returned.

    A disk that is full ends the records, with a warning, and not the run: only one rank writes, and the others would
    not know.
    """

    def __init__(self, path: Path | str, **run: Any) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w", buffering=1)
        self._start = time.monotonic()
        self.write("run", format=FORMAT, **_surroundings(), **run)

    def write(self, kind: str, **fields: Any) -> None:
        if self._file.closed:
            return
        elapsed = round(time.monotonic() - self._start, 6)
        try:
            self._file.write(json.dumps({"kind": kind, "time": elapsed, **plain(fields)}, allow_nan=False) + "\n")
        except OSError as error:
            log.warning("the records in %s end here: %s.", self.path, error.strerror)
            self.close()

    def go_on_in(self, path: Path) -> None:
        """Move to the end of records that there are already, of a run that goes on."""
        self._file.close()
        with path.open("r+b") as before:
            whole = before.read().rfind(b"\n") + 1  # its writer may have been killed in the middle of a line
            before.truncate(whole)
        with path.open("ab") as end:
            end.write(self.path.read_bytes())
        self.path.unlink()
        self.path, self._file = path, path.open("a", buffering=1)

    def close(self) -> None:
        with suppress(OSError):  # what could not be written is still waiting to be
            self._file.close()


def read(path: Path | str) -> Iterator[dict[str, Any]]:
    """The records of a file in order, without empty lines and one that was cut off by the end of its writer."""
    with Path(path).open() as file:
        for line in file:
            if line.endswith("\n") and not line.isspace():
                yield json.loads(line)


def plain(value: Any) -> Any:
    """As JSON can say it: keys are strings, tuples are lists, and what is not finite is null."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _surroundings() -> dict[str, Any]:
    return {
        "wall": time.time(),
        "command": sys.argv,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in ("thinwire", "torch")}},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
