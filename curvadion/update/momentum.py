"""Momenta and their norms: what a step's gradients do to them, before and after it is decided."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor

from curvadion import ops
from curvadion.update.gradients import Gradients
from curvadion.update.parameter import Parameter
from curvadion.update.plan import Plan

_decay = attrgetter("momentum_decay")


class MomentumNorms(NamedTuple):
    """Frobenius norms of a step's momenta, one per matrix, (k,).

    before: without the step's gradients. after: with them; a matrix without one has decayed.
    """

    before: Tensor
    after: Tensor


def momentum_norms(plan: Plan, gradients: Gradients) -> MomentumNorms:
    """Norms before and after this step's gradients; collective over the shards of a replica.

    Reads only: if the step is skipped, there is nothing to undo.
    """
    before = plan.stored_norms()
    if not plan.matrices:
        # A rank that holds none of the experts has no norms, but takes part in the decision.
        after = before
    else:
        lists = zip(plan.dion, gradients.M, gradients.G, strict=True)
        each = [(m, M, G) for p, M, G in lists for m in p.matrices]
        after = ops.momentum_norms(
            [m.elements(M) for m, M, _ in each],
            [m.elements(G) for m, _, G in each],
            [m.parameter.momentum_decay for m, _, _ in each],
        )
    return MomentumNorms(before, plan.norms_over_shards(after))


def accumulate_momenta(gradients: Gradients) -> None:
    """M <- M + G (error feedback) or M <- mu M + G (plain), with the local gradient."""
    ops.accumulate_(gradients.M, gradients.G, gradients.each(_decay))


def look_ahead_(gradients: Gradients, share: Callable[[Parameter], float]) -> None:
    """M <- M + share G, for as long as a direction is taken from it; no copy of M is made."""
    shares = gradients.each(share)
    if any(shares):
        ops.local_step_(gradients.M, gradients.G, [-s for s in shares], [1.0] * len(shares))


def measure_momenta(plan: Plan) -> None:
    """Store the momenta's norms anew; collective over the shards of a replica."""
    if plan.matrices:
        here = ops.norms([m.elements(m.parameter.M) for m in plan.matrices])
        plan.store_norms(plan.norms_over_shards(here))
