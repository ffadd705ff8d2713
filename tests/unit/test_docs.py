"""What the pages show can be typed: code parses, commands and their options exist, links lead somewhere."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from torch.distributed.run import get_args_parser
from typer.main import get_command

from thinwire.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#:]+)(#[^)]*)?\)")


class Block(NamedTuple):
    page: str
    language: str
    text: str


BLOCKS = [Block(page.name, *match.groups()) for page in PAGES for match in FENCE.finditer(page.read_text())]


def typed(program: str) -> list[list[str]]:
    """Every line of a page that begins with this program, in words."""
    shown = [block.text.replace("\\\n", " ") for block in BLOCKS if block.language in ("", "bash")]
    lines = [line.removeprefix("$ ") for text in shown for line in text.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(f"{program} ")]


def commands() -> list[list[str]]:
    """Every command of ours that a page shows, alone or by torchrun, without what it runs in turn."""
    found = [words[words.index("thinwire") :] for words in typed("torchrun") + typed("thinwire") if "thinwire" in words]
    return [words[: words.index("--")] if "--" in words else words for words in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    links = [match[1] for match in LINK.finditer(FENCE.sub("", page.read_text()))]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "python"], ids=lambda b: b.page)
def test_code_parses(block: Block) -> None:
    assert ast.parse(block.text).body


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "bash"], ids=lambda b: b.page)
def test_scripts_parse(block: Block) -> None:
    assert subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True).stderr == ""


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=lambda b: b.page)
def test_manifests_parse(block: Block) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extras")
    for document in yaml.safe_load_all(block.text):
        assert {"apiVersion", "kind", "metadata", "spec"} <= document.keys()


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_and_their_options_exist(words: list[str]) -> None:
    command = get_command(app)
    for word in words[1:]:
        if word in getattr(command, "commands", {}):
            command = command.commands[word]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    assert not getattr(command, "commands", {}), f"{words[1]} is no command"
    assert [word for word in words if word.startswith("--") and word not in known] == []


@pytest.mark.parametrize("words", typed("torchrun"), ids=" ".join)
def test_torchrun_has_the_options_that_it_is_given(words: list[str]) -> None:
    parser = get_args_parser()
    taken = parser.parse_args([word for word in words[1:] if word != "..."])
    if taken.training_script == "thinwire":
        assert taken.module or taken.no_python, "torchrun looks for a script of this name"
    else:
        assert (ROOT / taken.training_script).is_file()
