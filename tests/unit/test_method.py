"""The name of a method says what runs, and one that says nothing is told what there is."""

from __future__ import annotations

import pytest

from thinwire import exchange
from thinwire.compress.quantize import build as compressor_of
from thinwire.gossip import METHODS
from thinwire.gossip.topology import NAMES as TOPOLOGIES
from thinwire.jobs import method
from thinwire.jobs.method import Method


def test_the_names_are_those_that_exist() -> None:
    assert set(method.EXCHANGES) == set(exchange.NAMES)
    for name, collectives in method.EXCHANGES.items():
        assert set(collectives) == set(exchange.collectives_of(name))
    assert set(method.GOSSIP) == set(METHODS)
    assert set(method.TOPOLOGIES) == set(TOPOLOGIES)


@pytest.mark.parametrize("name", ["none", "sign", "int8", "int16-l2", "qsgd4", "random:0.1", "topk:0.01", "randk:1e-2"])
def test_a_compressor_that_is_let_through_exists(name: str) -> None:
    parsed = Method.parse(f"choco@{name}:star")
    assert parsed.compressor == name and parsed.topology == "star"
    assert compressor_of(name) is not None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("adaptive", {"kind": "adaptive", "name": "adaptive"}),
        ("ddp-powersgd", {"kind": "ddp", "name": "ddp-powersgd"}),
        ("dense", {"kind": "exchange", "name": "dense", "ratio": None, "collective": None}),
        ("dense:ring", {"kind": "exchange", "name": "dense", "collective": "ring"}),
        ("star-topk", {"kind": "exchange", "name": "star-topk", "ratio": 0.01, "collective": None}),
        ("star-topk@0.05:tree", {"name": "star-topk", "ratio": 0.05, "collective": "tree"}),
        ("topk-allgather:halving", {"name": "topk-allgather", "ratio": 0.01, "collective": "halving"}),
        ("dpsgd", {"kind": "gossip", "compressor": "none", "topology": "ring"}),
        ("dcd", {"kind": "gossip", "compressor": "int8", "topology": "ring"}),
        ("dcd:torus:2x4", {"compressor": "int8", "topology": "torus:2x4"}),
        ("choco@topk:0.01", {"compressor": "topk:0.01", "topology": "ring"}),
        ("choco@topk:0.01:random-regular:3", {"compressor": "topk:0.01", "topology": "random-regular:3"}),
    ],
)
def test_a_name_is_read(text: str, expected: dict[str, object]) -> None:
    parsed = Method.parse(text)
    assert parsed.text == text
    assert {key: getattr(parsed, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("star-topc@0.01", "Did you mean 'star-topk'?"),
        ("nonsense", "Known: adaptive, ddp,"),
        ("", "Known: adaptive"),
        ("star-topk@0", "in (0, 1]"),
        ("star-topk@much", "'much'"),
        ("star-topk@", "in (0, 1]"),
        ("star-topk:rign", "Did you mean 'ring'?"),
        ("topk-allgather:torch", "Known: ring, tree, halving, direct."),
        ("dense@0.1", "has no ratio"),
        ("adaptive@0.1", "neither"),
        ("ddp:ring", "neither"),
        ("dcd@int9", "names no compressor"),
        ("dcd@topk", "names no compressor"),
        ("dcd@topk:2", "in (0, 1]"),
        ("dcd@int8:rung", "Did you mean 'ring'?"),
        ("star-topk@0.1\n", "'0.1\\n'"),
    ],
)
def test_a_name_that_means_nothing_is_told_what_there_is(text: str, hint: str) -> None:
    with pytest.raises(ValueError) as told:
        Method.parse(text)
    assert hint in str(told.value)
    assert "\n" not in str(told.value)
