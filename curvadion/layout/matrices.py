"""From a parameter to its matrices: unsharded parameters, DTensors and flat shards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from curvadion.comm.collectives import group_size
from curvadion.comm.groups import Group, Unions
from curvadion.layout.blocks import BlockedTensor, blocked, rank_of, within
from curvadion.layout.dtensor import (
    DimensionShard,
    group_over,
    held_along,
    is_dtensor,
    placements_of,
)
from curvadion.layout.flat_shard import FlatShard, flat_matrices, flat_shard, ranges_of_all_ranks
from curvadion.layout.matrix import Block, Extent, FlatRange, MatrixLayout, ShardView
from curvadion.layout.states import QSlot, QSlots, flat_key


@dataclass(frozen=True)
class MatrixShard:
    """This rank's shard of one matrix of a parameter."""

    layout: MatrixLayout
    view: ShardView  # the location of its elements in the parameter's local tensor
    rank: int  # r
    q: QSlot  # the location of its right factor in the parameter's state
    # Equal for matrices that can be batched; from global facts, so that all ranks batch equally.
    kind: tuple[object, ...]


def matrices_of(
    X: Tensor, options: Mapping[str, Any], replicas: Group | None, unions: Unions
) -> list[MatrixShard]:
    """This rank's matrices of a parameter; collective if it is sharded."""
    if (declared := flat_shard(X)) is not None:
        return list(_of_flat_shard(declared, X, options, replicas, unions))
    return list(_of_tensor(X, options, replicas, unions))


def _of_tensor(
    X: Tensor, options: Mapping[str, Any], replicas: Group | None, unions: Unions
) -> Iterator[MatrixShard]:
    """The matrices of an unsharded tensor or a DTensor."""
    matrices, slots, dimension = blocked(X, options), QSlots(X, options), options["stack_dims"]
    rows_group, rows_by_rank = _by_rank(matrices.X, dimension, matrices.rows)
    columns_group, columns_by_rank = _by_rank(matrices.X, dimension + 1, matrices.columns)
    flattened = tuple(map(matrices.flattened, columns_by_rank))
    columns = Extent(matrices.flattened(matrices.columns.held), columns_group, by_rank=flattened)
    mesh = X.device_mesh if is_dtensor(X) else None
    facts = tuple(matrices.X.shape), placements_of(matrices.X), mesh
    parts = _parts(matrices, dimension, unions.of([rows_group, columns_group]))
    for stack in itertools.product(*(range(len(d.held)) for d in matrices.stack)):
        for b, block in enumerate(matrices.blocks):
            by_rank = tuple(within(rows, block.start, block.size) for rows in rows_by_rank)
            rows = Extent(block.held, rows_group, by_rank=by_rank)
            shape = block.size, matrices.n
            layout = _layout(shape, rows, columns, replicas, unions, parts[b])
            yield MatrixShard(
                layout,
                Block(stack, block.local, options["input_first"]),
                slots.ranks[b],
                slots.of(b, stack, block.local),
                (*facts, b, layout.replicas),
            )


def _by_rank(X: Tensor, dimension: int, shard: DimensionShard) -> tuple[Group | None, list[range]]:
    """The group over which a dimension is sharded, and the indices that each of its ranks holds."""
    if not is_dtensor(X) or (group := group_over(X.device_mesh, shard.axes)) is None:
        return None, []
    held = held_along(X, dimension, shard.axes, shard.axes)
    return group, [held[rank] for rank in dist.get_process_group_ranks(group)]


def _parts(
    matrices: BlockedTensor, dimension: int, shards: Group | None
) -> list[list[tuple[range, range]]]:
    """By block, the rows and columns of each rank of ``shards``."""
    if shards is None or not is_dtensor(matrices.X):
        return [[] for _ in matrices.blocks]
    rows, columns = matrices.rows.axes, matrices.columns.axes
    along = sorted({*rows, *columns})
    held_rows = held_along(matrices.X, dimension, rows, along)
    held_columns = held_along(matrices.X, dimension + 1, columns, along)
    ranks = dist.get_process_group_ranks(shards)
    flattened = [matrices.flattened(held_columns[rank]) for rank in ranks]
    return [
        [
            (within(held_rows[rank], block.start, block.size), columns)
            for rank, columns in zip(ranks, flattened, strict=True)
        ]
        for block in matrices.blocks
    ]


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
        parts = list(zip(sharded.by_rank, itertools.repeat(whole.indices)))
        if options["input_first"]:
            parts = [(held_columns, held_rows) for held_rows, held_columns in parts]
        layout = _layout(shape, rows, columns, replicas, unions, parts)
        slot = QSlot(flat_key(i, len(matrices)), ())
        yield MatrixShard(layout, view, rank_of(layout, options), slot, ("flat", id(X), i))


def _flat_extent(
    view: FlatRange, group: Group | None, ranges: list[tuple[int, int]], first: int, rows: int
) -> Extent:
    """The stored rows of a matrix in a flat shard; ``first``: the matrix's first element."""
    begins = (start - first for start, stop in ranges if start < stop)
    boundaries = (element for element in begins if 0 < element < rows * view.columns)
    shared = tuple(sorted({e // view.columns for e in boundaries if e % view.columns}))
    borrowed = bool(view.rows) and view.start % view.columns != 0
    elements = [within(range(*held), first, rows * view.columns) for held in ranges]
    by_rank = tuple(FlatRange(e.start, e.stop, view.columns).rows for e in elements)
    return Extent(view.rows, group, shared, borrowed, by_rank if group is not None else ())


def _layout(
    shape: tuple[int, int],
    rows: Extent,
    columns: Extent,
    replicas: Group | None,
    unions: Unions,
    parts: Sequence[tuple[range, range]],
) -> MatrixLayout:
    """The layout of X's oriented matrix; rows, columns: X's; parts: those of each shard."""
    if shape[0] < shape[1]:
        rows, columns = columns, rows
        parts = [(held_columns, held_rows) for held_rows, held_columns in parts]
    return MatrixLayout(
        shape,
        rows,
        columns,
        replicas,
        unions.of([rows.group, replicas]),
        unions.of([columns.group, replicas]),
        unions.of([rows.group, columns.group]),
        tuple(parts),
    )
