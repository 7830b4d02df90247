"""How far replicas have drifted."""

import torch
import torch.distributed as dist


@torch.no_grad()
def drift(optimizer):
    """The largest distance of an element from its mean over replicas; collective."""
    plan, replicas = optimizer._collective_plan(), optimizer.replicas.process_group
    largest = torch.zeros(())
    several = replicas is not None and replicas.size() > 1
    for p in plan.parameters if several else ():
        mean = p.local.to(torch.promote_types(p.X.dtype, torch.float32), copy=True)
        dist.all_reduce(mean, group=replicas)
        mean /= replicas.size()
        largest = torch.cat([largest.view(1), (p.local - mean).abs().flatten()]).max()
    if plan.all_ranks is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=plan.all_ranks)
    return largest.item()
