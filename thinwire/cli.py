"""The command line: arguments in, printing out, nothing else."""

from __future__ import annotations

from typing import Annotated

import typer

import thinwire

app = typer.Typer(
    help="Train PyTorch models over thin, unpredictable wires.", no_args_is_help=True, pretty_exceptions_enable=False
)
bench = typer.Typer(help="Measure what things cost on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")

Json = Annotated[bool, typer.Option("--json", help="End with all figures as one JSON line.")]
Seed = Annotated[int, typer.Option(help="Seed of the random gradients.")]


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
    ratio: Annotated[float, typer.Option(help="Share of entries to send, in (0, 1].")] = 0.01,
) -> None:
    """Train a small net on scikit-learn's digits with two processes, dense and compressed, and say what it saved."""
    from thinwire.bench import digits

    digits.main(steps=steps, ratio=ratio)


@bench.command()
def compress(
    numel: Annotated[int, typer.Option(min=1, help="Entries of the gradient; 25557032 is ResNet-50.")] = 25_557_032,
    ratio: Annotated[float, typer.Option(help="Share of entries to choose, in (0, 1].")] = 0.01,
    threads: Annotated[int, typer.Option(min=1, help="Threads that torch may use.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps; the median counts.")] = 9,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """One step of top-k compression against torch.topk and against r.add_(x)."""
    from thinwire.bench import compress

    if not 0 < ratio <= 1:
        raise typer.BadParameter(f"must be in (0, 1], got {ratio}", param_hint="--ratio")
    compress.main(numel, ratio, threads, repeats, seed, as_json=json)


@bench.command()
def link(json: Json = False) -> None:
    """Our tcp link against torch.distributed's messages: latency, throughput, processor time."""
    from thinwire.bench import link

    link.main(json)


if __name__ == "__main__":
    app()
