"""DTensors: the indices that each rank holds, and how to build a DTensor."""

# Importing torch's DTensors takes half as long as importing torch, so it is done only on use.

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from curvadion.comm.groups import Group, group_of_ranks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement, Shard


def is_dtensor(tensor: Any) -> TypeGuard[DTensor]:
    """Whether this is a DTensor; there are none until their module is imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing memory with the tensor; other tensors as they are."""
    if not is_dtensor(tensor):
        return tensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    shard: Tensor = tensor.to_local()
    # Autograd's collectives may still be running; fused operations need the memory itself.
    return shard.wait() if isinstance(shard, AsyncCollectiveTensor) else shard


def placements_of(X: Tensor) -> tuple[Placement, ...]:
    """The placements of a DTensor, one per mesh axis; () for other tensors."""
    return tuple(X.placements) if is_dtensor(X) else ()


def is_shard(placement: Placement) -> TypeGuard[Shard]:
    """Whether a placement splits a dimension."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, (Shard, _StridedShard))


def group_over(mesh: DeviceMesh, axes: Sequence[int]) -> Group | None:
    """The ranks whose mesh coordinates differ from this one's along ``axes`` only; collective."""
    return group_of_ranks(_ranks_along(mesh, tuple(_coordinate(mesh)), tuple(axes)))


@lru_cache  # many parameters share a mesh, which rebuilds its tensor of ranks at each access
def _ranks_along(mesh: DeviceMesh, coordinate: tuple[int, ...], axes: tuple[int, ...]) -> list[int]:
    index = tuple(slice(None) if a in axes else c for a, c in enumerate(coordinate))
    ranks: list[int] = mesh.mesh[index].flatten().tolist()
    return ranks


@dataclass(frozen=True)
class DimensionShard:
    """This rank's indices of a dimension, and the mesh axes that shard it, in order."""

    held: range
    axes: tuple[int, ...]


def dimension_shards(X: Tensor) -> list[DimensionShard]:
    """This rank's part of each dimension; everything if X is not a DTensor."""
    if not is_dtensor(X):
        return [DimensionShard(range(size), ()) for size in X.shape]
    shards = []
    for d, size in enumerate(X.shape):
        axes = _axes_in_order(X.placements, d)
        held = _held(size, X.device_mesh, axes, _coordinate(X.device_mesh))
        shards.append(DimensionShard(held, axes))
    expected, actual = [len(d.held) for d in shards], list(local(X).shape)
    if expected != actual and (0 not in expected or 0 not in actual):
        raise ValueError(
            f"a DTensor of shape {tuple(X.shape)} and placements {X.placements} holds {actual}, "
            f"not {expected}: shard uneven sizes as torch.chunk does."
        )
    return shards


def held_along(
    X: DTensor, dimension: int, axes: Sequence[int], along: Sequence[int]
) -> dict[int, range]:
    """The indices of a dimension, sharded over ``axes``, that each rank ``along`` axes holds."""
    mesh, own = X.device_mesh, _coordinate(X.device_mesh)
    at = product(*(range(mesh.size(a)) if a in along else (c,) for a, c in enumerate(own)))
    held = (_held(X.shape[dimension], mesh, axes, coordinate) for coordinate in at)
    return dict(zip(_ranks_along(mesh, tuple(own), tuple(along)), held, strict=True))


def _coordinate(mesh: DeviceMesh) -> Sequence[int]:
    return mesh.get_coordinate() or ()


def _held(size: int, mesh: DeviceMesh, axes: Sequence[int], coordinate: Sequence[int]) -> range:
    """The indices of a dimension, sharded over one axis after another, at a mesh coordinate."""
    held = range(size)
    for axis in axes:
        count, position = mesh.size(axis), coordinate[axis]
        chunk = -(-len(held) // count)
        held = held[min(position * chunk, len(held)) : min((position + 1) * chunk, len(held))]
    return held


def _axes_in_order(placements: Sequence[Placement], dimension: int) -> tuple[int, ...]:
    """The mesh axes that shard a dimension, in order: a _StridedShard after axes to its right."""
    order = []
    for axis, placement in enumerate(placements):
        if is_shard(placement) and placement.dim == dimension:
            order.append((_split_factor(placement), axis))
    return tuple(axis for _, axis in sorted(order))


def _split_factor(placement: Placement) -> int:
    """The number of shards that other axes made before this one; 0 for a plain Shard."""
    return int(getattr(placement, "split_factor", 0))


def _on_dimension(placement: Placement, dimension: int) -> Placement:
    """The same kind of shard for another dimension."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if factor := _split_factor(placement):
        strided: Placement = _StridedShard(dimension, split_factor=factor)
        return strided
    return Shard(dimension)


def from_local(
    like: DTensor,
    shard: Tensor,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
) -> DTensor:
    """A DTensor of a global shape and stride, on another one's mesh, from this shard."""
    size, mesh = torch.Size(shape), like.device_mesh
    whole: DTensor = like.from_local(
        shard, mesh, placements, run_check=False, shape=size, stride=tuple(stride)
    )
    return whole


def swapped(X: Tensor, dimension: int) -> Tensor:
    """A view of X with ``dimension`` and the next one swapped."""
    other = {dimension: dimension + 1, dimension + 1: dimension}
    X = X.detach()
    if not is_dtensor(X):
        return X.transpose(dimension, dimension + 1)
    placements = list(X.placements)
    for axis, placement in enumerate(placements):
        if is_shard(placement):
            placements[axis] = _on_dimension(placement, other.get(placement.dim, placement.dim))
    shape, stride = list(X.shape), list(X.stride())
    for sizes in (shape, stride):
        sizes[dimension], sizes[dimension + 1] = sizes[dimension + 1], sizes[dimension]
    return from_local(X, local(X).transpose(dimension, dimension + 1), placements, shape, stride)


def state_placements(X: Tensor, stack_dims: int, dimension: int | None) -> list[Placement]:
    """Placements for a state (*stack, d, ...) sharded like X; d is X's ``dimension``, if any."""
    if not is_dtensor(X):
        return []
    from torch.distributed.tensor import Replicate

    placements: list[Placement] = []
    for placement in X.placements:
        if is_shard(placement) and placement.dim < stack_dims:
            placements.append(placement)
        elif is_shard(placement) and placement.dim == dimension:
            placements.append(_on_dimension(placement, stack_dims))
        else:
            placements.append(Replicate())
    return placements


def zeros(
    X: Tensor, shape: Sequence[int], placements: Sequence[Placement], dtype: torch.dtype
) -> Tensor:
    """Zeros of a global shape on X's device: a DTensor on X's mesh if X is one."""
    if not is_dtensor(X):
        return torch.zeros(tuple(shape), dtype=dtype, device=X.device)
    held = []
    for d, size in enumerate(shape):
        axes = _axes_in_order(placements, d)
        held.append(len(_held(size, X.device_mesh, axes, _coordinate(X.device_mesh))))
    # Not torch's zeros of DTensors, which are on the mesh's device: X may be offloaded.
    shard = torch.zeros(held, dtype=dtype, device=local(X).device)
    stride = torch.empty(tuple(shape), device="meta").stride()
    return from_local(X, shard, placements, shape, stride)
