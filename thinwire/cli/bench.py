"""thinwire bench: what things cost on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from thinwire.cli.options import Json, Ratio

app = typer.Typer(help="Measure what things cost on this machine.", no_args_is_help=True)


@app.command()
def compress(
    numel: Annotated[int, typer.Option(min=1, help="Entries of the gradient; 25557032 is ResNet-50.")] = 25_557_032,
    ratio: Ratio = 0.01,
    threads: Annotated[int, typer.Option(min=1, help="Threads that torch may use.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps; the median counts.")] = 9,
    seed: Annotated[int, typer.Option(help="Seed of the random gradients.")] = 0,
    json: Json = False,
) -> None:
    """One step of top-k compression against torch.topk and against r.add_(x)."""
    from thinwire.bench import compress

    compress.main(numel, ratio, threads, repeats, seed, as_json=json)


@app.command()
def quantize(
    compressor: Annotated[list[str] | None, typer.Option(help="By name; may be given several times.")] = None,
    numel: Annotated[int, typer.Option(min=1, help="Entries of the model.")] = 1 << 24,
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds; the best counts.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the random model.")] = 0,
    json: Json = False,
) -> None:
    """Packing and unpacking of everything that gossip can compress to."""
    from thinwire.bench import quantize

    quantize.main(compressor or [], numel, repeats, seed, as_json=json)


@app.command()
def regret(
    hosts: Annotated[list[int] | None, typer.Option(help="Hosts in the lab; may be given several times.")] = None,
    params: Annotated[list[int] | None, typer.Option(help="Entries of the gradient; likewise.")] = None,
    ratio: Ratio = 0.01,
    json: Json = False,
) -> None:
    """Is what the controller chooses the fastest? In the lab, over latencies, rates and gradient sizes."""
    from thinwire.bench import regret

    regret.main(hosts or regret.HOSTS, params or regret.SIZES, ratio, as_json=json)


@app.command()
def harm(
    ranks: Annotated[int, typer.Option(min=2, help="Processes on loopback.")] = 2,
    blocks: Annotated[int, typer.Option(min=2, help="Blocks of ten steps, in turns.")] = 20,
    json: Json = False,
) -> None:
    """What adaptive costs where compression does not pay: against plain DDP on loopback, in turns."""
    from thinwire.bench import harm

    harm.main(ranks, blocks, as_json=json)


@app.command()
def link(json: Json = False) -> None:
    """Our tcp link against torch.distributed's messages: latency, throughput, processor time."""
    from thinwire.bench import link

    link.main(json)
