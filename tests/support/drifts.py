"""How far replicas have drifted."""

import math

import torch
import torch.distributed as dist

from curvadion.comm.collectives import group_size, mean_


@torch.no_grad()
def drift(optimizer):
    """sqrt( mean over replicas of ||X_i - mean||^2 ) / ||mean||; collective."""
    plan, replicas = optimizer._present_plan(), optimizer._replicas.process_group
    if group_size(replicas) == 1:
        return 0.0
    squares = torch.zeros(2, dtype=torch.float64)
    for p in plan.parameters:
        mean = p.local.to(torch.promote_types(p.X.dtype, torch.float32), copy=True)
        mean_([mean], replicas)
        both = torch.stack([(p.local - mean).square().sum(), mean.square().sum()]).double()
        squares += both / plan.copies_inside(p)
    if plan.inside is not None:
        dist.all_reduce(squares, group=plan.inside)
    mean_([squares], replicas)
    apart, norm = squares.tolist()
    return math.sqrt(apart / norm) if norm > 0 else 0.0
