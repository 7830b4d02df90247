"""How far replicas have drifted."""

import torch
import torch.distributed as dist

from curvadion.comm.collectives import group_size, mean_


@torch.no_grad()
def drift(optimizer):
    """The largest distance of an element from its mean over replicas; collective."""
    plan, replicas = optimizer._collective_plan(), optimizer.replicas.process_group
    largest = torch.zeros(())
    for p in plan.parameters if group_size(replicas) > 1 else ():
        mean = p.local.to(torch.promote_types(p.X.dtype, torch.float32), copy=True)
        mean_([mean], replicas)
        largest = torch.cat([largest.view(1), (p.local - mean).abs().flatten()]).max()
    if plan.all_ranks is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=plan.all_ranks)
    return largest.item()
