"""Settings of a job from a TOML file; a mistake in it is told with its line."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.jobs.job import KEYS, Job, Mistake
from thinwire.jobs.method import nearest


class Settings(NamedTuple):
    """What a TOML file says, and where it says it."""

    path: Path | str
    text: str
    data: dict[str, Any]

    @staticmethod
    def read(path: Path | str, also: Sequence[str] = ()) -> Settings:
        """A file with settings of a job at its top level, and maybe some `also`."""
        text = _text_of(Path(path))
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}:{_line_in(error, text)}: {error}.{_hint(error)}") from error
        except RecursionError as error:
            raise ValueError(f"{path} cannot be read: its arrays or tables are nested too deeply.") from error
        except ValueError as error:  # of Python's, which reads no whole number of more digits
            most = sys.get_int_max_str_digits()
            raise ValueError(f"{path} cannot be read: it has a number of more than {most} digits.") from error
        settings = Settings(path, text, data)
        for key, value in data.items():
            if wrong := _wrong_with(key, value, (*KEYS, *also)):
                raise settings.refused(key, wrong)
        return settings

    def job(self, **overrides: Any) -> Job:
        """The job that it describes; `overrides` win."""
        own = {key: value for key, value in self.data.items() if key in KEYS and key not in overrides}
        with self.blamed(overrides):
            job = Job(**own, **overrides)
            if job.names_a_network:
                job.schedule()
        return job

    @contextmanager
    def blamed(self, given: Collection[str]) -> Iterator[None]:
        """What is found to be a mistake within is told with its line, unless an option has `given` that setting.

        A comparison has methods and seeds where its jobs have one.
        """
        try:
            yield
        except Mistake as error:
            key = next((key for key in (error.key, f"{error.key}s") if key in self.data), None)
            if key is None or key in given or error.key in given:  # it is in an option
                raise
            raise self.refused(key, error) from error

    def refused(self, key: str, why: object) -> ValueError:
        """What is wrong with a key, and its line."""
        return ValueError(f"{self.path}:{_line_of(key, self.text)}: {why}")


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8.") from error


def _wrong_with(key: str, value: Any, known: Sequence[str]) -> str:
    """What is wrong with a key of a file, whatever its value; nothing if nothing is."""
    is_table = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(part, dict) for part in value))
    if key in known:
        return f"{key} must be no table: all keys are at the top level." if is_table else ""
    if is_table:
        return f"{key!r} is no setting of a job, which has no tables: leave [{key}] out, all keys are at the top level."
    return f"{key!r} is no setting of a job.{nearest(key, known)}"


def _line_in(error: tomllib.TOMLDecodeError, text: str) -> int:
    """tomllib says it in words, or that it is at the end."""
    found = re.search(r"\(at line (\d+),", str(error))
    return int(found[1]) if found else max(1, len(text.splitlines()))


def _hint(error: tomllib.TOMLDecodeError) -> str:
    hints = {"Invalid value": ' Text is in "quotes".', "Cannot overwrite": " It was set above already."}
    return next((hint for start, hint in hints.items() if str(error).startswith(start)), "")


def _line_of(key: str, text: str) -> int:
    """tomllib keeps no lines, so they are looked for in the text."""
    pattern = re.compile(rf"\s*(\[+\s*)?[\"']?{re.escape(key)}[\"']?\s*[=.\]]")
    lines = _WORDS.sub(_without_lines, text).splitlines()
    return next((number for number, line in enumerate(lines, 1) if pattern.match(line)), 1)


# A text of many lines, one of one, or a comment: what looks like the beginning of one may stand in another.
_WORDS = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}' r"|'''.*?'{3,5}" r'|"(?:\\.|[^"\\\n])*"' r"|'[^'\n]*'" r"|#[^\n]*", re.DOTALL
)


def _without_lines(found: re.Match[str]) -> str:
    """As many lines as there were, with nothing in them."""
    return "\n" * found[0].count("\n") or found[0]
