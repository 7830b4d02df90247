"""Each matrix on one rank: shards go to their owner, and the results return.

    B_r of every rank -> B on its owner         m n / S elements per matrix and rank
    U on the owner    -> U_r on every rank      the same

for m x n matrices in S shards. An owner has a run of a stack's matrices, so that a run is one
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.comm.collectives import all_to_all
from curvadion.comm.groups import Group
from curvadion.layout.matrix import MatrixLayout

# Operations of an accelerator that take as long as a byte between nodes: 400 TFLOP/s, 400 Gb/s.
OPERATIONS_A_BYTE = 8000


class Owners:
    """The assignment of stacks' matrices to owners in a group, and the exchanges with them."""

    def __init__(self, layouts: Sequence[MatrixLayout], counts: Sequence[int], group: Group):
        """layouts, counts: the common layout and the number of matrices of each stack."""
        self._layouts, self._group = layouts, group
        self._runs = runs_of(list(map(matrix_cost, layouts)), counts, group.size())
        self.mine = [runs[group.rank()] for runs in self._runs]  # of each stack

    def begin_gather(
        self, shards: Sequence[Tensor], dtype: torch.dtype
    ) -> Callable[[], list[Tensor]]:
        """Begin to send shards (k, m_i, n_j) by stack to their owners, in a dtype; collective.

        The returned call waits and returns the whole matrices (k_mine, m, n).
        """
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
    """About the operations of a polar factor: two products with B, three with G per iteration."""
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
        ends = accumulate(each, initial=0)
        runs[stack] = [slice(*span) for span in pairwise(ends)]
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
    """The inverse of :func:`_joined`; one copy if ranks have equal numbers of rows, or columns."""
    for dimension in (1, 2):
        held = [part[dimension - 1] for part in layout.parts]
        size, end = len(held[0]), U.shape[dimension]
        if size and held == [range(i, i + size) for i in range(0, end, size)]:
            by_rank = U.unflatten(dimension, (-1, size)).movedim(dimension, 0)
            return list(by_rank.contiguous())
    return [U[:, r.start : r.stop, c.start : c.stop] for r, c in layout.parts]
