"""thinwire lab: hosts on this machine behind an emulated, changing network."""

from __future__ import annotations

import json as json_module
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli.help import Command, Group, examples
from thinwire.cli.options import Json, print_figures
from thinwire.errors import ThinwireError

if TYPE_CHECKING:
    from thinwire.lab.lab import Lab
    from thinwire.lab.network import Change
    from thinwire.lab.registry import Entry
    from thinwire.lab.schedule import Schedule

app = typer.Typer(
    cls=Group,
    help="Hosts on this machine behind an emulated, changing network.",
    epilog=examples(
        ("any DDP script on four hosts", "thinwire lab run --hosts 4 --network home -- python train.py"),
        ("make it worse, from another terminal", "thinwire lab set latency=50ms loss=1%"),
    ),
    no_args_is_help=True,
)

Hosts = Annotated[int, typer.Option(min=1, max=200, metavar="N", help="How many hosts.")]
NetworkName = Annotated[
    str | None,
    typer.Option(
        "--network",
        metavar="NETWORK",
        help="A name that `thinwire lab profiles` lists, a .toml profile or a .csv trace; else it has no limits.",
    ),
]
Scale = Annotated[float, typer.Option(metavar="X", help="Divide all rates of the network by this.")]
Speed = Annotated[float, typer.Option(metavar="X", help="Let the network's schedule run so many times as fast.")]
Epoch = Annotated[
    str | None, typer.Option(metavar="TIME", help="How long an epoch of the schedule lasts, like 30s; else as it says.")
]
Latency = Annotated[str | None, typer.Option(metavar="TIME", help="Hold the latency of every route at this, like 5ms.")]
Rate = Annotated[str | None, typer.Option(metavar="RATE", help="Hold the rate of every host at this, like 100mbit.")]
Jitter = Annotated[str | None, typer.Option(metavar="TIME", help="Hold the jitter of every route at this, like 1ms.")]
Loss = Annotated[str | None, typer.Option(metavar="SHARE", help="Hold the loss of every route at this, like 1%.")]
Mtu = Annotated[int | None, typer.Option(metavar="N", help="Bytes of a full packet; else what suits the rates.")]
Seed = Annotated[
    int | None, typer.Option(metavar="N", help="The seed of loss, jitter and random walks; else the schedule's own.")
]
Truth = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Write what the network was when into this file, as JSON lines; else a new one."),
]
Which = Annotated[
    str | None, typer.Option("--lab", metavar="LAB", help="Which lab, if several run (see `thinwire lab ps`).")
]


@contextmanager
def _told() -> Iterator[None]:
    """A user's mistake and a machine's refusal are one message and no traceback."""
    try:
        yield
    except (ValueError, ThinwireError) as error:
        typer.echo(f"thinwire lab: {error}", err=True)
        raise typer.Exit(2) from error


def _clean_first() -> None:
    from thinwire.lab import registry

    for line in registry.clean():
        typer.echo(f"thinwire lab: {line}.", err=True)


def _build(
    hosts: int,
    network: str | None,
    scale: float,
    speed: float,
    epoch: str | None,
    pinned: dict[str, str | None],
    mtu: int | None,
    seed: int | None,
    truth: str | None,
) -> Lab:
    from thinwire.lab import profiles, units
    from thinwire.lab.lab import Lab
    from thinwire.lab.settings import read_values

    lasting = units.seconds(epoch) if epoch is not None else None
    schedule: Schedule = profiles.schedule(network, hosts, epoch=lasting, seed=seed).scaled(scale).faster(speed)
    schedule = schedule.pinned(read_values({key: word for key, word in pinned.items() if word is not None}))
    return Lab(hosts, schedule, mtu=mtu, seed=seed or 0, truth=truth)


def _introduce(lab: Lab) -> None:
    notes = "".join(f"; {note}" for note in lab.schedule.notes)
    typer.echo(
        f"lab {lab.id}: {lab.hosts} hosts, network {lab.schedule.name}{notes}; packets of up to {lab.mtu} bytes; "
        f"truth in {lab.truth}",
        err=True,
    )
    if lab.overloaded:
        typer.echo(
            "thinwire lab: these rates add up to more than the relay can carry here, so hosts may get less; "
            "see --scale.",
            err=True,
        )


@app.command(
    cls=Command,
    context_settings={"allow_interspersed_args": False},
    epilog=examples(
        (
            "a DDP script on four hosts that are 20 ms apart",
            "thinwire lab run --hosts 4 --latency 20ms --rate 50mbit -- python train.py",
        ),
        (
            "on a network that changes, ten times as thin",
            "thinwire lab run --network unpredictable --scale 10 -- python train.py",
        ),
    ),
)
def run(
    command: Annotated[list[str], typer.Argument(help="What every host runs, after --.")],
    hosts: Hosts = 2,
    network: NetworkName = None,
    scale: Scale = 1.0,
    speed: Speed = 1.0,
    epoch: Epoch = None,
    latency: Latency = None,
    rate: Rate = None,
    jitter: Jitter = None,
    loss: Loss = None,
    mtu: Mtu = None,
    seed: Seed = None,
    truth: Truth = None,
) -> None:
    """Run a command once per host, with torchrun's environment; for example any DDP script."""
    from thinwire.lab import run

    pinned = {"latency": latency, "rate": rate, "jitter": jitter, "loss": loss}
    with ExitStack() as stack:
        with _told():
            _clean_first()
            lab = stack.enter_context(_build(hosts, network, scale, speed, epoch, pinned, mtu, seed, truth))
        _introduce(lab)
        code = run.run(lab, command)
    raise typer.Exit(code)


@app.command(
    cls=Command,
    epilog=examples(
        ("is the network what it says?", "thinwire lab check --latency 5ms --rate 100mbit"),
        ("all to all, in figures", "thinwire lab check --hosts 4 --network home --json"),
    ),
)
def check(
    hosts: Hosts = 2,
    network: NetworkName = None,
    scale: Scale = 1.0,
    latency: Latency = None,
    rate: Rate = None,
    mtu: Mtu = None,
    json: Json = False,
) -> None:
    """Measure round trip and TCP throughput through a lab; with more than two hosts also all to all."""
    from thinwire.lab import check

    pinned = {"latency": latency, "rate": rate}
    with ExitStack() as stack:
        with _told():
            _clean_first()
            lab = stack.enter_context(_build(max(hosts, 2), network, scale, 1.0, None, pinned, mtu, None, None))
        _introduce(lab)
        with _told():
            figures = check.measure(lab)
    for line in check.describe(figures):
        typer.echo(line, err=json)
    if json:
        print_figures(figures)


@app.command("profiles", cls=Command, epilog=examples(("what --network takes", "thinwire lab profiles")))
def list_profiles() -> None:
    """The networks that come with thinwire."""
    from rich.console import Console
    from rich.table import Table

    from thinwire.lab import profiles

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name in profiles.names():
        table.add_row(name, profiles.load(name).about)
    Console().print(table)


# --- labs that run


@app.command(
    "set",
    cls=Command,
    context_settings={"allow_interspersed_args": True},
    epilog=examples(
        ("for all", "thinwire lab set latency=50ms rate=20mbit loss=1%"),
        ("one host has a thin wire", "thinwire lab set rate=5mbit --host 2"),
        ("one way is late", "thinwire lab set latency=200ms --pair '0>1'"),
    ),
)
def set_values(
    values: Annotated[
        list[str], typer.Argument(help="NAME=VALUE of latency, jitter, loss, rate, up, down, queue or max_packet.")
    ],
    host: Annotated[
        int | None, typer.Option(metavar="N", help="Only this host: its rates, and the routes to and from it.")
    ] = None,
    pair: Annotated[
        str | None, typer.Option(metavar="PAIR", help="Only these routes: 0:1 both ways, 0>1 one way.")
    ] = None,
    lab: Which = None,
) -> None:
    """Change the network of a running lab, for all or some."""
    from thinwire.lab.settings import change_from_words

    with _told():
        words = dict(_assignment(value) for value in values)
        _tell(lab, lambda hosts: change_from_words(words, hosts, host=host, pair=pair))


def _assignment(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r} sets nothing: write it like latency=50ms.")
    return key, value


@app.command(
    cls=Command,
    epilog=examples(
        ("two halves that do not hear each other", "thinwire lab partition '0,1|2,3'"),
        ("the first half is heard and hears nothing", "thinwire lab partition '2,3>0,1'"),
    ),
)
def partition(
    groups: Annotated[str, typer.Argument(help="'0,1|2,3' both ways, '0,1>2,3' one way.")], lab: Which = None
) -> None:
    """Stop all packets between groups of hosts."""
    from thinwire.lab import settings

    with _told():
        _tell(lab, lambda hosts: settings.partition(groups, hosts))


@app.command(cls=Command, epilog=examples(("after `thinwire lab partition`", "thinwire lab heal")))
def heal(lab: Which = None) -> None:
    """Let all packets pass again."""
    from thinwire.lab import settings

    with _told():
        _tell(lab, lambda hosts: settings.heal())


def _tell(identity: str | None, change: Callable[[int], Change]) -> None:
    with _relay(identity) as (entry, _, relay):
        from thinwire.lab.lab import ask

        done = ask(relay, {"do": "change", "change": change(entry.hosts).to_json()})
        typer.echo(f"lab {entry.id}: done at {done['time']:.3f} s")


@contextmanager
def _relay(identity: str | None) -> Iterator[tuple[Entry, Path, socket.socket]]:
    from thinwire.lab import registry
    from thinwire.lab.lab import visit

    _clean_first()
    entry, folder = registry.find(identity)
    with visit(folder) as relay:
        yield entry, folder, relay


@app.command(
    cls=Command,
    context_settings={"allow_interspersed_args": False},
    epilog=examples(
        ("a shell on host 0", "thinwire lab shell 0"),
        ("one command there", "thinwire lab shell 0 ping 10.77.0.2"),
    ),
)
def shell(
    host: Annotated[int, typer.Argument(help="Which host.")],
    command: Annotated[list[str] | None, typer.Argument(help="What to run there instead of $SHELL.")] = None,
    lab: Which = None,
) -> None:
    """Be on a host of a running lab."""
    from thinwire.lab import light
    from thinwire.lab.errors import LabError
    from thinwire.lab.lab import NAMES
    from thinwire.lab.settings import check_host

    with _told(), _relay(lab) as (entry, folder, relay):
        check_host(host, entry.hosts)
        relay.sendall(json_module.dumps({"do": "enter", "host": host}).encode() + b"\n")
        _, descriptors, _, _ = socket.recv_fds(relay, 4096, 2)
        if not descriptors:
            raise LabError("the relay has gone.")
    network, user = descriptors[0], descriptors[1] if len(descriptors) > 1 else -1
    for descriptor in descriptors:
        os.set_inheritable(descriptor, True)
    argv = command or [os.environ.get("SHELL", "/bin/sh")]
    sys.stdout.flush()
    parent = str(os.getppid())  # the new program takes our place, so our parent is its parent
    line = light.command("thinwire.lab.enter", "run", str(user), str(network), str(folder / NAMES), parent, *argv)
    os.execve(line[0], line, {**os.environ, "THINWIRE_LAB": entry.id})


@app.command(cls=Command, epilog=examples(("which labs run, and where their truth is", "thinwire lab ps")))
def ps() -> None:
    """The labs that run, and who lives in them."""
    from rich.console import Console
    from rich.table import Table

    from thinwire.lab import namespaces, registry

    with _told():
        _clean_first()
        labs = registry.running()
    if not labs:
        typer.echo("no lab is running.")
        return
    table = Table(box=None)
    for column in ("lab", "hosts", "network", "processes", "truth"):
        table.add_column(column)
    for entry, _ in labs:
        inhabitants = namespaces.inhabitants(dict(entry.networks))
        table.add_row(entry.id, str(entry.hosts), entry.network, str(len(inhabitants)), entry.truth)
    Console(soft_wrap=True, markup=False, emoji=False).print(table)


@app.command(cls=Command, epilog=examples(("after a lab was killed", "thinwire lab clean")))
def clean() -> None:
    """End and remove what labs left whose process was killed. Labs that run are not touched."""
    with _told():
        _clean_first()
