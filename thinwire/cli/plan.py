"""thinwire plan: what every way of exchanging gradients would cost on a network, without the network."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from thinwire.cli.help import examples
from thinwire.cli.options import Json, print_figures

if TYPE_CHECKING:
    from thinwire.control.pareto import Front
    from thinwire.types import Network

_WIDTH, _HEIGHT = 64, 16
_HOSTS = 128  # which takes half a minute; twice as many take four times as long
_GRAPHS = ("ring", "exponential", "one-peer-exponential")
_GOSSIP = (
    ("dpsgd", "none"),
    ("dcd", "int8"),
    ("ecd", "int16"),
    ("choco", "int8"),
    ("choco", "sign"),
    ("deepsqueeze", "int8"),
)

EXAMPLES = examples(
    (
        "ResNet18 on eight hosts: the front of time against gain, and its knee",
        "thinwire plan --params 11689512 --hosts 8 --latency 1ms --rate 10gbit",
    ),
    (
        "ResNet50 on four, far apart, sending 1 %",
        "thinwire plan --params 25557032 --hosts 4 --latency 20ms --ratio 0.01",
    ),
)

Hosts = Annotated[int, typer.Option(min=1, metavar="N", help="How many hosts, one rank each.")]
Params = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="Float32 entries of the gradient; 11689512 is ResNet18, 25557032 ResNet50."),
]
Latency = Annotated[str, typer.Option(metavar="TIME", help="One way from host to host, like 1ms.")]
Rate = Annotated[str, typer.Option(metavar="RATE", help="Of every host's connection, each way, like 10gbit.")]
Overhead = Annotated[
    str,
    typer.Option(metavar="TIME", help="What each message sent or received takes of a host's processor, like 50us."),
]
OneRatio = Annotated[
    float | None,
    typer.Option(
        metavar="R",
        help="Share of entries to send, in (0, 1]: 0.01 is 1 %. Without it the front is drawn and its knee taken.",
    ),
]
PriceList = Annotated[
    str,
    typer.Option(
        "--prices",
        metavar="WHOSE",
        help="ours: this implementation's schedules, played. paper: Tyagi & Swany's closed forms.",
    ),
]
Values = Annotated[
    str | None,
    typer.Option(
        metavar="CODE",
        help="With --prices ours, how gathered values are sent: float32, float16, bfloat16 or log4; by default as "
        "adaptive does, by log4.",
        show_default=False,
    ),
]
Gains = Annotated[
    str,
    typer.Option(
        metavar="GAINS",
        help="Share of the gradient's energy that a ratio keeps, assumed for the front: resnet18, resnet50, alexnet or "
        "vit as read from the paper's Fig. 3, or your own, like 0.1=0.73,0.01=0.25.",
    ),
]
Low = Annotated[float, typer.Option(metavar="R", help="The least ratio of the front.")]
High = Annotated[float, typer.Option(metavar="R", help="The largest ratio of the front.")]


class _Line(NamedTuple):
    """One way in the table: its price, and what it sends. Gossip has a price in consensus too, its spectral gap.

    Where a graph changes, the gap is that of all its turns, as many steps as it has.
    """

    name: str
    seconds: float
    messages: float
    nbytes: float
    gap: float = 1.0
    turns: int = 1


class _Prices(NamedTuple):
    """A price list for one network: all lines at a ratio, and the seconds of the fastest that compresses."""

    lines: Callable[[float], list[_Line]]
    fastest: Callable[[float], float]
    columns: tuple[str, str]
    gossip: Callable[[float], list[_Line]] = lambda ratio: []


def plan(
    context: typer.Context,
    params: Params,
    hosts: Hosts = 8,
    latency: Latency = "1ms",
    rate: Rate = "1gbit",
    overhead: Overhead = "0s",
    ratio: OneRatio = None,
    prices: PriceList = "ours",
    values: Values = None,
    gains: Gains = "resnet18",
    low: Low = 0.001,
    high: High = 0.1,
    json: Json = False,
) -> None:
    """Price every way of exchanging gradients on a network that need not exist.

    With --ratio: a table of exchanges, the fastest first, and one of gossip, which mixes models with neighbours
    instead of averaging over all: its spectral gap says how much of the nodes' disagreement a step takes away, where
    an exchange takes all of it.

    Without: the Pareto front of time against gain too, and the tables at its knee
    (the paper's choice: weights 0.6 for time and 0.4 for 1/gain).

    Nothing is started and nothing is sent.
    """
    from thinwire.control import pareto

    with _told():
        network, chosen, points = _network(latency, rate, overhead), _checked(ratio, context), None
        price_list = _price_list(prices, values, network, params, hosts, low, high)
        if chosen is None:
            gain = _gain(gains)
            points = pareto.front(price_list.fastest, gain, low, high)
            chosen = pareto.knee(price_list.fastest, gain, low, high).ratio
    lines = sorted(price_list.lines(chosen), key=lambda line: line.seconds)
    gossip = price_list.gossip(chosen)
    if json:
        print_figures(_figures(lines, gossip, chosen, points))
        return
    title = f"{params:,} parameters, {hosts} hosts, {latency}, {rate}, ratio {chosen:.3g}"
    _print_exchanges(lines, price_list, title)
    if gossip:
        _print_gossip(gossip, price_list)
    if points is not None:
        _print_front(points, chosen, gains)


@contextmanager
def _told() -> Iterator[None]:
    """A mistake is one sentence and no traceback."""
    try:
        yield
    except ValueError as error:
        typer.echo(f"thinwire plan: {error}", err=True)
        raise typer.Exit(2) from error


def _network(latency: str, rate: str, overhead: str) -> Network:
    from thinwire.lab import units
    from thinwire.types import Network

    return Network(alpha=units.seconds(latency), beta=1 / units.rate(rate), overhead=units.seconds(overhead))


def _checked(ratio: float | None, context: typer.Context) -> float | None:
    """What is for the front alone says nothing where there is none."""
    if ratio is None:
        return None
    if not 0 < ratio <= 1:
        raise ValueError(f"--ratio must be in (0, 1], got {ratio}.")
    for name in ("gains", "low", "high"):
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            raise ValueError(f"--{name} is for the front, which is not drawn with --ratio: leave one of them out.")
    return ratio


def _gain(text: str) -> Callable[[float], float]:
    from thinwire.control import paper

    if text in paper.GAINS:
        return paper.gain_curve(paper.GAINS[text])
    try:
        pairs = [pair.split("=") for pair in text.split(",")]
        readings = {float(ratio): float(gain) for ratio, gain in pairs}
    except ValueError:
        known = ", ".join(paper.GAINS)
        raise ValueError(f"--gains {text!r} is none of {known}, nor readings like 0.1=0.73,0.01=0.25.") from None
    return paper.gain_curve(readings)


def _price_list(
    name: str, values: str | None, network: Network, params: int, hosts: int, low: float, high: float
) -> _Prices:
    if name == "paper":
        if values is not None:
            raise ValueError(f"--values {values} belongs to --prices ours: the paper's price list knows no other.")
        if network.overhead > 0:
            raise ValueError("--overhead belongs to --prices ours: the paper's price list counts none.")
        return _papers(network, params, hosts)
    if name == "ours":
        return _ours(values, network, params, hosts, low, high)
    raise ValueError(f"--prices must be ours or paper, got {name!r}.")


def _papers(network: Network, params: int, hosts: int) -> _Prices:
    from thinwire.control import paper
    from thinwire.types import Network

    def at(network: Network, ratio: float) -> dict[str, float]:
        return paper.seconds(network, 4 * params, ratio, hosts)

    def lines(ratio: float) -> list[_Line]:
        # The coefficients of alpha and beta: what of each lies one after the other on the way to the result.
        latencies, nbytes = at(Network(alpha=1.0, beta=0.0), ratio), at(Network(alpha=0.0, beta=1.0), ratio)
        return [_Line(key, price, latencies[key], nbytes[key]) for key, price in at(network, ratio).items()]

    def fastest(ratio: float) -> float:
        return min(at(network, ratio)[key] for key in paper.COMPRESSED)

    return _Prices(lines, fastest, ("latencies in a row", "bytes in a row"))


def _ours(values: str | None, network: Network, params: int, hosts: int, low: float, high: float) -> _Prices:
    import numpy as np

    from thinwire.control.adaptive import Adaptive
    from thinwire.control.prices import Prices, ways

    if hosts > _HOSTS:
        raise ValueError(f"--prices ours plays every message, which takes too long for more than {_HOSTS} hosts.")
    values = Adaptive().values if values is None else values
    prices = Prices(params, 4, hosts, ways(hosts, has_group=True, values=values))
    sparse = [i for i, way in enumerate(prices.ways) if way.exchange != "dense"]

    def lines(ratio: float) -> list[_Line]:
        table = prices.table(network, [ratio])[:, 0]
        return [
            _Line(str(way), float(price), *prices.volume(way, ratio))
            for way, price in zip(prices.ways, table, strict=True)
        ]

    @functools.cache
    def knots() -> tuple[Any, Any]:
        ratios = np.geomspace(low, high, 25)
        return ratios, prices.table(network, list(ratios))[sparse].min(axis=0)

    def fastest(ratio: float) -> float:
        return float(np.interp(ratio, *knots()))  # time is all but a straight line between neighbours

    return _Prices(lines, fastest, ("messages", "bytes"), functools.partial(_gossip, network, params, hosts))


def _gossip(network: Network, params: int, hosts: int, ratio: float) -> list[_Line]:
    """A mixing step of each method with what it is usually compressed to; the mean of a graph's turns."""
    from thinwire.compress.quantize import build
    from thinwire.gossip import METHODS
    from thinwire.gossip.topology import build as graph_of

    lines = []
    for graph in (graph_of(name, hosts) for name in _GRAPHS):
        turns, gap = graph.period, 1 - graph.rho**graph.period
        messages = sum(len(graph.destinations(rank, step)) for rank in range(hosts) for step in range(turns)) / turns
        for name, spec in (*_GOSSIP, ("choco", f"topk:{ratio:g}")):
            method, compressor = METHODS[name], build(spec)
            if graph.static or not method.needs_fixed_graph:
                seconds = method.seconds(network, graph, compressor, params, steps=turns) / turns
                nbytes = messages * method.message_bytes(compressor, params)
                title = f"{name} over {graph.name}" if spec == "none" else f"{name} {spec} over {graph.name}"
                lines.append(_Line(title, seconds, messages, nbytes, gap, turns))
    return lines


def _figures(lines: list[_Line], gossip: list[_Line], ratio: float, points: Front | None) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "seconds": {line.name: line.seconds for line in lines},
        "best": lines[0].name,
        "ratio": ratio,
        "gossip": {
            line.name: {"seconds": line.seconds, "spectral_gap": line.gap, "turns": line.turns} for line in gossip
        },
    }
    if points is not None:
        figures["front"] = [
            {"ratio": float(r), "seconds": float(t), "gain": float(g)} for r, t, g in zip(*points, strict=True)
        ]
    return figures


def _print_exchanges(lines: list[_Line], prices: _Prices, title: str) -> None:
    """The fastest first, which is marked."""
    rows = [
        (line.name.removesuffix(" broadcast").removesuffix(" values"), *_numbers(line), "" if i else "best")
        for i, line in enumerate(lines)
    ]
    _print_table(title, ("exchange", "time", *prices.columns, ""), rows, texts=1)


def _print_gossip(lines: list[_Line], prices: _Prices) -> None:
    """Apart from exchanges, since a step of one is not what a step of the other is."""
    rows = []
    for line in sorted(lines, key=lambda line: line.seconds):
        method, _, graph = line.name.partition(" over ")
        gap = f"{line.gap:.3g}" + (f" in {line.turns}" if line.turns > 1 else "")
        rows.append((method, graph, *_numbers(line), gap))
    title = (
        "\nGossip: one step of mixing with neighbours, not comparable one to one with an\n"
        "average over all. The spectral gap is the share of disagreement that it takes\n"
        'away, an average takes all; "1 in 3" is said of three steps together.'
    )
    _print_table(title, ("method", "over", "time", *prices.columns, "spectral\ngap"), rows, texts=2)


def _numbers(line: _Line) -> tuple[str, ...]:
    from thinwire.lab.units import format_seconds

    return format_seconds(line.seconds), f"{line.messages:.3g}", f"{line.nbytes:,.0f}"


def _print_table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]], texts: int) -> None:
    """The first columns are words and the others numbers, set so that names need not wrap on 80 columns."""
    from rich.console import Console
    from rich.table import Table

    gap = 2 if texts == 1 else 1
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < texts else "right")
    for row in rows:
        table.add_row(*row)
    typer.echo(title)
    Console().print(table)


def _print_front(points: Front, knee: float, gains: str) -> None:
    from thinwire.lab.units import format_seconds

    typer.echo(f"\nTime of the fastest compressed exchange against gain, ratios {points.ratios[0]:g} to ", nl=False)
    typer.echo(f"{points.ratios[-1]:g}; K is the knee, ratio {knee:.3g}.")
    typer.echo(f"The gain at a ratio is an assumption ({gains}): yours depends on the model and on the training.\n")
    top, bottom = format_seconds(points.seconds[-1]), format_seconds(points.seconds[0])
    rows = _draw(points, knee)
    for i, row in enumerate(rows):
        label = top if i == 0 else bottom if i == len(rows) - 1 else ""
        typer.echo(f"{label:>10} |{row}".rstrip())
    typer.echo(f"{'':>10} +{'-' * _WIDTH}")
    left, right = f"gain {points.gains[0]:.2f}", f"{points.gains[-1]:.2f}"
    typer.echo(f"{'':>12}{left}{right:>{_WIDTH - len(left)}}")


def _draw(points: Front, knee: float) -> list[str]:
    """Gain to the right, time upwards on a logarithmic scale, K at the knee."""
    rows = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    nearest = min(range(len(points.ratios)), key=lambda i: abs(math.log(points.ratios[i] / knee)))
    order = [i for i in range(len(points.ratios)) if i != nearest] + [nearest]
    for i in order:
        x = _place(points.gains[i], points.gains[0], points.gains[-1], _WIDTH)
        y = _place(_log(points.seconds[i]), _log(points.seconds[0]), _log(points.seconds[-1]), _HEIGHT)
        rows[_HEIGHT - 1 - y][x] = "K" if i == nearest else "o"
    return ["".join(row) for row in rows]


def _log(seconds: float) -> float:
    return math.log(max(seconds, 1e-12))


def _place(value: float, low: float, high: float, cells: int) -> int:
    share = (value - low) / (high - low) if high > low else 0.0
    return min(cells - 1, int(share * cells))
