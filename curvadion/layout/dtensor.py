"""DTensors: the indices that each rank holds, and how to build a DTensor."""

# torch's DTensors take half as long to import as torch: functions that need them import them.

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from curvadion.comm.groups import Group, group_of_ranks
from curvadion.division import spans
from curvadion.layout.matrix import Options, block_sizes, within

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement, Shard


# What nearly all tensors are; asked first, because a step asks hundreds of times.
_PLAIN = {Tensor, torch.nn.Parameter}


def is_dtensor(tensor: Any) -> TypeGuard[DTensor]:
    """Whether this is a DTensor; none exist before their module is imported."""
    if type(tensor) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing memory with the tensor; other tensors as they are."""
    if not is_dtensor(tensor):
        return tensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    shard: Tensor = tensor.to_local()
    # Autograd's collectives may still be running.
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
    """The ranks whose coordinates differ from this one's along ``axes`` only; collective."""
    return group_of_ranks(_ranks_along(mesh, tuple(mesh.get_coordinate() or ()), tuple(axes)))


@lru_cache  # parameters share a mesh, which rebuilds its tensor of ranks at each access
def _ranks_along(mesh: DeviceMesh, coordinate: tuple[int, ...], axes: tuple[int, ...]) -> list[int]:
    index = tuple(slice(None) if a in axes else c for a, c in enumerate(coordinate))
    ranks: list[int] = mesh.mesh[index].flatten().tolist()
    return ranks


class DimensionShard(NamedTuple):
    """This rank's indices of a dimension, and the mesh axes that shard it, in order."""

    held: range
    axes: Sequence[int]


def dimension_shards(X: Tensor) -> list[DimensionShard]:
    """This rank's part of each dimension; everything if X is not a DTensor."""
    if not is_dtensor(X):
        return [DimensionShard(range(size), ()) for size in X.shape]
    shards = _shards(X.shape, X.device_mesh, X.placements)
    expected, actual = [len(d.held) for d in shards], list(local(X).shape)
    if expected != actual and (0 not in expected or 0 not in actual):
        raise ValueError(
            f"a DTensor of shape {tuple(X.shape)} and placements {X.placements} holds "
            f"{actual}, not {expected}: shard it as torch.chunk does"
        )
    return shards


def held_along(
    X: DTensor, dimension: int, axes: Sequence[int], along: Sequence[int]
) -> dict[int, range]:
    """By rank along some axes, its indices of a dimension that ``axes`` shard."""
    mesh, own = X.device_mesh, X.device_mesh.get_coordinate() or ()
    at = product(*(range(mesh.size(a)) if a in along else (c,) for a, c in enumerate(own)))
    held = (_held(X.shape[dimension], mesh, axes, coordinate) for coordinate in at)
    return dict(zip(_ranks_along(mesh, tuple(own), tuple(along)), held, strict=True))


def _held(size: int, mesh: DeviceMesh, axes: Sequence[int], coordinate: Sequence[int]) -> range:
    """The indices at a coordinate of a dimension that one axis after another shards."""
    held = range(size)
    for axis in axes:
        chunk = -(-len(held) // mesh.size(axis))
        held = held[coordinate[axis] * chunk : (coordinate[axis] + 1) * chunk]
    return held


def _shards(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> list[DimensionShard]:
    """This rank's part of each dimension of a global shape."""
    shards, own = [], mesh.get_coordinate() or ()
    for d, size in enumerate(shape):
        axes = [a for a, p in enumerate(placements) if is_shard(p) and p.dim == d]
        # A _StridedShard comes after axes to its right.
        axes.sort(key=lambda axis: _split_factor(placements[axis]))
        shards.append(DimensionShard(_held(size, mesh, axes, own), axes))
    return shards


def _split_factor(placement: Placement) -> int:
    """The number of shards that other axes made before; 0 for a plain Shard."""
    return int(getattr(placement, "split_factor", 0))


def _on_dimension(placement: Placement, dimension: int) -> Placement:
    """The same kind of shard for another dimension."""
    kind: Callable[..., Placement] = type(placement)
    factor = _split_factor(placement)
    return kind(dimension, split_factor=factor) if factor else kind(dimension)


def from_local(
    like: DTensor,
    shard: Tensor,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
) -> DTensor:
    """A DTensor of a global shape and stride, on another one's mesh, from this shard."""
    size, mesh = torch.Size(shape), like.device_mesh
    return like.from_local(
        shard, mesh, placements, run_check=False, shape=size, stride=tuple(stride)
    )


def swapped(X: Tensor, dimension: int) -> Tensor:
    """A view of X with ``dimension`` and the next one swapped."""
    X, order = X.detach(), list(range(X.dim()))
    order[dimension : dimension + 2] = dimension + 1, dimension
    if not is_dtensor(X):
        return X.permute(order)
    placements = [_on_dimension(p, order[p.dim]) if is_shard(p) else p for p in X.placements]
    shape, stride = ([sizes[d] for d in order] for sizes in (X.shape, X.stride()))
    return from_local(X, local(X).permute(order), placements, shape, stride)


def state_placements(X: Tensor, stack_dims: int, dimension: int | None) -> list[Placement]:
    """Placements for a state (*stack, d, ...) sharded like X; d: X's ``dimension``."""
    if not is_dtensor(X):
        return []
    from torch.distributed.tensor import Replicate

    kept: dict[int | None, int] = {dimension: stack_dims} | {d: d for d in range(stack_dims)}
    return [
        _on_dimension(p, kept[p.dim]) if is_shard(p) and p.dim in kept else Replicate()
        for p in X.placements
    ]


def zeros(
    X: Tensor, shape: Sequence[int], placements: Sequence[Placement], dtype: torch.dtype
) -> Tensor:
    """Zeros of a global shape on X's device: a DTensor on X's mesh if X is one."""
    if not is_dtensor(X):
        return torch.zeros(shape, dtype=dtype, device=X.device)
    held = [len(d.held) for d in _shards(shape, X.device_mesh, placements)]
    # Not torch's zeros of DTensors, which are on the mesh's device: X may be offloaded.
    shard = torch.zeros(held, dtype=dtype, device=local(X).device)
    stride = torch.empty(shape, device="meta").stride()
    return from_local(X, shard, placements, shape, stride)


def output_first(X: Tensor, options: Options) -> Tensor:
    """A view of the parameter in the order (*stack, out, in, ...)."""
    return swapped(X, options["stack_dims"]) if options["input_first"] else X


class RowBlock(NamedTuple):
    """A block of rows."""

    rows: range  # of all ranks
    held: range  # of this rank, counted from the block's first row
    local: slice  # the same rows of the local tensor


class BlockedTensor(NamedTuple):
    """An unsharded parameter or a DTensor, divided into matrices."""

    X: Tensor  # (*stack, m, ...); the dimensions after m are columns
    stack: list[DimensionShard]
    rows: DimensionShard
    columns: DimensionShard  # of the dimension after m
    n: int  # columns of each matrix, over all ranks
    width: int  # columns per index of the dimension after m
    blocks: list[RowBlock]  # of each matrix in the stack

    def flattened(self, indices: range) -> range:
        """The columns of these indices of the dimension after m."""
        return range(indices.start * self.width, indices.stop * self.width)


def blocked(X: Tensor, options: Options) -> BlockedTensor:
    """Divide an unsharded parameter or a DTensor; ValueError if that is impossible."""
    X, stack_dims = output_first(X, options), options["stack_dims"]
    dimensions = dimension_shards(X)
    rows, columns, *inner = dimensions[stack_dims:]
    m, channels, *kernel = X.shape[stack_dims:]
    shards = math.prod(X.device_mesh.size(a) for a in columns.axes) if is_dtensor(X) else 1
    if any(d.axes for d in inner) or (kernel and channels % shards):
        raise ValueError(
            f"a convolution of shape {tuple(X.shape)} is sharded by {placements_of(X)}: "
            f"shard it over output channels, or evenly over input channels"
        )
    width, blocks = math.prod(kernel), []
    for block in spans(block_sizes(m, options["row_blocks"])):
        held, offset = within(rows.held, block), block.start - rows.held.start
        here = slice(held.start + offset, held.stop + offset)
        blocks.append(RowBlock(block, held, here))
    return BlockedTensor(X, dimensions[:stack_dims], rows, columns, channels * width, width, blocks)
