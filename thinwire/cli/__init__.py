"""The command line: arguments in, printing out, nothing else. One file per group of commands."""

from __future__ import annotations

from typing import Annotated

import typer

import thinwire
from thinwire.cli import bench, lab, plan, topology
from thinwire.cli.options import Ratio

app = typer.Typer(
    help="Train PyTorch models over thin, unpredictable wires.", no_args_is_help=True, pretty_exceptions_enable=False
)
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


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 200,
    ratio: Ratio = 0.01,
) -> None:
    """Train a small net on scikit-learn's digits with two processes, dense and compressed, and say what it saved."""
    from thinwire.bench import digits

    digits.main(steps=steps, ratio=ratio)
