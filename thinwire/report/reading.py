"""Files that others wrote, perhaps not to their end: what can be read is, and the rest is told in words."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

FORMAT = 1  # of job.json and compare.json
LONGEST_TEXT, LONGEST_COMMAND = 400, 20_000  # letters
MOST_NUMBERS = 10  # of lines, in a sentence
LEAST, LARGEST = 1e-30, 1e30  # nothing that is recorded is smaller without being nothing, or larger
# Control characters, halves of surrogate pairs, and what turns the direction of writing.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]")
_SKIPPED = ('{"kind": "heard"', '{"kind": "asked"')  # two lines of three, and nothing that is drawn


class ReportError(ValueError):
    """There is nothing to report on, or nothing that this version can read."""


def lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines in order; what is wrong with the file is added to `notes`.

    An empty line says nothing, so nothing is lost by passing it over.
    """
    damaged, ended = list[int](), True
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                if line.startswith(_SKIPPED) or not line.strip():
                    continue
                found = _parsed(line)
                if isinstance(found, dict):
                    yield found
                elif line.endswith("\n"):
                    damaged.append(number)
                else:
                    ended = False
    except FileNotFoundError:
        notes.append(f"{path.name} is missing.")
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}.")
    if damaged:
        notes.append(f"{_numbered(damaged)} of {path.name} could not be read and {_was(damaged)} left out.")
    if not ended:
        notes.append(f"The last line of {path.name} was cut off and is left out: its writer was stopped.")


def document(path: Path, notes: list[str]) -> dict[str, Any] | None:
    """The object in a JSON file; None, with a note, if there is none."""
    try:
        found = _parsed(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        notes.append(f"{path.name} is missing.")
        return None
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}.")
        return None
    if not isinstance(found, dict):
        notes.append(f"{path.name} is damaged and was not used.")
        return None
    refuse_newer(path, found, FORMAT)
    return found


def refuse_newer(path: Path, found: Mapping[str, Any], known: int) -> None:
    written = number(found.get("format"))
    if written is not None and written > known:
        raise ReportError(
            f"{path} is of format {written:.0f}, from a newer thinwire; this one reads format {known}. "
            "Update thinwire to report on it."
        )


def number(value: Any) -> float | None:
    """
    >>> number(2), number("2"), number(True), number(float("nan")), number(1e300)
    (2.0, None, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    if math.isnan(found) or abs(found) > LARGEST:
        return None
    return found if abs(found) >= LEAST else 0.0


def text(value: Any, longest: int = LONGEST_TEXT) -> str:
    """As a person may see it: one line, of no great length, with nothing that writes over its neighbours.

    >>> text("a\\nb"), text(None), text(0.5)
    ('a\\ufffdb', '', '0.5')
    """
    if value is None:
        return ""
    shown = _UNPRINTABLE.sub("\ufffd", str(value))
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def texts(value: Any) -> dict[str, str]:
    """A mapping as words, without what is empty; nested ones by names with dots."""
    found: dict[str, str] = {}
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(inner, Mapping):
                found |= {f"{text(key)}.{name}": word for name, word in texts(inner).items()}
            elif isinstance(inner, list):
                found[text(key)] = text(", ".join(map(str, inner)))
            elif inner is not None and inner != "":
                found[text(key)] = text(inner)
    return found


def or_nan(value: Any) -> float:
    found = number(value)
    return math.nan if found is None else found


def count(value: Any) -> int | None:
    """
    >>> count(3), count(-1), count("3")
    (3, None, None)
    """
    found = number(value)
    return int(found) if found is not None and found >= 0 else None


def command(value: Any) -> str:
    """A list of arguments as it would be typed, where Python knows the program by the file that it ran.

    >>> command(["/usr/bin/thinwire", "train", "my net"]), command(["/lib/thinwire/__main__.py", "plan"])
    ("thinwire train 'my net'", 'thinwire plan')
    >>> command(["/home/me/mine/__main__.py", "-v"]), command(["train.py"]), command([])
    ('python -m mine -v', 'train.py', '')
    """
    if not isinstance(value, list):
        return text(value, LONGEST_COMMAND)
    words = [str(word) for word in value]
    return text(shlex.join([*_program(*words[:1]), *words[1:]]), LONGEST_COMMAND)


def _program(path: str = "") -> list[str]:
    *_, package, file = ("", "", *PurePath(path).parts)
    if file == "thinwire" or (package, file) == ("thinwire", "__main__.py"):
        return ["thinwire"]
    if package and file == "__main__.py":
        return ["python", "-m", package]
    return [path] if path else []


def _parsed(written: str) -> Any:
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return None


def _numbered(lines: list[int]) -> str:
    """
    >>> _numbered([6]), _numbered([6, 7, 9]), _numbered(list(range(1, 100)))
    ('Line 6', 'Lines 6, 7 and 9', 'Lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 89 more')
    """
    if len(lines) == 1:
        return f"Line {lines[0]}"
    shown = [str(line) for line in lines[:MOST_NUMBERS]]
    last = f"{len(lines) - MOST_NUMBERS} more" if len(lines) > MOST_NUMBERS else shown.pop()
    return f"Lines {', '.join(shown)} and {last}"


def _was(counted: list[int]) -> str:
    return "was" if len(counted) == 1 else "were"
