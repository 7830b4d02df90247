"""What can be said of any parameter, however it is sharded: its shape, groups and replicas."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from curvadion.comm.collectives import group_size
from curvadion.comm.groups import Group
from curvadion.layout.dtensor import (
    dimension_shards,
    group_over,
    is_shard,
    lengths_of_shards,
    placements_of,
)
from curvadion.layout.flat_shard import flat_shard
from curvadion.layout.lazy import is_dtensor


def global_shape(parameter: Tensor) -> tuple[int, ...]:
    """Shape of the whole parameter, of which this rank may hold only a shard."""
    declared = flat_shard(parameter)
    return tuple(parameter.shape) if declared is None else declared.shape


def shard_sizes(X: Tensor) -> list[int]:
    """Numbers in each shard of the parameter, alike on all ranks.

    Each rank knows where its own flat shard is cut. One with all numbers but one for each other
    shard fills as many blocks, of any length, as any cut could.
    """
    declared = flat_shard(X)
    if declared is not None:
        numbers = math.prod(declared.shape)
        small = max(min(group_size(declared.group), numbers) - 1, 0)
        return [numbers - small, *[1] * small]
    return [math.prod(lengths) for lengths in product(*lengths_of_shards(X))]


def groups_of(X: Tensor) -> list[Group]:
    """The groups over which the parameter is sharded, one per sharded dimension."""
    declared = flat_shard(X)
    if declared is not None:
        return [declared.group] if declared.group is not None else []
    if not is_dtensor(X):
        return []
    groups = [group_over(X.device_mesh, d.axes) for d in dimension_shards(X)]
    return [group for group in groups if group is not None]


class KeptApart(NamedTuple):
    """What an integration says of parameters whose gradients it keeps apart.

    ranks: a rank of each replica. optimizers: who trains the parameters, from the first step on.
    """

    ranks: tuple[int, ...]
    optimizers: WeakSet[Any]


# Not an attribute of the parameters, which would be copied and pickled with them.
_KEPT_APART = WeakTensorKeyDictionary()


def declare_replicas(parameters: Iterable[Tensor], kept: KeptApart) -> None:
    """Note that an integration keeps the replicas' gradients of the parameters apart."""
    for parameter in parameters:
        _KEPT_APART[parameter] = kept


def note_optimizer(parameters: Iterable[Tensor], optimizer: object) -> None:
    """Let integrations know who trains the parameters."""
    for parameter in parameters:
        if (kept := _KEPT_APART.get(parameter)) is not None:
            kept.optimizers.add(optimizer)


def check_replicas(X: Tensor, name: str, replicas: Group | None) -> None:
    """Check that ``replicas`` suits the parameter.

    Raises:
        ValueError: if the parameter is sharded over ranks of ``replicas``, or if ``replicas`` is
            None although an integration keeps the gradients of several replicas apart, or has
            other ranks than these.
    """
    kept = _KEPT_APART.get(X)
    if replicas is None:
        if kept is not None and len(kept.ranks) > 1:
            raise ValueError(
                f"replicas=None, but keep_gradients_local keeps the gradients of {len(kept.ranks)} "
                f"replicas of {name} apart, and nothing would ever average them: pass replicas=, "
                f"the process group of the replicas, or 'single' to train each one by itself."
            )
        return
    members = set(dist.get_process_group_ranks(replicas))
    for group in groups_of(X):
        if len(members.intersection(dist.get_process_group_ranks(group))) > 1:
            raise ValueError(
                f"replicas is the process group of ranks {sorted(members)}, over which {name} of "
                f"shape {global_shape(X)} is sharded: pass the group that replicates it, such as "
                f"mesh['replicate'], or None."
            )
    if kept is not None and members != {*kept.ranks}:
        raise ValueError(
            f"replicas is the process group of ranks {sorted(members)}, but keep_gradients_local "
            f"keeps the gradients of {name} apart on ranks {sorted(kept.ranks)}, and nothing would "
            f"ever average them over all of these: pass the group of all of them."
        )


def check_placements(X: Tensor, name: str) -> None:
    """Check that updates are written for the parameter's placements.

    Raises:
        ValueError: if X is a DTensor with placements other than Shard and Replicate.
    """
    for placement in placements_of(X):
        if not (is_shard(placement) or placement.is_replicate()):
            raise ValueError(
                f"{name} has the placements {placements_of(X)}: {placement!r} is not supported. "
                f"Redistribute it to Shard or Replicate placements first."
            )
