"""DTensors: the indices that each rank holds, and how to build a DTensor."""

# Importing torch's DTensors takes half as long as importing torch, so it is done only on use.

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from curvadion.comm.groups import Group, group_of_ranks
from curvadion.layout.matrix import Options, block_sizes, starts, within

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
    return group_of_ranks(_ranks_along(mesh, tuple(mesh.get_coordinate() or ()), tuple(axes)))


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
        shards.append(DimensionShard(_held(size, X.device_mesh, axes), axes))
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
    mesh, own = X.device_mesh, X.device_mesh.get_coordinate() or ()
    at = product(*(range(mesh.size(a)) if a in along else (c,) for a, c in enumerate(own)))
    held = (_held(X.shape[dimension], mesh, axes, coordinate) for coordinate in at)
    return dict(zip(_ranks_along(mesh, tuple(own), tuple(along)), held, strict=True))


def _held(
    size: int, mesh: DeviceMesh, axes: Sequence[int], coordinate: Sequence[int] | None = None
) -> range:
    """The indices of a dimension, sharded over one axis after another, here or elsewhere."""
    held, coordinate = range(size), coordinate or mesh.get_coordinate() or ()
    for axis in axes:
        chunk = -(-len(held) // mesh.size(axis))
        held = held[coordinate[axis] * chunk : (coordinate[axis] + 1) * chunk]
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
    kind: Any = type(placement)
    factor = _split_factor(placement)
    found: Placement = kind(dimension, split_factor=factor) if factor else kind(dimension)
    return found


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
        held.append(len(_held(size, X.device_mesh, axes)))
    # Not torch's zeros of DTensors, which are on the mesh's device: X may be offloaded.
    shard = torch.zeros(held, dtype=dtype, device=local(X).device)
    stride = torch.empty(tuple(shape), device="meta").stride()
    return from_local(X, shard, placements, shape, stride)


def output_first(X: Tensor, options: Options) -> Tensor:
    """A view of the parameter in the order (*stack, out, in, ...)."""
    return swapped(X, options["stack_dims"]) if options["input_first"] else X


class RowBlock(NamedTuple):
    """A block of rows: over all ranks; this rank's, from ``start``; and as local rows."""

    start: int
    size: int
    held: range
    local: slice


@dataclass(frozen=True)
class BlockedTensor:
    """An unsharded parameter or a DTensor, divided into matrices."""

    X: Tensor  # output first: (*stack, m, ...); the dimensions after m are columns
    stack: list[DimensionShard]
    rows: DimensionShard
    columns: DimensionShard  # of the dimension after the rows
    n: int  # number of columns of each matrix, over all ranks
    width: int  # columns per index of the dimension after the rows
    blocks: list[RowBlock]  # of each matrix in the stack

    def flattened(self, indices: range) -> range:
        """The columns of these indices of the dimension after the rows."""
        return range(indices.start * self.width, indices.stop * self.width)


def blocked(X: Tensor, options: Options) -> BlockedTensor:
    """Divide an unsharded parameter or a DTensor; ValueError if that is not possible."""
    X, stack_dims = output_first(X, options), options["stack_dims"]
    dimensions = dimension_shards(X)
    rows, columns = dimensions[stack_dims : stack_dims + 2]
    inner = dimensions[stack_dims + 2 :]
    shards = math.prod(X.device_mesh.size(a) for a in columns.axes) if is_dtensor(X) else 1
    if any(d.axes for d in inner) or (inner and X.shape[stack_dims + 1] % shards):
        raise ValueError(
            f"a parameter of shape {tuple(X.shape)} is sharded by {placements_of(X)}: shard a "
            f"convolution over output channels, or evenly over input channels"
        )
    width = math.prod(X.shape[stack_dims + 2 :])
    sizes = block_sizes(X.shape[stack_dims], options["row_blocks"])
    blocks = []
    for start, size in zip(starts(sizes), sizes, strict=True):
        held, offset = within(rows.held, start, size), start - rows.held.start
        here = slice(held.start + offset, held.stop + offset)
        blocks.append(RowBlock(start, size, held, here))
    n = X.shape[stack_dims + 1] * width
    return BlockedTensor(X, dimensions[:stack_dims], rows, columns, n, width, blocks)
