"""Exact means of weights and state over replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.comm.collectives import group_size, mean_
from curvadion.comm.groups import Group
from curvadion.layout.dtensor import local
from curvadion.layout.placements import global_shape
from curvadion.ops.tensors import Tensors
from curvadion.plan.parameter import Parameter, product_dtype
from curvadion.plan.plan import Plan
from curvadion.plan.state import StateKey, averaged
from curvadion.sync.base import Sync


def average_(tensors: Tensors, counters: Tensors, replicas: Group | None) -> None:
    """Replace tensors and scalar counters by their means over the replicas."""
    if group_size(replicas) == 1:
        return
    mean_(tensors, replicas)
    if counters:  # these may be on the CPU, where NCCL cannot reach them
        packed = torch.stack([c.detach().to(tensors[0].device) for c in counters])
        mean_([packed], replicas)
        torch._foreach_copy_(list(counters), list(packed.to(counters[0].device).unbind()))


def average_weights_(plan: Plan, replicas: Group | None) -> None:
    """Replace weights, and the moments of AdamW and Lion, by their means."""
    weights = [p.local for p in plan.parameters]
    moments = [local(x) for p in plan.elementwise for x in averaged(p.state).values()]
    average_([*weights, *moments], _counters(plan), replicas)


def average_everything_(
    plan: Plan,
    replicas: Group | None,
    sync: Sync,
    keys: Sequence[StateKey],
    kept: Sequence[Parameter] = (),
) -> None:
    """Replace weights, except those of ``kept``, and local state by their means.

    keys: of states that are not in the table of curvadion.plan.state.
    """
    before = [(p.local, p.local.clone()) for p in kept]
    ready = plan.select([bool(p.state) for p in plan.parameters])
    sync.before_average(ready.parameters)
    states = [local(x) for p in ready.parameters for x in averaged(p.state, keys).values()]
    average_([*(p.local for p in plan.parameters), *states], _counters(ready), replicas)
    for X, weights in before:
        X.copy_(weights)
    sync.after_average(ready.parameters)
    ready.measure_momenta()


def _counters(plan: Plan) -> list[Tensor]:
    return [x for p in plan.elementwise for x in averaged(p.state, counters=True).values()]


def sizes(X: Sequence[Tensor]) -> list[int]:
    """The number of elements of each parameter, over all its shards."""
    return [math.prod(global_shape(x)) for x in X]


def bytes_of_everything(plan: Plan, keys: Sequence[StateKey]) -> int:
    """Bytes that all ranks of a replica send in :func:`average_everything_`. Collective."""
    states = [x for p in plan.parameters for x in averaged(p.state, keys).values()]
    held = [*(p.local for p in plan.parameters), *map(local, states)]
    own = sum(x.numel() * product_dtype(x).itemsize for x in held)
    own += sum(counter.nbytes for counter in _counters(plan))
    if plan.inside is None:
        return own
    total = torch.tensor(own, device=plan.device)
    dist.all_reduce(total, group=plan.inside)
    return int(total)
