"""What the name of a method means: "adaptive", "ddp", "star-topk@0.01:tree", "choco@int8:ring".

The names are written out here, so that a command line is read without torch; a test holds them true.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches

HOOKS = ("ddp", "ddp-fp16", "ddp-powersgd")
_REDUCING = ("ring", "tree", "halving", "direct", "torch")
_GATHERING = ("ring", "tree", "halving", "direct")
EXCHANGES = {  # and what each can run over
    "dense": _REDUCING,
    "topk-allgather": _GATHERING,
    "layerwise-topk": _GATHERING,
    "ms-topk": _GATHERING,
    "star-topk": _REDUCING,
    "var-topk": _REDUCING,
}
GOSSIP = ("dpsgd", "naive", "dcd", "ecd", "choco", "adagossip", "deepsqueeze")
TOPOLOGIES = (
    "ring",
    "torus",
    "hypercube",
    "exponential",
    "star",
    "complete",
    "random-regular",
    "erdos-renyi",
    "one-peer-exponential",
)
NAMES = ("adaptive", *HOOKS, *EXCHANGES, *GOSSIP)

DEFAULT_RATIO = 0.01
_COMPRESSOR = re.compile(r"none|sign|int([1-8]|16)(-l2)?|qsgd([2-8]|16)|(random|topk|randk):[0-9.e+-]+")
_NUMBER = re.compile(r"[0-9.]+(e[+-]?[0-9]+)?")
_FORM = re.compile(r"([^@:]*)(?:@([^:]*))?(?::(.*))?", re.DOTALL)
_WITH_RATIO = ("random", "topk", "randk")


@dataclass(frozen=True, kw_only=True)
class Method:
    """How gradients or models are exchanged.

    Attributes:
        text: as it was written.
        kind: adaptive, ddp (torch's own exchange, or one of its hooks), exchange (one of ours, fixed) or gossip.
        name: the hook, the exchange, or the way of gossip.
        ratio: of an exchange.
        collective: of an exchange; None for its default.
        compressor, topology: of gossip.
    """

    text: str
    kind: str
    name: str
    ratio: float | None = None
    collective: str | None = None
    compressor: str | None = None
    topology: str | None = None

    @staticmethod
    def parse(text: str) -> Method:
        """
        >>> Method.parse("star-topk@0.01:tree").collective
        'tree'
        >>> Method.parse("choco@topk:0.01:torus:2x4").topology
        'torus:2x4'
        """
        parts = _FORM.fullmatch(text)
        name, at, over = parts.groups() if parts else (text, None, None)
        if name not in NAMES:
            raise ValueError(f"there is no method {text!r}.{nearest(name, NAMES)} {FORM}")
        if name in EXCHANGES:
            return _exchange(text, name, at, over)
        if name in GOSSIP:
            return _gossip(text, name, at, over)
        if at is not None or over is not None:
            raise ValueError(f"{name} takes neither a ratio nor a collective, got {text!r}.")
        return Method(text=text, kind="adaptive" if name == "adaptive" else "ddp", name=name)


FORM = "Write EXCHANGE@RATIO:COLLECTIVE, as in star-topk@0.01:tree, or GOSSIP@COMPRESSOR:TOPOLOGY, as in dcd@int8:ring."


def nearest(word: str, known: Collection[str]) -> str:
    """All names that are known, and the one that is nearest to what was written."""
    near = get_close_matches(word, known, n=1)
    return (f" Did you mean {near[0]!r}?" if near else "") + f" Known: {', '.join(known)}."


def _exchange(text: str, name: str, at: str | None, over: str | None) -> Method:
    if at is not None and name == "dense":
        raise ValueError(f"dense sends everything and has no ratio, got {text!r}.")
    if over is not None and over not in EXCHANGES[name]:
        raise ValueError(f"{name} does not run over {over!r}.{nearest(over, EXCHANGES[name])}")
    ratio = None if name == "dense" else DEFAULT_RATIO if at is None else _ratio(at, text)
    return Method(text=text, kind="exchange", name=name, ratio=ratio, collective=over)


def _ratio(at: str, text: str) -> float:
    try:
        ratio = float(at) if _NUMBER.fullmatch(at) else 0.0
    except ValueError:
        ratio = 0.0
    if not 0 < ratio <= 1:
        raise ValueError(f"the ratio of {text!r} must be a number in (0, 1], as in star-topk@0.01, got {at!r}.")
    return ratio


def _gossip(text: str, name: str, at: str | None, over: str | None) -> Method:
    compressor, rest = at, over
    if at in _WITH_RATIO:
        given, _, rest = (over or "").partition(":")
        compressor, rest = f"{at}:{given}", rest or None
    compressor = ("none" if name == "dpsgd" else "int8") if compressor is None else compressor
    if not _COMPRESSOR.fullmatch(compressor):
        raise ValueError(
            f"{text!r} names no compressor after @. Known: none, int1 to int8, int16, the same with -l2, qsgd2 to "
            "qsgd8, qsgd16, sign, random:RATIO, topk:RATIO, randk:RATIO."
        )
    if compressor.partition(":")[0] in _WITH_RATIO:
        _ratio(compressor.partition(":")[2], text)
    topology = rest or "ring"
    if topology.partition(":")[0] not in TOPOLOGIES:
        raise ValueError(f"there is no topology {topology!r}.{nearest(topology, TOPOLOGIES)}")
    return Method(text=text, kind="gossip", name=name, compressor=compressor, topology=topology)
