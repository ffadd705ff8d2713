"""Small models of every kind that people train, each a minute's work on two cores."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from thinwire.jobs.data import Data


def build(name: str, data: Data) -> nn.Module:
    """An mlp, cnn, resnet20 or vit for images, or a gpt for text, for data of this shape."""
    return BUILDERS[name](data.shape, data.classes)


def mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two hidden layers. 50,826 parameters for digits, 235,146 for 28 x 28."""
    inputs = torch.Size(shape).numel()
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, classes)
    )


def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two convolutions and two linear layers. 202,738 parameters for 28 x 28."""
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), 120),
        nn.ReLU(),
        nn.Linear(120, classes),
    )


class ResNet20(nn.Module):
    """The ResNet of He et al. 2016, section 4.2, with n = 3: 20 layers, 0.27 million parameters.

    Images larger than 16 x 16 are halved by the first convolution, which saves three quarters of the work.
    """

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        stride = 2 if shape[1] > 16 else 1
        self.stem = nn.Sequential(
            nn.Conv2d(shape[0], 16, 3, stride, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
        )
        widths = [16, 16, 16, 32, 32, 32, 64, 64, 64]
        self.blocks = nn.Sequential(*(Residual(a, b) for a, b in zip([16, *widths], widths, strict=False)))
        self.head = nn.Linear(64, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.blocks(self.stem(x)).mean((2, 3))
        logits: torch.Tensor = self.head(features)
        return logits


class Residual(nn.Module):
    """Two convolutions and a way around them; where the width grows, the side is halved and the rest is zeros."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.stride, self.more = (1, 0) if before == after else (2, after - before)
        self.first = nn.Sequential(
            nn.Conv2d(before, after, 3, self.stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()
        )
        self.second = nn.Sequential(nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        around = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return F.relu(self.second(self.first(x)) + around)


class Block(nn.Module):
    """Attention and a linear pair, each with a norm before and a way around it. `causal`: nothing looks ahead."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.before_attention, self.before_linear = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        self.linear = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.queries_keys_values(self.before_attention(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.mixed(seen.transpose(1, 2).reshape(batch, length, width))
        y: torch.Tensor = x + self.linear(self.before_linear(x))
        return y


class Vit(nn.Module):
    """A vision transformer (Dosovitskiy et al. 2021) of 4 blocks: patches of 4 x 4, or of 2 x 2 for small images."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 64, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        patch = 4 if shape[1] > 16 else 2
        self.patches = nn.Conv2d(shape[0], width, patch, patch)
        self.places = nn.Parameter(0.02 * torch.randn((shape[1] // patch) * (shape[2] // patch), width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        logits: torch.Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return logits


class Gpt(nn.Module):
    """A decoder (Radford et al. 2019) of 2 blocks: at every place, which character comes next?"""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 96, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(classes, width)
        self.places = nn.Parameter(0.02 * torch.randn(shape[0], width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.characters(x) + self.places[: x.shape[1]]
        logits: torch.Tensor = self.head(self.norm(self.blocks(tokens)))
        return logits


BUILDERS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet20": ResNet20,
    "vit": Vit,
    "gpt": Gpt,
}
