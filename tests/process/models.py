"""Small models, their data, and a training loop, for the tests with real processes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Cnn(nn.Module):
    """Convolutions with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.head = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.view(-1, 1, 8, 8)).flatten(1))


class Transformer(nn.Module):
    """Eight tokens of eight features."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, dropout=0.0, batch_first=True)
        self.embed = nn.Linear(8, 16)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(x.view(-1, 8, 8))).mean(1))


class ManyLayers(nn.Module):
    """Many small layers: one DDP bucket each when buckets are tiny."""

    def __init__(self, layers: int = 50) -> None:
        super().__init__()
        self.first = nn.Linear(64, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return self.head(x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10))


MODELS = {"mlp": mlp, "cnn": Cnn, "transformer": Transformer, "many-layers": ManyLayers}


def make(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name]()


def batch(rank: int, step: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Data of its own for every rank and step, the same in every run."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(size, 64, generator=generator)
    return x, (x[:, :10].argmax(1) + rank) % 10


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = batch(rank, step)
    return F.cross_entropy(model(x), y)


def flat_parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def flat_gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
