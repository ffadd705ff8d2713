"""What rounding gathered values costs in steps to an accuracy, with error feedback.

    python benchmarks/steps_by_values.py      writes benchmarks/results/steps_by_values.json; some 12 minutes

Top-k over all-gather, as in steps_to_accuracy.py: the same seed once for each way to send values. Every row has the
steps to the middle and to the late target and the gain. For each way that rounds, `factor` is the geometric mean of its
steps over those by float32, `error` the standard error of its logarithm, and `gain` the same for gains. A target that
was not reached counts as reached after MOST_STEPS, and `missed` counts them.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import steps_to_accuracy as steps
import torch

from thinwire.bench.machine import describe_machine

RESULTS = Path(__file__).parent / "results" / "steps_by_values.json"
TASKS = ("mlp-digits", "cnn-digits", "cnn-fashion", "transformer-text")
RATIOS, SEEDS, WORKERS, MOST_STEPS = (0.1, 0.011, 0.001), 3, 4, 1500
WAYS = ("float32", "bfloat16", "log4")


def main() -> None:
    torch.set_num_threads(1)
    steps.check()
    rows = []
    for seed, task, ratio in itertools.product(range(SEEDS), TASKS, RATIOS):
        rows.append({"task": task, "ratio": ratio, "seed": seed} | {way: run(task, ratio, seed, way) for way in WAYS})
        print(json.dumps(rows[-1]), flush=True)
    figures = {way: compared(rows, way) for way in WAYS[1:]}
    head = {"command": "python benchmarks/steps_by_values.py", **describe_machine(), **figures}
    lines = ",\n".join(map(json.dumps, rows))
    RESULTS.write_text(json.dumps(head, indent=1)[:-2] + ',\n "runs": [\n' + lines + "\n]}\n")
    print(json.dumps(figures))


def run(task: str, ratio: float, seed: int, values: str) -> dict[str, Any]:
    found = steps.train(task, "topk-allgather", ratio, WORKERS, seed, MOST_STEPS, values)
    reached = [steps.steps_to(found["curve"], target) for target in steps.TASKS[task].targets[1:]]
    return {"steps": reached, "gain": found["gain"]}


def compared(rows: list[dict[str, Any]], way: str) -> dict[str, float]:
    """Steps by this way over steps by float32, over all runs and both targets."""
    logs = [
        statistics.mean(
            math.log((ours or MOST_STEPS) / (plain or MOST_STEPS))
            for ours, plain in zip(row[way]["steps"], row["float32"]["steps"], strict=True)
        )
        for row in rows
    ]
    gains = [math.log(row[way]["gain"] / row["float32"]["gain"]) for row in rows]
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    return {
        "factor": round(math.exp(statistics.mean(logs)), 3),
        "error": round(error, 3),
        "gain": round(math.exp(statistics.mean(gains)), 3),
        "missed": sum(row[way]["steps"].count(None) for row in rows),
        "missed_by_float32": sum(row["float32"]["steps"].count(None) for row in rows),
    }


if __name__ == "__main__":
    main()
