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
from curvadion.layout.matrix import Options, blocks_of, within

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement, Shard


# What nearly all tensors are; a step asks hundreds of times, so they are told apart first.
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
    return shard.trigger_wait() if isinstance(shard, AsyncCollectiveTensor) else shard


def placements_of(X: Tensor) -> tuple[Placement, ...]:
    """The placements of a DTensor, one per mesh axis; () for other tensors."""
    return tuple(X.placements) if is_dtensor(X) else ()


def fsdp_groups(module: Any) -> list[Any]:
    """FSDP2's own groups of the parameters of a module that ``fully_shard`` has taken."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    # In older versions of torch one group, or None.
    return [state._fsdp_param_group] if state._fsdp_param_group else []


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
    """The ranks whose coordinates differ from ``coordinate`` along ``axes`` only, row-major."""
    index = tuple(slice(None) if a in axes else c for a, c in enumerate(coordinate))
    ranks: list[int] = mesh.mesh[index].flatten().tolist()
    return ranks


class DimensionShard(NamedTuple):
    """This rank's indices of a dimension, and the mesh axes that shard it, in order."""

    indices: range
    axes: Sequence[int]


def dimension_shards(X: Tensor) -> list[DimensionShard]:
    """This rank's part of each dimension; everything if X is not a DTensor."""
    if not is_dtensor(X):
        return [DimensionShard(range(size), ()) for size in X.shape]
    shards = _shards(X.shape, X.device_mesh, X.placements)
    expected = [len(shard.indices) for shard in shards]
    actual = list(local(X).shape)
    # If a shard is empty, its other sizes do not matter.
    both_empty = 0 in expected and 0 in actual
    if expected != actual and not both_empty:
        raise ValueError(
            f"a DTensor of shape {tuple(X.shape)} and placements {X.placements} holds "
            f"{actual}, not {expected}: shard it as torch.chunk does"
        )
    return shards


def indices_by_rank(
    X: DTensor, dimension: int, axes: Sequence[int], along: Sequence[int]
) -> dict[int, range]:
    """The indices of one dimension that each rank along some mesh axes has.

    Args:
        X: the DTensor.
        dimension: of X.
        axes: the mesh axes that shard the dimension, in order.
        along: the mesh axes along which the ranks lie, this rank among them.

    Returns:
        By global rank, its indices.
    """
    mesh = X.device_mesh
    my_coordinate = tuple(mesh.get_coordinate() or ())
    coordinate_ranges = []
    for axis, place in enumerate(my_coordinate):
        if axis in along:
            coordinate_ranges.append(range(mesh.size(axis)))
        else:
            coordinate_ranges.append(range(place, place + 1))
    indices = []
    # The last axis varies fastest, as in the list of ranks.
    for coordinate in product(*coordinate_ranges):
        indices.append(_indices_at(X.shape[dimension], mesh, axes, coordinate))
    ranks = _ranks_along(mesh, my_coordinate, tuple(along))
    return dict(zip(ranks, indices, strict=True))


def _indices_at(
    size: int, mesh: DeviceMesh, axes: Sequence[int], coordinate: Sequence[int]
) -> range:
    """The indices of a dimension that the rank at a coordinate of the mesh has.

    Args:
        size: of the dimension.
        mesh: that shards it.
        axes: the mesh axes that shard it, each what the axis before left.
        coordinate: in the mesh.
    """
    indices = range(size)
    for axis in axes:
        # As torch.chunk: equal chunks, rounded up, of which the last may be short or empty.
        chunk = -(-len(indices) // mesh.size(axis))
        start = coordinate[axis] * chunk
        indices = indices[start : start + chunk]
    return indices


def _shards(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> list[DimensionShard]:
    """This rank's part of each dimension of a global shape."""
    shards = []
    my_coordinate = mesh.get_coordinate() or ()
    for dimension, size in enumerate(shape):
        axes = []
        for axis, placement in enumerate(placements):
            if is_shard(placement) and placement.dim == dimension:
                axes.append(axis)
        # A _StridedShard divides what axes to its right have left, and so comes after them.
        axes.sort(key=lambda axis: _split_factor(placements[axis]))
        indices = _indices_at(size, mesh, axes, my_coordinate)
        shards.append(DimensionShard(indices, axes))
    return shards


def _split_factor(placement: Placement) -> int:
    """The number of shards that other axes made before; 0 for a plain Shard."""
    return int(getattr(placement, "split_factor", 0))


def _on_dimension(placement: Placement, dimension: int) -> Placement:
    """The same kind of shard for another dimension."""
    kind: Callable[..., Placement] = type(placement)
    split_factor = _split_factor(placement)
    if split_factor:
        return kind(dimension, split_factor=split_factor)
    return kind(dimension)


def from_local(
    like: DTensor,
    shard: Tensor,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
) -> DTensor:
    """A DTensor on another one's mesh, from this rank's shard.

    Args:
        like: a DTensor on the mesh.
        shard: this rank's shard, whose memory the result shares.
        placements: of the result, one per mesh axis.
        shape: of the result, global.
        stride: of the result, global.
    """
    return like.from_local(
        shard,
        like.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )


def sharded_like(X: DTensor, whole: Tensor) -> DTensor:
    """This rank's shard of a tensor of X's shape that every rank has, placed as X is.

    It may share the tensor's memory.
    """
    held = [shard.indices for shard in dimension_shards(X)]
    shard = whole[tuple(slice(indices.start, indices.stop) for indices in held)]
    on_device = shard.to(local(X).device).contiguous()
    return from_local(X, on_device, X.placements, X.shape, X.stride())


def swapped(X: Tensor, dimension: int) -> Tensor:
    """A view of X with ``dimension`` and the next one swapped."""
    X = X.detach()
    order = list(range(X.dim()))
    order[dimension] = dimension + 1
    order[dimension + 1] = dimension
    if not is_dtensor(X):
        return X.permute(order)
    placements: list[Placement] = []
    for placement in X.placements:
        if is_shard(placement):
            # A swap is its own inverse: order also maps old dimensions to new ones.
            placement = _on_dimension(placement, order[placement.dim])
        placements.append(placement)
    shape = [X.shape[d] for d in order]
    strides = X.stride()
    stride = [strides[d] for d in order]
    return from_local(X, local(X).permute(order), placements, shape, stride)


def state_placements(
    X: Tensor, stack_dims: int, dimension: int | None, own_dims: int = 0
) -> list[Placement]:
    """Placements for a state with a dimension of X behind the stack dimensions.

    Args:
        X: the parameter, in the order (*stack, out, in, ...).
        stack_dims: the number of stack dimensions, which the state has too.
        dimension: of X, which the state has behind these; None: it has none of X's there.
        own_dims: the number of dimensions that the state has in between, which X lacks.

    Returns:
        The placements of a state (*stack, size of the dimension, ...), sharded like X; [] if
        X is not a DTensor.
    """
    if not is_dtensor(X):
        return []
    from torch.distributed.tensor import Replicate

    # Where the state has X's dimensions.
    state_dimensions = {d: d for d in range(stack_dims)}
    if dimension is not None:
        state_dimensions[dimension] = stack_dims + own_dims
    placements: list[Placement] = []
    for placement in X.placements:
        if is_shard(placement) and placement.dim in state_dimensions:
            placements.append(_on_dimension(placement, state_dimensions[placement.dim]))
        else:
            placements.append(Replicate())
    return placements


def zeros(
    X: Tensor, shape: Sequence[int], placements: Sequence[Placement], dtype: torch.dtype
) -> Tensor:
    """Zeros on X's device: a DTensor on X's mesh if X is one.

    Args:
        X: a parameter.
        shape: of the result, global.
        placements: of the result, one per mesh axis; ignored if X is not a DTensor.
        dtype: of the result.
    """
    if not is_dtensor(X):
        return torch.zeros(shape, dtype=dtype, device=X.device)
    shards = _shards(shape, X.device_mesh, placements)
    local_shape = [len(shard.indices) for shard in shards]
    # Not torch's zeros of DTensors, which are on the mesh's device: X may be offloaded.
    shard = torch.zeros(local_shape, dtype=dtype, device=local(X).device)
    stride = torch.empty(shape, device="meta").stride()
    return from_local(X, shard, placements, shape, stride)


def made_like(X: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """What an operation makes of each element of X, or of its shape, placed as X is.

    Torch looks for placements of a DTensor's result anew for every shape, which takes
    milliseconds: longer than all else that creates states.

    Args:
        X: a parameter.
        make: such as torch.zeros_like; of this rank's shard if X is a DTensor.
    """
    X = X.detach()
    if not is_dtensor(X):
        return make(X)
    shard = local(X)
    if shard.device.type != X.device_mesh.device_type:
        return make(X)  # offloaded; from_local would bring it to the mesh's devices
    whole = torch.empty_strided(X.shape, X.stride(), device="meta")
    return from_local(X, make(shard), X.placements, X.shape, torch.empty_like(whole).stride())


def output_first(X: Tensor, options: Options) -> Tensor:
    """A view of the parameter in the order (*stack, out, in, ...)."""
    return swapped(X, options["stack_dims"]) if options["input_first"] else X


class MatrixBlock(NamedTuple):
    """A block of rows or of columns, which is a matrix of its own."""

    rows: range  # of all ranks
    columns: range
    shard_rows: range  # of this rank, counted from the block's first row
    shard_columns: range  # likewise
    local_rows: slice  # the same rows of the local tensor
    local_columns: slice  # likewise, with all dimensions after rows flattened

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix, over all ranks."""
        return len(self.rows), len(self.columns)


class BlockedTensor(NamedTuple):
    """An unsharded parameter or a DTensor, divided into matrices."""

    X: Tensor  # (*stack, m, ...); the dimensions after m are columns
    stack: list[DimensionShard]
    rows: DimensionShard
    columns: DimensionShard  # of the dimension after m
    width: int  # columns per index of the dimension after m
    blocks: list[MatrixBlock]  # of each matrix in the stack

    def channels(self, block: MatrixBlock) -> slice:
        """The block's indices of the dimension after m, in the local tensor."""
        if len(block.columns) == math.prod(self.X.shape[len(self.stack) + 1 :]):
            return slice(None)
        columns = block.local_columns
        return slice(columns.start // self.width, columns.stop // self.width)

    def flattened(self, indices: range) -> range:
        """The columns of these indices of the dimension after m."""
        return range(indices.start * self.width, indices.stop * self.width)


def blocked(X: Tensor, options: Options) -> BlockedTensor:
    """Divide an unsharded parameter or a DTensor; ValueError if that is impossible."""
    X = output_first(X, options)
    stack_dims = options["stack_dims"]
    dimensions = dimension_shards(X)
    rows, columns, *kernel_dimensions = dimensions[stack_dims:]
    m, channels, *kernel = X.shape[stack_dims:]
    column_shards = 1
    if is_dtensor(X):
        column_shards = math.prod(X.device_mesh.size(axis) for axis in columns.axes)
    kernel_is_sharded = any(dimension.axes for dimension in kernel_dimensions)
    # Q's rows are sharded like X's columns, (channels, kernel) flattened. torch.chunk cuts both
    # at the same places only if it divides the channels evenly.
    channels_are_uneven = bool(kernel) and channels % column_shards != 0
    if kernel_is_sharded or channels_are_uneven:
        raise ValueError(
            f"a convolution of shape {tuple(X.shape)} is sharded by {placements_of(X)}: "
            f"shard it over output channels, or evenly over input channels"
        )
    width = math.prod(kernel)
    n = channels * width
    held_columns = range(columns.indices.start * width, columns.indices.stop * width)
    blocks = []
    for block_rows, block_columns in blocks_of((m, n), options):
        shard_rows = within(rows.indices, block_rows)
        shard_columns = within(held_columns, block_columns)
        blocks.append(
            MatrixBlock(
                block_rows,
                block_columns,
                shard_rows,
                shard_columns,
                _in_local(shard_rows, block_rows, rows.indices),
                _in_local(shard_columns, block_columns, held_columns),
            )
        )
    return BlockedTensor(X, dimensions[:stack_dims], rows, columns, width, blocks)


def _in_local(shard: range, block: range, held: range) -> slice:
    """A block's rows or columns in the local tensor.

    Args:
        shard: those that this rank holds, counted from the block's first one.
        block: all of the block's.
        held: all that this rank holds, of the whole dimension like those of the block.
    """
    offset = block.start - held.start
    return slice(shard.start + offset, shard.stop + offset)
