"""What a worker tells whoever started it, by lines on stderr: notes while it goes on, a sentence at its end."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from typing import TextIO

from thinwire.errors import ThinwireWarning

# The user's own code may have left its line unfinished, as a progress bar does, and then ours stands at its end.
NOTE = re.compile(r".*thinwire: note: (.+)")
SENTENCE = re.compile(r"(?:.*thinwire: worker \d+: |thinwire: )(.+)")
BEGUN = re.compile(r".*thinwire: training begins")
LOST = "the connection to another worker is lost"
CONSEQUENCE = re.compile(rf"{LOST}|rank \d+ lost rank \d+")  # somebody else failed first


def begun() -> None:
    """All that comes before the first step is done."""
    sys.stderr.write("thinwire: training begins\n")  # in one piece, whoever else writes
    sys.stderr.flush()


def note(words: str) -> None:
    """Something that is not as it should be, though it goes on; to be told at once."""
    print(f"thinwire: note: {words}", file=sys.stderr, flush=True)


def say(words: str) -> None:
    """What is to be told when all have ended."""
    print(f"thinwire: worker {os.environ.get('RANK', '?')}: {words}", file=sys.stderr, flush=True)


class Warned(logging.Handler):
    """Tells what thinwire warns of, while this is open; what it logs is remembered too, as what is not well."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.words: list[str] = []
        self._begun: set[str] = set()
        self._show_others = warnings.showwarning
        warnings.showwarning = self._show
        logging.getLogger("thinwire").addHandler(self)

    def _show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Of those that differ in their figures alone the first is told; all are in the log."""
        self._show_others(message, category, filename, lineno, file, line)
        if issubclass(category, ThinwireWarning) and (beginning := str(message).partition(":")[0]) not in self._begun:
            self._begun.add(beginning)
            note(str(message))

    def emit(self, record: logging.LogRecord) -> None:
        self.words.append(record.getMessage())
        note(self.words[-1])

    def close(self) -> None:
        logging.getLogger("thinwire").removeHandler(self)
        warnings.showwarning = self._show_others
        super().close()
