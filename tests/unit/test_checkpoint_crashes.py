"""Saving that fails or is killed: the generation before stays, and half of a state is never taken for one."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import assert_same, files_of, small_state
from tests.disks import small_disk
from thinwire.train.checkpoint import Checkpoint


class Killed(BaseException):
    pass


DISK_CALLS = ("mkdir", "open", "fsync", "unlink", "replace", "rmdir")


class Disk:
    """Counts the calls that touch the disk and lets the one numbered `fatal` fail, or that one and all after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fatal: int, error: BaseException, forever: bool) -> None:
        self.calls = 0
        self.fatal, self.error, self.forever = fatal, error, forever
        for name in DISK_CALLS:
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self.fatal or (self.forever and self.calls > self.fatal):
                raise self.error
            return original(*args, **kwargs)

        return call


def interrupted_saves(
    monkeypatch: pytest.MonkeyPatch, base: Path, error: BaseException, forever: bool
) -> Iterator[Path]:
    """For every disk call of a third save: a directory in which that call was the one that failed."""
    for fatal in range(1, 1000):
        directory = base / str(fatal)
        checkpoint = Checkpoint(directory, rank=0, world_size=1, keep=2)
        checkpoint.save(small_state(10), 10)
        checkpoint.save(small_state(20), 20)
        with monkeypatch.context() as patch:
            disk = Disk(patch, fatal, error, forever)
            try:
                checkpoint.save(small_state(30), 30)
            except type(error):
                pass
        if disk.calls < fatal:
            assert fatal > 15, "the save was meant to be interrupted at every one of its steps"
            return
        yield directory


def assert_one_whole_state(directory: Path) -> int:
    checkpoint = Checkpoint(directory, rank=0, world_size=1)
    state, step = checkpoint.load()
    assert step in (20, 30)
    assert_same(state, small_state(step))
    return step


def test_killed_at_any_moment_of_a_save_the_old_or_the_new_state_is_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []
    for directory in interrupted_saves(monkeypatch, tmp_path, Killed(), forever=True):
        seen.append(assert_one_whole_state(directory))
        again = Checkpoint(directory, rank=0, world_size=1, keep=1)
        again.save(small_state(30), 30)
        assert files_of(directory) == ["step-000000030/rank-00000.json", "step-000000030/rank-00000.safetensors"]
    assert seen == sorted(seen) and set(seen) == {20, 30}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_an_error_at_any_moment_of_a_save_leaves_the_generations_and_no_temporary_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    for directory in interrupted_saves(monkeypatch, tmp_path, OSError(number, os.strerror(number)), forever=False):
        newest = assert_one_whole_state(directory)
        assert not [name for name in files_of(directory) if name.endswith(".tmp")]
        if newest == 20:
            assert Checkpoint(directory, rank=0, world_size=1).steps() == [10, 20]
            assert not (directory / "step-000000030").exists()


def test_killed_while_saving_a_step_again_no_mixture_is_taken_for_a_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for fatal in range(1, 30):
        checkpoint = Checkpoint(tmp_path / str(fatal), rank=0, world_size=1)
        checkpoint.save(small_state(10), 10)
        checkpoint.save(small_state(20), 20)
        with monkeypatch.context() as patch:
            Disk(patch, fatal, Killed(), forever=True)
            try:
                checkpoint.save(small_state(21), 20)
            except Killed:
                pass
        state, step = checkpoint.load()
        assert (step, state["step"]) in [(10, 10), (20, 20), (20, 21)]
        assert_same(state, small_state(state["step"]))


@pytest.fixture
def full_soon(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "1m") as folder:
        yield folder


def test_a_full_disk_leaves_the_generation_before_and_no_temporary_file(full_soon: Path) -> None:
    checkpoint = Checkpoint(full_soon, rank=0, world_size=1)
    checkpoint.save(small_state(10), 10)
    before = files_of(full_soon)
    with pytest.raises(OSError) as caught:
        checkpoint.save({"x": torch.ones(2**20)}, 20)
    assert caught.value.errno == errno.ENOSPC
    assert files_of(full_soon) == before and not (full_soon / "step-000000020").exists()
    assert_same(checkpoint.load(), (small_state(10), 10))
    checkpoint.save(small_state(20), 20)
    assert checkpoint.steps() == [10, 20]


def test_a_read_only_disk_leaves_the_generation_before(full_soon: Path) -> None:
    checkpoint = Checkpoint(full_soon, rank=0, world_size=1)
    checkpoint.save(small_state(10), 10)
    subprocess.run(["mount", "-o", "remount,ro", full_soon], check=True)
    with pytest.raises(OSError) as caught:
        checkpoint.save(small_state(20), 20)
    assert caught.value.errno == errno.EROFS
    assert_same(checkpoint.load(), (small_state(10), 10))


def test_a_folder_that_another_rank_removes_while_it_is_empty_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint(tmp_path, rank=0, world_size=2)
    folder = tmp_path / "step-000000005"
    removed = []
    make = Path.mkdir

    def make_and_lose(path: Path, *args: Any, **kwargs: Any) -> None:
        make(path, *args, **kwargs)
        if path == folder and not removed:
            removed.append(path.rmdir())

    monkeypatch.setattr(Path, "mkdir", make_and_lose)
    checkpoint.save({"x": torch.ones(3)}, 5)
    assert removed
    assert torch.equal(checkpoint.load(5)[0]["x"], torch.ones(3))
