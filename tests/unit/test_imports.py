"""Holds the picture of the house true: arrows point one way, and nothing that comes from outside can run code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import thinwire

PACKAGE = Path(thinwire.__file__).parent

# Who may import whom: a folder or top module, and the arrows that leave it. What can be reached along arrows may be
# imported too. `thinwire` is the package's own __init__.py, the door that users come in by.
ARROWS: dict[str, set[str]] = {
    "types": set(),
    "errors": set(),
    "link": {"types", "errors"},
    "compress": {"types", "errors"},
    "collectives": {"link"},
    "exchange": {"collectives", "compress"},
    "control": {"exchange"},
    "gossip": {"compress", "link"},
    "records": {"types"},
    "report": {"records"},
    "train": {"control", "gossip", "records"},
    "lab": {"train"},
    "thinwire": {"lab", "report"},
    "bench": {"thinwire"},
    "integrations": {"train"},
    "jobs": {"bench"},
    "cli": {"jobs"},
    "__main__": {"cli"},
}

# Names that turn bytes into code or objects, in whatever module they are found.
FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec"}
FORBIDDEN_OF_TORCH = {"load", "save"}
OBJECT_COLLECTIVE = re.compile(r"\w_object(s|_list)?$")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """The dotted name of a module's file."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def place_of(module: str) -> str:
    """The folder or top module that a dotted name of ours belongs to: thinwire.link.tcp is in `link`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def reachable(place: str) -> set[str]:
    """Every place at the end of some path of arrows."""
    return ARROWS[place].union(*(reachable(other) for other in ARROWS[place]))


def imported(tree: ast.AST, module: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """The line and the full name of everything that a module imports, wherever in it the statement is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            climbed = node.level - is_package
            anchor = module.split(".")[:-climbed] if climbed > 0 else module.split(".")
            base = ".".join([*(anchor if node.level else []), *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def places(names: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Of what is imported, the places that are ours. `from thinwire import Plan` goes through the door."""
    for line, name in names:
        if name.split(".")[0] == "thinwire":
            place = place_of(name)
            yield line, place if place in ARROWS or is_place(place) else "thinwire"


def is_place(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


def wrong_arrows(source: str, module: str, is_package: bool = False) -> list[str]:
    here = place_of(module)
    allowed = reachable(here) | {here}
    found = places(imported(ast.parse(source), module, is_package))
    return [f"{module}:{line} imports {place}" for line, place in found if place not in allowed]


def dangers(source: str) -> list[str]:
    """What in a module could turn bytes into code or objects."""
    tree = ast.parse(source)
    found = [name for _, name in imported(tree, "module") if name.split(".")[0] in FORBIDDEN_MODULES]
    found += [name for _, name in imported(tree, "module") if name in {f"torch.{bad}" for bad in FORBIDDEN_OF_TORCH}]
    found += [name for _, name in imported(tree, "module") if OBJECT_COLLECTIVE.search(name)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and (node.id in FORBIDDEN_CALLS or OBJECT_COLLECTIVE.search(node.id)):
            found.append(node.id)
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if OBJECT_COLLECTIVE.search(node.attr) or (owner == "torch" and node.attr in FORBIDDEN_OF_TORCH):
                found.append(f"{owner}.{node.attr}")
            elif owner == "builtins" and node.attr in FORBIDDEN_CALLS:
                found.append(f"{owner}.{node.attr}")
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append("allow_pickle")
    return found


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_follow_the_arrows(path: Path) -> None:
    place = place_of(name_of(path))
    advice = f"{place} is new: give it a row in ARROWS of this test and an arrow in docs/design.md."
    assert place in ARROWS, advice
    assert wrong_arrows(path.read_text(), name_of(path), path.name == "__init__.py") == []


def test_the_table_has_no_circle() -> None:
    for place in ARROWS:
        assert place not in reachable(place)


def test_compressors_know_no_network() -> None:
    for path in sorted((PACKAGE / "compress").glob("*.py")):
        tree = ast.parse(path.read_text())
        names = [name for _, name in imported(tree, name_of(path))]
        names += [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        assert not [name for name in names if name.startswith(("torch.distributed", "thinwire.link"))], name_of(path)


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_nothing_that_comes_from_outside_can_run_code(path: Path) -> None:
    assert dangers(path.read_text()) == []


def test_public_names_are_sorted_and_all_resolve() -> None:
    names = list(getattr(thinwire, "__all__", []))
    assert names == sorted(names)
    assert [name for name in names if not hasattr(thinwire, name)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("thinwire.link.tcp", "import thinwire.exchange"),
        ("thinwire.link.tcp", "import torch, thinwire.train.sync as sync"),
        ("thinwire.link.tcp", "def late():\n    from thinwire.collectives.ring import Ring"),
        ("thinwire.link.tcp", "from thinwire import collectives"),
        ("thinwire.link.tcp", "from thinwire import Plan"),
        ("thinwire.link.tcp", "from ..collectives import ring"),
        ("thinwire.link.tcp", "from .. import collectives"),
        ("thinwire.compress.topk", "from thinwire.link.base import Link"),
        ("thinwire.types", "from thinwire.errors import LinkError"),
        ("thinwire.train.sync", "from thinwire.bench import anything"),
        ("thinwire.bench.run", "import thinwire.cli"),
        ("thinwire.bench.run", "import thinwire.jobs.job"),
        ("thinwire.lab.run", "import thinwire.jobs.job"),
        ("thinwire.jobs.start", "import thinwire.cli"),
        ("thinwire.report.page", "from thinwire.train import sync"),
        ("thinwire.report.page", "from thinwire.jobs.job import Job"),
    ],
)
def test_an_arrow_that_points_up_is_noticed(module: str, source: str) -> None:
    assert len(wrong_arrows(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("thinwire.link.tcp", "from . import base\nfrom .base import Link\nfrom thinwire.types import Moment"),
        ("thinwire.link.tcp", "import torch\nfrom collections import deque"),
        ("thinwire.exchange.ar_topk", "from thinwire.link.base import Link\nfrom ..compress.topk import topk"),
        ("thinwire.jobs.start", "import thinwire.lab.run\nfrom thinwire.train.sync import Synchronizer"),
        ("thinwire.report.runs", "from thinwire.records import read"),
        ("thinwire.cli", "from thinwire import Plan\nfrom thinwire.report import page\nimport thinwire.lab.run"),
    ],
)
def test_an_arrow_that_points_down_or_stays_is_allowed(module: str, source: str) -> None:
    assert wrong_arrows(source, module) == []


def test_a_package_finds_its_own_modules_by_one_dot() -> None:
    assert wrong_arrows("from .base import Link\nfrom ..types import Plan", "thinwire.link", is_package=True) == []
    assert len(wrong_arrows("from ..train import sync", "thinwire.link", is_package=True)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as harmless",
        "from pickle import loads",
        "import cloudpickle.cloudpickle",
        "torch.load(path)",
        "read = torch.load",
        "from torch import save",
        "dist.all_gather_object(out, 1)",
        "from torch.distributed import broadcast_object_list",
        "eval('1')",
        "run = exec",
        "builtins.eval('1')",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_a_danger_is_noticed(source: str) -> None:
    assert dangers(source)


@pytest.mark.parametrize("source", ["model.eval()", "checkpoint.load()", "from thinwire import load", "object()"])
def test_a_likeness_of_a_danger_is_not_one(source: str) -> None:
    assert dangers(source) == []
