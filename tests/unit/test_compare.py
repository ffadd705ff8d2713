"""What is compared, what is written down of it, and what is said under the table."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from thinwire.cli.train import _print_comparison
from thinwire.jobs.compare import (
    EVALUATE_EVERY,
    Comparison,
    Row,
    Run,
    _rows,
    asked,
    compare,
    demo,
    jobs_of,
    least_of,
    speed_up_in_words,
)
from thinwire.jobs.job import Job
from thinwire.jobs.live import say
from thinwire.jobs.outcome import Outcome
from thinwire.jobs.team import Interrupts


def row(method: str, seconds: float | None, speed_up: float | None, message: str = "") -> Row:
    return Row(
        method=method,
        steps=100,
        seconds=seconds,
        speed_up=speed_up,
        at_least=False,
        sent_bytes=None,
        score=0.9,
        message=message,
    )


def a_comparison(*rows: Row, set_by: str = "") -> Comparison:
    return Comparison(
        folder=Path("runs/one"), target=0.9, set_by=set_by, runs=(), rows=rows, outcome=Outcome(how="done")
    )


def words(*rows: Row, set_by: str = "") -> str:
    return speed_up_in_words(a_comparison(*rows, set_by=set_by))


def test_the_fastest_is_named_wherever_it_stands() -> None:
    told = words(row("ddp", 10.0, 1.0), row("dcd@int8:ring", 4.0, 2.5), row("star-topk@0.01", 12.0, 0.8))
    assert told == "dcd@int8:ring came to 90.0% accuracy in 4.0 s, 2.5 times as fast as ddp."


def test_a_method_that_failed_or_never_came_there_is_not_named() -> None:
    told = words(
        row("ddp", 10.0, 1.0), row("a", 1.0, 10.0, message="it broke"), row("b", None, None), row("c", 20.0, 0.5)
    )
    assert told == "c came to 90.0% accuracy in 20.0 s, 0.5 times as fast as ddp."


def test_where_nobody_came_there_is_no_speed_up() -> None:
    told = words(row("ddp", 10.0, 1.0), row("b", None, None))
    assert told == "There is no speed-up to tell of: 90.0% accuracy was not reached."


def test_a_target_that_was_there_from_the_beginning_is_not_said_to_be_missed() -> None:
    told = words(row("ddp", 0.0, None), row("b", 0.0, None))
    assert told == "There is no speed-up to tell of: 90.0% accuracy was there before the first step."


def test_it_is_said_why_there_is_no_speed_up() -> None:
    failed = words(row("ddp", None, None, message="it broke"), row("b", 5.0, None))
    assert failed == "There is no speed-up to tell of: ddp, which the others are measured against, failed."
    untold = replace(row("ddp", None, None), score=None)
    assert words(untold, replace(untold, method="b")).endswith("nothing was found that tells how well they learned.")


@pytest.mark.parametrize("method", ["ddp", "dense:ring"])
@pytest.mark.parametrize("message", ["[/Users/me] is no folder", "no [bold] idea", ":ring: is no graph", "a [/] b"])
def test_what_went_wrong_is_printed_as_it_is(method: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    failed = row(method, None, None, message=message)
    _print_comparison(a_comparison(failed, row(f"{method}:{message}", 4.0, 2.5)), Console(width=200))
    say(Console(width=200), f"{method}: {message}")
    out = capsys.readouterr().out
    assert f"{method}: {message}\n" in out
    assert any(line.split()[0] == method and message in line for line in out.splitlines() if line)
    assert f": {method}, which the others are measured against, failed." in out


# --- what is compared


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "compare.toml"
    path.write_text(text)
    return path


def test_what_is_compared_can_stand_in_a_file_and_options_win(tmp_path: Path) -> None:
    assert asked(None, {}, None, None) == (Job(evaluate_every=EVALUATE_EVERY), ["ddp", "adaptive"], 1)
    listed = file(tmp_path, 'task = "digits"\nmethods = ["ddp", "choco@sign:ring"]\nseeds = 3\nevaluate_every = 2.0\n')
    assert asked(listed, {}, None, None) == (Job(), ["ddp", "choco@sign:ring"], 3)
    assert asked(listed, {"hosts": 2, "evaluate_every": 1.0}, "ddp-fp16", 2) == (
        Job(hosts=2, evaluate_every=1.0),
        ["ddp-fp16"],
        2,
    )
    assert asked(file(tmp_path, 'methods = "ddp,dcd"\n'), {}, None, None)[1] == ["ddp", "dcd"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('seed = 1\nmethod = "ddp"\n', "2: method has no effect in a comparison: name several as methods."),
        ("methods = 3\n", '1: methods must be texts, like ["ddp", "adaptive"], got 3.'),
        ('\nmethods = "ddp,adaptve"\n', "2: there is no method 'adaptve'. Did you mean 'adaptive'?"),
        ('\nmethods = ["ddp", "ddp"]\n', "2: ddp is among the methods twice."),
        ('\nmethods = "ddp,"\n', "2: methods have an empty place"),
        ("\nmethods = []\n", "2: methods are none: name at least one, as in ddp,adaptive."),
        ("\nseeds = 0\n", "2: seeds must be 1 or more, got 0."),
        ("seeds = true\n", "1: seeds must be 1 or more, got True."),
        ('metods = "ddp"\n', "1: 'metods' is no setting of a job. Did you mean 'methods'?"),
    ],
)
def test_a_mistake_in_such_a_file_is_told_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = file(tmp_path, text)
    with pytest.raises(ValueError) as told:
        asked(path, {}, None, None)
    assert str(told.value).startswith(f"{path}:{says}")


def test_the_demo_compares_plain_ddp_with_adaptive_in_the_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.jobs.compare.why_no_lab", lambda: "")
    job, methods, note = demo(seconds=7.0, out="here")
    assert (methods, note) == (["ddp", "adaptive"], "")
    assert (job.link, job.network, job.seconds, job.out) == ("auto", "unpredictable", 7.0, "here")


def test_without_a_lab_the_demo_has_what_its_links_can_slow_down_instead_of_ddp_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("thinwire.jobs.compare.why_no_lab", lambda: "this is no Linux.")
    job, methods, note = demo(seconds=7.0)
    assert (methods, job.link, job.seconds) == (["dense:ring", "adaptive"], "shaped", 7.0)
    reason, stand_in = note.splitlines()
    assert reason == "No lab here: this is no Linux."
    assert stand_in.endswith("so dense:ring, which sends the same bytes, stands in for it.")
    assert [each.method for each in jobs_of(job, methods, 1)] == methods


def test_a_target_that_nobody_named_is_said_to_be_that_of_the_method_that_learned_least() -> None:
    runs = [
        Run(method=method, seed=0, folder=method, curve=curve, message=message)
        for method, curve, message in (
            ("ddp", ((1.0, 0.5), (2.0, 0.9)), ""),
            ("dcd@int2:ring", ((1.0, 0.3), (2.0, 0.2)), ""),
            ("adaptive", ((1.0, 0.1),), "it broke"),
        )
    ]
    least = least_of(runs)
    assert least is not None and (least.method, least.best) == ("dcd@int2:ring", 0.3)
    told = words(row("ddp", 10.0, 1.0), row("b", 5.0, 2.0), set_by="dcd@int2:ring").splitlines()
    assert told[1].startswith("That is the best that dcd@int2:ring came to") and told[1].endswith("by --target.")
    assert len(words(row("ddp", 10.0, 1.0), row("b", 5.0, 2.0)).splitlines()) == 1


# --- what is written down


def compared(
    monkeypatch: pytest.MonkeyPatch, folder: Path, job: Job, found: Mapping[str, Sequence[dict[str, float]]]
) -> tuple[Comparison, dict[str, object]]:
    """A comparison whose runs are made up: what each of their evaluations, a second apart, has found."""

    def conduct(job: Job, folder: Path, *_: object) -> Outcome:
        evaluated = [{"kind": "evaluated", "time": float(t), **seen} for t, seen in enumerate(found[job.method], 1)]
        (folder / "records.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in evaluated))
        return Outcome(how="done")

    monkeypatch.setattr("thinwire.jobs.compare.conduct", conduct)
    with Interrupts() as interrupts:
        made = compare(job, jobs_of(job, list(found), 1), folder, [], Console(file=io.StringIO()), interrupts)
    return made, json.loads((folder / "compare.json").read_text())


PERPLEXITIES = {"ddp": [{"perplexity": 20.0}, {"perplexity": 9.0}], "adaptive": [{"perplexity": 8.5}]}
ACCURACIES = {"ddp": [{"accuracy": 0.5}, {"accuracy": 0.9}], "adaptive": [{"accuracy": 0.95}]}


@pytest.mark.parametrize(
    ("job", "found", "told"),
    [
        (Job(), ACCURACIES, ("accuracy", 0.9, False)),
        (Job(target=0.4), ACCURACIES, ("accuracy", 0.4, True)),
        (Job(task="chars"), PERPLEXITIES, ("perplexity", 9.0, False)),
        (Job(task="chars", target=12), PERPLEXITIES, ("perplexity", 12.0, True)),
        (Job(), {"ddp": [{}], "adaptive": [{}]}, (None, None, False)),
    ],
)
def test_a_target_is_told_as_a_person_says_it_and_whether_somebody_named_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    job: Job,
    found: Mapping[str, Sequence[dict[str, float]]],
    told: tuple[object, ...],
) -> None:
    made, written = compared(monkeypatch, tmp_path, job, found)
    for figures in (made.to_json(), written):
        assert (figures["quality"], figures["target"], figures["chosen"]) == told


def test_a_first_method_that_failed_is_no_measure_for_the_others() -> None:
    runs = [
        Run(method="ddp", seed=0, folder="ddp", seconds=9.0, curve=((1.0, 0.9),), message="it broke"),
        Run(method="adaptive", seed=0, folder="adaptive", seconds=9.0, curve=((1.0, 0.9),)),
    ]
    assert [(row.seconds, row.speed_up) for row in _rows(runs, ["ddp", "adaptive"], 0.9)] == [(1.0, None)] * 2


def test_a_perplexity_is_reached_from_above(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made, _ = compared(monkeypatch, tmp_path, Job(task="chars", target=12), PERPLEXITIES)
    assert [row.seconds for row in made.rows] == [2.0, 1.0]
    assert speed_up_in_words(made) == "adaptive came to perplexity 12 in 1.0 s, 2.0 times as fast as ddp."
