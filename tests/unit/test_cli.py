"""The command line, as a script or a person would use it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import thinwire
from thinwire.cli import app

runner = CliRunner()


@pytest.mark.parametrize(
    "command",
    [[], ["train"], ["compare"], ["demo"], ["doctor"], ["report"], ["cite"], ["bench"], ["bench", "compress"]],
)
def test_every_command_explains_itself(command: list[str]) -> None:
    result = runner.invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_the_version_is_the_packages() -> None:
    assert runner.invoke(app, ["--version"]).output == f"thinwire {thinwire.__version__}\n"


def test_bench_compress_ends_with_one_json_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.bench.compress.GROWTH", (1000, 10_000))
    result = runner.invoke(app, "bench compress --numel 20000 --ratio 0.05 --repeats 2 --json".split())
    assert result.exit_code == 0, result.output
    figures = json.loads(result.output.strip().splitlines()[-1])
    assert figures["speedup"] == pytest.approx(figures["torch_topk_ms"] / figures["ours_ms"], rel=1e-2)
    assert figures["over_add"] == pytest.approx(figures["ours_ms"] / figures["add_ms"], rel=1e-2)
    assert (figures["numel"], figures["ratio"], figures["threads"]) == (20000, 0.05, 1)
    assert figures["ns_per_element"].keys() == {"1000", "10000"}


@pytest.mark.parametrize("ratio", ["0", "1.5", "-1", "nan"])
def test_a_ratio_that_is_none_is_refused(ratio: str) -> None:
    result = runner.invoke(app, ["bench", "compress", "--ratio", ratio])
    assert result.exit_code == 2
    assert "must be in (0, 1]" in result.output
