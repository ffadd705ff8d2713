"""What is said under the table of a comparison."""

from __future__ import annotations

from pathlib import Path

from thinwire.jobs.compare import Comparison, Row, Run, least_of, speed_up_in_words
from thinwire.jobs.outcome import Outcome


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


def words(*rows: Row, set_by: str = "") -> str:
    return speed_up_in_words(
        Comparison(folder=Path("runs/one"), target=0.9, set_by=set_by, runs=(), rows=rows, outcome=Outcome(how="done"))
    )


def test_the_fastest_is_named_wherever_it_stands() -> None:
    told = words(row("ddp", 10.0, 1.0), row("dcd@int8:ring", 4.0, 2.5), row("star-topk@0.01", 12.0, 0.8))
    assert told == "dcd@int8:ring came to 90.0% accuracy in 4.0 s, 2.5 times as fast as ddp."


def test_a_method_that_failed_or_never_came_there_is_not_named() -> None:
    told = words(
        row("ddp", 10.0, 1.0), row("a", 1.0, 10.0, message="it broke"), row("b", None, None), row("c", 20.0, 0.5)
    )
    assert told == "c came to 90.0% accuracy in 20.0 s, 0.5 times as fast as ddp."


def test_where_nobody_came_there_is_no_speed_up() -> None:
    assert words(row("ddp", 10.0, 1.0), row("b", None, None)).startswith("There is no speed-up to tell of")


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
