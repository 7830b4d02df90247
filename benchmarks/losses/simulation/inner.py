"""Local steps of replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from benchmarks.losses.simulation.world import Weights, World
from curvadion.layout.matrix import UPDATE_SCALES, Extent
from curvadion.ops.newton_schulz import inverse_root
from curvadion.update.newton_schulz import polar_express
from curvadion.update.orthonormalize import orthonormal_columns

BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8
CHOSEN = 0.25  # share of rows or columns that Dion2 takes
Direction = Literal["adamw", "low_rank", "polar", "normuon", "dion2", "nordion2"]
POLAR = ("polar", "normuon", "dion2", "nordion2")


@dataclass(frozen=True)
class Inner:
    """A replica's own optimizer.

    Attributes:
        direction: of a matrix: "adamw", "low_rank" (Dion's power iteration of full rank) or one of
            POLAR.
        lr: the highest learning rate, of matrices.
        elementwise: learning rate of the AdamW parameters beside directions, as a share of ``lr``.
        look_ahead: weight of the gradient beside the momentum, in directions.
        mu: momentum of directions.
        weight_decay: of matrices.
        newton_schulz_steps: of polar directions.
        update_scale: key of ``UPDATE_SCALES``, which scale the step of an (m, n) matrix.
    """

    direction: Direction
    lr: float
    elementwise: float = 1.0
    look_ahead: float = 0.0
    mu: float = 0.95
    weight_decay: float = 0.01
    newton_schulz_steps: int = 4
    update_scale: str = "spectral"


class Replicas:
    """The weights of all replicas, and their optimizers' states.

    Attributes:
        X: weights. M: momenta of matrices with directions. U: the directions of the last step.
        scales: factors on the step of each matrix.
    """

    def __init__(self, inner: Inner, world: World, count: int):
        self.inner = inner
        self.X = {name: x.repeat(count, *[1] * x.ndim) for name, x in world.initial.items()}
        directed = world.matrices if inner.direction != "adamw" else []
        self.M = {name: torch.zeros_like(self.X[name]) for name in directed}
        self.U: Weights = {}
        scale = UPDATE_SCALES[inner.update_scale]
        self.scales = {name: scale(*M.shape[1:]) for name, M in self.M.items()}
        self._decayed = set(world.matrices)
        self._by_shape: dict[torch.Size, list[str]] = {}
        for name, M in self.M.items():
            self._by_shape.setdefault(M.shape, []).append(name)
        self._Q: dict[torch.Size, Tensor] = {}
        self._v: dict[torch.Size, Tensor] = {}
        others = {name: X for name, X in self.X.items() if name not in self.M}
        self._first = {name: torch.zeros_like(X) for name, X in others.items()}
        self._second = {name: torch.zeros_like(X) for name, X in others.items()}

    def step(self, step: int, scale: float, gradients: Weights) -> None:
        """Take step number ``step``, from 0, at a share of the highest learning rates."""
        lr = scale * self.inner.lr
        for names in self._by_shape.values():
            self._directed(names, lr, gradients)
        for name in self._first:
            self._adamw(name, step, lr, gradients[name])

    def _directed(self, names: Sequence[str], lr: float, gradients: Weights) -> None:
        inner = self.inner
        G = torch.stack([gradients[name] for name in names])
        M = torch.stack([self.M[name] for name in names]) + G
        U, missed = self._directions(M + inner.look_ahead * G, M)
        # Error feedback: the part of the momentum that the factors capture decays, the rest stays.
        M = inner.mu * M + (1 - inner.mu) * missed
        for name, u, m in zip(names, U, M, strict=True):
            self.U[name] = u
            self.M[name].copy_(m)
            self.X[name].mul_(1 - inner.weight_decay * lr).sub_(u, alpha=lr * self.scales[name])

    def _directions(self, B: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
        """(k, replicas, m, n) -> directions, and the part of B (for Dion2, of M) that they miss."""
        shape, tall = B.shape, B.shape[-2] >= B.shape[-1]
        B, M = (each if tall else each.mT for each in (B.flatten(0, 1), M.flatten(0, 1)))
        kind = self.inner.direction
        if kind == "low_rank":
            U, missed = self._power_iteration(shape[1:], B)
        elif kind in ("dion2", "nordion2"):
            norms = B.abs().sum(-2)
            count = math.ceil(CHOSEN * B.shape[-1])
            chosen = torch.zeros_like(norms).scatter_(-1, norms.topk(count).indices, 1.0)
            # Zero columns stay zero and do not change the polar factor of the others.
            U, missed = self._polar(B * chosen[:, None]), M * (1 - chosen[:, None])
        else:
            U, missed = self._polar(B), torch.zeros_like(B)
        if kind in ("normuon", "nordion2"):
            U = self._normed(shape[1:], U, tall=tall)
        pair = (U, missed) if tall else (U.mT, missed.mT)
        return pair[0].reshape(shape), pair[1].reshape(shape)

    def _polar(self, B: Tensor) -> Tensor:
        return B @ inverse_root(B.mT @ B, polar_express(self.inner.newton_schulz_steps)).Z

    def _normed(self, key: torch.Size, U: Tensor, *, tall: bool) -> Tensor:
        """Divide the rows of the matrix, which are U's columns if it is wide, by their RMS.

        Rows that have not moved keep their second moment.
        """
        along = -1 if tall else -2
        squares = U.square().sum(along, keepdim=True)
        width = (U != 0).sum(along, keepdim=True).clamp_min(1)
        v = self._v.get(key, torch.zeros_like(squares))
        v = torch.where(squares > 0, torch.lerp(squares / width, v, BETA2), v)
        self._v[key] = v
        moved = U / (v.sqrt() + EPSILON)
        kept: Tensor = U.norm(dim=(-2, -1)) / moved.norm(dim=(-2, -1))
        return moved * kept[:, None, None]

    def _power_iteration(self, key: torch.Size, B: Tensor) -> tuple[Tensor, Tensor]:
        """Take Dion's power iteration at full rank; keeps Q by key."""
        n = B.shape[-1]
        if key not in self._Q:
            self._Q[key] = torch.randn(n, n).to(B.device).expand(len(B), n, n)
        [found] = orthonormal_columns([B @ self._Q[key]], [Extent(range(B.shape[-2]))])
        P = found.columns
        R = B.mT @ P
        self._Q[key] = R / (R.norm(dim=-2, keepdim=True) + EPSILON)
        return P @ self._Q[key].mT, B - P @ R.mT

    def _adamw(self, name: str, step: int, lr: float, G: Tensor) -> None:
        first = self._first[name].lerp_(G, 1 - BETA1) / (1 - BETA1 ** (step + 1))
        second = self._second[name].lerp_(G.square(), 1 - BETA2) / (1 - BETA2 ** (step + 1))
        matrix = name in self._decayed  # if AdamW takes all parameters
        if matrix:
            self.X[name].mul_(1 - self.inner.weight_decay * lr)
        share = 1.0 if self.inner.direction == "adamw" else self.inner.elementwise
        self.X[name].sub_(first / (second.sqrt() + EPSILON), alpha=lr * share)
