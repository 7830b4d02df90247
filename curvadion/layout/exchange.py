"""Exchanges of shards: for whole rows on every rank, or for whole matrices on their owners.

The ranks of a column group hold the same rows. They exchange blocks, so that each holds an
equal part of these with all columns, and back. A row that several ranks hold in part is
summed.

An owner has a run of a stack's matrices. With S shards each way takes m n / S elements per
matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.comm.collectives import Buckets, Slot, all_to_all, begin_all_to_all
from curvadion.comm.groups import Group
from curvadion.division import shares, spans
from curvadion.layout.matrix import Extent, MatrixLayout
from curvadion.ops.tensors import Tensors

# An accelerator's operations in the time of a byte between nodes: 400 TFLOP/s, 400 Gb/s.
OPERATIONS_A_BYTE = 8000
Item = TypeVar("Item")


def whole_rows(shards: Tensors, layouts: Sequence[MatrixLayout]) -> list[Tensor]:
    """Shards (k, m_i, n_j) as whole rows (k, m_r, n), perhaps in place; collective."""
    rows = list(shards)
    for i, blocks in _exchanged(shards, layouts, back=False):
        rows[i] = shards[i].new_zeros(*blocks[0].shape[:2], min(layouts[i].shape))
        for there, block in zip(layouts[i].columns.by_rank, blocks, strict=True):
            # Several ranks have sent summands of a shared column.
            rows[i][:, :, there.start : there.stop] += block
    sum_shared_(rows, [layout.rows for layout in layouts])
    return rows


def cut_columns(rows: Tensors, layouts: Sequence[MatrixLayout]) -> list[Tensor]:
    """The inverse of :func:`whole_rows`: (k, m_r, n) as (k, m_i, n_j); collective."""
    shards = list(rows)
    for i, blocks in _exchanged(rows, layouts, back=True):
        shards[i] = torch.cat(blocks, dim=1)
    return shards


def _exchanged(
    stacks: Tensors, layouts: Sequence[MatrixLayout], *, back: bool
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


def summands_of_columns(A: Tensors, B: Tensors, layouts: Sequence[MatrixLayout]) -> Buckets:
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


def sum_shared_(products: Tensors, extents: Sequence[Extent]) -> None:
    """Sum rows of products (k, length, r) of which several ranks hold summands."""
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
    summands: Tensors,
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


class MatrixOwners:
    """The owners of matrices in a group, and exchanges with them; stacks have one dtype.

    Shards are exchanged in the order of dimensions in which they lie in memory, so that runs
    of matrices are sent as they are. What a rank sends to another is a part of one vector,
    which holds all stacks one after another.
    """

    def __init__(
        self,
        layouts: Sequence[MatrixLayout],
        counts: Sequence[int],
        turned: Sequence[bool],
        group: Group,
    ) -> None:
        """Choose the owners, the same on all ranks.

        Args:
            layouts: of each stack.
            counts: of each stack the number of matrices.
            turned: of each stack, whether the transposes of its matrices lie in memory.
            group: the ranks with shards.
        """
        runs = runs_of(list(map(matrix_cost, layouts)), counts, group.size())
        each = zip(layouts, turned, runs, strict=True)
        self._stacks = [_Exchanged(*of_stack) for of_stack in each]
        self._group = group
        self.mine = [of_stack[group.rank()] for of_stack in runs]  # of each stack

    def begin_gather(self, shards: Tensors, dtype: torch.dtype) -> Callable[[], list[Tensor]]:
        """Begin to send shards (k, m_i, n_j); the call returns matrices (k_mine, m, n).

        The matrices are in ``dtype``, and their strides in the order of the exchange.
        """
        here = self._group.rank()
        ranks = range(self._group.size())
        sent = [self._sizes(owner=rank, holder=here) for rank in ranks]
        received = [self._sizes(owner=here, holder=rank) for rank in ranks]
        stored = [s.in_order(B) for s, B in zip(self._stacks, shards, strict=True)]
        runs = []
        for rank in ranks:
            for s, B in zip(self._stacks, stored, strict=True):
                run = s.runs[rank]
                runs.append(B[run.start : run.stop].reshape(-1))
        buffer = shards[0].new_empty(sum(map(sum, sent)), dtype=dtype)
        torch._foreach_copy_(buffer.split(list(chain(*sent))), runs)
        end = begin_all_to_all(buffer, list(map(sum, sent)), list(map(sum, received)), self._group)

        def whole() -> list[Tensor]:
            parts = end().split(list(chain(*received)))
            count = len(self._stacks)
            matrices = []
            for i, s in enumerate(self._stacks):
                joined = s.joined(parts[i::count], len(self.mine[i]))
                matrices.append(s.in_order(joined))
            return matrices

        return whole

    def scatter(
        self, whole: Tensors, numbers: Tensor, sent_as: torch.dtype, dtype: torch.dtype
    ) -> tuple[list[Tensor], Tensor]:
        """The inverse of :meth:`begin_gather`, also for a number per matrix, sent unrounded.

        Args:
            whole: this rank's matrices, (k_mine, m, n) by stack, of one dtype.
            numbers: one for each of them, (sum of k_mine,), float32 or wider.
            sent_as: the dtype in which matrices are sent.
            dtype: of the shards.

        Returns:
            Shards (k, m_i, n_j) by stack, with their strides in the order of the exchange,
            and the numbers of all matrices as :meth:`by_owner` orders them.
        """
        here = self._group.rank()
        ranks = range(self._group.size())
        wider = numbers.dtype.itemsize // sent_as.itemsize
        sent = []
        received = []
        for rank in ranks:
            owned = sum(len(s.runs[rank]) for s in self._stacks)
            sent.append([*self._sizes(owner=here, holder=rank), len(numbers) * wider])
            received.append([*self._sizes(owner=rank, holder=here), owned * wider])
        buffer = self._packed(whole, numbers.view(sent_as), sent)
        end = begin_all_to_all(buffer, list(map(sum, sent)), list(map(sum, received)), self._group)
        parts = end().split(list(chain(*received)))
        count = len(self._stacks) + 1  # of parts that a rank has sent
        shards = []
        places: list[Tensor] = []
        blocks: list[Tensor] = []
        for i, s in enumerate(self._stacks):
            of_all = sum(map(len, s.runs))
            stack = buffer.new_empty(of_all, *s.shape(here), dtype=dtype)
            shards.append(s.in_order(stack))
            places += stack.view(-1).split([sizes[i] for sizes in received])
            blocks += parts[i::count]
        torch._foreach_copy_(places, blocks)
        # Joined before they are viewed, because wider elements must be aligned.
        return shards, torch.cat(parts[count - 1 :: count]).view(numbers.dtype)

    def by_owner(self, items: Sequence[Sequence[Item]]) -> list[Item]:
        """An item for each matrix, given by stack, in the order of the owners' ranks."""
        ordered: list[Item] = []
        for rank in range(self._group.size()):
            for s, of_stack in zip(self._stacks, items, strict=True):
                run = s.runs[rank]
                ordered += of_stack[run.start : run.stop]
        return ordered

    def _packed(self, whole: Tensors, bits: Tensor, sizes: Sequence[list[int]]) -> Tensor:
        """What each rank gets of this rank's matrices, followed by the same bits for all.

        Args:
            whole: this rank's matrices, (k_mine, m, n) by stack.
            bits: a vector of the dtype in which all is sent.
            sizes: by rank, the numbers of elements of each stack and of the bits.
        """
        buffer = bits.new_empty(sum(map(sum, sizes)))
        stored = [s.in_order(U) for s, U in zip(self._stacks, whole, strict=True)]
        each = list(zip(self._stacks, stored, strict=True))
        divided = [s.evenly_divided(U) for s, U in each]
        even = [blocks for blocks in divided if blocks is not None]
        if len(even) == len(divided):
            # One copy a stack, for all ranks.
            *places, behind = buffer.view(len(sizes), -1).split(sizes[0], dim=1)
            for place, blocks in zip(places, even, strict=True):
                if blocks.numel():
                    place.unflatten(1, blocks.shape[1:]).copy_(blocks)
            behind.copy_(bits)
            return buffer
        parts = buffer.split(list(chain(*sizes)))
        count = len(each) + 1  # of parts for a rank
        ragged: list[Tensor] = []
        of_ragged: list[Tensor] = []
        for i, (s, U) in enumerate(each):
            for rank, part in enumerate(parts[i::count]):
                ragged.append(s.of_rank(U, rank))
                of_ragged.append(part.view(ragged[-1].shape))
        torch._foreach_copy_(of_ragged, ragged)
        torch._foreach_copy_(parts[count - 1 :: count], [bits] * len(sizes))
        return buffer

    def _sizes(self, owner: int, holder: int) -> list[int]:
        """By stack, the elements of one rank's shards of another one's matrices."""
        return [len(s.runs[owner]) * math.prod(s.shape(holder)) for s in self._stacks]


class _Exchanged(NamedTuple):
    """A stack of matrices, and the order of dimensions in which its shards are exchanged."""

    layout: MatrixLayout
    turned: bool  # whether columns come before rows
    runs: list[range]  # of matrices, by owner

    def in_order(self, matrices: Tensor) -> Tensor:
        """Oriented matrices in the order of the exchange, or back."""
        return matrices.mT if self.turned else matrices

    def held(self, rank: int) -> tuple[range, range]:
        """The part of each matrix that a rank holds."""
        rows, columns = self.layout.parts[rank]
        return (columns, rows) if self.turned else (rows, columns)

    def shape(self, rank: int) -> tuple[int, int]:
        """The shape of a rank's part."""
        first, second = self.held(rank)
        return len(first), len(second)

    def of_rank(self, U: Tensor, rank: int) -> Tensor:
        """A rank's part of whole matrices."""
        first, second = self.held(rank)
        return U[:, first.start : first.stop, second.start : second.stop]

    def evenly_divided(self, U: Tensor) -> Tensor | None:
        """The parts of all ranks as a view, (ranks, k, ., .), if they are equal."""
        for dimension in (1, 2):
            held = [self.held(rank)[dimension - 1] for rank in range(len(self.runs))]
            size = len(held[0])
            end = U.shape[dimension]
            if size and held == [range(i, i + size) for i in range(0, end, size)]:
                parts: Tensor = U.unflatten(dimension, (-1, size))
                return parts.movedim(dimension, 0)
        return None

    def joined(self, parts: Tensors, count: int) -> Tensor:
        """Whole matrices (count, ., .) from the parts of all ranks, which are vectors."""
        held = list(map(self.held, range(len(parts))))
        blocks = []
        for part, (first, second) in zip(parts, held, strict=True):
            blocks.append(part.view(count, len(first), len(second)))
        for dimension in (1, 2):
            along = [ranges[dimension - 1] for ranges in held]
            if [r.start for r in along] == [0, *(r.stop for r in along[:-1])]:
                return torch.cat(blocks, dim=dimension)
        # Ranks that share a row have each sent a part.
        m, n = sorted(self.layout.shape, reverse=True)
        whole = self.in_order(blocks[0].new_zeros(count, m, n))
        for rank, block in enumerate(blocks):
            part = self.of_rank(whole, rank)
            part += block
        return whole


def sends_less(layout: MatrixLayout, count: int, sent: torch.dtype, summed: torch.dtype) -> bool:
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
