"""What every rank leaves beside a framework's checkpoint, and how it is found again. Ranks are threads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from thinwire import Checkpoint, Synchronizer
from thinwire.integrations import saving
from thinwire.link.thread import ThreadLink, ThreadWorld


def trained(link: ThreadLink, steps: Sequence[int]) -> Synchronizer:
    """A synchronizer that has made these steps."""
    net = nn.Linear(20, 1, bias=False)
    sync = Synchronizer(net, "star-topk", ratio=0.1, link=link)
    for step in steps:
        noise = torch.Generator().manual_seed(2 * step + link.rank)
        net.weight.grad = torch.randn(1, 20, generator=noise)
        sync.average_gradients()
    return sync


def errors(sync: Synchronizer) -> torch.Tensor:
    error: torch.Tensor = sync.state_dict()["error"]["weight"]
    return error


def test_every_rank_finds_its_own_state(tmp_path: Path) -> None:
    def leave(link: ThreadLink) -> torch.Tensor:
        sync = trained(link, range(4))
        saving.save(sync, tmp_path)
        return errors(sync)

    def find(link: ThreadLink) -> tuple[int, torch.Tensor]:
        sync = trained(link, [])
        saving.load(sync, tmp_path)
        return sync.step, errors(sync)

    left = ThreadWorld(2).run(leave)
    assert not torch.equal(left[0], left[1])
    for error, (step, found) in zip(left, ThreadWorld(2).run(find), strict=True):
        assert step == 4
        assert torch.equal(error, found)


def test_a_step_that_is_asked_for_is_the_one_that_is_found(tmp_path: Path) -> None:
    def program(link: ThreadLink) -> int:
        sync = trained(link, range(2))
        saving.save(sync, tmp_path)
        saving.save(trained(link, range(3)), tmp_path)
        saving.load(sync, tmp_path, step=2)
        return sync.step

    assert ThreadWorld(2).run(program) == [2, 2]


@pytest.mark.parametrize("step", [None, 3])
def test_a_checkpoint_that_some_rank_has_no_state_in_is_gone_on_from_and_that_is_said(
    tmp_path: Path, step: int | None
) -> None:
    def program(link: ThreadLink) -> tuple[int, torch.Tensor]:
        sync = trained(link, range(3))
        if link.rank == 0:
            saving.save(sync, tmp_path)
        fresh = trained(link, [])
        saving.load(fresh, tmp_path, step)
        return fresh.step, errors(fresh)

    with pytest.warns(UserWarning, match="holds no state of thinwire that all ranks have"):
        outcomes = ThreadWorld(2).run(program)
    assert [made for made, _ in outcomes] == [0, 0]
    assert not any(error.any() for _, error in outcomes)


def test_a_damaged_state_is_an_error_and_not_a_beginning(tmp_path: Path) -> None:
    def program(link: ThreadLink) -> None:
        sync = trained(link, range(3))
        saving.save(sync, tmp_path)
        if link.rank == 1:
            tensors = tmp_path / "step-000000003" / "rank-00001.safetensors"
            content = bytearray(tensors.read_bytes())
            content[-1] ^= 1
            tensors.write_bytes(content)
        saving.load(sync, tmp_path)

    with pytest.raises(Exception, match="is damaged"):
        ThreadWorld(2).run(program)
    assert Checkpoint(tmp_path, 0, 2).steps() == [3]
