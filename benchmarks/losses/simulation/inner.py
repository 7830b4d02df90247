"""Local steps of replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from benchmarks.losses.simulation.world import Weights, World
from curvadion.layout.matrix import UPDATE_SCALES, Extent, MatrixLayout
from curvadion.update.newton_schulz import Scales, polar_factors, row_stack, scaled
from curvadion.update.orthonormalize import orthonormal_columns

BETA1, EPSILON = 0.9, 1e-8
ROW_DECAY = 0.95  # of NorMuon's second moments
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
        beta2: of AdamW.
        clip: the most that the norm of all of a replica's gradients may be; None: any.
    """

    direction: Direction
    lr: float
    elementwise: float = 1.0
    look_ahead: float = 0.0
    mu: float = 0.95
    weight_decay: float = 0.01
    newton_schulz_steps: int = 4
    update_scale: str = "spectral"
    beta2: float = 0.95
    clip: float | None = None


class Stack(NamedTuple):
    """The k matrices of one shape, of all replicas.

    Attributes:
        names: of the matrices. scale: of their steps.
        X, M: weights and momenta, (k, replicas, m, n).
    """

    names: list[str]
    scale: float
    X: Tensor
    M: Tensor


class Replicas:
    """The weights of all replicas, and their optimizers' states.

    Attributes:
        X: weights. M: momenta of matrices with directions. U: the directions of the last step.
        scales: factors on the step of each matrix.
    """

    def __init__(self, inner: Inner, world: World, count: int):
        self.inner = inner
        self.X = {name: x.repeat(count, *[1] * x.ndim) for name, x in world.initial.items()}
        self.M: Weights = {}
        self.U: Weights = {}
        self.scales: dict[str, float] = {}
        self._stacks = self._stacked(world)
        self._roots: dict[torch.Size, tuple[Tensor, ...]] = {}
        self._Q: dict[torch.Size, Tensor] = {}
        self._v: dict[torch.Size, Tensor] = {}
        # AdamW's parameters; those that decay come first.
        matrices = set(world.matrices)
        others = [name for name in self.X if name not in self.M]
        self._others = sorted(others, key=lambda name: name not in matrices)
        self._decayed = sum(name in matrices for name in others)
        self._first = [torch.zeros_like(self.X[name]) for name in self._others]
        self._second = [torch.zeros_like(self.X[name]) for name in self._others]

    def _stacked(self, world: World) -> list[Stack]:
        """Move matrices with directions into stacks by shape; X and M become views of them."""
        names_by_shape: dict[torch.Size, list[str]] = {}
        for name in world.matrices if self.inner.direction != "adamw" else ():
            names_by_shape.setdefault(self.X[name].shape, []).append(name)
        stacks = []
        for shape, names in names_by_shape.items():
            X = torch.stack([self.X[name] for name in names])
            scale = UPDATE_SCALES[self.inner.update_scale](*shape[1:])
            stack = Stack(names, scale, X, torch.zeros_like(X))
            for i, name in enumerate(names):
                self.X[name] = stack.X[i]
                self.M[name] = stack.M[i]
                self.scales[name] = scale
            stacks.append(stack)
        return stacks

    def step(
        self, step: int, scale: float, gradients: Weights, others: float | None = None
    ) -> None:
        """Take step number ``step``, from 0, at shares of the highest learning rates.

        Args:
            step: its number.
            scale: share of the rate of matrices.
            gradients: of all parameters.
            others: share of the rate of AdamW's parameters; None: ``scale``.
        """
        inner = self.inner
        if inner.clip is not None:
            _clip_(gradients, inner.clip)
        self._directed(scale * inner.lr, gradients)
        self._adamw(step, (scale if others is None else others) * inner.lr, gradients)

    def _directed(self, lr: float, gradients: Weights) -> None:
        inner = self.inner
        B = []
        for stack in self._stacks:
            G = torch.stack([gradients[name] for name in stack.names])
            stack.M.add_(G)
            B.append(stack.M + inner.look_ahead * G)
        directions = self._directions(B)
        for stack, (U, missed) in zip(self._stacks, directions, strict=True):
            # Error feedback: the part of the momentum that the factors capture decays, the rest
            # stays.
            stack.M.mul_(inner.mu)
            if missed is not None:
                stack.M.add_(missed, alpha=1 - inner.mu)
            stack.X.mul_(1 - inner.weight_decay * lr).sub_(U, alpha=lr * stack.scale)
            self.U.update(zip(stack.names, U, strict=True))

    def _directions(self, B: Sequence[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
        """Return directions of stacks B (k, replicas, m, n), and what they miss.

        That is the part of B, for Dion2 of the momentum; None if it is zero.
        """
        kind = self.inner.direction
        oriented = [_oriented(each) for each in B]
        missed: list[Tensor | None] = [None] * len(B)
        if kind == "low_rank":
            keys = [each.shape[1:] for each in B]
            pairs = [self._power_iteration(*pair) for pair in zip(keys, oriented, strict=True)]
            U, missed = [u for u, _ in pairs], [rest for _, rest in pairs]
        else:
            if kind in ("dion2", "nordion2"):
                for i, stack in enumerate(self._stacks):
                    chosen = _largest_columns(oriented[i])
                    missed[i] = _oriented(stack.M) * ~chosen
                    # Zero columns stay zero and do not change the polar factor of the others.
                    oriented[i] = oriented[i] * chosen
            U = self._polar(oriented)
        if kind in ("normuon", "nordion2"):
            shapes = [each.shape[1:] for each in B]
            U = [self._normed(*pair) for pair in zip(shapes, U, strict=True)]
        return [
            (_as_before(u, each), None if rest is None else _as_before(rest, each))
            for u, rest, each in zip(U, missed, B, strict=True)
        ]

    def _polar(self, B: Sequence[Tensor]) -> list[Tensor]:
        """The package's iterations, on all matrices together; float16 on a GPU.

        B: (k, m, n) with m >= n.
        """
        options = {
            "newton_schulz": "polar_express",
            "newton_schulz_steps": self.inner.newton_schulz_steps,
        }
        stacks = []
        for rows in scaled([each.contiguous() for each in B]):
            k, m, n = rows.B.shape
            if rows.B.shape not in self._roots:
                self._roots[rows.B.shape] = rows.e.new_zeros(k).unbind()
            scales = Scales(self._roots[rows.B.shape], [1.0] * k, ())
            stacks.append(row_stack(options, MatrixLayout.whole((m, n)), rows, scales))
        return [U.float() for U in polar_factors(stacks)]

    def _normed(self, key: torch.Size, U: Tensor) -> Tensor:
        """Divide the rows of the matrix, which are U's columns if it is wide, by their RMS.

        Rows that have not moved keep their second moment.
        """
        tall = key[-2] >= key[-1]
        along = -1 if tall else -2
        # v <- 0.95 v + 0.05 squares / width,  U' = U / (sqrt(v) + eps),  U <- U' |U| / |U'|
        squares = U.square().sum(along, keepdim=True)
        width = (U != 0).sum(along, keepdim=True).clamp_min(1)
        v = self._v.get(key, torch.zeros_like(squares))
        v = torch.where(squares > 0, torch.lerp(squares / width, v, ROW_DECAY), v)
        self._v[key] = v
        moved = U / (v.sqrt() + EPSILON)
        scale: Tensor = U.norm(dim=(-2, -1)) / moved.norm(dim=(-2, -1))
        return moved * scale[:, None, None]

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

    def _adamw(self, step: int, lr: float, gradients: Weights) -> None:
        if not self._others:
            return
        inner = self.inner
        X = [self.X[name] for name in self._others]
        G = [gradients[name] for name in self._others]
        # m <- beta1 m + (1 - beta1) G,  v <- beta2 v + (1 - beta2) G^2
        torch._foreach_lerp_(self._first, G, 1 - BETA1)
        torch._foreach_lerp_(self._second, torch._foreach_mul(G, G), 1 - inner.beta2)
        # X <- (1 - lr wd) X - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)
        share = 1.0 if inner.direction == "adamw" else inner.elementwise
        if decayed := X[: self._decayed]:
            torch._foreach_mul_(decayed, 1 - inner.weight_decay * lr)
        root = torch._foreach_sqrt(self._second)
        torch._foreach_div_(root, math.sqrt(1 - inner.beta2 ** (step + 1)))
        torch._foreach_add_(root, EPSILON)
        torch._foreach_addcdiv_(X, self._first, root, -lr * share / (1 - BETA1 ** (step + 1)))


def _clip_(gradients: Weights, most: float) -> None:
    """Scale each replica's gradients down to a norm, as torch's clip_grad_norm_ does."""
    squares = [G.flatten(1).square().sum(1) for G in gradients.values()]
    norm = torch.stack(squares).sum(0).sqrt()
    factors = (most / (norm + 1e-6)).clamp_max(1.0)
    for G in gradients.values():
        G.mul_(factors.view(-1, *[1] * (G.dim() - 1)))


def _oriented(x: Tensor) -> Tensor:
    """(k, replicas, m, n) -> (k * replicas, larger side, smaller side)."""
    flat = x.flatten(0, 1)
    return flat if flat.shape[-2] >= flat.shape[-1] else flat.mT


def _as_before(oriented: Tensor, x: Tensor) -> Tensor:
    """Give an oriented stack the shape of x, (k, replicas, m, n)."""
    tall = x.shape[-2] >= x.shape[-1]
    return (oriented if tall else oriented.mT).reshape(x.shape)


def _largest_columns(B: Tensor) -> Tensor:
    """Return which columns of B, (k, m, n), Dion2 takes: (k, 1, n) bool."""
    norms = B.abs().sum(-2)
    count = math.ceil(CHOSEN * B.shape[-1])
    chosen = torch.zeros_like(norms, dtype=torch.bool)
    chosen.scatter_(-1, norms.topk(count).indices, value=True)
    return chosen[:, None]
