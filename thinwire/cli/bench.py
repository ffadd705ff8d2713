"""thinwire bench: what things cost on this machine."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Annotated, Any

import typer

from thinwire.cli.help import Command, Group, examples
from thinwire.cli.mistakes import told
from thinwire.cli.options import Json, Ratio

app = typer.Typer(
    cls=Group,
    help="Measure what things cost on this machine.",
    epilog=examples(("how fast top-k is here", "thinwire bench compress")),
    no_args_is_help=True,
)


class _HoldingBack(io.RawIOBase):
    """Passes all that is printed on to stderr but for the last line, which it keeps."""

    last = b""

    def writable(self) -> bool:
        return True

    def write(self, printed: Any) -> int:
        *before, self.last = (self.last + bytes(printed)).splitlines(keepends=True)
        sys.stderr.buffer.write(b"".join(before))
        sys.stderr.flush()
        return len(printed)


@contextmanager
def _figures_alone(wanted: bool) -> Iterator[None]:
    """With --json stdout has the last line only, the figures; benchmarks print what is for people before it."""
    if not wanted:
        yield
        return
    held = _HoldingBack()
    with io.TextIOWrapper(io.BufferedWriter(held), "utf-8", line_buffering=True) as stdout, redirect_stdout(stdout):
        yield
    typer.echo(held.last.decode(), nl=False)


@app.command(
    cls=Command,
    epilog=examples(
        ("a gradient of ResNet50, one thread", "thinwire bench compress"),
        ("a million entries, 0.1 % of them sent", "thinwire bench compress --numel 1000000 --ratio 0.001"),
    ),
)
def compress(
    numel: Annotated[
        int, typer.Option(min=1, metavar="N", help="Entries of the gradient; 25557032 is ResNet50.")
    ] = 25_557_032,
    ratio: Ratio = 0.01,
    threads: Annotated[int, typer.Option(min=1, metavar="N", help="Threads that torch may use.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Timed steps; the median counts.")] = 9,
    seed: Annotated[int, typer.Option(metavar="N", help="The seed of the random gradients.")] = 0,
    json: Json = False,
) -> None:
    """One step of top-k compression against torch.topk and against r.add_(x)."""
    from thinwire.bench import compress

    with _figures_alone(json):
        compress.main(numel, ratio, threads, repeats, seed, as_json=json)


@app.command(
    cls=Command,
    epilog=examples(
        ("all compressors", "thinwire bench quantize"),
        ("two of them", "thinwire bench quantize --compressor int4 --compressor topk:0.1"),
    ),
)
def quantize(
    compressor: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Which one; may be given several times, else it is all.")
    ] = None,
    numel: Annotated[int, typer.Option(min=1, metavar="N", help="Entries of the model.")] = 1 << 24,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Timed rounds; the best counts.")] = 5,
    seed: Annotated[int, typer.Option(metavar="N", help="The seed of the random model.")] = 0,
    json: Json = False,
) -> None:
    """Packing and unpacking of everything that gossip can compress to."""
    from thinwire.bench import quantize

    with told("bench quantize"), _figures_alone(json):
        quantize.main(compressor or [], numel, repeats, seed, as_json=json)


@app.command(
    cls=Command,
    epilog=examples(
        ("all of it, which takes long", "thinwire bench regret"),
        ("four hosts and one size", "thinwire bench regret --hosts 4 --params 1000000"),
    ),
)
def regret(
    hosts: Annotated[
        list[int] | None,
        typer.Option(min=2, max=200, metavar="N", help="Hosts in the lab; may be given several times, else 4 and 8."),
    ] = None,
    params: Annotated[
        list[int] | None,
        typer.Option(
            min=1, metavar="N", help="Entries of the gradient; may be given several times, else 0.1, 1 and 4 million."
        ),
    ] = None,
    ratio: Ratio = 0.01,
    json: Json = False,
) -> None:
    """Is what the controller chooses the fastest? In the lab, over latencies, rates and gradient sizes."""
    from thinwire.bench import regret

    with told("bench regret"), _figures_alone(json):
        regret.main(hosts or regret.HOSTS, params or regret.SIZES, ratio, as_json=json)


@app.command(cls=Command, epilog=examples(("four processes instead of two", "thinwire bench harm --ranks 4")))
def harm(
    ranks: Annotated[int, typer.Option(min=2, metavar="N", help="Processes on loopback.")] = 2,
    blocks: Annotated[int, typer.Option(min=2, metavar="N", help="Blocks of ten steps, in turns.")] = 20,
    json: Json = False,
) -> None:
    """What adaptive costs where compression does not pay: against plain DDP on loopback, in turns."""
    from thinwire.bench import harm

    with _figures_alone(json):
        harm.main(ranks, blocks, as_json=json)


@app.command(cls=Command, epilog=examples(("the figures for a script", "thinwire bench link --json")))
def link(json: Json = False) -> None:
    """Our tcp link against torch.distributed's messages: latency, throughput, processor time."""
    from thinwire.bench import link

    with _figures_alone(json):
        link.main(json)
