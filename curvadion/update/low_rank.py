"""Low-rank factors of the momentum as the direction (Dion, arXiv 2504.05295, algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from curvadion import ops
from curvadion.layout.states import create_right_factors, right_factor_shapes
from curvadion.update.direction import Direction, How, Taken
from curvadion.update.gradients import Gradients
from curvadion.update.parameter import (
    Matrix,
    Parameter,
    dtype_of,
    open_shards,
    product_dtype,
    remember_scales,
    rounding_seeds,
    scale_before,
)
from curvadion.update.plan import Plan
from curvadion.update.power_iteration import (
    LowRank,
    Stack,
    left_products,
    power_iteration,
    right_products,
)


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

    def state_shapes(self, X: Tensor, options: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return right_factor_shapes(X, options)

    def step(self, batch: Plan, gradients: Gradients, begun: Any, how: How) -> Taken:
        stacks = batch.stacks
        _look_ahead_(gradients, lambda p: float(p.group["look_ahead"]))
        factors = power_iteration([_as_stack(s, how.inside_replica) for s in stacks])
        _update(stacks, factors, how.number)
        if how.remember:
            remember_scales(stacks, [of_stack.scale for of_stack in factors])
        _look_ahead_(gradients, lambda p: -p.group["look_ahead"] * (1 - p.feedback))
        return LowRankTaken(batch, factors)


class LowRankTaken(Taken):
    """A step along U = P Q^T."""

    def __init__(self, plan: Plan, factors: list[LowRank]) -> None:
        super().__init__(plan)
        self._factors = factors

    def ranks(self) -> list[int]:
        return [factors.Q.shape[2] for factors in self._factors]

    def turn_momenta_(
        self, changes: Sequence[Tensor], shares: Sequence[Tensor], decay: float = 0.0
    ) -> None:
        momenta = [_as_stack(stack, True) for stack in self.stacks]
        right = right_products(momenta, [factors.P for factors in self._factors])
        each = zip(momenta, self._factors, changes, strict=True)
        left = left_products([replace(s, B=list(C), Q=list(f.Q)) for s, f, C in each])
        for matrices, T, share, R in zip(self.stacks, left, shares, right, strict=True):
            # C U^T M = (C Q) (M^T P)^T: (m_i, r) = (m_i, n_j) (n_j, r), then (m_i, r) (r, n_j)
            T = T * -share[:, None, None]
            ones = [1.0] * len(matrices)
            with open_shards(matrices, [m.parameter.M for m in matrices]) as (M,):
                ops.low_rank_update_(M, list(T), list(R), ones, ones)


def _look_ahead_(gradients: Gradients, share: Callable[[Parameter], float]) -> None:
    """M <- M + share G, while a direction is computed from it; does not copy M."""
    shares = gradients.each(share)
    if any(shares):
        ops.local_step_(gradients.M, gradients.G, [-s for s in shares], [1.0] * len(shares))


def _as_stack(matrices: Sequence[Matrix], inside_replica: bool) -> Stack:
    layout, parameter = matrices[0].layout, matrices[0].parameter
    return Stack(
        layout=layout.inside_replica() if inside_replica else layout,
        B=[m.M for m in matrices],
        Q=[m.Q for m in matrices],
        right_factor=parameter.group["right_factor"],
        dtype=product_dtype(parameter.X),
        stored=parameter.M.dtype,
        scale=scale_before(matrices),
    )


def _update(stacks: Sequence[Sequence[Matrix]], factors: Sequence[LowRank], step: int) -> None:
    """X <- (1 - lr wd) X - lr scale P Q^T, and M <- M - (1 - mu) P R^T under error feedback."""
    matrices = [m for stack in stacks for m in stack]
    if not matrices:
        return
    P, R, Q = ([one for found in factors for one in found[i]] for i in range(3))
    for found, stack in zip(factors, stacks, strict=True):
        ops.copy_([m.Q for m in stack], found.Q)
    # The plain rule has no feedback, so momenta need not be read again.
    feeds_back = any(m.parameter.feedback for m in matrices)
    fed_back = matrices if feeds_back else ()
    with (
        open_shards(matrices, [m.parameter.local for m in matrices]) as (X,),
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
            [m.parameter.feedback for m in fed_back],
            rounding_seeds(matrices, step),
        )
