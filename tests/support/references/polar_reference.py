"""Replicas of one matrix under polar directions, in float64, by a singular value decomposition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from support.references.reference import DionReference, rank_of

# As many iterations as bring every singular value to 1.
POLAR = {"direction": "polar", "newton_schulz_steps": 14}
OF_POLAR = ("direction", "rank_fraction")
KNOWN = ("lr", "look_ahead", "momentum_rule", "right_factor", "local_step", "local_lr")


def reference_of(
    matrix: Tensor, replicas: int, r: int, options: dict[str, Any]
) -> DionReference | PolarReference:
    """The reference of the optimizer's options."""
    known = {key: options[key] for key in KNOWN if key in options}
    if "direction" in options:
        polar = {key: options[key] for key in OF_POLAR if key in options}
        return PolarReference(matrix, replicas, **known, **polar)
    return DionReference(matrix, replicas, r, **known)


def polar(B: Tensor) -> Tensor:
    """U V^T of B = U S V^T, without the directions in which B has nothing."""
    U, S, Vh = torch.linalg.svd(B.double(), full_matrices=False)
    kept = 1e-12 * S.max() < S
    return U[:, kept] @ Vh[kept]


@dataclass
class PolarReference:
    """Open steps take the mean gradient, and after local steps the mean of weights and states.

    direction: "polar" (Muon), "normuon", "dion2" or "nordion2".
    """

    X0: Tensor
    replicas: int
    lr: float = 0.02
    momentum: float = 0.95
    wd: float = 0.01
    look_ahead: float = 0.0
    direction: str = "polar"
    rank_fraction: float = 1.0
    beta2: float = 0.95
    local_steps: int = 0
    X: list[Tensor] = field(init=False)
    M: list[Tensor] = field(init=False)
    v: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.X = [self.X0.double().clone() for _ in range(self.replicas)]
        self.M = [torch.zeros_like(X) for X in self.X]
        self.v = [torch.zeros(len(X), 1, dtype=torch.float64) for X in self.X]

    @property
    def decay(self) -> float:
        """What M is multiplied by before a step; Dion2 decays what it has used, afterwards."""
        return 1.0 if "dion2" in self.direction else self.momentum

    def rmmc(self, gradients: Sequence[Tensor]) -> float:
        changes = []
        for M, G in zip(self.M, gradients, strict=True):
            before, after = M.norm(), (self.decay * M + G.double()).norm()
            changes.append(((after - before).abs() / before).item())
        return max(changes)

    def step(self, gradients: Sequence[Tensor], gate_open: bool) -> None:
        G = [g.double() for g in gradients]
        if gate_open:
            if self.local_steps:
                self.X, self.M, self.v = map(self._means, (self.X, self.M, self.v))
            G = self._means(G)
        m, n = self.X0.shape
        for i, g in enumerate(G):
            self.M[i] = self.decay * self.M[i] + g
            U = self._direction(i, self.M[i] + self.look_ahead * g)
            self.X[i] = (1 - self.lr * self.wd) * self.X[i] - self.lr * math.sqrt(m / n) * U
        self.local_steps = 0 if gate_open else self.local_steps + 1

    def _direction(self, i: int, B: Tensor) -> Tensor:
        rows, columns = (slice(None) for _ in range(2))
        if "dion2" in self.direction:
            shorter = 1 if B.shape[0] >= B.shape[1] else 0
            count = rank_of(self.rank_fraction, B.shape)
            chosen = B.abs().sum(1 - shorter).topk(count).indices
            rows, columns = (rows, chosen) if shorter else (chosen, columns)
            self.M[i][rows, columns] *= self.momentum
        U = torch.zeros_like(B)
        some = polar(B[rows, columns])
        if "nor" in self.direction:
            v = self.v[i][rows]
            v = self.beta2 * v + (1 - self.beta2) * some.square().mean(1, keepdim=True)
            self.v[i][rows] = v
            shaped = some / (v.sqrt() + 1e-8)
            some = shaped * (some.norm() / shaped.norm())
        U[rows, columns] = some
        return U

    def _means(self, each: Sequence[Tensor]) -> list[Tensor]:
        mean = sum(each[1:], each[0]) / self.replicas
        return [mean.clone() for _ in each]
