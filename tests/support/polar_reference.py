"""Replicas of one matrix under direction="polar", in float64, by a singular value decomposition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


def polar(B: Tensor) -> Tensor:
    """U V^T of B = U S V^T, without the directions in which B has nothing."""
    U, S, Vh = torch.linalg.svd(B.double(), full_matrices=False)
    kept = 1e-12 * S.max() < S
    return U[:, kept] @ Vh[kept]


@dataclass
class PolarReference:
    """Open steps take the mean gradient, and after local steps the mean of weights and momenta."""

    X0: Tensor
    replicas: int
    lr: float = 0.02
    momentum: float = 0.95
    wd: float = 0.01
    look_ahead: float = 0.0
    local_steps: int = 0
    X: list[Tensor] = field(init=False)
    M: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.X = [self.X0.double().clone() for _ in range(self.replicas)]
        self.M = [torch.zeros_like(X) for X in self.X]

    def rmmc(self, gradients: Sequence[Tensor]) -> float:
        changes = []
        for M, G in zip(self.M, gradients, strict=True):
            before, after = M.norm(), (self.momentum * M + G.double()).norm()
            changes.append(((after - before).abs() / before).item())
        return max(changes)

    def step(self, gradients: Sequence[Tensor], gate_open: bool) -> None:
        G = [g.double() for g in gradients]
        if gate_open:
            if self.local_steps:
                self.X, self.M = self._means(self.X), self._means(self.M)
            G = self._means(G)
        m, n = self.X0.shape
        for i, g in enumerate(G):
            self.M[i] = self.momentum * self.M[i] + g
            U = polar(self.M[i] + self.look_ahead * g)
            self.X[i] = (1 - self.lr * self.wd) * self.X[i] - self.lr * math.sqrt(m / n) * U
        self.local_steps = 0 if gate_open else self.local_steps + 1

    def _means(self, each: Sequence[Tensor]) -> list[Tensor]:
        mean = sum(each[1:], each[0]) / self.replicas
        return [mean.clone() for _ in each]
