"""The Dion update of all matrices of a plan (arXiv 2504.05295, algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from curvadion import ops
from curvadion.update.gradients import Gradients
from curvadion.update.momentum import accumulate_momenta, look_ahead_, measure_momenta
from curvadion.update.parameter import Matrix, Parameter, batches, open_shards
from curvadion.update.plan import Plan
from curvadion.update.power_iteration import LowRank, power_iteration
from curvadion.update.stack import as_stack


class LowRankStep(NamedTuple):
    """What a step was made of: the plan, its matrices in stacks, and the factors of each stack."""

    plan: Plan
    stacks: list[list[Matrix]]
    factors: list[LowRank]

    def among(self, parameters: Sequence[Parameter]) -> LowRankStep:
        """The part of it that moved these parameters."""
        these = set(map(id, parameters))
        plan = self.plan.select([id(p) in these for p in self.plan.parameters])
        if plan is self.plan:
            return self
        places = {id(m): (s, i) for s, stack in enumerate(self.stacks) for i, m in enumerate(stack)}
        stacks, factors = plan.stacks(), []
        for stack in stacks:
            # Matrices of one stack were in one stack before.
            (s, *_), rows = zip(*(places[id(m)] for m in stack), strict=True)
            factors.append(LowRank(*(factor[list(rows)] for factor in self.factors[s])))
        return LowRankStep(plan, stacks, factors)


def dion_step(
    plan: Plan,
    gradients: Gradients,
    norms: Tensor | None,
    *,
    step: int,
    inside_replica: bool,
    remember: bool = True,
) -> LowRankStep:
    """M <- M + G, a power iteration on the momenta, then the update of X, M and Q.

        P = orth( mean_i(M_i Q) ),   R = mean_i( M_i^T P ),   Q = column_normalize(R)
        M_i <- M_i - (1 - mu) P R^T,   X <- (1 - lr wd) X - lr sqrt(m / n) P Q^T

    With Nesterov's look-ahead P and R are those of M + nesterov G, and the error feedback is
    M <- M - (1 - mu) (P R^T - nesterov G).

    Args:
        plan: the parameters that move.
        gradients: of its matrices.
        norms: Frobenius norms of the momenta with these gradients, in the plan's order, (k,); None
            if no gate reads them.
        step: how many steps were taken before, which seeds a stochastic rounding.
        inside_replica: leave the other replicas out of the means.
        remember: note how long R is. Steps that share products with other replicas may depend on
            such notes only if all replicas have made the same ones.

    Returns:
        The factors and their matrices. They take as much memory as 2 r / n of the momenta.
    """
    accumulate_momenta(gradients)
    stacks = plan.stacks()
    look_ahead_(gradients, lambda p: p.nesterov)
    factors = power_iteration([as_stack(s, inside_replica=inside_replica) for s in stacks])
    _update(stacks, factors, step)
    if remember:
        for stack, factor in zip(stacks, factors, strict=True):
            torch._foreach_copy_([m.R_scale for m in stack], list(factor.scale))
    look_ahead_(gradients, lambda p: -p.nesterov * (1 - p.feedback))
    if norms is not None and any(p.nesterov for p in plan.dion):
        measure_momenta(plan)
    elif norms is not None and stacks:
        drops = plan.by_matrix([_drop(*stack) for stack in zip(stacks, factors, strict=True)])
        plan.store_norms(_norms_after(plan, norms, drops))
    return LowRankStep(plan, stacks, factors)


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
        for batch in batches([update.matrix for update in alike]):
            _apply(alike[batch], step, feeds_back=feeds_back, random=random)


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
            [m.group["lr"] * m.layout.update_scale for m in matrices],
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
    c = low_rank.scale.new_tensor([m.feedback for m in matrices])
    # Lengths of about one, whose squares fit into any dtype.
    unit = low_rank.scale.clamp_min(torch.finfo(low_rank.R.dtype).tiny)
    R, own_R = (each / unit.to(each.dtype)[:, None, None] for each in (low_rank.R, low_rank.own_R))
    inner = (own_R * R).sum(dim=(1, 2))
    square = layout.columns.counted(R).square().sum(dim=(1, 2)) * layout.share_of_R()
    return (2 * c * inner - c.square() * square) * unit.square()


def _norms_after(plan: Plan, norms: Tensor, drops: Tensor) -> Tensor:
    """Norms of the momenta after the error feedback, without a second pass over them."""
    return (norms.double().square() - plan.sum_over_shards(drops)).clamp_min(0).sqrt()
