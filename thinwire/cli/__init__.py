"""The command line: arguments in, printing out, nothing else. One file per group of commands."""

from __future__ import annotations

from typing import Annotated

import typer

import thinwire
from thinwire.cli import bench, doctor, lab, plan, report, topology, train
from thinwire.cli.help import Command, Group, JobCommand, examples

app = typer.Typer(
    cls=Group,
    help="Train PyTorch models over thin, unpredictable wires. Every command explains itself: thinwire train --help.",
    epilog=examples(
        ("is it worth it? plain DDP and thinwire on an unpredictable network", "thinwire demo"),
        ("train, watch it adapt, and get a report", "thinwire train digits --network home"),
        ("what is wrong with this machine's network?", "thinwire doctor"),
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command(cls=JobCommand, epilog=train.TRAIN_EXAMPLES)(train.train)
app.command(cls=JobCommand, epilog=train.COMPARE_EXAMPLES)(train.compare)
app.command(cls=Command, epilog=train.DEMO_EXAMPLES)(train.demo)
app.command(cls=Command, epilog=doctor.EXAMPLES)(doctor.doctor)
app.command(cls=Command, epilog=report.REPORT_EXAMPLES)(report.report)
app.command(cls=Command, epilog=report.CITE_EXAMPLES)(report.cite)
app.command(cls=Command, epilog=plan.EXAMPLES)(plan.plan)
app.command(cls=Command, epilog=topology.EXAMPLES)(topology.topology)
app.add_typer(bench.app, name="bench")
app.add_typer(lab.app, name="lab")


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
