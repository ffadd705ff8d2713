"""Fashion-MNIST and a small CNN for it, for the scripts beside this file."""

from __future__ import annotations

import functools
import gzip
from pathlib import Path

import numpy as np
import torch
from torch import nn

PLACES = ("/usr/share/datasets/fashion-mnist", "/usr/share/dataset-fashion-mnist", "/usr/share/fashion-mnist")
Examples = tuple[torch.Tensor, torch.Tensor]


@functools.cache
def load(part: str) -> Examples:
    """Images, as bytes, and labels of "train" or "t10k": IDX files, as Debian's dataset-fashion-mnist installs them."""
    for place in map(Path, PLACES):
        if place.is_dir():
            images, labels = (_bytes(place / f"{part}-{name}-ubyte.gz") for name in ("images-idx3", "labels-idx1"))
            return torch.from_numpy(images[16:].reshape(-1, 1, 28, 28)), torch.from_numpy(labels[8:]).long()
    raise SystemExit(f"Fashion-MNIST is in none of {', '.join(PLACES)}: apt-get install dataset-fashion-mnist")


def _bytes(path: Path) -> np.ndarray:
    return np.frombuffer(bytearray(gzip.decompress(path.read_bytes())), np.uint8)


def pixels(images: torch.Tensor) -> torch.Tensor:
    """Of mean 0 and deviation 1."""
    return (images.float() / 255 - 0.286) / 0.353


def net(channels: int = 16) -> nn.Module:
    """55,338 parameters; 26,698 with 8 channels."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * channels * 49, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def judge(flat: torch.Tensor, examples: Examples, channels: int = 16) -> tuple[float, float]:
    """The loss and the accuracy of a model given by its parameters."""
    model = net(channels)
    nn.utils.vector_to_parameters(flat.clone(), model.parameters())
    with torch.no_grad():
        said = torch.cat([model(pixels(part)) for part in examples[0].split(500)])
    right = (said.argmax(1) == examples[1]).double().mean()
    return float(nn.functional.cross_entropy(said, examples[1])), float(right)


def first(part: str, count: int) -> Examples:
    images, labels = load(part)
    return images[:count], labels[:count]
