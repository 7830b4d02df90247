"""From a parameter to its matrices: unsharded parameters, DTensors and flat shards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from curvadion.comm.groups import Group, Unions, ranks_of
from curvadion.layout.dtensor import (
    BlockedTensor,
    blocked,
    group_over,
    indices_by_rank,
    is_dtensor,
    local,
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
from curvadion.ops.tensors import is_dense


@dataclass(frozen=True)
class MatrixShard:
    """This rank's shard of one matrix of a parameter.

    Args:
        layout: of the matrix.
        view: of its elements in the parameter's local tensor.
        rank: r.
        q: the place of its right factor in the state.
        block: its index among the blocks into which a matrix of the stack is divided.
        kind: equal for matrices that can be batched. It consists of global facts, so that all
            ranks batch equally.
    """

    layout: MatrixLayout
    view: Block | FlatRange
    rank: int
    q: QSlot
    block: int
    kind: tuple[object, ...]


def matrices_of(
    X: Tensor, options: Options, replicas: Group | None, unions: Unions
) -> list[MatrixShard]:
    """This rank's matrices of a parameter; collective if it is sharded.

    Args:
        X: the parameter.
        options: its parameter group.
        replicas: the ranks with the same shard in other replicas; None for one replica.
        unions: the optimizer's unions of groups.
    """
    declared = flat_shard(X)
    if declared is not None:
        return list(_matrices_of_flat_shard(declared, X, options, replicas, unions))
    return list(_matrices_of_tensor(X, options, replicas, unions))


def _matrices_of_tensor(
    X: Tensor, options: Options, replicas: Group | None, unions: Unions
) -> Iterator[MatrixShard]:
    """The matrices of an unsharded tensor or a DTensor.

    Args:
        X: the parameter.
        options: its parameter group.
        replicas: as in :func:`matrices_of`.
        unions: the optimizer's unions of groups.
    """
    matrices = blocked(X, options)
    slots = QSlots(X, options)
    mesh = X.device_mesh if is_dtensor(X) else None
    kind_of_parameter = (tuple(matrices.X.shape), placements_of(matrices.X), mesh)
    layouts = _layouts(matrices, options["stack_dims"], replicas, unions)
    for b, view in _views_of_tensor(matrices, options):
        block = matrices.blocks[b]
        layout = layouts[b]
        yield MatrixShard(
            layout,
            view,
            slots.ranks[b],
            slots.of(b, view.stack, block),
            b,
            # Parameters of one shape may be divided in different ways.
            (*kind_of_parameter, block.rows, block.columns, layout.replicas),
        )


def _views_of_tensor(matrices: BlockedTensor, options: Options) -> Iterator[tuple[int, Block]]:
    """Each matrix's number among the blocks of its stack, and its view of the local tensor."""
    my_stack_indices = [range(len(dimension.indices)) for dimension in matrices.stack]
    for stack in itertools.product(*my_stack_indices):
        for b, block in enumerate(matrices.blocks):
            channels = matrices.channels(block)
            yield b, Block(stack, block.local_rows, channels, options["input_first"])


def sizes_in_memory(X: Tensor, options: Options) -> list[int] | None:
    """The elements of this rank's shards of a parameter's matrices.

    Args:
        X: the parameter.
        options: its parameter group.

    Returns:
        Their numbers in the order of :func:`matrices_of`, if the shards fill the local tensor one
        after another without gaps; None if they do not, or if a rank holds a part of a row.
    """
    declared = flat_shard(X)
    views: list[Block | FlatRange]
    if declared is not None:
        views = [view for _, _, view in flat_matrices(declared, options)]
    else:
        views = [view for _, view in _views_of_tensor(blocked(X, options), options)]
    tensor = local(X.detach())
    sizes = []
    end = tensor.storage_offset()
    for view in views:
        if not view.is_view:
            return None
        shard = view.read(tensor)
        if shard.numel():
            if shard.storage_offset() != end or not is_dense(shard):
                return None
            end += shard.numel()
        sizes.append(shard.numel())
    return sizes if sum(sizes) == tensor.numel() else None


class _Part(NamedTuple):
    """A rank's part of a matrix, as it is stored; indices are global."""

    rows: range
    columns: range


def _layouts(
    matrices: BlockedTensor, row_dimension: int, replicas: Group | None, unions: Unions
) -> list[MatrixLayout]:
    """The layout of each block.

    Args:
        matrices: the parameter.
        row_dimension: of the parameter; the next one is that of columns.
        replicas: as in :func:`matrices_of`.
        unions: the optimizer's unions of groups.
    """
    X = matrices.X
    row_axes = matrices.rows.axes
    column_axes = matrices.columns.axes
    rows_group = None
    columns_group = None
    parts_by_rank: dict[int, _Part] = {}  # of all blocks, by global rank
    if is_dtensor(X):
        rows_group = group_over(X.device_mesh, row_axes)
        columns_group = group_over(X.device_mesh, column_axes)
        axes = sorted({*row_axes, *column_axes})
        rows_by_rank = indices_by_rank(X, row_dimension, row_axes, along=axes)
        channels_by_rank = indices_by_rank(X, row_dimension + 1, column_axes, along=axes)
        for rank, row_indices in rows_by_rank.items():
            part = _Part(row_indices, matrices.flattened(channels_by_rank[rank]))
            parts_by_rank[rank] = part
    shards_group = unions.of([rows_group, columns_group])

    def parts_in(group: Group | None) -> list[_Part]:
        if group is None:
            return []
        return [parts_by_rank[rank] for rank in ranks_of(group)]

    layouts = []
    for block in matrices.blocks:
        rows = Extent(
            block.shard_rows,
            rows_group,
            by_rank=tuple(within(part.rows, block.rows) for part in parts_in(rows_group)),
        )
        columns = Extent(
            block.shard_columns,
            columns_group,
            by_rank=tuple(within(part.columns, block.columns) for part in parts_in(columns_group)),
        )
        parts = []
        for part in parts_in(shards_group):
            rows_of_rank = within(part.rows, block.rows)
            parts.append(_Part(rows_of_rank, within(part.columns, block.columns)))
        m, n = block.shape
        layouts.append(_layout((m, n), rows, columns, parts, m < n, replicas, unions))
    return layouts


def _matrices_of_flat_shard(
    shard: FlatShard, X: Tensor, options: Options, replicas: Group | None, unions: Unions
) -> Iterator[MatrixShard]:
    """The matrices of a flat shard.

    Args:
        shard: the declaration of X.
        X: the parameter.
        options: its parameter group.
        replicas: as in :func:`matrices_of`.
        unions: the optimizer's unions of groups.
    """
    ranges = ranges_of_all_ranks(shard)
    matrices = list(flat_matrices(shard, options))
    group = shard.group if len(ranges) > 1 else None
    for i, (block, shape, view) in enumerate(matrices):
        elements_by_rank = [block.held(start, stop) for start, stop in ranges]
        rows = _flat_extent(view, group, elements_by_rank)
        columns = Extent(range(view.columns))
        parts = [_Part(rank_rows, columns.indices) for rank_rows in rows.by_rank]
        # The matrix, or with the input first its transpose, is stored; B is either.
        stores_transpose = (shape[0] < shape[1]) != options["input_first"]
        layout = _layout(shape, rows, columns, parts, stores_transpose, replicas, unions)
        slot = QSlot(flat_key(i, len(matrices)), ())
        blocks_per_matrix = len(matrices) // math.prod(shard.shape[: options["stack_dims"]])
        b = i % blocks_per_matrix
        yield MatrixShard(layout, view, layout.rank(options), slot, b, ("flat", id(X), i))


def _flat_extent(view: FlatRange, group: Group | None, elements_by_rank: Sequence[range]) -> Extent:
    """The stored rows of a matrix in a flat shard.

    Args:
        view: this rank's part of the matrix.
        group: the ranks that hold the tensor; None for one rank.
        elements_by_rank: the matrix's elements on each rank, counted from its first one.
    """
    n = view.columns
    # A range that begins inside a row shares this row with the rank before.
    shared = {part.start // n for part in elements_by_rank if part and part.start % n}
    rows_by_rank = tuple(FlatRange(part.start, part.stop, n).rows for part in elements_by_rank)
    return Extent(
        view.rows,
        group,
        shared=tuple(sorted(shared)),
        borrowed=view.start % n != 0,
        by_rank=rows_by_rank,
    )


def _layout(
    shape: tuple[int, int],
    rows: Extent,
    columns: Extent,
    parts: Sequence[_Part],
    stores_transpose: bool,
    replicas: Group | None,
    unions: Unions,
) -> MatrixLayout:
    """The layout of the oriented matrix B.

    Args:
        shape: (m, n), output features first.
        rows: this rank's rows, as stored.
        columns: this rank's columns, as stored.
        parts: of each rank with a shard, as stored.
        stores_transpose: whether B^T is stored, not B.
        replicas: as in :func:`matrices_of`.
        unions: the optimizer's unions of groups.
    """
    parts_of_B = [(part.rows, part.columns) for part in parts]
    if stores_transpose:
        rows, columns = columns, rows  # B's rows are the columns of B^T
        parts_of_B = [(part.columns, part.rows) for part in parts]
    return MatrixLayout(
        shape,
        rows,
        columns,
        replicas,
        rows_and_replicas=unions.of([rows.group, replicas]),
        columns_and_replicas=unions.of([columns.group, replicas]),
        shards=unions.of([rows.group, columns.group]),
        parts=tuple(parts_of_B),
    )
