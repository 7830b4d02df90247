"""Shape, groups and gradient of a parameter in any layout."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from typing import TYPE_CHECKING, Any

from torch import Tensor

from curvadion.comm.collectives import group_size
from curvadion.comm.groups import Group, ranks_of
from curvadion.layout.dtensor import (
    dimension_shards,
    from_local,
    group_over,
    indices_by_rank,
    is_dtensor,
    is_shard,
    local,
    placements_of,
)
from curvadion.layout.flat_shard import flat_shard
from curvadion.ops.tensors import wide_dtype

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def global_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape of the unsharded parameter."""
    declared = flat_shard(parameter)
    return tuple(parameter.shape if declared is None else declared.shape)


def shard_sizes(X: Tensor) -> list[int]:
    """Elements of each shard, equal on all ranks; flat shards assume the most uneven case."""
    declared = flat_shard(X)
    if declared is not None:
        numel = math.prod(declared.shape)
        # One rank has nearly all elements, and each other rank has one, while elements last.
        small_shards = max(min(group_size(declared.group), numel) - 1, 0)
        return [numel - small_shards, *[1] * small_shards]
    if not is_dtensor(X):
        return [X.numel()]
    lengths_by_dimension = []
    for dimension, shard in enumerate(dimension_shards(X)):
        indices = indices_by_rank(X, dimension, shard.axes, along=shard.axes)
        lengths_by_dimension.append([len(part) for part in indices.values()])
    return [math.prod(lengths) for lengths in product(*lengths_by_dimension)]


def groups_of(X: Tensor) -> list[Group]:
    """The groups over which the parameter's dimensions are sharded."""
    groups: list[Group | None] = []
    declared = flat_shard(X)
    if declared is not None:
        groups = [declared.group]
    elif is_dtensor(X):
        groups = [group_over(X.device_mesh, shard.axes) for shard in dimension_shards(X)]
    return [group for group in groups if group is not None]


def spans_replicas(X: Tensor, replicas: Group) -> bool:
    """Whether the parameter's mesh has ranks of several replicas."""
    if not is_dtensor(X):
        return False
    return _share_ranks(replicas, X.device_mesh.mesh.flatten().tolist())


def check_replicas(X: Tensor, name: str, replicas: Group | None) -> None:
    """Raise ValueError if the parameter is sharded over ranks of ``replicas``."""
    if replicas is None:
        return
    for group in groups_of(X):
        if _share_ranks(replicas, ranks_of(group)):
            ranks = ranks_of(replicas)
            raise ValueError(
                f"replicas is the process group of ranks {ranks}, over which {name} of shape "
                f"{global_shape(X)} is sharded: pass mesh['replicate'], or None"
            )


def _share_ranks(group: Group, ranks: list[int]) -> bool:
    """Whether a group has several of these ranks."""
    return len(set(ranks_of(group)).intersection(ranks)) > 1


def check_placements(X: Tensor, name: str) -> None:
    """Raise ValueError unless all placements of X are Shard or Replicate."""
    if not all(is_shard(p) or p.is_replicate() for p in placements_of(X)):
        raise ValueError(
            f"{name} has the placements {placements_of(X)}: redistribute it to Shard or Replicate"
        )


def place_gradients(parameters: Iterable[Tensor], replicas: Group | None) -> None:
    """Give every gradient its parameter's placements; collective if they differ."""
    # Under sequence parallelism the gradients of norms are partial sums.
    for X in parameters:
        gradient = X.grad
        if not is_dtensor(gradient) or not is_dtensor(X):
            continue
        if gradient.placements == X.placements:
            continue
        # A sum in half precision could overflow.
        wide: Any = _without_sums_over(replicas, gradient).to(wide_dtype(X.dtype))
        X.grad = wide.redistribute(X.device_mesh, X.placements).to(gradient.dtype)


def _without_sums_over(replicas: Group | None, gradient: DTensor) -> DTensor:
    """Replace partial sums over the replicas by this replica's own gradient.

    The sync averages over replicas, and so this step must not sum over them.
    """
    from torch.distributed.tensor import Partial, Replicate

    placements = list(gradient.placements)
    for axis, placement in enumerate(gradient.placements):
        is_sum = type(placement) is Partial and placement.reduce_op == "sum"
        if is_sum and replicas is not None:
            axis_ranks = ranks_of(gradient.device_mesh.get_group(axis))
            if set(axis_ranks) == set(ranks_of(replicas)):
                placements[axis] = Replicate()
    if placements == list(gradient.placements):
        return gradient
    # The sum is a mean over replicas: each adds its gradient divided by their number.
    shard = local(gradient) * group_size(replicas)
    return from_local(gradient, shard, placements, gradient.shape, gradient.stride())
