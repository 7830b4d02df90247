"""Exchanges of shards: for whole rows on every rank, or for whole matrices on their owners.

The ranks of a column group hold the same rows. They exchange blocks, so that each holds an
equal part of these with all columns, and back. A row that several ranks hold in part is
summed.

An owner has a run of a stack's matrices. With S shards each way takes m n / S elements per
matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.comm.collectives import Buckets, Slot, all_to_all, shares, spans
from curvadion.comm.groups import Group
from curvadion.layout.matrix import Extent, MatrixLayout
from curvadion.ops.tensors import Lists

# An accelerator's operations in the time of a byte between nodes: 400 TFLOP/s, 400 Gb/s.
OPERATIONS_A_BYTE = 8000


def whole_rows(shards: Lists, layouts: Sequence[MatrixLayout]) -> list[Tensor]:
    """Shards (k, m_i, n_j) as whole rows (k, m_r, n), perhaps in place; collective."""
    rows = list(shards)
    for i, blocks in _exchanged(shards, layouts, back=False):
        rows[i] = shards[i].new_zeros(*blocks[0].shape[:2], min(layouts[i].shape))
        for there, block in zip(layouts[i].columns.by_rank, blocks, strict=True):
            # Several ranks have sent summands of a shared column.
            rows[i][:, :, there.start : there.stop] += block
    sum_shared_(rows, [layout.rows for layout in layouts])
    return rows


def cut_columns(rows: Lists, layouts: Sequence[MatrixLayout]) -> list[Tensor]:
    """The inverse of :func:`whole_rows`: (k, m_r, n) as (k, m_i, n_j); collective."""
    shards = list(rows)
    for i, blocks in _exchanged(rows, layouts, back=True):
        shards[i] = torch.cat(blocks, dim=1)
    return shards


def _exchanged(
    stacks: Lists, layouts: Sequence[MatrixLayout], *, back: bool
) -> Iterator[tuple[int, list[Tensor]]]:
    """Exchange blocks of stacks with sharded columns; back: from whole rows to shards."""
    cut: dict[tuple[Group, torch.dtype], list[int]] = {}
    for i, (stack, layout) in enumerate(zip(stacks, layouts, strict=True)):
        if layout.columns.group is not None:
            cut.setdefault((layout.columns.group, stack.dtype), []).append(i)
    for (group, _), chosen in cut.items():
        to: list[list[Tensor]] = [[] for _ in range(group.size())]
        shapes: list[list[tuple[int, ...]]] = [[] for _ in to]
        for i in chosen:
            B, columns = stacks[i], layouts[i].columns
            parts = spans(shares(len(layouts[i].rows), group.size()))  # of rows, by rank
            here = parts[group.rank()]
            for rank, (there, held) in enumerate(zip(parts, columns.by_rank, strict=True)):
                if back:
                    to[rank].append(B[..., held.start : held.stop])
                    shapes[rank].append((len(B), len(there), len(columns)))
                else:
                    to[rank].append(B[:, there.start : there.stop])
                    shapes[rank].append((len(B), len(here), len(held)))
        received = all_to_all(to, shapes, group, stacks[chosen[0]])()
        for i, *blocks in zip(chosen, *received, strict=True):
            yield i, blocks


def counted(rows: Tensor, layout: MatrixLayout) -> Tensor:
    """The whole rows that this rank counts in sums over a matrix's shards."""
    return rows if layout.columns.group is not None else layout.rows.counted(rows)


def summands_of_columns(A: Lists, B: Lists, layouts: Sequence[MatrixLayout]) -> Buckets:
    """This rank's summands of A^T B, (k, n, n), from whole rows scaled to about 1."""
    slots = []
    for b, layout in zip(B, layouts, strict=True):
        n = b.shape[2]
        slots.append(Slot((len(b), n, n), layout.shards, b.dtype, b.device))
    buckets = Buckets(slots)
    for a, b, layout, out in zip(A, B, layouts, buckets.views, strict=True):
        left, right = (counted(rows, layout).to(dtype_of_products(rows)) for rows in (a, b))
        out.copy_(torch.bmm(left.mT, right))
    return buckets


def dtype_of_products(rows: Tensor) -> torch.dtype:
    """float16 for float32 values near 1 on a GPU, which is faster."""
    half = rows.device.type == "cuda" and rows.dtype in (torch.float32, torch.float16)
    return torch.float16 if half else rows.dtype


def sum_shared_(products: Lists, extents: Sequence[Extent]) -> None:
    """Sum rows of products (k, length, r) of which several ranks hold summands."""
    partial = [
        (p, extent) for p, extent in zip(products, extents, strict=True) if extent.shared
    ]
    tables = [p.new_zeros(len(p), len(extent.shared), p.shape[2]) for p, extent in partial]
    for (p, extent), table in zip(partial, tables, strict=True):
        for slot, place in extent.shared_here():
            table[:, slot] = p[:, place]
    summed = sums(tables, [extent.group for _, extent in partial])
    for (p, extent), table in zip(partial, summed, strict=True):
        for slot, place in extent.shared_here():
            p[:, place] = table[:, slot]


def sums(
    summands: Lists,
    groups: Sequence[Group | None],
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> list[Tensor]:
    """Sum tensors over their groups, or reduce them by ``op``; collective."""
    each = list(zip(summands, groups, strict=True))
    cut = [(t, group) for t, group in each if group is not None]
    buckets = Buckets([Slot(tuple(t.shape), group, t.dtype, t.device) for t, group in cut])
    if cut:
        torch._foreach_copy_(buckets.views, [t for t, _ in cut])
    buckets.all_reduce_(op=op)
    summed = iter(buckets.views)
    return [t if group is None else next(summed) for t, group in each]


def pack(G: Tensor) -> Tensor:
    """Pack symmetric matrices (k, n, n) as (k, n (n + 1) / 2).

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
    """The owners of matrices in a group, and exchanges with them; stacks have one dtype."""

    def __init__(self, layouts: Sequence[MatrixLayout], counts: Sequence[int], group: Group):
        """layouts, counts: of each stack the layout and the number of matrices."""
        self._layouts, self._group = layouts, group
        self._runs = runs_of(list(map(matrix_cost, layouts)), counts, group.size())
        self.mine = [runs[group.rank()] for runs in self._runs]  # of each stack

    def begin_gather(self, shards: Lists, dtype: torch.dtype) -> Callable[[], list[Tensor]]:
        """Begin to send shards (k, m_i, n_j); the call returns matrices (k_mine, m, n)."""
        ranks = range(self._group.size())
        each = zip(shards, self._runs, strict=True)
        # Contiguous, so that runs are too.
        packed = [B.to(dtype).contiguous().split(list(map(len, runs))) for B, runs in each]
        to = list(zip(*packed, strict=True))
        shapes = [self._shapes(owner=self._group.rank(), holder=rank) for rank in ranks]
        before = shards[0].dtype
        end = all_to_all(to, shapes, self._group, packed[0][0])

        def whole() -> list[Tensor]:
            by_stack = zip(*end(), strict=True)
            return [U.to(before) for U in map(_joined, by_stack, self._layouts)]

        return whole

    def scatter(
        self, whole: Lists, numbers: Lists, dtype: torch.dtype
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The inverse of :meth:`begin_gather`, also for a number per matrix, sent unrounded.

        (k_mine, m, n) and (k_mine,) -> (k, m_i, n_j) and (k,), by stack.
        """
        each = zip(whole, self._layouts, strict=True)
        parts = [_divided(U.to(dtype), layout) for U, layout in each]
        also = [n.view(dtype) for n in numbers]
        to = [[*of_rank, *also] for of_rank in zip(*parts, strict=True)]
        wider = numbers[0].dtype.itemsize // dtype.itemsize
        shapes = []
        for rank in range(len(to)):
            held = self._shapes(owner=rank, holder=self._group.rank())
            shapes.append([*held, *((k * wider,) for k, *_ in held)])
        received = all_to_all(to, shapes, self._group, also[0])()
        joined = [torch.cat(blocks) for blocks in zip(*received, strict=True)]
        shards = [U.to(whole[0].dtype) for U in joined[: len(whole)]]
        return shards, [bits.view(numbers[0].dtype) for bits in joined[len(whole) :]]

    def _shapes(self, owner: int, holder: int) -> list[tuple[int, int, int]]:
        """By stack, the shape of one rank's shards of another one's matrices."""
        shapes = []
        for layout, runs in zip(self._layouts, self._runs, strict=True):
            rows, columns = layout.parts[holder]
            shapes.append((len(runs[owner]), len(rows), len(columns)))
        return shapes


def sends_less(
    layout: MatrixLayout, count: int, sent: torch.dtype, summed: torch.dtype
) -> bool:
    """Whether owners of shards sent in a dtype cost less than Gram matrices in another."""
    n, m = sorted(layout.shape)
    ranks = dist.get_world_size(layout.shards)
    whole_rows = 2 * m * n / ranks if layout.columns.group is not None else 0
    gram = (n * (n + 1) * (1 + 1 / ranks) + whole_rows) * summed.itemsize
    owner = 2 * m * n / ranks * sent.itemsize
    # B^T B and B Z: of an owner's matrices, or of shards.
    waiting = 4 * m * n * n * (-(-count // ranks) / count - 1 / ranks)
    return owner + waiting / OPERATIONS_A_BYTE < gram


def matrix_cost(layout: MatrixLayout) -> int:
    """About the operations of a polar factor."""
    n, m = sorted(layout.shape)
    return 4 * m * n * n + 24 * n**3


def runs_of(costs: Sequence[int], counts: Sequence[int], ranks: int) -> list[list[range]]:
    """By stack and rank, the matrices that the rank owns, with about equal loads."""
    load = [0] * ranks
    runs: list[list[range]] = [[] for _ in costs]
    for stack in sorted(range(len(costs)), key=lambda i: -costs[i]):
        each = [0] * ranks
        least_first = sorted(range(ranks), key=load.__getitem__)
        for rank, share in zip(least_first, shares(counts[stack], ranks), strict=True):
            each[rank] = share
            load[rank] += share * costs[stack]
        runs[stack] = spans(each)
    return runs


def _joined(blocks: Lists, layout: MatrixLayout) -> Tensor:
    """Whole matrices from the shards of all ranks, (k, m_i, n_j) by rank."""
    for dimension in (1, 2):
        held = [part[dimension - 1] for part in layout.parts]
        if [r.start for r in held] == [0, *(r.stop for r in held[:-1])]:
            return torch.cat(list(blocks), dim=dimension)
    # Ranks that share a row have each sent a part.
    found = blocks[0].new_zeros(len(blocks[0]), *sorted(layout.shape, reverse=True))
    for block, (rows, columns) in zip(blocks, layout.parts, strict=True):
        found[:, rows.start : rows.stop, columns.start : columns.stop] += block
    return found


def _divided(U: Tensor, layout: MatrixLayout) -> Lists:
    """The inverse of :func:`_joined`; one copy if ranks have equal parts."""
    for dimension in (1, 2):
        held = [part[dimension - 1] for part in layout.parts]
        size, end = len(held[0]), U.shape[dimension]
        if size and held == [range(i, i + size) for i in range(0, end, size)]:
            by_rank = U.unflatten(dimension, (-1, size)).movedim(dimension, 0)
            return list(by_rank.contiguous())
    return [U[:, r.start : r.stop, c.start : c.stop] for r, c in layout.parts]
