"""Small states for checkpoints, the files that they are kept in, and when two states are the same."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import torch


def assert_same(a: object, b: object) -> None:
    """Same types, same structure in the same order, same bits."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.contiguous().reshape(-1).view(torch.uint8).equal(b.contiguous().reshape(-1).view(torch.uint8))
    elif isinstance(a, dict) and isinstance(b, dict):
        assert [(type(key), key) for key in a] == [(type(key), key) for key in b]
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, float) and isinstance(b, float):
        assert struct.pack("<d", a) == struct.pack("<d", b)
    else:
        assert a == b


def small_state(number: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((3,), float(number))}, "lr": 1e-05, "best": math.inf, "step": number, "é": "é"}


def files_of(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def paths(directory: Path, step: int, rank: int = 0) -> tuple[Path, Path]:
    stem = directory / f"step-{step:09d}" / f"rank-{rank:05d}"
    return stem.with_suffix(".safetensors"), stem.with_suffix(".json")
