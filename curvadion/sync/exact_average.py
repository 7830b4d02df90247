"""Exact means of weights and state over replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.comm.collectives import group_size, mean_
from curvadion.comm.groups import Group
from curvadion.layout.dtensor import local
from curvadion.layout.placements import global_shape
from curvadion.ops.tensors import Tensors
from curvadion.plan.opened_states import opened
from curvadion.plan.parameter import Parameter, product_dtype
from curvadion.plan.plan import Plan
from curvadion.plan.state import StateKey, averaged
from curvadion.sync.base import Sync


def average_(tensors: Tensors, counters: Tensors, replicas: Group | None) -> None:
    """Replace tensors and scalar counters by their means over the replicas."""
    if group_size(replicas) == 1:
        return
    mean_(tensors, replicas)
    if counters:
        # These may be on the CPU, where NCCL cannot reach them.
        stacked = torch.stack([counter.detach().to(tensors[0].device) for counter in counters])
        mean_([stacked], replicas)
        means = stacked.to(counters[0].device)
        torch._foreach_copy_(list(counters), list(means.unbind()))


def average_weights_(plan: Plan, replicas: Group | None) -> None:
    """Replace weights, and the moments of AdamW and Lion, by their means."""
    weights = [p.local for p in plan.parameters]
    with _open_averaged(plan.elementwise) as moments:
        average_([*weights, *moments], _counters(plan), replicas)


def average_everything_(
    plan: Plan,
    replicas: Group | None,
    sync: Sync,
    keys: Sequence[StateKey],
    kept: Sequence[Parameter] = (),
) -> None:
    """Replace weights and local state by their means over the replicas.

    Args:
        plan: of the parameters.
        replicas: the ranks with the same shards; None for one alone.
        sync: prepares its states for a mean, and takes note of it.
        keys: of states that are not in the table of curvadion.plan.state.
        kept: parameters whose weights are equal on all replicas, and keep every bit.
    """
    copies = [(p.local, p.local.clone()) for p in kept]
    ready = plan.select([bool(p.state) for p in plan.parameters])
    sync.before_average(ready.parameters)
    weights = [p.local for p in plan.parameters]
    with _open_averaged(ready.parameters, keys) as states:
        average_([*weights, *states], _counters(ready), replicas)
    for X, copy in copies:
        X.copy_(copy)
    sync.after_average(ready.parameters)
    ready.measure_momenta()


def _open_averaged(
    parameters: Sequence[Parameter], keys: Sequence[StateKey] = ()
) -> AbstractContextManager[list[Tensor]]:
    """This rank's shards of the states that are averaged, to write.

    Args:
        parameters: of the states.
        keys: of states that are not in the table of curvadion.plan.state.
    """
    return opened([(p, key) for p in parameters for key in _averaged(p, keys)])


def _averaged(p: Parameter, keys: Sequence[StateKey]) -> dict[str, Tensor]:
    """The states of a parameter that are averaged, by key.

    Args:
        p: the parameter.
        keys: of states that are not in the table of curvadion.plan.state.
    """
    states = averaged(p.state, keys)
    return {k: x for k, x in states.items() if x.is_floating_point() or p.is_coded(k)}


def _counters(plan: Plan) -> list[Tensor]:
    """The step counters of the elementwise parameters, each of shape ()."""
    return [x for p in plan.elementwise for x in averaged(p.state, counters=True).values()]


def sizes(X: Sequence[Tensor]) -> list[int]:
    """The number of elements of each parameter, over all its shards."""
    return [math.prod(global_shape(x)) for x in X]


def bytes_of_everything(plan: Plan, keys: Sequence[StateKey]) -> int:
    """Bytes that all ranks of a replica send in :func:`average_everything_`. Collective."""
    weights = [p.local for p in plan.parameters]
    states = []
    for p in plan.parameters:
        for key, x in _averaged(p, keys).items():
            # States in 8 bits are decoded before they are sent.
            states.append(p.local if p.is_coded(key) else local(x))
    of_this_rank = sum(x.numel() * product_dtype(x).itemsize for x in (*weights, *states))
    of_this_rank += sum(counter.nbytes for counter in _counters(plan))
    if plan.inside is None:
        return of_this_rank
    total = torch.tensor(of_this_rank, device=plan.device)
    dist.all_reduce(total, group=plan.inside)
    return int(total)
