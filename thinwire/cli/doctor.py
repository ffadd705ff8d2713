"""thinwire doctor: what is wrong with this network, before a training finds out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli.help import examples
from thinwire.cli.options import Json, print_figures
from thinwire.errors import ThinwireError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from thinwire.jobs.doctor.diagnosis import Diagnosis
    from thinwire.jobs.doctor.findings import Finding, Matrix

_MARKS = {"ok": ("✓", "green"), "note": ("·", "yellow"), "problem": ("✗", "red")}
_PLAIN_MARKS = {"✓": "+", "·": "-", "✗": "x"}  # for a terminal that has no others
_COLUMNS = 16  # of a matrix that fits on a screen
_PIPE_WIDTH = 160

EXAMPLES = examples(
    ("this machine alone", "thinwire doctor"),
    (
        "the network between machines: on each, with its own number after --node-rank",
        "torchrun --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 -m thinwire doctor",
    ),
    ("an emulated network", "thinwire lab run --hosts 4 --network home -- thinwire doctor"),
)

Params = Annotated[
    int,
    typer.Option(
        min=1, metavar="N", help="Parameters of the model to plan for; 11689512 is ResNet18, 25557032 ResNet50."
    ),
]
Wait = Annotated[float, typer.Option(min=1, metavar="S", help="Seconds that rank 0 waits for the other ranks to come.")]


def doctor(params: Params = 11_689_512, wait: Wait = 30.0, json: Json = False) -> None:
    """Say which interface would be used and why, measure the network between all ranks, and find what is wrong.

    Alone it looks at this machine. Started on every machine by torchrun, or in the lab, all ranks measure together:
    latency and rate between every two, the size of packets that pass, losses; and name the plan that would be chosen.

    Exit code 0: all is well; 1: problems were found; 2: it was called wrongly.
    """
    with _told(ValueError, 2):
        rank, world_size = _place()
    with _told(ThinwireError, 1):
        diagnosis = _examine(rank, world_size, params, wait)
    if diagnosis is None:  # rank 0 speaks for all
        return
    _print(diagnosis, on_stderr=json)
    if json:
        print_figures(diagnosis.to_json())
    raise typer.Exit(1 if diagnosis.problems else 0)


@contextmanager
def _told(kind: type[Exception], code: int) -> Iterator[None]:
    """Such an error is one sentence and no traceback."""
    try:
        yield
    except kind as error:
        typer.echo(f"thinwire doctor: {error}", err=True)
        raise typer.Exit(code) from error


def _place() -> tuple[int, int]:
    """This rank and the number of ranks, as torchrun and the lab tell them; alone that is 0 of 1."""
    texts = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE")]
    if texts == [None, None]:
        return 0, 1
    if not all(text is not None and text.isdigit() for text in texts) or not int(texts[0] or 0) < int(texts[1] or 0):
        raise ValueError(f"RANK={texts[0]} and WORLD_SIZE={texts[1]} do not say which rank this is: set both or none.")
    return int(texts[0] or 0), int(texts[1] or 0)


def _examine(rank: int, world_size: int, params: int, wait: float) -> Diagnosis | None:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch tells of every try to reach a store
    if world_size == 1:
        from thinwire.jobs.doctor.diagnosis import examine_alone

        return examine_alone()
    from thinwire.jobs.doctor.together import take_part

    world = take_part(rank, world_size, wait)
    if world is None:
        return None
    from thinwire.jobs.doctor.diagnosis import diagnose  # which takes a while to import, and only rank 0 needs it

    return diagnose(world, params)


# --- printing


def _print(diagnosis: Diagnosis, on_stderr: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, stderr=on_stderr)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    for section in diagnosis.sections:
        console.print(f"\n[bold]{section.title}[/]")
        for finding in section.findings:
            _print_finding(console, finding)
        if section.title == "Ranks" and len(diagnosis.ranks) > 1:
            _print_matrices(console, diagnosis)
    if diagnosis.world_size == 1:
        console.print(f"\n{_HOW_TO_MEASURE}", markup=False)
    problems = len(diagnosis.problems)
    verdict = {0: "[green]No problem was found.[/]", 1: "[red]One problem was found.[/]"}
    console.print("\n" + verdict.get(problems, f"[red]{problems} problems were found.[/]"))


_HOW_TO_MEASURE = """\
The network itself was not measured. On every machine, with its own number after --node-rank:
  torchrun --nnodes 2 --node-rank 0 --master-addr ADDRESS_OF_THE_FIRST -m thinwire doctor
Or in the lab: thinwire lab run --hosts 4 --network home -- thinwire doctor"""


def _print_finding(console: Console, finding: Finding) -> None:
    from rich.text import Text

    sign, colour = _MARKS[finding.mark]
    if not console.encoding.lower().startswith("utf"):
        sign = _PLAIN_MARKS[sign]
    console.print(Text.assemble("  ", (sign, colour), " ", finding.text))
    if finding.advice:
        console.print(Text.assemble("      ", (finding.advice, "cyan" if finding.mark == "problem" else "dim")))


def _print_matrices(console: Console, diagnosis: Diagnosis) -> None:
    if len(diagnosis.ranks) > _COLUMNS:
        console.print(f"  {len(diagnosis.ranks)} ranks are too many for a table: --json has it.")
        return
    console.print(_matrix("latency, half a round trip (ms)", diagnosis.ranks, diagnosis.latency))
    console.print(_matrix("rate (Mbit/s), from the row to the column", diagnosis.ranks, diagnosis.rate))


def _matrix(title: str, ranks: tuple[int, ...], rows: Matrix) -> Table:
    from rich.table import Table

    table = Table(title=f"\n  {title}", box=None, padding=(0, 0, 0, 2), title_justify="left", title_style="")
    table.add_column("", no_wrap=True)
    for rank in ranks:
        table.add_column(str(rank), justify="right", no_wrap=True, min_width=4)
    for rank, row in zip(ranks, rows, strict=True):
        cells = ("" if column == rank else _cell(value) for column, value in zip(ranks, row, strict=True))
        table.add_row(f"rank {rank}", *cells)
    return table


def _cell(value: float | None) -> str:
    return "?" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"
