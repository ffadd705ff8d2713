"""CHOCO's Table 1 in small: which method stands which compressor (Koloskova et al. 2020, Table 1).

Eight nodes on a ring train a CNN of 26,698 parameters on Fashion-MNIST: SGD with momentum 0.9, learning rate times 0.1
after 1/2 and 3/4 of the steps. Accuracy is that of the averaged model on 2000 held-out images. All methods have the
same learning rate, and choco's gamma is "auto". The nodes are columns of one matrix (columns.py), which is what
thinwire.Gossip computes, in one process and without messages: tests/laws/test_gossip.py holds the two together.

    python papers/choco_table1.py                      everything that is not yet in the results, for hours
    python papers/choco_table1.py --seeds 1            may run beside others: each takes what none has begun
    python papers/choco_table1.py --classes 2          every node holds two of the ten classes
    python papers/choco_table1.py --longer             why: scales of whole layers, and ecd with more steps
    python papers/choco_table1.py --table              the tables of what there is

Writes choco_table1/*.json, one for each run, and choco_table1.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from thinwire.compress.quantize import Compressor, Qsgd, build
from thinwire.gossip import METHODS as METHODS_OF
from thinwire.gossip.choco import tune
from thinwire.gossip.mail import HEADER_BYTES
from thinwire.gossip.topology import build as topology_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from papers import fashion  # noqa: E402
from papers.columns import Columns  # noqa: E402

HERE = Path(__file__).parent
FOLDER = HERE / "choco_table1"
NODES, BATCH, STEPS, TESTED, CHANNELS = 8, 16, 300, 2000, 8
RATE, MOMENTUM, DECAY = 0.05, 0.9, 1e-4
METHODS = ("dcd", "ecd", "choco")
QSGD = ("qsgd16", "qsgd8", "qsgd4", "qsgd2")
OURS = ("int16", "int8", "int4", "int2")
SPARSE = ("random:0.1", "random:0.01", "topk:0.1", "topk:0.01", "sign")
COMPRESSORS = (*QSGD, *SPARSE, *OURS)
NON_IID = ("int8", "sign", "topk:0.1")
PAPER = {
    "qsgd16": ("92.51", "92.02", "92.34"),
    "qsgd8": ("92.36", "59.11", "92.30"),
    "qsgd4": ("23.56", "div", "91.92"),
    "qsgd2": ("div", "div", "91.41"),
    "random:0.1": ("div", "div", "91.87"),
    "random:0.01": ("div", "div", "91.32"),
    "topk:0.1": ("91.97", "16.78", "92.29"),
    "topk:0.01": ("89.79", "18.03", "91.73"),
    "sign": ("92.40", "div", "92.46"),
}
WHOLE = 1 << 16  # entries that share a scale: more than the model has
LONGER = (
    *(f"{method} qsgd{bits}-whole" for method in METHODS for bits in (8, 4)),
    *(f"ecd qsgd8 x{times}" for times in (2, 4, 8)),
    *(f"ecd int8 x{times}" for times in (2, 4, 8)),
    "dcd qsgd8 x4",
)


class Run(NamedTuple):
    """One training. `times` is how many times the usual number of steps it makes."""

    method: str
    compressor: str
    seed: int
    classes: int = 10
    times: int = 1

    @property
    def path(self) -> Path:
        words = self.method, self.compressor.replace(":", "-"), f"seed{self.seed}", f"{self.classes}classes"
        return FOLDER / ("_".join(words) + (f"_x{self.times}" if self.times > 1 else "") + ".json")

    def result(self) -> dict[str, Any] | None:
        return json.loads(self.path.read_text()) if self.path.exists() and self.path.stat().st_size else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--classes", type=int, default=10, help="classes that a node holds")
    parser.add_argument("--longer", action="store_true")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for wanted in [] if arguments.table else runs(arguments.seeds, arguments.classes, arguments.longer):
        if begin(wanted):
            start = time.time()
            result = train(wanted)
            draft = wanted.path.with_suffix(".draft")
            draft.write_text(json.dumps({**result, "torch": torch.__version__, "machine": platform.machine()}))
            os.replace(draft, wanted.path)
            print(f"{time.time() - start:5.1f} s  {' '.join(map(str, wanted))}: {result['accuracy']:.1f} %", flush=True)
    (HERE / "choco_table1.md").write_text(report())


def runs(seeds: int, classes: int, longer: bool) -> list[Run]:
    wanted = []
    for seed in range(seeds):
        if longer:
            for words in LONGER:
                method, compressor, *times = words.split()
                wanted.append(Run(method, compressor, seed, 10, int(times[0][1:]) if times else 1))
        else:
            wanted.append(Run("dpsgd", "none", seed, classes))
            compressors = COMPRESSORS if classes == 10 else NON_IID
            wanted += [Run(method, spec, seed, classes) for spec in compressors for method in METHODS]
    return wanted


def begin(wanted: Run) -> bool:
    """Claim a run by making its file, empty; False if it is there already."""
    try:
        wanted.path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def compressor_of(name: str) -> Compressor:
    """As the product has it, or QSGD with one scale for everything."""
    spec, _, whole = name.partition("-whole")
    return Qsgd(int(spec[4:]), block=WHOLE) if name.endswith("-whole") else build(spec)


def shares(seed: int, classes: int) -> list[torch.Tensor]:
    """Which training images each node holds."""
    labels = fashion.load("train")[1]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    if classes == 10:
        return [order[node::NODES] for node in range(NODES)]
    held = [torch.tensor([(node * 10 // NODES + k) % 10 for k in range(classes)]) for node in range(NODES)]
    return [order[torch.isin(labels[order], mine)] for mine in held]  # no class is without a node


def train(wanted: Run, steps: int = STEPS) -> dict[str, float]:
    try:
        columns, alpha = descend(wanted, steps * wanted.times)
    except ValueError:  # not finite
        return {"accuracy": float("nan"), "consensus": float("nan"), "message_bytes": 0, "alpha": float("nan")}
    mean = columns.X.mean(1)
    away = np.sqrt(((columns.X - mean[:, None]) ** 2).sum(0).mean()) / np.linalg.norm(mean)
    _, accuracy = fashion.judge(torch.from_numpy(mean), fashion.first("t10k", TESTED), CHANNELS)
    nbytes = HEADER_BYTES + columns.compressor.nbytes(len(mean))
    return {"accuracy": 100 * accuracy, "consensus": float(away), "message_bytes": nbytes, "alpha": alpha}


def descend(wanted: Run, steps: int) -> tuple[Columns, float]:
    """All nodes after so many steps, and dcd's alpha as last measured."""
    method, graph, mine = METHODS_OF[wanted.method], topology_of("ring", NODES), shares(wanted.seed, wanted.classes)
    images, labels = fashion.load("train")
    compressor = method.prepared(compressor_of(wanted.compressor))
    options = {"gamma": tune(graph, compressor)} if wanted.method == "choco" else {}
    X = np.repeat(first_model(wanted.seed)[:, None], NODES, 1)
    columns = Columns(graph.weights, compressor, X, wanted.seed, **options)
    randoms = [torch.Generator().manual_seed(1000 * wanted.seed + node) for node in range(NODES)]
    gradients, momentum, measured = vmap(grad(loss)), np.zeros_like(X), 0.0
    for step in range(steps):
        batch = torch.stack(
            [mine[i][torch.randint(len(mine[i]), (BATCH,), generator=randoms[i])] for i in range(NODES)]
        )
        models = torch.from_numpy(np.ascontiguousarray(columns.X.T))
        slopes = gradients(models, fashion.pixels(images[batch]), labels[batch]).numpy().T
        momentum = MOMENTUM * momentum + (slopes + DECAY * columns.X)
        before = columns.X
        columns.step(wanted.method, -np.float32(rate(step, steps)) * momentum)
        if wanted.method == "dcd" and step % 50 == 0:
            Z = before @ graph.weights().astype(np.float32) - np.float32(rate(step, steps)) * momentum - before
            measured = float(np.linalg.norm(columns.X - before - Z) / np.linalg.norm(Z))
        if not np.isfinite(columns.X).all():
            raise ValueError("not finite")
    return columns, measured


def rate(step: int, steps: int) -> float:
    return RATE * 0.1 ** ((step >= steps // 2) + (step >= steps * 3 // 4))


def first_model(seed: int) -> np.ndarray:
    torch.manual_seed(seed)
    first: np.ndarray = nn.utils.parameters_to_vector(fashion.net(CHANNELS).parameters()).detach().numpy()
    return first


NET = fashion.net(CHANNELS)


def loss(flat: torch.Tensor, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    shapes = {name: p.shape for name, p in NET.named_parameters()}
    parts = flat.split([shape.numel() for shape in shapes.values()])
    parameters = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    return nn.functional.cross_entropy(functional_call(NET, parameters, (images,)), labels)


# --- what is shown


def found(method: str, compressor: str, classes: int = 10, times: int = 1) -> list[dict[str, Any]]:
    """The runs that there are, by seed."""
    results = [Run(method, compressor, seed, classes, times).result() for seed in range(10)]
    return [result for result in results if result is not None]


def cell(method: str, compressor: str, classes: int = 10, times: int = 1) -> str:
    """Mean and deviation of those that learned, one alone without; a star for each that did not, "div" if none did."""
    values = np.array([result["accuracy"] for result in found(method, compressor, classes, times)])
    learned = values[values > 20]
    if not len(values):
        return ""
    if not len(learned):
        return "div"
    deviation = f" ± {learned.std():.1f}" if len(learned) > 1 else ""
    return f"{learned.mean():.1f}{deviation}" + "*" * (len(values) - len(learned))


def report() -> str:
    seeds = len(found("dpsgd", "none"))
    lines = [
        "# CHOCO's Table 1 in small",
        "",
        f"`python papers/choco_table1.py --seeds {seeds}`, torch {torch.__version__}. {STEPS} steps of {NODES} x "
        f"{BATCH} images. Test accuracy of the averaged model in %, mean and deviation over seeds; `div` where it is "
        "20 % or less or nothing finite, a star for each such run among others. In brackets what the paper has for "
        f"ResNet-20 on CIFAR-10. Uncompressed (dpsgd): {cell('dpsgd', 'none')} (92.64).",
        "",
        "| compressor | bytes | " + " | ".join(METHODS) + " |",
        "| --- | --- | --- | --- | --- |",
    ]
    for compressor in COMPRESSORS:
        sizes = [int(result["message_bytes"]) for method in METHODS for result in found(method, compressor)]
        papers = PAPER.get(compressor, ("", "", ""))
        cells = [
            cell(method, compressor) + (f" ({paper})" if paper else "")
            for method, paper in zip(METHODS, papers, strict=True)
        ]
        if sizes:
            lines.append(f"| {compressor} | {max(sizes):,} | " + " | ".join(cells) + " |")
    if any(found(words.split()[0], words.split()[1], 10, 1) for words in LONGER[:6]):
        lines += ["", "QSGD with one scale for the whole model instead of one per 1024 entries:", ""]
        lines += ["| compressor | " + " | ".join(METHODS) + " |", "| --- | --- | --- | --- |"]
        for spec in ("qsgd8-whole", "qsgd4-whole"):
            lines.append(f"| {spec} | " + " | ".join(cell(method, spec) for method in METHODS) + " |")
        lines += ["", "With more steps:", "", "| run | 300 | 600 | 1200 | 2400 |", "| --- | --- | --- | --- | --- |"]
        for method, spec in (("ecd", "qsgd8"), ("ecd", "int8"), ("dcd", "qsgd8")):
            cells = [cell(method, spec, times=times) for times in (1, 2, 4, 8)]
            lines.append(f"| {method} {spec} | " + " | ".join(cells) + " |")
    if found("dpsgd", "none", 2):
        lines += ["", f"Two classes per node. Uncompressed: {cell('dpsgd', 'none', 2)}.", ""]
        lines += ["| compressor | " + " | ".join(METHODS) + " |", "| --- | --- | --- | --- |"]
        for spec in NON_IID:
            lines.append(f"| {spec} | " + " | ".join(cell(method, spec, 2) for method in METHODS) + " |")
    alphas = [f"{spec} {found('dcd', spec)[0]['alpha']:.2g}" for spec in COMPRESSORS if found("dcd", spec)]
    lines += [
        "",
        "dcd's alpha as measured last on its own differences (it allows 0.073): " + ", ".join(alphas) + ".",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
