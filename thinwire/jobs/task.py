"""What a worker trains and tests: a model, a loss, its batches, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from thinwire.jobs import data, models
from thinwire.jobs.job import Job

TEST_BATCH = 250


class Task(NamedTuple):
    """What to train, and with what."""

    module: nn.Module
    loss: Callable[[Any, Any], torch.Tensor]
    batches: data.Batches
    tested: Callable[[], Iterator[data.Batch]]
    is_text: bool = False


def task_of(job: Job, group: dist.ProcessGroup | None = None) -> Task:
    """The model and this worker's data. Call on all workers."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data.seed_all([job.seed])  # the same model on all
    if job.own:
        made = data.own(job.task)
        if not any(p.requires_grad for p in made.model.parameters()):
            raise ValueError(f"{job.task}: the model has no parameters to train.")
        least = torch.tensor(len(made.train_loader))
        dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
        batches = data.Loader(made.train_loader, int(least), rank, job.seed)
        return Task(made.model, _checked(job.task, made.loss), batches, lambda: data.tested(made.test_loader))
    loaded = data.load(job.task, folder=job.folder_of_data, text=job.text)
    parts = data.partition(loaded.train.labels, world_size, job.concentration, job.seed)
    assert job.chosen_model is not None, "it is not the user's"
    module = models.build(job.chosen_model, loaded)
    share = data.Share(loaded.train, parts, rank, job.batch, job.seed)
    return Task(module, cross_entropy, share, lambda: loaded.test.batches(TEST_BATCH), job.task == "chars")


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Over classes of images, or over characters at every place of a text."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _checked(task: str, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], torch.Tensor]:
    """The user's own: it must give one number, and one that the model has a part in where it is to learn from it."""

    def checked(answer: Any, y: Any) -> torch.Tensor:
        found = loss(answer, y)
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            shown = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)
            raise ValueError(f"{task}: the loss must give one number, like loss.mean(), got {shown}.")
        if torch.is_grad_enabled() and not found.requires_grad:
            raise ValueError(f"{task}: the loss does not depend on the model, so there is nothing to learn.")
        return found

    return checked


def check_used(task: str, module: nn.Module) -> None:
    """After backward(): DDP waits for the gradient of every parameter, and an exchange waits with it."""
    unused = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    if unused:
        names = ", ".join(repr(name) for name in unused[:5]) + (", ..." if unused[5:] else "")
        raise ValueError(
            f"{task}: the loss does not depend on {names}. Leave out of the model what forward() does not use, or "
            "freeze it by requires_grad_(False)."
        )


def optimizer_of(job: Job, module: nn.Module) -> torch.optim.Optimizer:
    if job.chosen_optimizer == "adam":
        return torch.optim.Adam(module.parameters(), lr=job.chosen_lr)
    return torch.optim.SGD(module.parameters(), lr=job.chosen_lr, momentum=job.momentum)


class Tested(NamedTuple):
    """How well a model does: the mean loss, and the share of right answers where there is a right answer to give."""

    loss: float
    accuracy: float | None


@torch.no_grad()
def evaluate(task: Task) -> Tested:
    """On a part of the test set that is always the same. Training goes on as if it had not been."""
    random = data.random_state()  # a loader may draw from it
    task.module.eval()
    total, right, number, is_choice = 0.0, 0, 0, not task.is_text
    for x, y in task.tested():
        answer = task.module(x)
        total += float(task.loss(answer, y)) * len(y)
        number += len(y)
        is_choice = is_choice and isinstance(answer, torch.Tensor) and answer.dim() == 2 and _are_labels(y)
        right += int((answer.argmax(1) == y).sum()) if is_choice else 0
    task.module.train()
    data.set_random_state(random)
    return Tested(total / max(number, 1), right / number if is_choice and number else None)


def _are_labels(y: object) -> bool:
    return isinstance(y, torch.Tensor) and y.dim() == 1 and not y.is_floating_point()
