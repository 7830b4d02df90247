"""Exchanges of shards: for whole rows on every rank, or for whole matrices on their owners.

The ranks of a column group hold the same rows. They exchange blocks, so that each holds an equal
part of these rows with all columns, and back. A row that several ranks hold in part is summed.

An owner has a run of a stack's matrices. With S shards each way takes m n / S elements per matrix
and rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.comm.collectives import Buckets, Slot, all_to_all, shares, spans
from curvadion.comm.groups import Group
from curvadion.layout.matrix import Extent, MatrixLayout

# Operations of an accelerator that take as long as a byte between nodes: 400 TFLOP/s, 400 Gb/s.
OPERATIONS_A_BYTE = 8000


def whole_rows(shards: Sequence[Tensor], layouts: Sequence[MatrixLayout]) -> list[Tensor]:
    """Stacks of shards (k, m_i, n_j) as whole rows (k, m_r, n), perhaps in place; collective."""
    rows = list(shards)
    for i, blocks in _exchanged(shards, layouts, back=False):
        rows[i] = shards[i].new_zeros(*blocks[0].shape[:2], min(layouts[i].shape))
        for held_there, block in zip(layouts[i].columns.by_rank, blocks, strict=True):
            # Several ranks have sent summands of a shared column.
            rows[i][:, :, held_there.start : held_there.stop] += block
    sum_shared_(rows, [layout.rows for layout in layouts])
    return rows


def cut_columns(rows: Sequence[Tensor], layouts: Sequence[MatrixLayout]) -> list[Tensor]:
    """The inverse of :func:`whole_rows`: (k, m_r, n) as (k, m_i, n_j); collective."""
    shards = list(rows)
    for i, blocks in _exchanged(rows, layouts, back=True):
        shards[i] = torch.cat(blocks, dim=1)
    return shards


def _exchanged(
    stacks: Sequence[Tensor], layouts: Sequence[MatrixLayout], *, back: bool
) -> Iterator[tuple[int, list[Tensor]]]:
    """Exchange blocks of stacks with sharded columns; back: from whole rows to shards."""
    cut: dict[tuple[Group, torch.dtype], list[int]] = {}
    for i, (stack, layout) in enumerate(zip(stacks, layouts, strict=True)):
        if layout.columns.group is not None:
            cut.setdefault((layout.columns.group, stack.dtype), []).append(i)
    for (group, _), chosen in cut.items():
        to, shapes = [], []
        for rank in range(group.size()):
            sent: list[Tensor] = []
            received: list[tuple[int, ...]] = []
            for i in chosen:
                B, columns = stacks[i], layouts[i].columns
                here, there = (_part(layouts[i], r) for r in (group.rank(), rank))
                held = columns.by_rank[rank]
                if back:
                    sent.append(B[..., held.start : held.stop])
                    received.append((len(B), len(there), len(columns)))
                else:
                    sent.append(B[:, there.start : there.stop])
                    received.append((len(B), len(here), len(held)))
            to.append(sent)
            shapes.append(received)
        received_by_rank = all_to_all(to, shapes, group, stacks[chosen[0]])()
        for i, *blocks in zip(chosen, *received_by_rank, strict=True):
            yield i, blocks


def _part(layout: MatrixLayout, rank: int) -> range:
    """The part of these rows that a rank of the column group takes."""
    return spans(shares(len(layout.rows), len(layout.columns.by_rank)))[rank]


def counted(rows: Tensor, layout: MatrixLayout) -> Tensor:
    """The whole rows that this rank contributes to sums over a matrix's shards."""
    return rows if layout.columns.group is not None else layout.rows.counted(rows)


def summands_of_columns(
    A: Sequence[Tensor], B: Sequence[Tensor], layouts: Sequence[MatrixLayout]
) -> Buckets:
    """This rank's summands of A^T B, (k, n, n), from whole rows scaled to about 1."""
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
    """float16 for float32 values near 1 on a GPU, which multiplies these faster."""
    half = rows.device.type == "cuda" and rows.dtype in (torch.float32, torch.float16)
    return torch.float16 if half else rows.dtype


def sum_shared_(products: Sequence[Tensor], extents: Sequence[Extent]) -> None:
    """Sum the rows of products (k, length, r) of which several ranks hold summands."""
    partial = [(p, extent) for p, extent in zip(products, extents, strict=True) if extent.shared]
    tables = [p.new_zeros(len(p), len(extent.shared), p.shape[2]) for p, extent in partial]
    for (p, extent), table in zip(partial, tables, strict=True):
        for slot, place in extent.shared_here():
            table[:, slot] = p[:, place]
    summed = sums(tables, [extent.group for _, extent in partial])
    for (p, extent), table in zip(partial, summed, strict=True):
        for slot, place in extent.shared_here():
            p[:, place] = table[:, slot]


def sums(
    summands: Sequence[Tensor],
    groups: Sequence[dist.ProcessGroup | None],
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> list[Tensor]:
    """Sum tensors over their groups, or reduce them by another operation; collective."""
    each = list(zip(summands, groups, strict=True))
    cut = [(t, group) for t, group in each if group is not None]
    buckets = Buckets([Slot(tuple(t.shape), group, t.dtype, t.device) for t, group in cut])
    if cut:
        torch._foreach_copy_(buckets.views, [t for t, _ in cut])
    buckets.all_reduce_(op=op)
    summed = iter(buckets.views)
    return [t if group is None else next(summed) for t, group in each]


def pack(G: Tensor) -> Tensor:
    """Pack symmetric matrices (k, n, n) into (k, n (n + 1) / 2) elements.

    [[A, .], [C, D]] becomes C and a rectangle: A's lower triangle beside D's upper one.
    """
    k, n, _ = G.shape
    h, odd = (n + 1) // 2, n % 2
    folded = G.new_zeros(k, h + 1 - odd, h)
    folded[:, 1 - odd :] = G[:, :h, :h].tril()
    folded[:, : n - h, odd:].add_(G[:, h:, h:].triu())
    return torch.cat((G[:, h:, :h].reshape(k, -1), folded.reshape(k, -1)), dim=1)


def unpack(packed: Tensor, n: int) -> Tensor:
    """The inverse of :func:`pack`."""
    k, h, odd = len(packed), (n + 1) // 2, n % 2
    C, folded = packed.tensor_split([(n - h) * h], dim=1)
    folded = folded.view(k, h + 1 - odd, h)
    G = packed.new_zeros(k, n, n)
    G[:, :h, :h] = folded[:, 1 - odd :].tril()
    G[:, h:, h:] = folded[:, : n - h, odd:].triu().mT
    G[:, h:, :h] = C.view(k, n - h, h)
    return G.add_(G.tril(-1).mT)


class Owners:
    """The owners of stacks' matrices in a group, and the exchanges with them."""

    def __init__(self, layouts: Sequence[MatrixLayout], counts: Sequence[int], group: Group):
        """layouts, counts: the common layout and the number of matrices of each stack."""
        self._layouts, self._group = layouts, group
        self._runs = runs_of(list(map(matrix_cost, layouts)), counts, group.size())
        self.mine = [runs[group.rank()] for runs in self._runs]  # of each stack

    def begin_gather(
        self, shards: Sequence[Tensor], dtype: torch.dtype
    ) -> Callable[[], list[Tensor]]:
        """Begin to send shards (k, m_i, n_j); the call returns matrices (k_mine, m, n)."""
        ranks = range(self._group.size())
        packed = [B.to(dtype).contiguous() for B in shards]  # a run is contiguous
        to = [[B[runs[r]] for B, runs in zip(packed, self._runs, strict=True)] for r in ranks]
        shapes = [self._shapes(owner=self._group.rank(), holder=rank) for rank in ranks]
        kinds = [B.new_empty(0) for B in shards]
        end = all_to_all(to, shapes, self._group, kinds[0].to(dtype))

        def whole() -> list[Tensor]:
            each = zip(zip(*end(), strict=True), kinds, self._layouts, strict=True)
            return [_joined(blocks, layout).to(like.dtype) for blocks, like, layout in each]

        return whole

    def scatter(
        self, whole: Sequence[Tensor], numbers: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The inverse of :meth:`begin_gather`, also for one number per matrix, sent unrounded.

        (k_mine, m, n) and (k_mine,) -> (k, m_i, n_j) and (k,), by stack.
        """
        ranks = range(self._group.size())
        each = zip(whole, self._layouts, strict=True)
        parts = [_divided(U.to(dtype), layout) for U, layout in each]
        also = [n.view(dtype) for n in numbers]
        to = [[*(part[rank] for part in parts), *also] for rank in ranks]
        wider = [n.dtype.itemsize // dtype.itemsize for n in numbers]
        shapes: list[list[tuple[int, ...]]] = []
        for rank in ranks:
            held = self._shapes(owner=rank, holder=self._group.rank())
            shapes.append([*held, *((k * w,) for (k, *_), w in zip(held, wider, strict=True))])
        received = all_to_all(to, shapes, self._group, whole[0].new_empty(0, dtype=dtype))()
        joined = [torch.cat(blocks) for blocks in zip(*received, strict=True)]
        shards = [U.to(W.dtype) for U, W in zip(joined, whole, strict=False)]
        return shards, [b.view(n.dtype) for b, n in zip(joined[len(whole) :], numbers, strict=True)]

    def _shapes(self, owner: int, holder: int) -> list[tuple[int, int, int]]:
        """By stack, the shape of one rank's shards of the matrices that another one owns."""
        shapes = []
        for layout, runs in zip(self._layouts, self._runs, strict=True):
            rows, columns = layout.parts[holder]
            shapes.append((runs[owner].stop - runs[owner].start, len(rows), len(columns)))
        return shapes


def sends_less(layout: MatrixLayout, count: int, sent: torch.dtype, summed: torch.dtype) -> bool:
    """Whether owners, with shards sent in a dtype, cost less than Gram matrices in another."""
    m, n = max(layout.shape), min(layout.shape)
    ranks = dist.get_world_size(layout.shards)
    whole_rows = 2 * m * n / ranks if layout.columns.group is not None else 0
    gram = (n * (n + 1) * (1 + 1 / ranks) + whole_rows) * summed.itemsize
    owner = 2 * m * n / ranks * sent.itemsize
    # B^T B and B Z: of an owner's matrices, or of each rank's shards.
    products = 4 * m * n * n
    waiting = products * (-(-count // ranks) / count - 1 / ranks)
    return owner + waiting / OPERATIONS_A_BYTE < gram


def matrix_cost(layout: MatrixLayout) -> int:
    """About the operations of a polar factor."""
    m, n = max(layout.shape), min(layout.shape)
    return 4 * m * n * n + 24 * n**3


def runs_of(costs: Sequence[int], counts: Sequence[int], ranks: int) -> list[list[slice]]:
    """By stack and rank, the matrices that the rank owns, with about equal loads."""
    load = [0] * ranks
    runs: list[list[slice]] = [[] for _ in costs]
    for stack in sorted(range(len(costs)), key=lambda i: -costs[i]):
        each = [counts[stack] // ranks] * ranks
        for rank in sorted(range(ranks), key=load.__getitem__)[: counts[stack] % ranks]:
            each[rank] += 1
        runs[stack] = [slice(run.start, run.stop) for run in spans(each)]
        load = [sum_ + costs[stack] * k for sum_, k in zip(load, each, strict=True)]
    return runs


def _joined(blocks: Sequence[Tensor], layout: MatrixLayout) -> Tensor:
    """Join the shards of all ranks, (k, m_i, n_j) by rank, to whole matrices."""
    for dimension in (1, 2):
        held = [part[dimension - 1] for part in layout.parts]
        if [r.start for r in held] == [0, *(r.stop for r in held[:-1])]:
            return torch.cat(list(blocks), dim=dimension)
    # A row that two ranks share was sent by both, each its part.
    found = blocks[0].new_zeros(len(blocks[0]), max(layout.shape), min(layout.shape))
    for block, (rows, columns) in zip(blocks, layout.parts, strict=True):
        found[:, rows.start : rows.stop, columns.start : columns.stop] += block
    return found


def _divided(U: Tensor, layout: MatrixLayout) -> Sequence[Tensor]:
    """The inverse of :func:`_joined`; one copy if ranks have equal parts."""
    for dimension in (1, 2):
        held = [part[dimension - 1] for part in layout.parts]
        size, end = len(held[0]), U.shape[dimension]
        if size and held == [range(i, i + size) for i in range(0, end, size)]:
            by_rank = U.unflatten(dimension, (-1, size)).movedim(dimension, 0)
            return list(by_rank.contiguous())
    return [U[:, r.start : r.stop, c.start : c.stop] for r, c in layout.parts]
