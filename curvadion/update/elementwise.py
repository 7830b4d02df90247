"""AdamW and Lion steps of a plan's parameters that are not matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvadion.layout.dtensor import local
from curvadion.update.plan import Plan
from curvadion.update.scalar import elementwise_step, place_counter_


def elementwise_steps(plan: Plan, gradients: Sequence[Tensor]) -> None:
    """Steps of the parameters that are not matrices.

    Args:
        plan: the parameters that move.
        gradients: of ``plan.elementwise``.
    """
    gradient = {id(p): G for p, G in zip(plan.elementwise, gradients, strict=True)}
    for p in plan.elementwise:
        place_counter_(p.state, p.local)
    for parameters in plan.elementwise_by_group():
        elementwise_step(
            parameters[0].group["algorithm"],
            [p.local for p in parameters],
            [gradient[id(p)] for p in parameters],
            [
                {key: local(t) for key, t in p.state.items() if torch.is_tensor(t)}
                for p in parameters
            ],
            parameters[0].group,
        )
