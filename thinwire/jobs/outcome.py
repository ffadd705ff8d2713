"""How a run ended, and the file in its folder that says so: `outcome.json`.

    how         done, interrupted or failed; nothing while it runs, and after an end that nobody could write down
    message     what there is to say about it: of a run that is done, what is not well all the same
    log         the last lines of the worker that failed, if it could not say what was wrong
    steps       made in all, `seconds` of training in all, `saved`: the step of the newest checkpoint
    accuracy    the last that was measured, after the step `evaluated`
    sent_bytes  by rank 0 in these steps, and `dense_bytes`: what it would have sent uncompressed
    recorded    the step at which the records break off because the disk was full; null if they are whole

Rank 0 writes what it knows, and whoever started the workers adds what only he can know. The file is as long from the
beginning as it will be, so that its end can be written on a disk that has become full.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

FORMAT = 1
FILE = "outcome.json"
ROOM = 8192  # bytes
LONGEST = 1000  # letters of what is said
_FIGURES = ("steps", "seconds", "accuracy", "evaluated", "sent_bytes", "dense_bytes", "saved", "recorded")
_NOTHING: dict[str, Any] = {"format": FORMAT, "how": "", "message": "", "log": [], **dict.fromkeys(_FIGURES)}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        how: done, interrupted or failed.
        code: the exit code that says so: 0, 1, or 128 + n for signal n.
        message: what went wrong, in a sentence; nothing when all is well.
        log: the last lines of the worker that failed first, if it could not say what was wrong.
        at_once: nobody wants to wait for anything any more.
    """

    how: str
    code: int = 0
    message: str = ""
    log: tuple[str, ...] = ()
    at_once: bool = False


def begin(folder: Path) -> None:
    """A start, the first or a later one: how the one before ended is past."""
    path = folder / FILE
    is_new = not path.exists()
    try:
        _write(path, _NOTHING)
    except OSError:
        if is_new:
            path.unlink(missing_ok=True)
        raise


def note(folder: Path, **facts: Any) -> None:
    """Write these down besides what is known. Where even that cannot be written, it is not."""
    with suppress(OSError):
        _write(folder / FILE, read(folder) | facts)


def conclude(folder: Path, outcome: Outcome) -> Outcome:
    """Write down how it ended, as whoever started the workers saw it, and give that with what rank 0 knows besides.

    Of an interrupt it knows more, and what is not well it has written down though nobody may have heard it.
    """
    known = read(folder)
    unheard = known["message"] if known["how"] == outcome.how == "done" and not outcome.message else ""
    if unheard:
        outcome = replace(outcome, code=1, message=unheard)
    message = known["message"] if known["how"] == outcome.how == "interrupted" else outcome.message
    log = [line[:LONGEST] for line in outcome.log]
    note(folder, how=outcome.how, message=message[:LONGEST], log=log)
    return outcome


def note_recorded(folder: Path, steps: int) -> None:
    """Write down how many steps the records tell of, if rank 0 has made more."""
    if steps < (read(folder)["steps"] or 0):
        note(folder, recorded=steps)


def read(folder: Path) -> dict[str, Any]:
    """What is known of how a run ended; of one that says nothing, that."""
    try:
        found = json.loads((folder / FILE).read_bytes())
    except (OSError, ValueError):
        found = None
    return _NOTHING | (found if isinstance(found, dict) and found.get("format") == FORMAT else {})


def _write(path: Path, facts: dict[str, Any]) -> None:
    """In place: a new file would need room."""
    content = json.dumps(facts).encode().ljust(ROOM - 1) + b"\n"
    with path.open("r+b" if path.exists() else "xb") as file:
        file.write(content)
        file.truncate()
