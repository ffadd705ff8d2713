"""Every method as its paper writes it: all nodes are columns of one matrix X, and mixing is X W.

The product's methods are held to these equations over 200 steps, to 1e-10 in double precision (tests/laws). Scripts use
them where eight nodes of the real thing would take too long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from thinwire.compress.quantize import Compressor, Draw


class Columns:
    """X (entry, node). W(t)[i, j] is the weight that node i gives to node j at step t.

    Args:
        compressor: as the method uses it (`Method.prepared`).
        options: gamma, beta, eps, of methods that have them.
    """

    def __init__(
        self, W: Callable[[int], np.ndarray], compressor: Compressor, X: np.ndarray, seed: int, **options: Any
    ) -> None:
        self.W, self.compressor, self.seed, self.options = W, compressor, seed, options
        self.X, self.t = X.copy(), 0
        self.hat, self.public, self.error, self.v = X.copy(), 0 * X, 0 * X, 0 * X

    def C(self, Z: np.ndarray) -> np.ndarray:
        """Every column compressed by itself."""
        columns = [
            self.compressor.apply(torch.from_numpy(Z[:, i].copy()), Draw(self.seed, self.t, i)).numpy()
            for i in range(Z.shape[1])
        ]
        return np.stack(columns, 1)

    def step(self, name: str, U: np.ndarray) -> None:
        """U is what the papers call -gamma G(X)."""
        W = self.W(self.t).T.astype(self.X.dtype)
        getattr(self, name)(W, U)
        self.t += 1

    def dpsgd(self, W: np.ndarray, U: np.ndarray) -> None:
        self.X = self.X @ W + U

    def naive(self, W: np.ndarray, U: np.ndarray) -> None:
        self.X = self.C(self.X) @ W + U

    def dcd(self, W: np.ndarray, U: np.ndarray) -> None:
        self.X = self.X + self.C(self.X @ W + U - self.X)

    def ecd(self, W: np.ndarray, U: np.ndarray) -> None:
        t = self.t + 2
        new = self.hat @ W + U
        self.hat = (1 - 2 / t) * self.hat + 2 / t * self.C((1 - 0.5 * t) * self.X + 0.5 * t * new)
        self.X = new

    def choco(self, W: np.ndarray, U: np.ndarray) -> None:
        self.public = self.public + self.C(self.X - self.public)
        self.X = self.X + U + self.options["gamma"] * (self.public @ W - self.public)

    def adagossip(self, W: np.ndarray, U: np.ndarray) -> None:
        self.public = self.public + self.C(self.X - self.public)
        gap, beta = self.public @ W - self.public, self.options["beta"]
        self.v = beta * self.v + (1 - beta) * gap**2
        self.X = self.X + U + self.options["gamma"] / (np.sqrt(self.v) + self.options["eps"]) * gap

    def deepsqueeze(self, W: np.ndarray, U: np.ndarray) -> None:
        V = self.X + U + self.error
        sent = self.C(V)
        self.error = V - sent
        self.X = self.X + U + self.options["gamma"] * (sent @ W - sent)
