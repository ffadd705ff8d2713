"""thinwire topology: a graph, its spectrum, and what each method may compress to on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from thinwire.cli.help import examples

if TYPE_CHECKING:
    from thinwire.gossip.topology import Topology

EXAMPLES = examples(
    ("a ring of eight", "thinwire topology ring"),
    ("two by four, and a picture of it", "thinwire topology torus:2x4 --png torus.png"),
)
_COMPRESSORS = ("int16", "int8", "int6", "int4", "int2", "sign", "random:0.1", "topk:0.1", "topk:0.01")


def topology(
    name: Annotated[
        str,
        typer.Argument(
            help="ring, torus:2x4, hypercube, exponential, one-peer-exponential, star, complete, random-regular:3 or "
            "erdos-renyi:0.4."
        ),
    ],
    nodes: Annotated[int, typer.Option(min=1, metavar="N", help="How many nodes.")] = 8,
    seed: Annotated[int, typer.Option(metavar="N", help="The seed of a random graph.")] = 0,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the graph into this file (needs matplotlib).")
    ] = None,
) -> None:
    """Print a graph for decentralised training, its spectrum, and what each method may compress to on it."""
    from thinwire.gossip.topology import TopologyError, build

    try:
        graph = build(name, nodes, seed=seed)
    except TopologyError as error:
        raise typer.BadParameter(str(error)) from None
    if png is not None:
        _draw(graph, png)
    console = Console()
    console.print(_neighbours(graph))
    console.print(_spectrum(graph))
    console.print(_compression(graph))
    if png is not None:
        typer.echo(f"drawn into {png}")


def _neighbours(graph: Topology) -> Table:
    table = Table(title=f"{graph.name}, {graph.world_size} nodes, {len(graph.edges)} edges")
    table.add_column("node", justify="right")
    for step in range(graph.period):
        table.add_column("hears (weight)" if graph.static else f"hears at step {step} (weight)")
    for rank in range(graph.world_size):
        cells = [
            ", ".join(f"{j} ({graph.weights(step)[rank, j]:.3g})" for j in graph.sources(rank, step))
            for step in range(graph.period)
        ]
        table.add_row(str(rank), *cells)
    return table


def _spectrum(graph: Topology) -> Table:
    table = Table(title="spectrum of W" if graph.static else "spectrum of a whole period")
    table.add_column("quantity")
    table.add_column("value")
    table.add_row("eigenvalues" if graph.static else "singular values", _numbers(graph.eigenvalues.tolist()))
    table.add_row("rho = max(|lambda_2|, |lambda_n|), per step", f"{graph.rho:.4f}")
    table.add_row("spectral gap 1 - rho", f"{graph.spectral_gap:.4f}")
    if graph.static:
        table.add_row("mu = max |lambda_i - 1|", f"{graph.mu:.4f}")
        table.add_row("alpha that dcd allows, (1 - rho) / (2 mu)", f"{graph.dcd_alpha:.4f}")
    table.add_row("messages per node and step", str(graph.degree))
    return table


def _compression(graph: Topology) -> Table:
    """alpha is measured on a Gaussian vector; a run measures it on its own tensors."""
    from thinwire.compress.quantize import build, gaussian_alpha

    table = Table(title="what each method may compress to (alpha, delta of a Gaussian vector)")
    for column in ("compressor", "bits per entry", "alpha", "delta", "dcd", "ecd", "choco gamma (theory)"):
        table.add_column(column, justify="left" if column == "compressor" else "right")
    for spec in _COMPRESSORS:
        compressor = build(spec)
        alpha, delta = gaussian_alpha(compressor), 1 - gaussian_alpha(compressor.contraction()) ** 2
        table.add_row(
            spec,
            f"{8 * compressor.nbytes(1 << 20) / (1 << 20):.2f}",
            f"{alpha:.3g}",
            f"{delta:.3g}",
            _dcd(graph, alpha, compressor.unbiased),
            _ecd(graph, spec, compressor.unbiased),
            f"{graph.choco_gamma(delta):.2g}" if graph.static else "graph changes",
        )
    return table


def _dcd(graph: Topology, alpha: float, unbiased: bool) -> str:
    if not graph.static:
        return "graph changes"
    fits = "yes" if alpha < graph.dcd_alpha else "no"
    return fits if unbiased else f"{fits}, biased"


def _ecd(graph: Topology, spec: str, unbiased: bool) -> str:
    """Its error must be bounded, not relative: what it extrapolates grows with every step."""
    if not graph.static:
        return "graph changes"
    return "biased" if not unbiased else "yes" if spec == "int16" else "short runs"


def _numbers(values: list[float]) -> str:
    shown = [f"{value:.3f}" for value in values]
    return " ".join(shown if len(shown) <= 16 else [*shown[:8], "...", *shown[-8:]])


def _draw(graph: Topology, path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        raise typer.BadParameter("--png needs matplotlib: pip install matplotlib") from None
    matplotlib.use("agg")
    import networkx  # type: ignore[import-untyped, unused-ignore]
    from matplotlib import pyplot

    drawing = networkx.Graph(graph.edges)
    drawing.add_nodes_from(range(graph.world_size))
    figure, axes = pyplot.subplots(figsize=(5, 5))
    networkx.draw_networkx(drawing, networkx.circular_layout(drawing), ax=axes, node_color="#d9e6f2")
    axes.set_title(f"{graph.name}, {graph.world_size} nodes, spectral gap {graph.spectral_gap:.3g}")
    axes.axis("off")
    try:
        figure.savefig(path, dpi=150, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"cannot draw into {path}: {error}.") from None
    finally:
        pyplot.close(figure)
