"""Laws of trying ratios out: only what can be undone is tried, how often, and over what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.laws.test_control import a_net
from thinwire.control.adaptive import Adaptive
from thinwire.link.thread import ThreadWorld
from thinwire.train.explore import Explorer
from thinwire.train.sync import Synchronizer


class Wrapped(nn.Module):
    """A model under another name, with more that is trained than is averaged."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.head = net, nn.Linear(3, 3)


def an_explorer(net: nn.Module, model: Any = None, step: Any = print, comm: Any = None) -> Explorer:
    """For a run of one rank that asks for it."""
    comm = Synchronizer(net, Adaptive(explore="restore"), link=ThreadWorld(1).links[0]) if comm is None else comm
    return Explorer(comm, model or net, torch.optim.SGD(net.parameters(), lr=0.1), step)


def test_a_model_that_is_not_what_is_averaged_is_refused_by_the_first_parameter_that_it_lacks() -> None:
    net = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 2))
    with pytest.raises(ValueError, match="'0.weight' is averaged, but is none of this model's"):
        an_explorer(net, nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 2)))
    with pytest.raises(ValueError, match=r"'1.weight' is averaged, .* Give the model that comm was made for"):
        an_explorer(net, net[0])
    an_explorer(net, Wrapped(net))


def test_what_is_no_step_or_no_synchronizer_is_refused_with_a_reason() -> None:
    with pytest.raises(TypeError, match="step must be a function that trains on a batch, got Tensor"):
        an_explorer(a_net(400), step=torch.zeros(3))
    with pytest.raises(TypeError, match="comm must be what attach gave, or a Synchronizer, got Linear"):
        an_explorer(a_net(400), comm=nn.Linear(2, 2))
