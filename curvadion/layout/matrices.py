"""From a parameter to its matrices: whole parameters, DTensors and flat shards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvadion.comm.collectives import group_size
from curvadion.comm.groups import Group, Unions
from curvadion.layout.blocks import block_sizes, blocked, intersection, output_first, rank_of
from curvadion.layout.dtensor import (
    DimensionShard,
    group_over,
    held_by_rank,
    placements_of,
    state_placements,
    zeros,
)
from curvadion.layout.flat_shard import (
    FlatShard,
    flat_matrices,
    flat_shard,
    ranges_of_all_ranks,
    shared_rows,
)
from curvadion.layout.lazy import is_dtensor
from curvadion.layout.matrix import Extent, MatrixLayout
from curvadion.layout.right_factors import QSlot, QSlots, flat_key
from curvadion.layout.shard_views import Block, FlatRange, ShardView


@dataclass(frozen=True)
class MatrixShard:
    """One matrix of a parameter, as this rank holds it.

    Attributes:
        layout: orientation, sharding and groups.
        view: where its elements lie in the parameter's local tensor.
        rank: r.
        q: where its right factor lies in the parameter's state.
        kind: equal for matrices that can be batched. It follows from global facts alone, so all
            ranks form the same batches.
    """

    layout: MatrixLayout
    view: ShardView
    rank: int
    q: QSlot
    kind: tuple[object, ...]


def matrices_of(
    X: Tensor, options: Mapping[str, Any], replicas: Group | None, unions: Unions
) -> list[MatrixShard]:
    """The matrices of a parameter, as far as this rank holds them; collective if it is sharded.

    Args:
        X: the parameter.
        options: its group, with stack_dims, row_blocks, input_first and the rank options.
        replicas: the ranks that hold the same shard in other replicas.
        unions: looks up the groups that span shards and replicas.

    Raises:
        ValueError: if the options do not fit the parameter, or if it is sharded in a way that no
            update is written for.
    """
    declared = flat_shard(X)
    if declared is not None:
        return list(_of_flat_shard(declared, X, options, replicas, unions))
    return list(_of_tensor(X, options, replicas, unions))


def _of_tensor(
    X: Tensor, options: Mapping[str, Any], replicas: Group | None, unions: Unions
) -> Iterator[MatrixShard]:
    """The matrices of a whole tensor or a DTensor."""
    matrices = blocked(X, options)
    mesh = X.device_mesh if is_dtensor(X) else None
    rows_group = group_over(mesh, matrices.rows.axes) if mesh is not None else None
    columns_group = group_over(mesh, matrices.columns.axes) if mesh is not None else None
    dimension = options["stack_dims"]
    transposed = [block.size < matrices.n for block in matrices.blocks]
    # Only the columns of oriented matrices are asked for.
    rows_by_rank = _by_rank(matrices.X, dimension, matrices.rows, rows_group, any(transposed))
    columns_by_rank = _by_rank(
        matrices.X, dimension + 1, matrices.columns, columns_group, not all(transposed)
    )
    held_columns = Extent(
        matrices.held_columns,
        columns_group,
        by_rank=tuple(map(matrices.flattened, columns_by_rank)),
    )
    held_rows = [
        Extent(block.held, rows_group, by_rank=tuple(map(block.among, rows_by_rank)))
        for block in matrices.blocks
    ]
    slots = QSlots(X, options)
    shape, placements = tuple(matrices.X.shape), placements_of(matrices.X)
    for stack in itertools.product(*(range(len(d.held)) for d in matrices.stack)):
        for b, block in enumerate(matrices.blocks):
            layout = _layout(
                (block.size, matrices.n),
                held_rows[b],
                held_columns,
                replicas,
                unions,
            )
            yield MatrixShard(
                layout,
                Block(stack, block.local, options["input_first"]),
                slots.ranks[b],
                slots.of(b, stack, block.local),
                (shape, placements, mesh, b, layout.replicas),
            )


def _by_rank(
    X: Tensor, dimension: int, shard: DimensionShard, group: Group | None, needed: bool
) -> list[range]:
    return held_by_rank(X, dimension, shard.axes, group) if needed and group is not None else []


def _of_flat_shard(
    shard: FlatShard,
    X: Tensor,
    options: Mapping[str, Any],
    replicas: Group | None,
    unions: Unions,
) -> Iterator[MatrixShard]:
    ranges = ranges_of_all_ranks(shard)
    matrices = list(flat_matrices(shard, options))
    group = shard.group if group_size(shard.group) > 1 else None
    for i, (first, shape, view) in enumerate(matrices):
        sharded = _flat_extent(view, group, ranges, first, math.prod(shape) // view.columns)
        whole = Extent(range(view.columns))
        rows, columns = (whole, sharded) if options["input_first"] else (sharded, whole)
        layout = _layout(shape, rows, columns, replicas, unions)
        slot = QSlot(flat_key(i, len(matrices)), ())
        yield MatrixShard(layout, view, rank_of(layout, options), slot, ("flat", id(X), i))


def _flat_extent(
    view: FlatRange, group: Group | None, ranges: list[tuple[int, int]], first: int, rows: int
) -> Extent:
    """The stored rows of a matrix that a flat shard holds; ``first`` is its first element."""
    shared = shared_rows(ranges, first, rows, view.columns)
    borrowed = bool(view.rows) and view.start % view.columns != 0
    matrix = range(first, first + rows * view.columns)
    by_rank = []
    for start, stop in ranges if group is not None else ():
        inside = intersection(range(start, stop), matrix)
        by_rank.append(FlatRange(inside.start - first, inside.stop - first, view.columns).rows)
    return Extent(view.rows, group, shared, borrowed=borrowed, by_rank=tuple(by_rank))


def _layout(
    shape: tuple[int, int],
    X_rows: Extent,
    X_columns: Extent,
    replicas: Group | None,
    unions: Unions,
) -> MatrixLayout:
    rows, columns = (X_columns, X_rows) if shape[0] < shape[1] else (X_rows, X_columns)
    return MatrixLayout(
        shape,
        rows,
        columns,
        replicas,
        unions.of([rows.group, replicas]),
        unions.of([columns.group, replicas]),
        unions.of([rows.group, columns.group]),
    )


def zeros_per_matrix(X: Tensor, options: Mapping[str, Any]) -> Tensor:
    """A zero for each matrix: shape (*stack dimensions, row blocks), without row blocks of one.

    For a flat shard the shape is (matrices,), or () for one matrix. float32 or wider; sharded as
    the parameter's stack dimensions are.
    """
    dtype = torch.promote_types(X.dtype, torch.float32)
    if (shard := flat_shard(X)) is not None:
        count = len(list(flat_matrices(shard, options)))
        return torch.zeros((count,) if count > 1 else (), dtype=dtype, device=X.device)
    X, stack_dims = output_first(X, options), options["stack_dims"]
    blocks = len(block_sizes(X.shape[stack_dims], options["row_blocks"]))
    shape = (*X.shape[:stack_dims], *([blocks] if blocks > 1 else []))
    if not stack_dims:
        return torch.zeros(shape, dtype=dtype, device=X.device)
    return zeros(X, shape, state_placements(X, stack_dims, None), dtype)
