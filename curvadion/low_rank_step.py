"""The Dion update of all matrices of a plan (arXiv 2504.05295, algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvadion import ops
from curvadion.plan import Matrix, Plan, as_stack
from curvadion.power_iteration import LowRank, power_iteration


def accumulate_momenta(plan: Plan) -> None:
    """M <- M + G (error feedback) or M <- mu M + G (plain), with the local gradient.

    A gradient that this replica misses counts as zero.
    """
    pushed = [(p, G) for p in plan.dion if (G := p.G) is not None]
    if pushed:
        ops.accumulate_(
            [p.M for p, _ in pushed], [G for _, G in pushed], [p.momentum_decay for p, _ in pushed]
        )
    for p in plan.dion:
        if p.G is None and p.momentum_decay != 1.0:
            p.M.mul_(p.momentum_decay)


def low_rank_step(plan: Plan, norms: Tensor | None, *, inside_replica: bool) -> None:
    """Power iteration on the accumulated momenta, then the update of X, M and Q.

    Args:
        plan: the matrices that take part.
        norms: Frobenius norms of the accumulated momenta, in the plan's order, (k,); None if no
            gate reads them.
        inside_replica: leave the other replicas out.
    """
    stacks = plan.stacks()
    factors = power_iteration([as_stack(s, inside_replica=inside_replica) for s in stacks])
    for matrices, low_rank in zip(stacks, factors, strict=True):
        _update(matrices, low_rank)
    if norms is not None and stacks:
        order = [i for stack in plan.stack_positions() for i in stack]
        drops = torch.cat([_drop(*stack) for stack in zip(stacks, factors, strict=True)])
        plan.store_norms(_norms_after(plan, norms, drops[torch.tensor(order).argsort()]))


def _update(matrices: Sequence[Matrix], low_rank: LowRank) -> None:
    P, R, Q, _ = low_rank
    # One at a time where a piece is a padded copy, so that never more than one such copy exists.
    batches = [matrices] if matrices[0].is_view else [[m] for m in matrices]
    for batch, first in zip(batches, range(len(matrices)), strict=False):
        X, M = [m.X for m in batch], [m.M for m in batch]
        here = slice(first, first + len(batch))
        ops.low_rank_update_(
            X,
            P[here].unbind(),
            Q[here].unbind(),
            [m.group["lr"] * m.layout.update_scale for m in batch],
            [m.parameter.decay for m in batch],
            M,
            R[here].unbind(),
            [m.feedback for m in batch],
        )
        for m, X_piece, M_piece in zip(batch, X, M, strict=True):
            m.write(X_piece, M_piece)
    for m, q in zip(matrices, Q, strict=True):
        m.Q.copy_(q)


def _drop(matrices: Sequence[Matrix], low_rank: LowRank) -> Tensor:
    """This rank's summand of ||M||^2 - ||M - c P R^T||^2 = 2 c <M^T P, R> - c^2 ||R||^2, (k,).

    Holds for orthonormal P. R may be the mean over replicas; M^T P is this replica's own.
    """
    layout = matrices[0].layout
    c = low_rank.R.new_tensor([m.feedback for m in matrices])
    inner = (low_rank.own_R * low_rank.R).sum(dim=(1, 2))
    square = layout.columns.counted(low_rank.R).square().sum(dim=(1, 2)) * layout.share_of_R()
    return 2 * c * inner - c.square() * square


def _norms_after(plan: Plan, norms: Tensor, drops: Tensor) -> Tensor:
    """Norms of the momenta after the error feedback, without a second pass over them."""
    return (norms.square() - plan.sum_over_shards(drops)).clamp_min(0).sqrt()
