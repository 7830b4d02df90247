"""Shape, groups and gradient of a parameter in any layout."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvadion.comm.collectives import group_size
from curvadion.comm.groups import Group, ranks_of
from curvadion.layout.dtensor import (
    dimension_shards,
    from_local,
    group_over,
    held_along,
    is_dtensor,
    is_shard,
    local,
    placements_of,
)
from curvadion.layout.flat_shard import flat_shard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def global_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape of the unsharded parameter."""
    return tuple((flat_shard(parameter) or parameter).shape)


def shard_sizes(X: Tensor) -> list[int]:
    """Elements of each shard, equal on all ranks; flat shards assume the most uneven case."""
    if (declared := flat_shard(X)) is not None:
        numbers = math.prod(declared.shape)
        small = max(min(group_size(declared.group), numbers) - 1, 0)
        return [numbers - small, *[1] * small]
    if not is_dtensor(X):
        return [X.numel()]
    lengths = []
    for d, (_, axes) in enumerate(dimension_shards(X)):
        lengths.append(map(len, held_along(X, d, axes, axes).values()))
    return list(map(math.prod, product(*lengths)))


def groups_of(X: Tensor) -> list[Group]:
    """The groups over which the parameter's dimensions are sharded."""
    groups: list[Group | None] = []
    if (declared := flat_shard(X)) is not None:
        groups = [declared.group]
    elif is_dtensor(X):
        groups = [group_over(X.device_mesh, d.axes) for d in dimension_shards(X)]
    return [group for group in groups if group is not None]


def spans_replicas(X: Tensor, replicas: Group) -> bool:
    """Whether the parameter's mesh has ranks of several replicas."""
    return is_dtensor(X) and _share_ranks(replicas, X.device_mesh.mesh.flatten().tolist())


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
        if is_dtensor(gradient) and is_dtensor(X) and gradient.placements != X.placements:
            # A sum in half precision could overflow.
            wide: Any = _own(gradient, replicas).to(torch.promote_types(X.dtype, torch.float32))
            X.grad = wide.redistribute(X.device_mesh, X.placements).to(gradient.dtype)


def _own(gradient: DTensor, replicas: Group | None) -> DTensor:
    """Replace partial sums over the replicas by this replica's own gradient."""
    from torch.distributed.tensor import Partial, Replicate

    placements = list(gradient.placements)
    for axis, placement in enumerate(gradient.placements):
        if type(placement) is Partial and placement.reduce_op == "sum" and replicas is not None:
            along = ranks_of(gradient.device_mesh.get_group(axis))
            if set(along) == set(ranks_of(replicas)):
                placements[axis] = Replicate()
    if placements == list(gradient.placements):
        return gradient
    shard = local(gradient) * group_size(replicas)
    return from_local(gradient, shard, placements, gradient.shape, gradient.stride())
