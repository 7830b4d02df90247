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
    for m in plan.matrices:
        if m.G is None and m.momentum_decay != 1.0:
            m.M.mul_(m.momentum_decay)
    pushed = [(m, m.G) for m in plan.matrices if m.G is not None]
    if pushed:
        ops.accumulate_(
            [m.M for m, _ in pushed], [G for _, G in pushed], [m.momentum_decay for m, _ in pushed]
        )


def low_rank_step(plan: Plan, norms: Tensor | None, *, inside_replica: bool) -> None:
    """Power iteration on the accumulated momenta, then the update of X, M and Q.

    Args:
        plan: the matrices that take part.
        norms: Frobenius norms of the accumulated momenta, in the plan's order, (k,); None if no
            gate reads them.
        inside_replica: leave the other replicas out.
    """
    stacks = plan.stacks()
    layouts = [stack[0].layout for stack in stacks]
    if inside_replica:
        layouts = [layout.without_replicas() for layout in layouts]
    factors = power_iteration([as_stack(*pair) for pair in zip(stacks, layouts, strict=True)])
    for matrices, low_rank in zip(stacks, factors, strict=True):
        _update(matrices, low_rank)
    if norms is not None:
        position = {id(m): i for i, m in enumerate(plan.matrices)}
        for matrices, low_rank in zip(stacks, factors, strict=True):
            _store_norms(matrices, low_rank, norms[[position[id(m)] for m in matrices]])


def _update(matrices: Sequence[Matrix], low_rank: LowRank) -> None:
    P, R, Q, _ = low_rank
    ops.low_rank_update_(
        [m.layout.oriented(m.X) for m in matrices],
        list(P),
        list(Q),
        step=[m.group["lr"] * m.layout.update_scale for m in matrices],
        decay=[m.decay for m in matrices],
    )
    fed_back = [i for i, m in enumerate(matrices) if m.error_feedback]
    ops.error_feedback_(
        [matrices[i].layout.oriented(matrices[i].M) for i in fed_back],
        [P[i] for i in fed_back],
        [R[i] for i in fed_back],
        [1 - matrices[i].group["mu"] for i in fed_back],
    )
    for m, q in zip(matrices, Q, strict=True):
        m.Q.copy_(q)


def _store_norms(matrices: Sequence[Matrix], low_rank: LowRank, norms: Tensor) -> None:
    """||M - c P R^T||^2 = ||M||^2 - 2 c <M^T P, R> + c^2 ||R||^2 for orthonormal P.

    R may be the mean over replicas; M^T P is this replica's own. No second pass over M.
    """
    c = norms.new_tensor([1 - m.group["mu"] if m.error_feedback else 0.0 for m in matrices])
    inner = (low_rank.own_R * low_rank.R).sum(dim=(1, 2))
    square = low_rank.R.square().sum(dim=(1, 2))
    after = norms.square() - 2 * c * inner + c.square() * square
    torch._foreach_copy_(
        [m.state["momentum_norm"] for m in matrices], list(after.clamp_min(0).sqrt().unbind())
    )
