"""AdamW and Lion steps of a plan's parameters that are not matrices."""

from __future__ import annotations

import torch
import torch.distributed as dist

from curvadion.comm.collectives import mean_
from curvadion.layout.dtensor import local
from curvadion.update.plan import Plan
from curvadion.update.scalar import elementwise_step


def elementwise_steps(plan: Plan, replicas: dist.ProcessGroup | None) -> None:
    """Steps with the gradients' means over replicas; a missing gradient is zero.

    Args:
        plan: the parameters that move.
        replicas: the process group to average over; None for this replica's own gradients.
    """
    gradients = [torch.zeros_like(p.local) if p.G is None else p.G for p in plan.elementwise]
    mean_(gradients, replicas)
    gradient = {id(p): G for p, G in zip(plan.elementwise, gradients, strict=True)}
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
