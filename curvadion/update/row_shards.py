"""Shards of whole rows, of which a Gram matrix is a sum over ranks.

An oriented matrix B (m x n) is held as B_ij: rows i over one group, columns j over another. The
products B^T B and B Z with an n x n matrix need whole rows. The ranks of a column group hold the
same rows. They exchange blocks, so that each of them holds an equal part of these rows with all
columns, and send results back in the same way. Either way a rank sends as many numbers as its shard
has, less its own part, and holds no more of a matrix than before.

A row that several ranks hold in part (a flat shard's) is added up first, n numbers a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from curvadion.comm.collectives import Buckets, Slot, all_to_all, shares
from curvadion.comm.groups import Group
from curvadion.layout.matrix import Extent, MatrixLayout


def whole_rows(shards: Sequence[Tensor], layouts: Sequence[MatrixLayout]) -> list[Tensor]:
    """Stacks of shards (k, m_i, n_j) as stacks of whole rows (k, m_r, n); collective.

    The results of uncut stacks are the arguments themselves, those of row cuts are changed in
    place.
    """
    rows = list(shards)
    for group, cut in _by_column_group(shards, layouts):
        to, shapes = [], []
        for rank in range(group.size()):
            parts = [_part(layouts[i], rank) for i in cut]
            to.append([shards[i][:, p.start : p.stop] for i, p in zip(cut, parts, strict=True)])
            here = [len(_part(layouts[i], group.rank())) for i in cut]
            held = [len(layouts[i].columns.by_rank[rank]) for i in cut]
            shapes.append([(len(shards[i]), *s) for i, *s in zip(cut, here, held, strict=True)])
        for i, *blocks in zip(cut, *all_to_all(to, shapes, group, shards[cut[0]])(), strict=True):
            rows[i] = shards[i].new_zeros(*blocks[0].shape[:2], min(layouts[i].shape))
            for held_there, block in zip(layouts[i].columns.by_rank, blocks, strict=True):
                # Of a shared column several ranks have sent summands.
                rows[i][:, :, held_there.start : held_there.stop] += block
    sum_shared_(rows, [layout.rows for layout in layouts])
    return rows


def cut_columns(rows: Sequence[Tensor], layouts: Sequence[MatrixLayout]) -> list[Tensor]:
    """The inverse of :func:`whole_rows`: (k, m_r, n) as (k, m_i, n_j); collective."""
    shards = list(rows)
    for group, cut in _by_column_group(rows, layouts):
        to, shapes = [], []
        for rank in range(group.size()):
            held = [layouts[i].columns.by_rank[rank] for i in cut]
            to.append([rows[i][:, :, h.start : h.stop] for i, h in zip(cut, held, strict=True)])
            parts = [len(_part(layouts[i], rank)) for i in cut]
            here = [len(layouts[i].columns) for i in cut]
            shapes.append([(len(rows[i]), *s) for i, *s in zip(cut, parts, here, strict=True)])
        for i, *blocks in zip(cut, *all_to_all(to, shapes, group, rows[cut[0]])(), strict=True):
            shards[i] = torch.cat(blocks, dim=1)
    return shards


def counted(rows: Tensor, layout: MatrixLayout) -> Tensor:
    """The whole rows that this rank contributes to sums over a matrix's shards."""
    return rows if layout.columns.group is not None else layout.rows.counted(rows)


def summands_of_columns(
    A: Sequence[Tensor], B: Sequence[Tensor], layouts: Sequence[MatrixLayout]
) -> Buckets:
    """This rank's summands of A^T B, (k, n, n) by stack, from whole rows (k, m_r, n).

    ``all_reduce_`` makes the sums. Their dtypes are B's. A and B must be of a size about 1
    (:func:`dtype_of_products`).
    """
    slots = []
    for b, layout in zip(B, layouts, strict=True):
        k, _, n = b.shape
        slots.append(Slot((k, n, n), layout.shards, b.dtype, b.device))
    buckets = Buckets(slots)
    for a, b, layout, out in zip(A, B, layouts, buckets.views, strict=True):
        left, right = (counted(rows, layout).to(dtype_of_products(rows)) for rows in (a, b))
        out.copy_(torch.bmm(left.mT, right))
    return buckets


def dtype_of_products(rows: Tensor) -> torch.dtype:
    """float16 for float32 numbers on a GPU, which multiplies these fifteen times as fast.

    The numbers must be of a size about 1.
    """
    half = rows.device.type == "cuda" and rows.dtype in (torch.float32, torch.float16)
    return torch.float16 if half else rows.dtype


def sum_shared_(products: Sequence[Tensor], extents: Sequence[Extent]) -> None:
    """Add up, in products (k, length, r), the rows of which several ranks hold summands."""
    partial = [i for i, extent in enumerate(extents) if extent.shared]
    slots = []
    for i in partial:
        (k, _, r), extent = products[i].shape, extents[i]
        shape = (k, len(extent.shared), r)
        slots.append(Slot(shape, extent.group, products[i].dtype, products[i].device))
    tables = Buckets(slots)
    for i, table in zip(partial, tables.views, strict=True):
        table.zero_()
        for slot, place in extents[i].shared_here():
            table[:, slot] = products[i][:, place]
    tables.all_reduce_()
    for i, table in zip(partial, tables.views, strict=True):
        for slot, place in extents[i].shared_here():
            products[i][:, place] = table[:, slot]


def _by_column_group(
    stacks: Sequence[Tensor], layouts: Sequence[MatrixLayout]
) -> Iterator[tuple[Group, list[int]]]:
    """The stacks whose columns are sharded, by the ranks that hold them and by dtype."""
    cut: dict[tuple[Group, torch.dtype], list[int]] = {}
    for i, (stack, layout) in enumerate(zip(stacks, layouts, strict=True)):
        if layout.columns.group is not None:
            cut.setdefault((layout.columns.group, stack.dtype), []).append(i)
    for (group, _), chosen in cut.items():
        yield group, chosen


def _part(layout: MatrixLayout, rank: int) -> range:
    """Which of the rows held here a rank of the column group takes."""
    ends = accumulate(shares(len(layout.rows), len(layout.columns.by_rank)), initial=0)
    return [range(*span) for span in pairwise(ends)][rank]
