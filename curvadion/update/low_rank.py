"""Low-rank factors of the momentum as the direction (Dion, arXiv 2504.05295, algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvadion import ops
from curvadion.layout.right_factors import create_right_factors
from curvadion.ops.tensors import from_host
from curvadion.update.direction import Direction, Taken
from curvadion.update.gradients import Gradients
from curvadion.update.momentum import look_ahead_
from curvadion.update.parameter import Matrix, dtype_of, open_shards, runs_of_views
from curvadion.update.plan import Plan
from curvadion.update.power_iteration import (
    LowRank,
    left_products,
    power_iteration,
    right_products,
)
from curvadion.update.stack import as_stack, remember_scales


class PowerIteration(Direction):
    """A power iteration of rank r on the momenta.

        P = orth( mean_i(M_i Q) ),   R = mean_i( M_i^T P ),   Q = column_normalize(R)
        M_i <- M_i - (1 - mu) P R^T,   X <- (1 - lr wd) X - lr sqrt(m / n) P Q^T

    With Nesterov's look-ahead P and R are those of M + look_ahead G, and the error feedback is
    M <- M - (1 - mu) (P R^T - look_ahead G).
    """

    shares_factors = True

    def create_state(self, X: Tensor, options: Mapping[str, Any]) -> dict[str, Tensor]:
        return create_right_factors(X, options, dtype_of(options["q_dtype"], X))

    def step(
        self,
        batch: Plan,
        gradients: Gradients,
        *,
        step: int,
        inside_replica: bool,
        remember: bool,
    ) -> Taken:
        stacks = batch.stacks()
        look_ahead_(gradients, lambda p: p.look_ahead)
        factors = power_iteration([as_stack(s, inside_replica=inside_replica) for s in stacks])
        _update(stacks, factors, step)
        if remember:
            remember_scales(stacks, [of_stack.scale for of_stack in factors])
        look_ahead_(gradients, lambda p: -p.look_ahead * (1 - p.feedback))
        return LowRankTaken(batch, stacks, factors)


class LowRankTaken(Taken):
    """A step along U = P Q^T. The factors take as much memory as 2 r / n of the momenta."""

    def __init__(self, plan: Plan, stacks: list[list[Matrix]], factors: list[LowRank]) -> None:
        super().__init__(plan, stacks)
        self._factors = factors

    def ranks(self) -> list[int]:
        return [factors.Q.shape[2] for factors in self._factors]

    def drops(self) -> list[Tensor]:
        return [_drop(*stack) for stack in zip(self.stacks, self._factors, strict=True)]

    def turn_momenta_(
        self, changes: Sequence[Tensor], shares: Sequence[Tensor], decay: float = 0.0
    ) -> None:
        momenta = [as_stack(stack, inside_replica=True) for stack in self.stacks]
        right, _ = right_products(momenta, [factors.P for factors in self._factors])
        left = left_products(
            [
                replace(stack, B=list(C), Q=list(factors.Q))
                for stack, factors, C in zip(momenta, self._factors, changes, strict=True)
            ]
        )
        for stack, T, share, R in zip(self.stacks, left, shares, right, strict=True):
            # C U^T M = (C Q) (M^T P)^T: (m_i, r) = (m_i, n_j) (n_j, r), then (m_i, r) (r, n_j)
            _subtract(stack, T * -share[:, None, None], R)


def _subtract(matrices: Sequence[Matrix], T: Tensor, R: Tensor) -> None:
    """M <- M - T R^T."""
    for run in runs_of_views(matrices):
        chosen = matrices[run]
        ones = [1.0] * len(chosen)
        with open_shards(chosen, [m.parameter.M for m in chosen]) as (M,):
            ops.low_rank_update_(M, list(T[run]), list(R[run]), ones, ones)


class _Update(NamedTuple):
    matrix: Matrix
    P: Tensor
    Q: Tensor
    R: Tensor


def _update(stacks: Sequence[Sequence[Matrix]], factors: Sequence[LowRank], step: int) -> None:
    updates = []
    for matrices, (P, R, Q, *_) in zip(stacks, factors, strict=True):
        updates += [_Update(*one) for one in zip(matrices, P, Q, R, strict=True)]
        torch._foreach_copy_([m.Q for m in matrices], list(Q))
    updates.sort(key=lambda update: not update.matrix.is_view)  # views in as few calls as can be
    for (feeds_back, random), chosen in groupby(updates, key=_kind):
        alike = list(chosen)
        for run in runs_of_views([update.matrix for update in alike]):
            _apply(alike[run], step, feeds_back=feeds_back, random=random)


def _kind(update: _Update) -> tuple[bool, bool]:
    parameter = update.matrix.parameter
    return parameter.error_feedback, parameter.stochastic_rounding


def _apply(updates: Sequence[_Update], step: int, *, feeds_back: bool, random: bool) -> None:
    """X <- (1 - lr wd) X - lr scale P Q^T, and M <- M - (1 - mu) P R^T under error feedback."""
    matrices, P, Q, R = zip(*updates, strict=True)
    weights = [m.parameter.local for m in matrices]
    # The plain rule feeds nothing back: its momenta need not be read again.
    fed_back = matrices if feeds_back else ()
    with (
        open_shards(matrices, weights) as (X,),
        open_shards(fed_back, [m.parameter.M for m in fed_back]) as (M,),
    ):
        ops.low_rank_update_(
            X,
            P,
            Q,
            [m.group["lr"] * m.update_scale for m in matrices],
            [m.parameter.decay for m in matrices],
            M,
            R if feeds_back else (),
            [m.feedback for m in fed_back],
            [m.rounding_seed(step) for m in matrices] if random else None,
        )


def _drop(matrices: Sequence[Matrix], low_rank: LowRank) -> Tensor:
    """This rank's summand of ||M||^2 - ||M - c P R^T||^2 = 2 c <M^T P, R> - c^2 ||R||^2, (k,).

    float64. Holds for orthonormal P. R may be the mean over replicas; M^T P is this replica's own.
    """
    layout = matrices[0].layout
    scale = low_rank.scale
    c = from_host([m.feedback for m in matrices], scale.dtype, scale.device)
    # Lengths of about one, whose squares fit into any dtype.
    unit = scale.clamp_min(torch.finfo(low_rank.R.dtype).tiny)
    R, own_R = (each / unit.to(each.dtype)[:, None, None] for each in (low_rank.R, low_rank.own_R))
    inner = (own_R * R).sum(dim=(1, 2))
    square = layout.columns.counted(R).square().sum(dim=(1, 2)) * layout.share_of_R()
    return (2 * c * inner - c.square() * square) * unit.square()
