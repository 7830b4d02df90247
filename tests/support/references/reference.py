"""Float64 references, written from the papers' equations and from nothing in the package.

Replicas are simulated in one process: each is a dictionary of float64 tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


def positive_qr(A: Tensor) -> Tensor:
    """The Q of the QR factorisation whose R has a positive diagonal."""
    q, r = torch.linalg.qr(A)
    return q * r.diagonal().sign()


def initial_q(m: int, n: int, r: int) -> Tensor:
    """The library's documented start: Q ~ N(0, 1) drawn from the global shape."""
    generator = torch.Generator().manual_seed((m * 1_000_003 + n) * 1_000_003 + r)
    return torch.randn(min(m, n), r, generator=generator).double()


def rank_of(fraction: float, shape: Sequence[int], multiple: int = 1) -> int:
    """A fraction of the shorter side, rounded up to a multiple, or else the whole side.

    The fraction is a decimal: 0.07 of 100 are 7.
    """
    shorter = min(shape)
    return min(multiple * math.ceil(round(fraction * shorter, 9) / multiple), shorter)


def sizes_of(length: int, blocks: int | Sequence[int]) -> list[int]:
    """The sizes of blocks, of which a number says that they are equal."""
    if isinstance(blocks, int):
        assert length % blocks == 0
        return [length // blocks] * blocks
    assert sum(blocks) == length
    return [*blocks]


@dataclass
class DionReference:
    """Replicas of one matrix X under CurvaDion (DESIGN: Dion's algorithm 1 with a gate)."""

    X0: Tensor
    replicas: int
    r: int
    lr: float = 0.02
    momentum: float = 0.95
    wd: float = 0.01
    look_ahead: float = 0.0
    local_lr: float | None = None
    local_step: str = "dion"
    momentum_rule: str = "error_feedback"
    right_factor: str = "column_normalized"
    average_weights: bool = True
    local_steps: int = 0
    X: list[Tensor] = field(init=False)
    M: list[Tensor] = field(init=False)
    Q: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        m, n = self.X0.shape
        self.X = [self.X0.double().clone() for _ in range(self.replicas)]
        self.M = [torch.zeros(m, n, dtype=torch.float64) for _ in range(self.replicas)]
        self.Q = [initial_q(m, n, self.r) for _ in range(self.replicas)]

    def rmmc(self, gradients: Sequence[Tensor]) -> float:
        changes = []
        for M, G in zip(self.M, gradients, strict=True):
            before, after = M.norm(), self.accumulated(M, G).norm()
            changes.append(((after - before).abs() / before).item())
        return max(changes)

    def accumulated(self, M: Tensor, G: Tensor) -> Tensor:
        return (M if self.momentum_rule == "error_feedback" else self.momentum * M) + G.double()

    def step(self, gradients: Sequence[Tensor], gate_open: bool) -> None:
        if gate_open and self.local_steps and self.average_weights:
            mean = sum(self.X) / self.replicas
            self.X = [mean.clone() for _ in self.X]
        self.M = [self.accumulated(M, G) for M, G in zip(self.M, gradients, strict=True)]
        if gate_open:
            self._dion(list(range(self.replicas)), gradients)
        else:
            for i, G in enumerate(gradients):
                if self.local_step == "dion":
                    self._dion([i], gradients)
                else:
                    eta = self.lr if self.local_lr is None else self.local_lr
                    self.X[i] = (1 - self.lr * self.wd) * self.X[i] - eta * G.double()
        self.local_steps = 0 if gate_open else self.local_steps + 1

    def _dion(self, members: list[int], gradients: Sequence[Tensor]) -> None:
        m, n = self.X0.shape
        flip = m < n
        ahead = [self.look_ahead * gradients[i].double() for i in members]
        B = [self.M[i] + G for i, G in zip(members, ahead, strict=True)]
        B = [b.mT if flip else b for b in B]
        P = positive_qr(sum(b @ self.Q[i] for b, i in zip(B, members, strict=True)) / len(members))
        R = sum(b.mT @ P for b in B) / len(members)
        # Dion's epsilon is for columns of zeros.
        Q = positive_qr(R) if self.right_factor == "qr" else R / R.norm(dim=0, keepdim=True)
        for i, G in zip(members, ahead, strict=True):
            if self.momentum_rule == "error_feedback":
                feedback = (1 - self.momentum) * P @ R.mT
                self.M[i] = self.M[i] - (feedback.mT if flip else feedback)
                self.M[i] = self.M[i] + (1 - self.momentum) * G
            update = P @ Q.mT
            self.X[i] = (1 - self.lr * self.wd) * self.X[i] - self.lr * math.sqrt(m / n) * (
                update.mT if flip else update
            )
            self.Q[i] = Q


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Frobenius distance relative to the expected tensor's norm."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()
