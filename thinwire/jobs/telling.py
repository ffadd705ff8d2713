"""What a worker tells whoever started it, by lines on stderr: notes while it goes on, a sentence at its end."""

from __future__ import annotations

import logging
import os
import re
import sys

NOTE = re.compile(r"thinwire: note: (.+)")
SENTENCE = re.compile(r"thinwire: (?:worker \d+: )?(.+)")
LOST = "the connection to another worker is lost"
CONSEQUENCE = re.compile(rf"{LOST}|rank \d+ lost rank \d+")  # somebody else failed first


def note(words: str) -> None:
    """Something that is not as it should be, though it goes on; to be told at once."""
    print(f"thinwire: note: {words}", file=sys.stderr, flush=True)


def say(words: str) -> None:
    """What is to be told when all have ended."""
    print(f"thinwire: worker {os.environ.get('RANK', '?')}: {words}", file=sys.stderr, flush=True)


class Warned(logging.Handler):
    """Tells what thinwire warns of, while this is open, and remembers it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.words: list[str] = []
        logging.getLogger("thinwire").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.words.append(record.getMessage())
        note(self.words[-1])

    def close(self) -> None:
        logging.getLogger("thinwire").removeHandler(self)
        super().close()
