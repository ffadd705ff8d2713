"""thinwire plan, as a script or a person would use it."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from typer.testing import CliRunner

from thinwire.cli import app
from thinwire.compress.quantize import build as compressor_of
from thinwire.compress.values import VALUES
from thinwire.control.adaptive import Adaptive
from thinwire.control.prices import ways
from thinwire.exchange import build, complete
from thinwire.gossip import METHODS
from thinwire.gossip.topology import build as topology_of
from thinwire.types import Network

runner = CliRunner()
RESNET18 = "--hosts 8 --params 11689512 --latency 1ms --rate 10gbit"


def _figures(arguments: str) -> Any:
    result = runner.invoke(app, ["plan", *arguments.split(), "--json"])
    assert result.exit_code == 0, result.output
    [line] = result.output.splitlines()
    return json.loads(line)


def test_the_papers_prices_are_its_table_vi() -> None:
    figures = _figures(f"{RESNET18} --ratio 0.1 --prices paper")
    assert figures["best"] == "ART-Ring"
    assert figures["seconds"].keys() == {"AG", "ART-Ring", "ART-Tree", "PS", "Ring-AR", "Tree-AR"}
    for name, ms in (("AG", 54), ("ART-Ring", 35), ("ART-Tree", 43.2)):
        assert figures["seconds"][name] == pytest.approx(ms / 1e3, rel=0.03)


def test_our_prices_are_those_of_the_exchanges() -> None:
    asked, network = (
        "--hosts 4 --params 100000 --latency 5ms --rate 100mbit --overhead 50us --ratio 0.01",
        Network(alpha=5e-3, beta=8e-8, overhead=5e-5),
    )
    for said, values in (("", Adaptive().values), *((f" --values {values}", values) for values in VALUES)):
        figures = _figures(asked + said)
        assert figures["seconds"].keys() == {str(way) for way in ways(4, has_group=True, values=values)}
        assert figures["best"] == min(figures["seconds"], key=figures["seconds"].get)
        plan = complete("topk-allgather", 0.01, "direct", values=values)
        expected = build(plan, (100_000,)).seconds(network, 100_000, 0.01, 4)
        assert figures["seconds"][str(plan).partition(" at ")[0]] == pytest.approx(expected, rel=1e-9)


def test_what_is_unknown_or_has_no_price_is_refused() -> None:
    wrong = {
        "--values int3": "Known are: float32",
        "--values log4 --prices paper": "--values log4 belongs to --prices ours",
        "--overhead 50us --prices paper": "--overhead belongs to --prices ours",
    }
    for said, pattern in wrong.items():
        result = runner.invoke(app, ["plan", "--params", "1000", "--ratio", "0.1", *said.split()])
        assert result.exit_code == 2 and pattern in result.output


def test_gossip_stands_beside_them_with_its_price_in_consensus() -> None:
    figures = _figures("--hosts 8 --params 100000 --latency 20ms --rate 5mbit --ratio 0.01")
    network, ring = Network(alpha=20e-3, beta=1.6e-6), topology_of("ring", 8)
    for name, method, compressor in (("dcd int8", "dcd", "int8"), ("choco topk:0.01", "choco", "topk:0.01")):
        expected = METHODS[method].seconds(network, ring, compressor_of(compressor), 100_000)
        found = figures["gossip"][f"{name} over ring"]
        assert found == {"seconds": expected, "spectral_gap": ring.spectral_gap, "turns": 1}
    assert figures["gossip"]["dcd int8 over ring"]["seconds"] == pytest.approx(20e-3 + 2 * 100e3 * 1.6e-6, rel=0.01)
    # Everyone has heard everyone after three turns, for half the bytes of a ring's.
    turns = figures["gossip"]["dpsgd over one-peer-exponential"]
    assert (turns["spectral_gap"], turns["turns"]) == (1.0, 3)
    assert "dcd int8 over one-peer-exponential" not in figures["gossip"]
    # Where latency is long and the wire thin, no all-reduce of everything comes near.
    dense = min(seconds for name, seconds in figures["seconds"].items() if name.startswith("dense"))
    assert figures["gossip"]["dcd int8 over ring"]["seconds"] < dense / 3


def test_a_person_sees_both_prices_of_gossip() -> None:
    lines = _printed("--hosts 8 --params 1000 --ratio 0.01")
    assert [line.split()[-1] for line in lines if line.split()[:3] == ["dcd", "int8", "ring"]] == ["0.195"]
    assert sum("one-peer" in line and line.endswith("1 in 3") for line in lines) == 2


def test_the_first_line_is_the_best_exchange_and_gossip_stands_apart() -> None:
    arguments = f"{RESNET18} --ratio 0.01"  # where a step of gossip is faster than any average
    figures, lines = _figures(arguments), _printed(arguments)
    assert min(each["seconds"] for each in figures["gossip"].values()) < min(figures["seconds"].values())
    assert lines[2].startswith("topk-allgather over direct, log4 ") and lines[2].endswith("  best")
    assert figures["best"] == "topk-allgather over direct, log4 values"
    assert sum(line.endswith("best") for line in lines) == 1
    title = next(i for i, line in enumerate(lines) if line.startswith("Gossip: "))
    assert "not comparable one to one" in lines[title]
    assert all(line.startswith(("topk", "star", "dense")) for line in lines[2 : title - 1])
    assert not any("gap" in line for line in lines[:title]) and any("gap" in line for line in lines[title:])


def test_no_name_is_broken_on_80_columns_and_the_papers_prices_have_no_gap() -> None:
    lines = _printed("--hosts 8 --params 25557032 --ratio 0.0123")
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith(("topk", "star", "dense")) for line in lines) == len(ways(8, has_group=True))
    assert "gap" not in " ".join(_printed(f"{RESNET18} --ratio 0.01 --prices paper"))


def _printed(arguments: str) -> list[str]:
    result = runner.invoke(app, ["plan", *arguments.split()], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return [line.rstrip() for line in result.output.splitlines()]


@pytest.mark.parametrize("prices", ["ours", "paper"])
def test_without_a_ratio_the_knee_of_the_front_is_taken(prices: str) -> None:
    figures = _figures(f"{RESNET18} --prices {prices}")
    front = figures["front"]
    assert (front[0]["ratio"], front[-1]["ratio"]) == (0.001, 0.1)
    assert front[0]["gain"] == pytest.approx(0.09)
    assert front[0]["seconds"] < front[-1]["seconds"]
    assert 0.002 < figures["ratio"] < 0.05


def test_a_person_gets_a_table_with_the_fastest_first_and_a_picture() -> None:
    result = runner.invoke(app, ["plan", *RESNET18.split(), "--prices", "paper", "--gains", "0.1=0.7,0.01=0.2"])
    assert result.exit_code == 0, result.output
    names = [line.split()[0] for line in result.output.splitlines() if line.startswith(("A", "P", "R", "Tree"))]
    assert set(names) == {"AG", "ART-Ring", "ART-Tree", "PS", "Ring-AR", "Tree-AR"}
    assert names[-1] == "PS"
    assert "assumption (0.1=0.7,0.01=0.2)" in result.output
    assert sum("K" in line for line in result.output.splitlines()) == 2  # in the picture and in the words above it


def test_with_a_ratio_there_is_no_picture() -> None:
    result = runner.invoke(app, ["plan", *RESNET18.split(), "--prices", "paper", "--ratio", "0.1"])
    assert "knee" not in result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--ratio 2", "--ratio must be in (0, 1]"),
        ("--ratio nan", "--ratio must be in (0, 1]"),
        ("--latency 5", "'5' is not a time"),
        ("--rate fast", "'fast' is not a rate"),
        ("--prices theirs", "--prices must be ours or paper, got 'theirs'"),
        ("--gains vgg", "none of resnet18, resnet50, alexnet, vit"),
        ("--gains 0.1=0.2,0.01=0.3", "a gain cannot fall"),
        ("--low 0.5", "0 < low <= high <= 1"),
        ("--ratio 0.1 --gains vit", "--gains is for the front, which is not drawn with --ratio"),
        ("--low 0.001 --ratio 0.1", "--low is for the front, which is not drawn with --ratio"),
        ("--high 0.1 --ratio 0.1", "--high is for the front, which is not drawn with --ratio"),
        ("--hosts 1000", "more than 128 hosts"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments: str, sentence: str) -> None:
    result = runner.invoke(app, ["plan", "--params", "1000", *arguments.split()])
    assert result.exit_code == 2
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("thinwire plan: ")
    assert sentence in line


@pytest.mark.parametrize("arguments", ["--hosts 1", "--rate unlimited", "--params 1", "--hosts 2 --latency 0s"])
def test_the_corners_have_prices_too(arguments: str) -> None:
    for prices in ("ours", "paper"):
        figures = _figures(f"--params 5000 {arguments} --prices {prices}")
        assert all(price >= 0 for price in figures["seconds"].values())


def test_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("plan started something")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr("socket.socket.bind", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("torch.distributed.init_process_group", refuse)
    _figures("--params 5000 --hosts 2")


def test_help_teaches() -> None:
    result = runner.invoke(app, ["plan", "--help"])
    assert result.exit_code == 0
    assert "thinwire plan --params 11689512 --hosts 8" in result.output
