"""What a replica does while the gate is closed: nothing of it reaches another replica."""

from __future__ import annotations

import torch
from torch import Tensor

from curvadion import ops
from curvadion.low_rank_step import accumulate_momenta, low_rank_step
from curvadion.plan import Plan


def local_dion_step(plan: Plan, norms: Tensor | None) -> None:
    """A Dion step inside the replica, with its own momentum, P, R and Q."""
    accumulate_momenta(plan)
    low_rank_step(plan, norms, inside_replica=True)


def local_gradient_step(plan: Plan, norms: Tensor | None) -> None:
    """X <- (1 - lr wd) X - local_lr G (CurvaDion); the momentum keeps the gradient for later."""
    accumulate_momenta(plan)
    stepped = [(m, m.G) for m in plan.matrices if m.G is not None]
    ops.gradient_step_(
        [m.X for m, _ in stepped],
        [G for _, G in stepped],
        step=[m.local_lr for m, _ in stepped],
        decay=[m.decay for m, _ in stepped],
    )
    if norms is not None and plan.matrices:
        torch._foreach_copy_(
            [m.state["momentum_norm"] for m in plan.matrices], list(norms.unbind())
        )
