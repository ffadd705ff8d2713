"""The user's own module, of a task like `my_module:make`: found without torch, before anything is started."""

from __future__ import annotations

import importlib
import sys
import sysconfig
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, cast

_OTHERS = (str(Path(__file__).parents[1]), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
_NOT_THE_USERS = ("<", *(f"{folder}/" for folder in _OTHERS))


def maker_of(task: str) -> Callable[[], Any]:
    """`make` of `package.module:make`. The module is found from the current directory, or where packages are."""
    module, _, name = task.partition(":")
    found = _imported(task, module)
    if not hasattr(found, name):
        raise ValueError(f"{task} cannot be found: module {module!r} has no attribute {name!r}.")
    make: Any = getattr(found, name)
    if not callable(make):
        raise ValueError(f"{task} must be a function that makes a model and its data, got {type(make).__name__}.")
    return cast(Callable[[], Any], make)


def _imported(task: str, module: str) -> ModuleType:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        with redirect_stdout(sys.stderr):  # what the module prints is not what came of our command
            return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module}.".startswith(f"{missing}."):
            raise ValueError(f"{task} cannot be found: No module named {missing!r} in {here}, or installed.") from error
        raise ValueError(f"{task} cannot be imported: {in_words(error)}") from error


def in_words(error: BaseException) -> str:
    """An error, and where in the user's files it was raised."""
    place = place_of(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}{f' ({place})' if place else ''}."


def place_of(error: BaseException) -> str:
    """The line of the user's that was the last on the way to an error; nothing if none was."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_NOT_THE_USERS):
            return f"{frame.filename}, line {frame.lineno}"
    return ""
