"""What a replica does while the gate is closed: nothing of it reaches another replica."""

from __future__ import annotations

from operator import attrgetter

from torch import Tensor

from curvadion import ops
from curvadion.update.low_rank_step import LowRankStep, accumulate_momenta, low_rank_step
from curvadion.update.plan import Plan, Pushed


def local_dion_step(
    plan: Plan, pushed: Pushed, norms: Tensor | None, *, step: int, remember: bool
) -> LowRankStep:
    """A Dion step inside the replica, with its own momentum, P, R and Q."""
    accumulate_momenta(plan, pushed)
    return low_rank_step(plan, pushed, norms, step=step, inside_replica=True, remember=remember)


def local_gradient_step(plan: Plan, pushed: Pushed, norms: Tensor | None, *, step: int) -> None:
    """X <- (1 - lr wd) X - local_lr G (CurvaDion); the momentum keeps the gradient for later.

    A gradient that this rank misses is zero: another shard of the replica has one.
    """
    for chosen, seeds in pushed.by_rounding(step):
        ops.local_step_(
            chosen.X,
            chosen.G,
            chosen.each(attrgetter("local_lr")),
            chosen.each(attrgetter("decay")),
            chosen.M,
            chosen.each(attrgetter("momentum_decay")),
            seeds,
        )
    if not pushed.everyone:
        for p in plan.dion:
            if p.G is None:
                p.local.mul_(p.decay)
                p.M.mul_(p.momentum_decay)
    if norms is not None and plan.matrices:
        plan.store_norms(norms)
