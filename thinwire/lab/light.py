"""Start a module of ours in a bare interpreter: no site packages, nothing of the user's, ready after some 30 ms.

The new interpreter gets a `thinwire` that is nothing but its folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

_BOOT = """\
import importlib, sys, types
thinwire = types.ModuleType("thinwire")
thinwire.__path__ = [sys.argv[1]]
sys.modules["thinwire"] = thinwire
importlib.import_module(sys.argv[2]).main(sys.argv[3:])
"""


def command(module: str, *arguments: str) -> list[str]:
    """The command line that calls `main(arguments)` of a module."""
    quiet = ["-B"] if sys.dont_write_bytecode else []
    return [sys.executable, "-I", "-S", *quiet, "-c", _BOOT, str(Path(__file__).parents[1]), module, *arguments]
