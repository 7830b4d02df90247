"""Exchanges of shards for whole rows, sums over shards, and packed symmetric matrices.

The ranks of a column group hold the same rows. They exchange blocks, so that each holds an
equal part of these with all columns, and back. A row that several ranks hold in part is
summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.comm.collectives import (
    Buckets,
    Slot,
    all_to_all,
)
from curvadion.comm.groups import Group
from curvadion.division import shares, spans
from curvadion.layout.matrix import Extent, MatrixLayout
from curvadion.ops.tensors import Tensors


def whole_rows(shards: Tensors, layouts: Sequence[MatrixLayout]) -> list[Tensor]:
    """Exchange shards for whole rows; collective.

    The S ranks of a column group hold the same m_i rows, and different columns of them. Each
    gets all columns of m_r of these rows, which is m_i / S, rounded::

        before   rank 0  a a a . . .    after   rank 0  a a a b b b
                         a a a . . .            rank 1  a a a b b b
                 rank 1  . . . b b b
                         . . . b b b

    Args:
        shards: by stack, (k, m_i, n_j). Flat shards have zeros for elements of other ranks.
        layouts: of each stack.

    Returns:
        By stack, (k, m_r, n). Without a column group it is the stack of shards itself, of
        which shared rows are summed in place.
    """
    rows = list(shards)
    for i, blocks in _exchanged_blocks(shards, layouts, back=False):
        layout = layouts[i]
        n = min(layout.shape)
        k, m_r, _ = blocks[0].shape
        rows[i] = shards[i].new_zeros(k, m_r, n)
        for columns, block in zip(layout.columns.by_rank, blocks, strict=True):
            # Added, because each rank that shares a column has sent a summand of it.
            rows[i][:, :, columns.start : columns.stop] += block
    sum_shared_(rows, [layout.rows for layout in layouts])
    return rows


def cut_columns(rows: Tensors, layouts: Sequence[MatrixLayout]) -> list[Tensor]:
    """The inverse of :func:`whole_rows`: (k, m_r, n) as (k, m_i, n_j); collective."""
    shards = list(rows)
    for i, blocks in _exchanged_blocks(rows, layouts, back=True):
        shards[i] = torch.cat(blocks, dim=1)
    return shards


def _exchanged_blocks(
    stacks: Tensors, layouts: Sequence[MatrixLayout], *, back: bool
) -> Iterator[tuple[int, list[Tensor]]]:
    """Exchange blocks of stacks with sharded columns, all of a group and dtype at once.

    The block between ranks a and b has a's run of the rows, and b's columns. From shards to
    whole rows b sends it to a, and back a sends it to b.

    Args:
        stacks: shards (k, m_i, n_j); back: whole rows (k, m_r, n).
        layouts: of each stack.
        back: whether from whole rows to shards.

    Yields:
        The index of a stack, and by rank the blocks that this rank has received.
    """
    indices_by_kind: dict[tuple[Group, torch.dtype], list[int]] = {}
    for i, (stack, layout) in enumerate(zip(stacks, layouts, strict=True)):
        group = layout.columns.group
        if group is not None:
            indices_by_kind.setdefault((group, stack.dtype), []).append(i)
    for (group, _), indices in indices_by_kind.items():
        sent: list[list[Tensor]] = [[] for _ in range(group.size())]
        received_shapes: list[list[tuple[int, ...]]] = [[] for _ in range(group.size())]
        for i in indices:
            stack = stacks[i]
            k = len(stack)
            columns = layouts[i].columns
            runs = spans(shares(len(layouts[i].rows), group.size()))  # of rows, by rank
            my_run = runs[group.rank()]
            ranks = zip(sent, received_shapes, runs, columns.by_rank, strict=True)
            for blocks, shapes, run, rank_columns in ranks:
                if back:
                    blocks.append(stack[..., rank_columns.start : rank_columns.stop])
                    shapes.append((k, len(run), len(columns)))
                else:
                    blocks.append(stack[:, run.start : run.stop])
                    shapes.append((k, len(my_run), len(rank_columns)))
        received = all_to_all(sent, received_shapes, group, stacks[indices[0]])
        for position, i in enumerate(indices):
            yield i, [blocks[position] for blocks in received]


def counted(rows: Tensor, layout: MatrixLayout) -> Tensor:
    """Of the whole rows (k, m_r, n) those that this rank counts in sums over the shards.

    After an exchange no two ranks have the same row; without one they may share rows.
    """
    if layout.columns.group is not None:
        return rows
    return layout.rows.counted(rows)


def summands_of_columns(A: Tensors, B: Tensors, layouts: Sequence[MatrixLayout]) -> Buckets:
    """This rank's summands of A^T B, (k, n, n) by stack, not yet summed over the shards.

    Args:
        A: whole rows by stack, (k, m_r, n), scaled to about 1 for products in half precision.
        B: likewise, in dtypes at least as wide.
        layouts: of each stack.
    """
    slots = []
    for rows_of_B, layout in zip(B, layouts, strict=True):
        k, _, n = rows_of_B.shape
        slots.append(Slot((k, n, n), layout.shards, rows_of_B.dtype, rows_of_B.device))
    buckets = Buckets(slots)
    for rows_of_A, rows_of_B, layout, summand in zip(A, B, layouts, buckets.views, strict=True):
        # Directions of float64 matrices are float32 if these were sent in a narrower dtype.
        dtype = dtype_of_products(rows_of_B)
        left = counted(rows_of_A, layout).to(dtype)
        right = counted(rows_of_B, layout).to(dtype)
        # A_k^T B_k
        summand.copy_(torch.bmm(left.mT, right))
    return buckets


def dtype_of_products(rows: Tensor) -> torch.dtype:
    """float16 for float32 values near 1 on a GPU, which is faster."""
    on_gpu = rows.device.type == "cuda"
    if on_gpu and rows.dtype in (torch.float32, torch.float16):
        return torch.float16
    return rows.dtype


def sum_shared_(products: Tensors, extents: Sequence[Extent]) -> None:
    """Sum rows of products (k, length, r) of which several ranks hold summands, in place.

    All ranks of a group sum a table with all of its shared rows, few as they are: a rank has
    zeros for those of others.
    """
    shared = []
    for product, extent in zip(products, extents, strict=True):
        if extent.shared:
            shared.append((product, extent))
    tables = []
    for product, extent in shared:
        k, _, r = product.shape
        table = product.new_zeros(k, len(extent.shared), r)
        for slot, row in extent.shared_positions():
            table[:, slot] = product[:, row]
        tables.append(table)
    summed_tables = sums(tables, [extent.group for _, extent in shared])
    for (product, extent), table in zip(shared, summed_tables, strict=True):
        for slot, row in extent.shared_positions():
            product[:, row] = table[:, slot]


def sums(
    summands: Tensors,
    groups: Sequence[Group | None],
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> list[Tensor]:
    """Sum tensors over their groups, or reduce them by ``op``; collective.

    A tensor whose group is None is returned as it is.
    """
    slots = []
    sharded_summands = []
    for summand, group in zip(summands, groups, strict=True):
        if group is not None:
            slots.append(Slot(tuple(summand.shape), group, summand.dtype, summand.device))
            sharded_summands.append(summand)
    buckets = Buckets(slots)
    if sharded_summands:
        torch._foreach_copy_(buckets.views, sharded_summands)
    buckets.all_reduce_(op=op)
    views = iter(buckets.views)
    totals = []
    for summand, group in zip(summands, groups, strict=True):
        totals.append(summand if group is None else next(views))
    return totals


def pack(G: Tensor) -> Tensor:
    """Pack symmetric matrices (k, n, n) as (k, n (n + 1) / 2).

    With h = n / 2, rounded up, and A of h rows::

        G = [A  C^T]    becomes C, and a rectangle of h columns into which the triangles of
            [C   D ]    A and D are folded

    The rectangle has A's lower triangle below and D's upper one above it, for n = 3 and 4::

        a11 d11        d11 d12
        a21 a22        a11 d22
                       a21 a22

    These are slices of matrices, which take less time than gathers of single elements.
    """
    k, n, _ = G.shape
    h = (n + 1) // 2
    odd = n % 2
    folded = G.new_zeros(k, h + 1 - odd, h)
    folded[:, 1 - odd :] = G[:, :h, :h].tril()  # A
    folded[:, : n - h, odd:].add_(G[:, h:, h:].triu())  # D
    C = G[:, h:, :h]
    return torch.cat((C.reshape(k, -1), folded.reshape(k, -1)), dim=1)


def unpack(packed: Tensor, n: int) -> Tensor:
    """The inverse of :func:`pack`."""
    k = len(packed)
    h = (n + 1) // 2
    odd = n % 2
    C, folded = packed.tensor_split([(n - h) * h], dim=1)
    folded = folded.view(k, h + 1 - odd, h)
    # The lower triangle of G, and then G = lower + (strictly lower)^T.
    G = packed.new_zeros(k, n, n)
    G[:, :h, :h] = folded[:, 1 - odd :].tril()
    G[:, h:, h:] = folded[:, : n - h, odd:].triu().mT
    G[:, h:, :h] = C.view(k, n - h, h)
    return G.add_(G.tril(-1).mT)
