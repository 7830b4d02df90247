"""The plain gradient step that a replica may take while the gate is closed (CurvaDion)."""

from __future__ import annotations

from operator import attrgetter

from torch import Tensor

from curvadion import ops
from curvadion.update.gradients import Gradients
from curvadion.update.plan import Plan


def gradient_step(plan: Plan, gradients: Gradients, norms: Tensor | None, *, step: int) -> None:
    """X <- (1 - lr wd) X - local_lr G; the momentum keeps the gradient for later (CurvaDion).

    Args:
        plan: the parameters that move.
        gradients: of its matrices.
        norms: Frobenius norms of the momenta with these gradients, (k,); None if no gate reads
            them.
        step: how many steps were taken before, which seeds a stochastic rounding.
    """
    for chosen, seeds in gradients.by_rounding(step):
        ops.local_step_(
            chosen.X,
            chosen.G,
            chosen.each(attrgetter("local_lr")),
            chosen.each(attrgetter("decay")),
            chosen.M,
            chosen.each(attrgetter("momentum_decay")),
            seeds,
        )
    if norms is not None and plan.matrices:
        plan.store_norms(norms)
