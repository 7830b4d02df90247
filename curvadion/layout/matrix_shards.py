"""From a parameter to its matrices: unsharded parameters, DTensors and flat shards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from curvadion.comm.groups import Group, Unions, ranks_of
from curvadion.layout.dtensor import (
    BlockedTensor,
    blocked,
    group_over,
    held_along,
    is_dtensor,
    placements_of,
)
from curvadion.layout.flat_shard import (
    FlatShard,
    flat_matrices,
    flat_shard,
    ranges_of_all_ranks,
)
from curvadion.layout.matrix import (
    Block,
    Extent,
    FlatRange,
    MatrixLayout,
    Options,
    within,
)
from curvadion.layout.sharded_states import QSlot, QSlots, flat_key


@dataclass(frozen=True)
class MatrixShard:
    """This rank's shard of one matrix of a parameter."""

    layout: MatrixLayout
    view: Block | FlatRange  # of its elements in the parameter's local tensor
    rank: int  # r
    q: QSlot  # of its right factor
    # Equal for matrices that can be batched; from global facts, so that all ranks batch
    # equally.
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
    by_row, by_column, by_shard = (
        [held[rank] for rank in ranks_of(group)] if group else [] for group in groups
    )
    own = matrices.flattened(matrices.columns.held)
    columns = Extent(own, columns_group, by_rank=tuple(there for _, there in by_column))
    layouts = []
    for block in matrices.blocks:
        by_rank = tuple(within(there, block.rows) for there, _ in by_row)
        rows = Extent(block.held, rows_group, by_rank=by_rank)
        parts = [(within(r, block.rows), c) for r, c in by_shard]
        shape = len(block.rows), matrices.n
        turned = shape[0] < shape[1]
        layouts.append(_layout(shape, rows, columns, parts, turned, replicas, unions))
    return layouts


def _of_flat_shard(
    shard: FlatShard, X: Tensor, options: Options, replicas: Group | None, unions: Unions
) -> Iterator[MatrixShard]:
    ranges = ranges_of_all_ranks(shard)
    matrices = list(flat_matrices(shard, options))
    group = shard.group if len(ranges) > 1 else None
    for i, (whole, shape, view) in enumerate(matrices):
        held = [within(range(*there), whole) for there in ranges]
        rows, columns = _flat_extent(view, group, held), Extent(range(view.columns))
        parts = [(there, columns.indices) for there in rows.by_rank]
        turned = (shape[0] < shape[1]) != options["input_first"]
        layout = _layout(shape, rows, columns, parts, turned, replicas, unions)
        slot = QSlot(flat_key(i, len(matrices)), ())
        yield MatrixShard(layout, view, layout.rank(options), slot, ("flat", id(X), i))


def _flat_extent(view: FlatRange, group: Group | None, held: Sequence[range]) -> Extent:
    """The stored rows of a matrix in a flat shard; held: its elements on each rank."""
    n = view.columns
    shared = {part.start // n for part in held if part and part.start % n}
    by_rank = tuple(FlatRange(part.start, part.stop, n).rows for part in held)
    return Extent(view.rows, group, tuple(sorted(shared)), view.start % n != 0, by_rank)


def _layout(
    shape: tuple[int, int],
    rows: Extent,
    columns: Extent,
    parts: Sequence[tuple[range, range]],
    turned: bool,
    replicas: Group | None,
    unions: Unions,
) -> MatrixLayout:
    """The layout of B; rows, columns, parts: as stored; turned: whether B^T is stored."""
    if turned:
        rows, columns = columns, rows
        parts = [(c, r) for r, c in parts]
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
