"""The command line, as a script or a person would use it."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from torch import nn
from typer.main import get_command
from typer.testing import CliRunner

import thinwire
from tests import recorded
from thinwire.cli import app
from thinwire.jobs import compare
from thinwire.jobs.job import Job
from thinwire.jobs.outcome import Outcome

runner = CliRunner()
WIDTH = 80  # letters, of a terminal that is not wide


def walk(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All commands and groups by what is typed to come to them."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, *path, name)


COMMANDS = dict(walk(get_command(app)))


def named(path: tuple[str, ...]) -> str:
    return " ".join(path) or "thinwire"


def help_of(path: tuple[str, ...]) -> str:
    result = runner.invoke(app, [*path, "--help"], env={"COLUMNS": str(WIDTH), "TERMINAL_WIDTH": str(WIDTH)})
    assert result.exit_code == 0, result.output
    return result.stdout


# --- help


@pytest.mark.parametrize("path", COMMANDS, ids=named)
def test_every_command_explains_itself_on_a_terminal_that_is_not_wide(path: tuple[str, ...]) -> None:
    text = help_of(path)
    assert "Usage" in text and "Examples:" in text
    assert "<bool>" not in text and " range>" not in text
    assert all(len(line) <= WIDTH for line in text.splitlines())


@pytest.mark.parametrize("path", COMMANDS, ids=named)
def test_every_option_is_told_of_with_its_default(path: tuple[str, ...]) -> None:
    rows = [" ".join(row.replace("│", " ").split()) for row in re.split(r"\n│ [ *]{0,4}(?=\S)", help_of(path))]
    told = {row.partition(" ")[0]: row for row in rows}
    settings = {field.name: field.default for field in fields(Job)} if path in (("train",), ("compare",)) else {}
    for param in COMMANDS[path].params:
        assert param.help
        default = settings.get(param.name) if param.default is None else param.default
        if default is not None and not isinstance(default, bool):
            shown = ", ".join(map(str, default)) if isinstance(default, tuple) else default
            assert f"[default: {shown}]" in told[param.opts[0]]


@pytest.mark.parametrize("path", COMMANDS, ids=named)
def test_every_example_can_be_typed_and_copied(path: tuple[str, ...]) -> None:
    shown = [re.sub(r"\[/?\w+\]", "", line) for line in COMMANDS[path].epilog.splitlines()]
    lines = [line for line in shown if line.startswith(("thinwire ", "torchrun "))]
    assert any(line.partition("thinwire ")[2].startswith(" ".join(path)) for line in lines)
    for line in lines:
        assert len(line) <= WIDTH - 2, "it has to stay on one line"
        words = shlex.split(line.partition("thinwire ")[2])
        words = words[: words.index("--")] if "--" in words else words
        command = COMMANDS[()]
        for word in words:
            command = getattr(command, "commands", {}).get(word, command)
        known = {option for param in command.params for option in param.opts}
        assert not getattr(command, "commands", {}) and {word for word in words if word.startswith("--")} <= known


def test_the_version_is_the_packages() -> None:
    assert runner.invoke(app, ["--version"]).output == f"thinwire {thinwire.__version__}\n"


# --- figures

HARM = {
    "ddp_ms": 10.0,
    "hook_ms": 10.2,
    "adaptive_ms": 10.3,
    "ratio": 1.03,
    "hook_ratio": 1.02,
    "control_share": 0.005,
    "control_bytes_share": 0.0,
    "plans": {"dense over torch": 119, "topk-allgather 0.01": 1},
}


def test_harm_says_how_many_times_longer_a_step_takes_and_under_which_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("thinwire.bench.harm._measured", lambda *_: HARM)
    told = CliRunner().invoke(app, ["bench", "harm"]).output
    assert "1.030 times" in told and "dense over torch in 119 blocks, topk-allgather 0.01 in 1 blocks" in told


def with_json(command: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """How a command is called so that it costs little: what it would start or measure is made up."""
    outcome, run = Outcome(how="done"), recorded.run(folder / "run", steps=20)
    row = {"steps": 20, "speed_up": 1.0, "at_least": False, "sent_bytes": 1, "score": float("nan"), "message": ""}
    rows = tuple(compare.Row(method=name, seconds=1.0, **row) for name in ("ddp", "adaptive"))
    made = compare.Comparison(folder=folder, target=0.9, set_by="", runs=(), rows=rows, outcome=outcome)
    monkeypatch.setattr("thinwire.jobs.start.train", lambda *_: (outcome, run))
    monkeypatch.setattr("thinwire.jobs.compare.compare", lambda *_: made)
    monkeypatch.setattr("thinwire.jobs.compare.why_no_lab", lambda: "")
    monkeypatch.setattr("thinwire.jobs.doctor.diagnosis._lab", lambda: findings_of_a_lab())
    monkeypatch.setattr("thinwire.bench.compress.GROWTH", (1000,))
    monkeypatch.setattr("thinwire.bench.harm._measured", lambda *_: HARM)
    monkeypatch.setattr("thinwire.bench.link.measure", lambda _: {})
    monkeypatch.setattr("thinwire.bench.link.ROWS", {})
    monkeypatch.setattr("thinwire.bench.regret.main", a_benchmark_that_tells_how_it_goes)
    monkeypatch.setattr("thinwire.cli.lab._clean_first", lambda: None)
    monkeypatch.setattr("thinwire.cli.lab._build", lambda *_: nullcontext(a_lab()))
    monkeypatch.setattr("thinwire.lab.check.measure", lambda _: {"round_trip_ms": 10.0})
    monkeypatch.setattr("thinwire.lab.check.describe", lambda _: ["round trip 10 ms"])
    out = ["--out", str(folder / "runs")]
    arguments = {
        "train": out,
        "compare": out,
        "demo": out,
        "report": [str(run)],
        "plan": ["--params", "1000", "--hosts", "2"],
        "bench compress": "--numel 2000 --repeats 1".split(),
        "bench quantize": "--compressor int8 --numel 2000 --repeats 1".split(),
    }
    return [*command.split(), *arguments.get(command, []), "--json"]


def findings_of_a_lab() -> Any:
    from thinwire.jobs.doctor.findings import OK, Finding

    return Finding(OK, "lab", "it runs")


def a_lab() -> Any:
    schedule = SimpleNamespace(name="home", notes=[])
    return SimpleNamespace(id="a", hosts=2, schedule=schedule, mtu=1500, truth="truth.jsonl", overloaded=False)


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ("regret --hosts 0", "--hosts"),
        ("regret --hosts 4 --hosts 1", "--hosts"),
        ("regret --params 0", "--params"),
        ("quantize --compressor int8 --compressor foo", "unknown compressor 'foo'. Known are: none, int1"),
    ],
)
def test_what_a_benchmark_cannot_measure_is_refused_before_it_begins(
    asked: str, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr("thinwire.bench.regret.main", refuse)
    monkeypatch.setattr("thinwire.bench.quantize.measure", refuse)
    result = runner.invoke(app, ["bench", *asked.split()])
    assert result.exit_code == 2 and result.stdout == ""
    assert pattern in result.stderr and "Traceback" not in result.stderr


def a_benchmark_that_tells_how_it_goes(*_: object, as_json: bool) -> None:
    sys.stdout.buffer.write(b"[0] 100000 entries: star-topk\n")  # as the lab passes on what hosts print
    print("so far so good", end="", flush=True)
    print(", and at its end")
    print(json.dumps({"median_regret": 0.0}))


@pytest.mark.parametrize(
    "command", [" ".join(path) for path, command in COMMANDS.items() if "json" in {p.name for p in command.params}]
)
def test_with_json_stdout_has_one_line_of_json_and_nothing_else(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    result = runner.invoke(app, with_json(command, monkeypatch, tmp_path))
    assert result.exit_code == 0, result.output
    [line] = result.stdout.splitlines()
    assert json.loads(line, parse_constant=pytest.fail)
    if command == "bench regret":
        assert result.stderr == "[0] 100000 entries: star-topk\nso far so good, and at its end\n"


def test_an_interrupt_while_the_report_is_made_does_not_cost_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(folder: Path) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("thinwire.report.page.write", interrupted)
    *words, _ = with_json("compare", monkeypatch, tmp_path)
    result = runner.invoke(app, words)
    assert result.exit_code == 130
    assert "speed-up" in result.stdout and "adaptive came to 90.0% accuracy in 1.0 s" in result.stdout


def test_under_torchrun_json_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    result = runner.invoke(app, ["train", "--json"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("thinwire train: --json has no effect under torchrun")


def test_bench_compress_has_all_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.bench.compress.GROWTH", (1000, 10_000))
    result = runner.invoke(app, "bench compress --numel 20000 --ratio 0.05 --repeats 2 --json".split())
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["speedup"] == pytest.approx(figures["torch_topk_ms"] / figures["ours_ms"], rel=1e-2)
    assert figures["over_add"] == pytest.approx(figures["ours_ms"] / figures["add_ms"], rel=1e-2)
    assert (figures["numel"], figures["ratio"], figures["threads"]) == (20000, 0.05, 1)
    assert figures["ns_per_element"].keys() == {"1000", "10000"}
    assert "growth of thinwire's step" in result.stderr


# --- mistakes


@pytest.mark.parametrize("word", ["compare", "demo"])
def test_a_comparison_is_no_worker_of_torchruns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, word: str) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    result = runner.invoke(app, [word, "--out", str(tmp_path / "runs")])
    assert result.exit_code == 2 and not (tmp_path / "runs").exists()
    assert result.output == f"thinwire {word}: a comparison starts its own workers: call it without torchrun.\n"


@pytest.mark.parametrize("ratio", ["0", "1.5", "-1", "nan"])
def test_a_ratio_that_is_none_is_refused(ratio: str) -> None:
    result = runner.invoke(app, ["bench", "compress", "--ratio", ratio])
    assert result.exit_code == 2
    assert "must be in (0, 1]" in result.output


@pytest.mark.parametrize(
    ("text", "line", "wrong"),
    [
        ('task = "digits"\nhosts 4\n', 2, "Expected '=' after a key"),
        ("seed = 1\n\nmethod = adaptive\n", 3, 'Text is in "quotes".'),
        ("hosts = 4\nseed = 1\nhosts = 2\nkeep = 1\n", 3, "It was set above already."),
        ('seed = 1\nname = "a', 2, "Unterminated string"),
        ("[train]\nhosts = 2\n", 1, "leave [train] out, all keys are at the top level."),
        ("seed = 1\n\n[[train]]\nhosts = 2\n", 3, "leave [train] out, all keys are at the top level."),
        ("[thinwire.train]\nhosts = 2\n", 1, "leave [thinwire] out, all keys are at the top level."),
        ("[lr]\nvalue = 1\n", 1, "lr must be no table: all keys are at the top level."),
    ],
)
def test_a_mistake_in_a_file_of_settings_is_one_sentence_with_file_and_line(
    text: str, line: int, wrong: str, tmp_path: Path
) -> None:
    config = tmp_path / "job.toml"
    config.write_text(text)
    result = runner.invoke(app, ["train", "--config", str(config), "--out", str(tmp_path / "runs")])
    assert result.exit_code == 2
    assert result.output.startswith(f"thinwire train: {config}:{line}: ") and result.output.count("\n") == 1
    assert wrong in result.output
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("word", "text", "line", "wrong"),
    [
        ("train", 'seed = 1\nlink = "shaped"\n', 2, "a shaped link needs a network to be like"),
        ("train", 'task = "chars"\ntext = "/no/such"\n', 2, "/no/such does not exist"),
        ("train", 'task = "fashion-mnist"\nfolder_of_data = "/no/such"\n', 2, "/no/such does not exist"),
        ("train", 'task = "fashion-mnist"\nfolder_of_data = "/"\n', 2, "is not in /"),
        ("train", 'seed = 1\ntask = "nowhere:make"\n', 2, "No module named 'nowhere'"),
        ("train", 'hosts = 3\nmethod = "dcd@int8:hypercube"\n', 2, "nodes, not 3"),
        ("compare", 'hosts = 3\nmethods = ["ddp", "dcd@int8:hypercube"]\n', 2, "nodes, not 3"),
        ("compare", "seed = 4294967295\nseeds = 2\n", 2, "2 from 4294967295 on go beyond."),
        ("compare", 'seed = 1\nout = "/dev/null"\n', 2, "/dev/null cannot be the folder of runs"),
    ],
)
def test_so_is_one_that_is_found_when_the_setting_is_used(
    word: str, text: str, line: int, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "job.toml").write_text(text)
    result = runner.invoke(app, [word, "--config", "job.toml"])
    assert result.exit_code == 2
    assert result.output.startswith(f"thinwire {word}: job.toml:{line}: ") and result.output.count("\n") == 1
    assert wrong in result.output and not (tmp_path / "runs").exists()


def test_one_in_an_option_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text('hosts = 3\nlink = "auto"\nmethods = "ddp"\n')
    for words in (["--link", "shaped"], ["--methods", "dcd@int8:hypercube"]):
        result = runner.invoke(app, ["compare", "--config", str(config), *words, "--out", str(tmp_path / "runs")])
        assert result.exit_code == 2 and "job.toml" not in result.output


def test_an_unknown_exchange_is_told_with_all_that_are_known() -> None:
    known = "adaptive, dense, topk-allgather, layerwise-topk, ms-topk, star-topk, var-topk"
    with pytest.raises(ValueError, match=f"unknown exchange 'adaptiv'. Known are: {known}."):
        thinwire.Synchronizer(nn.Linear(2, 2), exchange="adaptiv")
    result = runner.invoke(app, ["train", "--method", "telepathy@0.01"])
    assert result.exit_code == 2
    named = result.output.partition("Known: ")[2].partition(".")[0].split(", ")
    assert set(known.split(", ")) <= set(named)
