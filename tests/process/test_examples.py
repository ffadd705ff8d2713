"""The examples do what they say: each runs under torchrun, and a resumed run has the bits of one that went on."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import thinwire

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS = 2
LIMIT = 140.0  # seconds for one run

needs = {
    name: pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs thinwire[{name}]")
    for name in ("accelerate", "lightning", "transformers")
}


def torchrun(example: str, *arguments: object) -> str:
    """Run an example on two processes of this machine and give what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(EXAMPLES / example), *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=LIMIT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, errors
    return output


def states(folder: Path, step: int | None = None) -> list[Any]:
    """What every rank saved."""
    return [thinwire.Checkpoint(folder, rank, RANKS).load(step)[0] for rank in range(RANKS)]


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal, bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def made(states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each rank's state what training made, without what was measured: times are never the same."""
    return [{name: value for name, value in state.items() if name != "pilot"} for state in states]


def assert_each_has_an_error_of_its_own(states: list[dict[str, Any]]) -> None:
    """Else a resumed run would have the same bits although one rank's state had been given to all."""
    assert all(any(error.any() for error in state["error"].values()) for state in states)
    assert not same(states[0]["error"], states[1]["error"])


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_it_is_run(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 80
    assert path.name in (ast.get_docstring(ast.parse(text)) or "")


def test_a_plain_script_runs_as_it_is() -> None:
    assert "2 hosts, 1.2 MB of gradients" in torchrun("ddp.py", "--steps", 10)


def test_one_line_on_top_explains_what_it_did() -> None:
    output = torchrun("adaptive.py", "--steps", 10, "--width", 64)
    assert "The network:" in output
    assert "loss" in output


@pytest.mark.slow
def test_a_resumed_torchrun_run_has_the_same_bits(tmp_path: Path) -> None:
    through, resumed = tmp_path / "through", tmp_path / "resumed"
    torchrun("torchrun.py", "--epochs", 3, "--exchange", "star-topk", "--out", through)
    earlier, last = thinwire.Checkpoint(through, 0, RANKS).steps()
    shutil.copytree(through / f"step-{earlier:09d}", resumed / f"step-{earlier:09d}")
    torchrun("torchrun.py", "--epochs", 3, "--exchange", "star-topk", "--out", resumed, "--resume")
    for one, other in zip(states(through, last), states(resumed, last), strict=True):
        assert same(made([one.pop("comm")]), made([other.pop("comm")]))
        assert same(one, other)
    assert_each_has_an_error_of_its_own([state["comm"] for state in states(through, earlier)])


@pytest.mark.slow
@needs["accelerate"]
def test_a_resumed_accelerate_run_has_the_same_bits(tmp_path: Path) -> None:
    through, resumed = tmp_path / "through", tmp_path / "resumed"
    torchrun("accelerate_loop.py", "--epochs", 2, "--exchange", "star-topk", "--out", through)
    earlier, last = through / "epoch-1", "epoch-2"
    torchrun("accelerate_loop.py", "--epochs", 2, "--exchange", "star-topk", "--out", resumed, "--resume", earlier)
    assert same(load_file(through / last / "model.safetensors"), load_file(resumed / last / "model.safetensors"))
    assert same(made(states(through / last / "thinwire")), made(states(resumed / last / "thinwire")))
    assert_each_has_an_error_of_its_own(states(earlier / "thinwire"))


@pytest.mark.slow
@needs["lightning"]
def test_a_resumed_lightning_run_has_the_same_bits(tmp_path: Path) -> None:
    through, resumed = tmp_path / "through", tmp_path / "resumed"
    torchrun("lightning_loop.py", "--epochs", 2, "--exchange", "star-topk", "--out", through)
    earlier, last = through / "epoch=0.ckpt", "epoch=1.ckpt"
    torchrun("lightning_loop.py", "--epochs", 2, "--exchange", "star-topk", "--out", resumed, "--resume", earlier)
    weights = [torch.load(folder / last, weights_only=True)["state_dict"] for folder in (through, resumed)]
    assert same(*weights)
    assert same(made(states(through / f"{last}.thinwire")), made(states(resumed / f"{last}.thinwire")))
    assert_each_has_an_error_of_its_own(states(Path(f"{earlier}.thinwire")))


@pytest.mark.slow
@needs["transformers"]
def test_a_resumed_trainer_has_the_same_bits(tmp_path: Path) -> None:
    through, resumed = tmp_path / "through", tmp_path / "resumed"
    common = ("--steps", 12, "--save-every", 6, "--exchange", "star-topk", "--out")
    torchrun("transformers_trainer.py", *common, through)
    earlier, last = through / "checkpoint-6", "checkpoint-12"
    torchrun("transformers_trainer.py", *common, resumed, "--resume", earlier)
    assert same(load_file(through / last / "model.safetensors"), load_file(resumed / last / "model.safetensors"))
    assert same(made(states(through / last / "thinwire")), made(states(resumed / last / "thinwire")))
    assert_each_has_an_error_of_its_own(states(earlier / "thinwire"))


def test_thinwire_alone_brings_none_of_them() -> None:
    names = ("accelerate", "lightning", "transformers")
    program = f"import sys, thinwire; thinwire.attach; print([name for name in {names} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"
