"""What compressing a whole tensor into a message costs on the processor, and reading it: one core, GB/s of float32."""

from __future__ import annotations

import json
import time

import torch
from rich.console import Console
from rich.table import Table

from thinwire.bench.machine import describe_machine
from thinwire.compress.quantize import Draw, build

SPECS = (
    *("none", "sign", *(f"int{bits}" for bits in (1, 2, 3, 4, 5, 6, 7, 8, 16))),
    *("int4-l2", "int8-l2", "qsgd4", "qsgd8", "qsgd16"),
    *("random:0.1", "random:0.01", "randk:0.1", "randk:0.01", "topk:0.1", "topk:0.01"),
)


def measure(spec: str, numel: int, repeats: int, seed: int) -> dict[str, float]:
    """Bits per entry, and GB/s of float32 packed and unpacked: the best of `repeats`, of this thread's own time."""
    x, compressor = torch.randn(numel, generator=torch.Generator().manual_seed(seed)), build(spec)
    code, out = torch.empty(compressor.nbytes(numel), dtype=torch.uint8), torch.empty_like(x)
    packing, unpacking = [], []
    for step in range(repeats + 1):  # in the first, loops are compiled
        start = time.thread_time()
        compressor.encode(x, code, Draw(seed, step, 0))
        middle = time.thread_time()
        compressor.decode(code, out)
        packing.append(middle - start)
        unpacking.append(time.thread_time() - middle)
    return {
        "bits": 8 * code.numel() / numel,
        "packing": x.nbytes / min(packing[1:]) / 1e9,
        "unpacking": x.nbytes / min(unpacking[1:]) / 1e9,
    }


def main(specs: list[str], numel: int, repeats: int, seed: int, as_json: bool) -> None:
    """Print the figures, and with `as_json` all of them again as one JSON line at the end."""
    for spec in specs:
        build(spec)  # a name that is unknown is told before anything is measured
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    figures = {spec: measure(spec, numel, repeats, seed) for spec in specs or SPECS}
    torch.set_num_threads(before)
    table = Table(title=f"compressors, {numel:,} float32, one thread, GB/s of float32")
    for column in ("compressor", "bits per entry", "packing", "unpacking"):
        table.add_column(column, justify="left" if column == "compressor" else "right")
    for spec, speed in figures.items():
        table.add_row(spec, *(f"{value:.2f}" for value in speed.values()))
    Console().print(table)
    if as_json:
        rounded = {spec: {name: round(value, 3) for name, value in speed.items()} for spec, speed in figures.items()}
        print(json.dumps({"numel": numel, "repeats": repeats, "seed": seed, "speeds": rounded, **describe_machine()}))
