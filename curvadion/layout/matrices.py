"""From a parameter to its matrices: unsharded parameters, DTensors and flat shards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from curvadion.comm.collectives import group_size
from curvadion.comm.groups import Group, Unions
from curvadion.layout.dtensor import (
    BlockedTensor,
    blocked,
    group_over,
    held_along,
    is_dtensor,
    placements_of,
)
from curvadion.layout.flat_shard import FlatShard, flat_matrices, flat_shard, ranges_of_all_ranks
from curvadion.layout.matrix import (
    Block,
    Extent,
    FlatRange,
    MatrixLayout,
    Options,
    within,
)
from curvadion.layout.states import QSlot, QSlots, flat_key


@dataclass(frozen=True)
class MatrixShard:
    """This rank's shard of one matrix of a parameter."""

    layout: MatrixLayout
    view: Block | FlatRange  # the location of its elements in the parameter's local tensor
    rank: int  # r
    q: QSlot  # the location of its right factor in the parameter's state
    # Equal for matrices that can be batched; from global facts, so that all ranks batch equally.
    kind: tuple[object, ...]


def matrices_of(
    X: Tensor, options: Options, replicas: Group | None, unions: Unions
) -> list[MatrixShard]:
    """This rank's matrices of a parameter; collective if it is sharded."""
    if (declared := flat_shard(X)) is not None:
        return list(_of_flat_shard(declared, X, options, replicas, unions))
    return list(_of_tensor(X, options, replicas, unions))


def _of_tensor(
    X: Tensor, options: Options, replicas: Group | None, unions: Unions
) -> Iterator[MatrixShard]:
    """The matrices of an unsharded tensor or a DTensor."""
    matrices, slots = blocked(X, options), QSlots(X, options)
    mesh = X.device_mesh if is_dtensor(X) else None
    facts = tuple(matrices.X.shape), placements_of(matrices.X), mesh
    layouts = _layouts(matrices, options["stack_dims"], replicas, unions)
    for stack in itertools.product(*(range(len(d.held)) for d in matrices.stack)):
        for b, (block, layout) in enumerate(zip(matrices.blocks, layouts, strict=True)):
            yield MatrixShard(
                layout,
                Block(stack, block.local, options["input_first"]),
                slots.ranks[b],
                slots.of(b, stack, block.local),
                (*facts, b, layout.replicas),
            )


def _layouts(
    matrices: BlockedTensor, dimension: int, replicas: Group | None, unions: Unions
) -> list[MatrixLayout]:
    """The layout of each row block."""
    X, row_axes, column_axes = matrices.X, matrices.rows.axes, matrices.columns.axes
    rows_group = columns_group = None
    held: dict[int, tuple[range, range]] = {}  # rows and columns of each rank
    if is_dtensor(X):
        rows_group, columns_group = (group_over(X.device_mesh, a) for a in (row_axes, column_axes))
        along = sorted({*row_axes, *column_axes})
        columns_by_rank = held_along(X, dimension + 1, column_axes, along)
        for rank, held_rows in held_along(X, dimension, row_axes, along).items():
            held[rank] = held_rows, matrices.flattened(columns_by_rank[rank])
    groups = rows_group, columns_group, unions.of([rows_group, columns_group])
    by_row, by_column, by_shard = ([held[rank] for rank in _ranks(g)] for g in groups)
    columns = Extent(
        matrices.flattened(matrices.columns.held),
        columns_group,
        by_rank=tuple(held_columns for _, held_columns in by_column),
    )
    layouts = []
    for block in matrices.blocks:
        by_rank = [within(held_rows, block.start, block.size) for held_rows, _ in by_row]
        rows = Extent(block.held, rows_group, by_rank=tuple(by_rank))
        parts = [(within(r, block.start, block.size), c) for r, c in by_shard]
        shape = block.size, matrices.n
        turned = shape[0] < shape[1]
        layouts.append(_layout(shape, rows, columns, parts, turned, replicas, unions))
    return layouts


def _ranks(group: Group | None) -> list[int]:
    return [] if group is None else dist.get_process_group_ranks(group)


def _of_flat_shard(
    shard: FlatShard, X: Tensor, options: Options, replicas: Group | None, unions: Unions
) -> Iterator[MatrixShard]:
    ranges = ranges_of_all_ranks(shard)
    matrices = list(flat_matrices(shard, options))
    group = shard.group if group_size(shard.group) > 1 else None
    for i, (first, shape, view) in enumerate(matrices):
        rows = _flat_extent(view, group, ranges, first, math.prod(shape) // view.columns)
        columns = Extent(range(view.columns))
        parts = [(held_rows, columns.indices) for held_rows in rows.by_rank]
        turned = (shape[0] < shape[1]) != options["input_first"]
        layout = _layout(shape, rows, columns, parts, turned, replicas, unions)
        slot = QSlot(flat_key(i, len(matrices)), ())
        yield MatrixShard(layout, view, layout.rank(options), slot, ("flat", id(X), i))


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
    parts: Sequence[tuple[range, range]],
    turned: bool,
    replicas: Group | None,
    unions: Unions,
) -> MatrixLayout:
    """The layout of B; rows, columns, parts: as stored; turned: whether that is B's transpose."""
    if turned:
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
