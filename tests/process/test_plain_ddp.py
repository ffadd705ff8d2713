"""A plain DDP script ends cleanly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import thinwire

pytestmark = pytest.mark.process

ROOT = Path(thinwire.__file__).parents[1]

LOOK = """
import runpy, sys
from pathlib import Path

sys.argv[1:] = ["--steps", "6", "--width", "8"]
runpy.run_path("examples/ddp.py", run_name="__main__")
print(*[task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are looked up in /proc")
def test_no_thread_of_gloo_lives_on_after_the_process_group() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, "-c", LOOK]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | alone, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    report, threads = ended.stdout.splitlines()
    assert report.startswith("1 hosts")
    assert "python" in threads and "gloo" not in threads
