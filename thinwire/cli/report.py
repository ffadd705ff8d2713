"""thinwire report and thinwire cite: what a run was like, and whose methods it used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.help import examples
from thinwire.cli.options import Json, print_figures

REPORT_EXAMPLES = examples(
    ("a run, or a compare, and look at it", "thinwire report runs/digits-adaptive-1 --open"),
    ("what attach(model, records=...) has written", "thinwire report mine.jsonl"),
    ("beside other runs", "thinwire report runs/digits-adaptive-1 --tensorboard"),
)
CITE_EXAMPLES = examples(("what a paper has to cite", "thinwire cite runs/digits-adaptive-1 >> paper.bib"))

Folder = Annotated[
    Path, typer.Argument(metavar="RUN", help="The folder of a run or of a compare, or a file of records (.jsonl).")
]


@contextmanager
def _told() -> Iterator[None]:
    """What cannot be read or written is one sentence and no traceback."""
    from thinwire.report.reading import ReportError

    try:
        yield
    except ReportError as error:
        typer.echo(f"thinwire: {error}", err=True)
        raise typer.Exit(2) from error
    except OSError as error:
        typer.echo(f"thinwire: {error.filename or 'the report'}: {error.strerror}.", err=True)
        raise typer.Exit(1) from error


def report(
    run: Folder,
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write what TensorBoard shows too, in RUN/tensorboard.")
    ] = False,
    json: Json = False,
) -> None:
    """Make the report of a run again: one HTML file that needs nothing else, beside the run's records."""
    from thinwire.report import page
    from thinwire.report import tensorboard as scalars

    with _told():
        if tensorboard:
            scalars.require()
        made = page.make(run)
        path = page.save(made, run)
        events = scalars.write(run) if tensorboard else []
    for note in made.notes:
        typer.echo(f"thinwire: {note}", err=True)
    typer.echo(f"{path}  ({path.stat().st_size / 1e3:.0f} kB)", err=json)
    for folder in events:
        typer.echo(str(folder), err=json)
    if json:
        figures = {"report": str(path), "bytes": path.stat().st_size, "notes": made.notes, "compare": made.compare}
        print_figures(figures | ({"tensorboard": [str(folder) for folder in events]} if tensorboard else {}))
    if open_:
        typer.launch(path.resolve().as_uri())


def cite(run: Folder) -> None:
    """Print the BibTeX of thinwire and of the methods that a run used."""
    from thinwire.report import cite as citing
    from thinwire.report.folders import load

    with _told():
        typer.echo(citing.bibtex(load(run)))
