"""The command line: arguments in, printing out, nothing else. One file per group of commands."""

from __future__ import annotations

from typing import Annotated

import typer

import thinwire
from thinwire.cli import bench, doctor, lab, plan, report, topology, train

app = typer.Typer(
    help="Train PyTorch models over thin, unpredictable wires.", no_args_is_help=True, pretty_exceptions_enable=False
)
app.command(epilog=train.TRAIN_EXAMPLES)(train.train)
app.command(epilog=train.COMPARE_EXAMPLES)(train.compare)
app.command()(train.demo)
app.command()(doctor.doctor)
app.command()(report.report)
app.command()(report.cite)
app.add_typer(bench.app, name="bench")
app.add_typer(lab.app, name="lab")
app.command()(plan.plan)
app.command()(topology.topology)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"thinwire {thinwire.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
