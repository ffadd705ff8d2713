"""Streams that may lose their reader: a run must not end because nobody looks any more."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import EIO, EPIPE
from pathlib import Path
from typing import Any, TextIO, cast

STDOUT, STDERR = 1, 2  # their descriptors

_figures: TextIO | None = None


def figures() -> TextIO:
    """Where what --json leaves is written: stdout, also while nothing else is."""
    return _figures or sys.stdout


@contextmanager
def outlived(figures_only: bool = False) -> Iterator[None]:
    """While this is open, stdout and stderr lead to nowhere once their reader or their terminal has gone.

    What is told on stderr while a run goes on is not worth its end, so there any other failure, as of a disk that is
    full, counts too. What came of it must be written to stdout if somebody waits for it there. One that was closed
    from the beginning leads to nowhere too.

    Args:
        figures_only: leave stdout to the figures, from now on.
    """
    before = sys.stdout, sys.stderr
    _fill_descriptors()
    if figures_only:
        _set_stdout_aside()
    with Path(os.devnull).open("w") as nowhere:
        out = _Outlived(sys.stdout or nowhere, _has_no_reader)
        err = _Outlived(sys.stderr or nowhere, lambda error: True)
        sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in (out, err))
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


def _fill_descriptors() -> None:
    """Put nothing in the place of a standard stream that was closed: the next file to be opened would take it."""
    while (free := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(free, True)
    os.close(free)


def _set_stdout_aside() -> None:
    """What others write there goes to stderr until we end: the user's module, what it starts, C code, atexit."""
    global _figures
    with suppress(OSError):  # what is no file is nobody else's
        if _figures is None and sys.stdout is not None and sys.stdout.fileno() == STDOUT:
            _figures = cast(TextIO, _Outlived(os.fdopen(os.dup(STDOUT), "w"), _has_no_reader))
            os.dup2(STDERR, STDOUT)


def _has_no_reader(error: OSError) -> bool:
    return error.errno in (EPIPE, EIO)


class _Outlived:
    """A stream, and what becomes of it when it cannot be written to.

    Args:
        is_gone: whether this error means that it is given up.
    """

    def __init__(self, stream: TextIO, is_gone: Callable[[OSError], bool]) -> None:
        self._stream, self._is_gone = stream, is_gone

    def write(self, text: str) -> int:
        return self._or_nowhere(lambda: self._stream.write(text)) or len(text)

    def flush(self) -> None:
        self._or_nowhere(self._stream.flush)

    def _or_nowhere(self, act: Callable[[], int | None]) -> int | None:
        try:
            return act()
        except OSError as error:
            if not self._is_gone(error):
                raise
            # Beneath the stream, so that what it still holds can be flushed when the interpreter ends.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
