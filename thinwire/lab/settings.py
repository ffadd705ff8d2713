"""From words to changes of the network: what `lab set`, profiles and overrides say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from thinwire.lab import units
from thinwire.lab.network import DISTRIBUTIONS, OF_HOST, RATES, Change, Conditions, Pair, Value


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("true", "yes", "on", "false", "no", "off"):
        return str(value).lower() in ("true", "yes", "on")
    raise ValueError(f"{value!r} is neither true nor false.")


def _distribution(value: object) -> str:
    if value not in DISTRIBUTIONS:
        raise ValueError(f"{value!r} is no distribution of jitter: use one of {', '.join(DISTRIBUTIONS)}.")
    return str(value)


def _count(value: object) -> float:
    try:
        packets = int(str(value))
    except ValueError:
        packets = -1
    if packets < 0:
        raise ValueError(f"{value!r} is no number of packets: use 1 or more, or 0 for one bandwidth-delay product.")
    return float(packets)


def _packet(value: object) -> float:
    try:
        nbytes = int(str(value))
    except ValueError:
        nbytes = -1
    if nbytes < 0:
        raise ValueError(f"{value!r} is no size of a packet: use a number of bytes, like 1500, or 0 for any.")
    return float(nbytes)


READERS: dict[str, Callable[[Any], Value]] = {
    "latency": lambda text: units.seconds(as_text(text)),
    "jitter": lambda text: units.seconds(as_text(text)),
    "distribution": _distribution,
    "reorder": _flag,
    "loss": lambda text: units.share(str(text)),
    "max_packet": _packet,
    "rate": lambda text: units.rate(as_text(text)),
    "up": lambda text: units.rate(as_text(text)),
    "down": lambda text: units.rate(as_text(text)),
    "queue": _count,
}


def as_text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"{value!r} has no unit: write it as text, like 5ms or 100mbit.")


def read_values(words: Mapping[str, Any]) -> dict[str, Value]:
    """Numbers of one unit each, from what a person wrote. `rate` sets both directions.

    >>> read_values({"latency": "5ms", "rate": "80mbit"})
    {'latency': 0.005, 'up': 10000000.0, 'down': 10000000.0}
    """
    values: dict[str, Value] = {}
    for key, word in words.items():
        if key not in READERS:
            raise ValueError(f"{key!r} is no setting of a network.{did_you_mean(key, READERS)}")
        try:
            value = READERS[key](word)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        values |= {"up": value, "down": value} if key == "rate" else {key: value}
    return values


def describe(values: Mapping[str, Value]) -> str:
    """
    >>> describe({"latency": 0.005, "up": 125e5, "down": 125e5, "loss": 0.01})
    'latency 5 ms, rate 100 Mbit/s, loss 1%'
    """
    shown = dict(values)
    if shown.get("up") is not None and shown.get("up") == shown.get("down"):
        shown = {("rate" if key == "up" else key): value for key, value in shown.items() if key != "down"}
    return ", ".join(f"{key} {_in_units(key, value)}" for key, value in shown.items())


def _in_units(key: str, value: Value) -> str:
    if key in ("latency", "jitter"):
        return units.format_seconds(float(value))
    if key in ("rate", *RATES):
        return units.format_rate(float(value))
    if key == "max_packet":
        return f"{value:g} bytes"
    return f"{float(value) * 100:.4g}%" if key == "loss" else str(value)


def did_you_mean(key: str, known: Iterable[str]) -> str:
    """The nearest known name, else all of them."""
    names = sorted(known)
    near = get_close_matches(key, names, n=1)
    return f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(names)}."


# --- for whom


def of_hosts(hosts: Iterable[int], total: int, values: Mapping[str, Value], **more: Any) -> Change:
    """A change of some hosts: their rates, and the routes to and from them."""
    chosen = tuple(hosts)
    for host in chosen:
        check_host(host, total)
    pairs = [(src, dst) for src, dst in Conditions(total).all_pairs() if src in chosen or dst in chosen]
    return Change(values=values, hosts=chosen, pairs=tuple(pairs), **more)


def of_pairs(pairs: Iterable[Pair], values: Mapping[str, Value], **more: Any) -> Change:
    """A change of the routes between some pairs. Rates belong to hosts, so they cannot change here."""
    wrong = [key for key in values if key in OF_HOST]
    if wrong:
        raise ValueError(f"{wrong[0]} belongs to a host, not to a pair: set it for a host.")
    return Change(values=values, hosts=(), pairs=tuple(pairs), **more)


def read_pairs(text: str, total: int) -> list[Pair]:
    """Both directions of `0:1`, one of `0>1`.

    >>> read_pairs("0:1", 2), read_pairs("1>0", 2)
    ([(0, 1), (1, 0)], [(1, 0)])
    """
    for mark in (":", ">"):
        if mark in text:
            src, dst = (_host(name, total) for name in text.split(mark, 1))
            if src == dst:
                raise ValueError(f"{text!r} names one host twice.")
            return [(src, dst), (dst, src)] if mark == ":" else [(src, dst)]
    raise ValueError(f"{text!r} is no pair: write 0:1 for both directions, 0>1 for one.")


def read_partition(text: str, total: int) -> list[Pair]:
    """The pairs that a partition blocks: `0,1|2,3` both ways, `0,1>2,3` only from left to right.

    >>> read_partition("0|1,2", 4)
    [(0, 1), (0, 2), (1, 0), (2, 0)]
    >>> read_partition("0>1,2", 4)
    [(0, 1), (0, 2)]
    """
    one_way = ">" in text
    groups = [[_host(name, total) for name in side.split(",")] for side in text.split(">" if one_way else "|")]
    members = [host for group in groups for host in group]
    if len(groups) < 2 or (one_way and len(groups) > 2) or len(set(members)) < len(members):
        raise ValueError(f"{text!r} is no partition: write 0,1|2,3 for both ways, 0,1>2,3 for one, no host twice.")
    blocked = [
        (src, dst)
        for i, senders in enumerate(groups)
        for j, receivers in enumerate(groups)
        if i < j or (i > j and not one_way)
        for src in senders
        for dst in receivers
    ]
    return blocked


def change_from_words(
    words: Mapping[str, Any], total: int, *, host: int | None = None, pair: str | None = None, cause: str = "set"
) -> Change:
    """What `lab set` asks for."""
    values = read_values(words)
    if not values:
        raise ValueError(f"nothing to set: name one or more of {', '.join(READERS)}.")
    if host is not None and pair is not None:
        raise ValueError("choose a host or a pair, not both.")
    if pair is not None:
        return of_pairs(read_pairs(pair, total), values, cause=cause)
    return of_hosts([host], total, values, cause=cause) if host is not None else Change(values=values, cause=cause)


def partition(text: str, total: int, **more: Any) -> Change:
    """A change that blocks what a partition separates."""
    return Change(
        values={"blocked": True}, hosts=(), pairs=tuple(read_partition(text, total)), **{"cause": "partition", **more}
    )


def heal(**more: Any) -> Change:
    """A change that unblocks everything."""
    return Change(values={"blocked": False}, **{"cause": "heal", **more})


def _host(name: str, total: int) -> int:
    try:
        host = int(name)
    except ValueError:
        raise ValueError(f"{name!r} is no host: hosts are numbers from 0 to {total - 1}.") from None
    return check_host(host, total)


def check_host(host: int, total: int) -> int:
    if not isinstance(host, int) or not 0 <= host < total:
        raise ValueError(f"there is no host {host!r}: hosts are numbers from 0 to {total - 1}.")
    return host
