"""What a finding is."""

from __future__ import annotations

from typing import NamedTuple

OK, NOTE, PROBLEM = "ok", "note", "problem"


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
        mark: ok, note or problem.
        kind: a word for programs.
        text: a sentence.
        where: which ranks or which way.
    """

    mark: str
    kind: str
    text: str
    where: str = ""
    advice: str = ""
