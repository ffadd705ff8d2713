"""thinwire's commands as processes, and what they leave: folders, records, workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from thinwire.lab import namespaces

ROOT = Path(__file__).parents[2]
PLAIN = {"NO_COLOR": "1", "COLUMNS": "200"}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "thinwire", *words]


def thinwire(*words: str, env: dict[str, str] | None = None, cwd: Path = ROOT) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command(*words), cwd=cwd, text=True, env={**os.environ, **PLAIN, **(env or {})}, **pipes)


def done(*words: str, env: dict[str, str] | None = None, cwd: Path = ROOT) -> tuple[int, str, str]:
    process = thinwire(*words, env=env, cwd=cwd)
    try:
        out, err = process.communicate()
    finally:
        process.kill()  # it has ended, unless the test was
    return process.returncode, out, err


def last_json(out: str) -> dict[str, Any]:
    """What --json leaves on stdout: one line, and nothing else."""
    (line,) = out.splitlines()
    figures: dict[str, Any] = json.loads(line)
    return figures


def lines_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "records.jsonl"
    whole = (
        [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []
    )
    return [json.loads(line) for line in whole]


def until(condition: Any, seconds: float = 60.0) -> Any:
    """What the condition gives, as soon as it is something."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)
    return found


def workers_of(folder: Path) -> list[int]:
    """The processes that work in this folder."""
    mark = f"thinwire.jobs.worker\0{folder}\0".encode()
    found = []
    for pid in namespaces.all_processes():
        try:
            if mark in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            pass  # it has ended
    return found


def is_training(folder: Path, steps: int = 5) -> bool:
    return any(line["kind"] == "step" and line["step"] >= steps for line in lines_of(folder))


@contextmanager
def a_training(out: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A training without an end that has made some steps, and its folder."""
    name = f"long-{time.monotonic_ns()}"
    endless = ["--epochs", "100000", "--checkpoint-every", "20", *words]
    process = thinwire("train", "digits", "--hosts", "2", "--name", name, "--out", str(out), *endless)
    try:
        until(lambda: is_training(out / name) or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        yield process, out / name
    finally:
        process.kill()
        process.communicate()


def of_kind(kind: str, written: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in written if record["kind"] == kind]
