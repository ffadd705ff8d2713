"""Every model learns on every shape that it is for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from thinwire.jobs import job, models
from thinwire.jobs.data import Data, Images, Text

SHAPES = {"digits": (1, 8, 8), "fashion-mnist": (1, 28, 28), "chars": (64,)}


def _data(task: str) -> Data:
    generator = torch.Generator().manual_seed(0)
    shape = SHAPES[task]
    if task == "chars":
        windows = (torch.arange(16)[:, None] + torch.arange(65)) % 7
        examples: Images | Text = Text(windows.to(torch.uint8), torch.zeros(16))
        return Data(train=examples, test=examples, shape=shape, classes=7)
    pixels = torch.randint(0, 256, (16, *shape), generator=generator, dtype=torch.uint8)
    examples = Images(pixels, torch.arange(16) % 10, 128.0, 64.0)
    return Data(train=examples, test=examples, shape=shape, classes=10)


CASES = [(task, model) for task, known in job.MODELS.items() for model in known]


def test_the_names_are_those_that_exist() -> None:
    assert {model for _, model in CASES} == set(models.BUILDERS) == set(job.LEARNING)
    assert all(job.DEFAULT_MODELS[task] in job.MODELS[task] for task in job.MODELS)


@pytest.mark.parametrize(("task", "name"), CASES)
def test_a_model_comes_to_know_one_batch(task: str, name: str) -> None:
    data = _data(task)
    torch.manual_seed(0)
    model = models.build(name, data)
    x, y = data.train.batch(torch.arange(16))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        logits = model(x)
        assert logits.shape == (*y.shape, data.classes)
        loss = F.cross_entropy(logits.flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert all(p.grad is not None for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) < 300_000


def test_a_resnet_has_twenty_layers_and_batch_norms() -> None:
    model = models.build("resnet20", _data("digits"))
    layers = [m for m in model.modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear))]
    assert len(layers) == 20
    assert sum(isinstance(m, torch.nn.BatchNorm2d) for m in model.modules()) == 19


def test_a_gpt_does_not_look_ahead() -> None:
    data = _data("chars")
    model = models.build("gpt", data)
    x, _ = data.train.batch(torch.arange(1))
    changed = x.clone()
    changed[0, 40:] = (changed[0, 40:] + 1) % data.classes
    with torch.no_grad():
        before, after = model(x), model(changed)
    assert torch.equal(before[0, :40], after[0, :40]) and not torch.equal(before[0, 40:], after[0, 40:])
