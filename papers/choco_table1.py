"""CHOCO's Table 1 in small: which method stands which compressor (Koloskova et al. 2020, Table 1).

Eight nodes on a ring, all in one process on the thread link, an MLP on scikit-learn's digits, SGD with momentum 0.9,
learning rate times 0.1 after 1/2 and 3/4 of the steps. Accuracy is that of the averaged model on held-out digits.

    python papers/choco_table1.py --seeds 3 --steps 400
    python papers/choco_table1.py --seeds 3 --steps 400 --classes 2      # every node holds two of the ten digits

Writes choco_table1.json and .md beside this file (with -non-iid where classes are few).
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from thinwire.gossip.topology import build as topology_of
from thinwire.link.thread import ThreadLink, ThreadWorld
from thinwire.train.gossip import Gossip

NODES, BATCH, LR = 8, 32, 0.1
METHODS_SHOWN = ("dpsgd", "dcd", "ecd", "choco", "deepsqueeze", "naive")
COMPRESSORS = (
    "int16", "int8", "int4", "int2", "qsgd16", "qsgd8", "qsgd4", "qsgd2",
    "sign", "topk:0.1", "topk:0.01", "randk:0.1", "randk:0.01", "random:0.1", "random:0.01",
)  # fmt: skip


def data(seed: int, classes: int) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]:
    """A share of the digits for every node, and the held-out fifth."""
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    x, y, held = x[order], y[order], len(y) // 5
    test, x, y = (x[:held], y[:held]), x[held:], y[held:]
    if classes == 10:
        return [(x[node::NODES], y[node::NODES]) for node in range(NODES)], test
    shares = []
    for node in range(NODES):
        mine = torch.tensor([(node * 10 // NODES + k) % 10 for k in range(classes)])  # no digit is without a node
        chosen = torch.isin(y, mine)
        shares.append((x[chosen], y[chosen]))
    return shares, test


def train(method: str, compressor: str, steps: int, seed: int, classes: int) -> dict[str, float]:
    shares, test = data(seed, classes)
    graph = topology_of("ring", NODES)

    def program(link: ThreadLink) -> tuple[float, float, int]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=1e-4)
        decay = torch.optim.lr_scheduler.MultiStepLR(optimizer, [steps // 2, steps * 3 // 4])
        gossip = Gossip(model, optimizer, method, topology=graph, compressor=compressor, seed=seed, link=link)
        x, y = shares[link.rank]
        random = torch.Generator().manual_seed(1000 * seed + link.rank)
        for _ in range(steps):
            chosen = torch.randint(len(y), (BATCH,), generator=random)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
            decay.step()
        apart = gossip.consensus()
        with gossip.average(), torch.no_grad():
            right = (model(test[0]).argmax(1) == test[1]).float().mean()
        return float(right), apart, gossip.method.mail.message_bytes

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            accuracy, apart, nbytes = ThreadWorld(NODES).run(program)[0]
    except FloatingPointError:
        accuracy, apart, nbytes = float("nan"), float("nan"), 0
    return {"accuracy": 100 * accuracy, "consensus": apart, "message_bytes": nbytes}


def table(results: dict[str, list[dict[str, float]]]) -> str:
    rows = ["| compressor | bytes | " + " | ".join(METHODS_SHOWN[1:]) + " |", "| --- " * (len(METHODS_SHOWN) + 1) + "|"]
    for compressor in (name for name in COMPRESSORS if f"dcd {name}" in results):
        cells = []
        for method in METHODS_SHOWN[1:]:
            runs = results.get(f"{method} {compressor}", [])
            values = np.array([run["accuracy"] for run in runs])
            failed = ~(values > 20) if len(values) else np.array([])
            if not len(values):
                cells.append("")
            elif failed.all():
                cells.append("div")
            else:
                stars = "*" * int(failed.sum())
                cells.append(f"{values[~failed].mean():.1f} ± {values[~failed].std():.1f}{stars}")
        sizes = [run["message_bytes"] for m in METHODS_SHOWN for run in results.get(f"{m} {compressor}", [])]
        rows.append(f"| {compressor} | {int(max(sizes, default=0))} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--classes", type=int, default=10, help="classes that a node holds")
    parser.add_argument("--compressors", nargs="*", default=COMPRESSORS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    name = "choco_table1" + ("" if arguments.classes == 10 else "-non-iid")
    here, results, start = Path(__file__).parent, {}, time.time()
    for seed in range(arguments.seeds):
        for method in METHODS_SHOWN:
            for compressor in arguments.compressors if method != "dpsgd" else ("none",):
                run = train(method, compressor, arguments.steps, seed, arguments.classes)
                results.setdefault(f"{method} {compressor}", []).append(run)
                print(f"{time.time() - start:6.0f} s  {method} {compressor}: {run['accuracy']:.1f} %", flush=True)
        facts = {
            "command": f"python papers/choco_table1.py --seeds {seed + 1} --steps {arguments.steps} "
            f"--classes {arguments.classes} --compressors {' '.join(arguments.compressors)}",
            "seeds": seed + 1,
            "torch": torch.__version__,
            "machine": platform.machine(),
            "results": results,
        }
        (here / f"{name}.json").write_text(json.dumps(facts, indent=1))
        base = np.mean([run["accuracy"] for run in results["dpsgd none"]])
        head = (
            f"# CHOCO's Table 1 in small{'' if arguments.classes == 10 else ', two classes per node'}\n\n"
            f"`{facts['command']}`, seeds: {seed + 1}, torch {torch.__version__}. Test accuracy of the averaged model "
            f"in %, mean and deviation; `div` below 20 % or not finite, a star for each such run among others. "
            f"Uncompressed (dpsgd): {base:.1f}.\n\n"
        )
        (here / f"{name}.md").write_text(head + table(results) + "\n")


if __name__ == "__main__":
    main()
