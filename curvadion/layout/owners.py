"""Exchanges of shards for whole matrices on their owners, and back.

An owner has a run of a stack's matrices. With S shards, a rank sends m n / S elements per
matrix, and as many on the way back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.comm.collectives import begin_exchange_of_vectors, exchange_vectors
from curvadion.comm.groups import Group
from curvadion.division import shares, spans
from curvadion.layout.matrix import MatrixLayout
from curvadion.ops.tensors import Tensors

# An accelerator's operations in the time of a byte between nodes: 400 TFLOP/s, 400 Gb/s.
OPERATIONS_A_BYTE = 8000
Item = TypeVar("Item")


class MatrixOwners:
    """The owners of matrices in a group, and exchanges with them; stacks have one dtype.

    Each rank of the group owns a run of the matrices of each stack, ``mine``, and has a shard
    of all matrices. :meth:`begin_gather` sends shards to owners, and :meth:`scatter` sends
    what owners have computed back to the shards.

    Shards are exchanged in the order of dimensions in which they lie in memory, so that runs
    of matrices are sent as they are. What a rank sends to another is a part of one vector,
    which holds all stacks one after another. So the parts of a vector that is sent or
    received are, with stacks 0 and 1::

        rank 0, stack 0 | rank 0, stack 1 | rank 1, stack 0 | rank 1, stack 1 | ...

    Args:
        layouts: of each stack.
        counts: of each stack the number of matrices, k.
        turned: of each stack, whether the transposes of its matrices are exchanged.
        group: the ranks with shards. All choose the same owners.
    """

    def __init__(
        self,
        layouts: Sequence[MatrixLayout],
        counts: Sequence[int],
        turned: Sequence[bool],
        group: Group,
    ) -> None:
        costs = [matrix_cost(layout) for layout in layouts]
        runs_by_stack = runs_of(costs, counts, group.size())
        self._stacks = []
        for layout, is_turned, runs in zip(layouts, turned, runs_by_stack, strict=True):
            self._stacks.append(_ExchangedStack(layout, is_turned, runs))
        self._group = group
        self.mine = [runs[group.rank()] for runs in runs_by_stack]  # of each stack

    def begin_gather(self, shards: Tensors, dtype: torch.dtype) -> Callable[[], list[Tensor]]:
        """Begin to send all ranks' shards to the owners of their matrices.

        Args:
            shards: by stack, (k, m_i, n_j).
            dtype: in which they are sent.

        Returns:
            A function that waits for this rank's matrices, by stack (k_mine, m, n), in
            ``dtype``, with strides in the order of the exchange.
        """
        rank = self._group.rank()
        ranks = range(self._group.size())
        sent_sizes = [self._sizes(owner=owner, holder=rank) for owner in ranks]
        received_sizes = [self._sizes(owner=rank, holder=holder) for holder in ranks]
        stored_shards = []
        for stack, shard in zip(self._stacks, shards, strict=True):
            stored_shards.append(stack.in_order(shard))
        runs_of_shards = []
        for owner in ranks:
            for stack, shard in zip(self._stacks, stored_shards, strict=True):
                run = stack.runs[owner]
                runs_of_shards.append(shard[run.start : run.stop].reshape(-1))
        buffer = shards[0].new_empty(sum(map(sum, sent_sizes)), dtype=dtype)
        torch._foreach_copy_(buffer.split(list(chain(*sent_sizes))), runs_of_shards)
        sent = [sum(sizes) for sizes in sent_sizes]
        received = [sum(sizes) for sizes in received_sizes]
        end = begin_exchange_of_vectors(buffer, sent, received, self._group)

        def wait() -> list[Tensor]:
            parts = end().split(list(chain(*received_sizes)))
            parts_per_rank = len(self._stacks)
            matrices = []
            for i, stack in enumerate(self._stacks):
                parts_of_stack = parts[i::parts_per_rank]  # by holder
                joined = stack.joined(parts_of_stack, len(self.mine[i]))
                matrices.append(stack.in_order(joined))
            return matrices

        return wait

    def scatter(
        self, whole: Tensors, numbers: Tensor, sent_as: torch.dtype, dtype: torch.dtype
    ) -> tuple[list[Tensor], Tensor]:
        """The inverse of :meth:`begin_gather`, also for a number per matrix, sent unrounded.

        A rank gets its parts of an owner's matrices, stack after stack. Behind them it gets
        all of the owner's numbers: their bits, as elements of the dtype of the matrices, so
        that one exchange takes both.

        Args:
            whole: this rank's matrices, (k_mine, m, n) by stack, of one dtype.
            numbers: one for each of them, (sum of k_mine,), float32 or wider.
            sent_as: the dtype in which matrices are sent, no wider than the numbers.
            dtype: of the shards.

        Returns:
            Shards (k, m_i, n_j) by stack, with their strides in the order of the exchange,
            and the numbers of all matrices as :meth:`by_owner` orders them.
        """
        rank = self._group.rank()
        ranks = range(self._group.size())
        elements_per_number = numbers.dtype.itemsize // sent_as.itemsize
        sent_sizes = []
        received_sizes = []
        for other_rank in ranks:
            to_holder = self._sizes(owner=rank, holder=other_rank)
            sent_sizes.append([*to_holder, len(numbers) * elements_per_number])
            from_owner = self._sizes(owner=other_rank, holder=rank)
            owned_count = sum(len(stack.runs[other_rank]) for stack in self._stacks)
            received_sizes.append([*from_owner, owned_count * elements_per_number])
        buffer = self._packed(whole, numbers.view(sent_as), sent_sizes)
        sent = [sum(sizes) for sizes in sent_sizes]
        received = [sum(sizes) for sizes in received_sizes]
        vector = exchange_vectors(buffer, sent, received, self._group)
        parts = vector.split(list(chain(*received_sizes)))
        parts_per_rank = len(self._stacks) + 1
        shards = []
        places: list[Tensor] = []
        blocks: list[Tensor] = []
        for i, stack in enumerate(self._stacks):
            k = sum(len(run) for run in stack.runs)
            shard = buffer.new_empty(k, *stack.shape_of(rank), dtype=dtype)
            shards.append(stack.in_order(shard))
            # Owners have consecutive runs of matrices: a part from each fills the next place.
            places += shard.view(-1).split([sizes[i] for sizes in received_sizes])
            blocks += parts[i::parts_per_rank]
        torch._foreach_copy_(places, blocks)
        # Joined before they are viewed, because wider elements must be aligned.
        bits = torch.cat(parts[parts_per_rank - 1 :: parts_per_rank])
        return shards, bits.view(numbers.dtype)

    def by_owner(self, items: Sequence[Sequence[Item]]) -> list[Item]:
        """An item for each matrix, given by stack, in the order of the owners' ranks."""
        ordered: list[Item] = []
        for owner in range(self._group.size()):
            for stack, items_of_stack in zip(self._stacks, items, strict=True):
                run = stack.runs[owner]
                ordered += items_of_stack[run.start : run.stop]
        return ordered

    def _packed(self, whole: Tensors, bits: Tensor, sizes: Sequence[list[int]]) -> Tensor:
        """What each rank gets of this rank's matrices, followed by the same bits for all.

        Args:
            whole: this rank's matrices, (k_mine, m, n) by stack.
            bits: a vector of the dtype in which all is sent.
            sizes: by rank, the numbers of elements of each stack and of the bits.
        """
        ranks = len(sizes)
        buffer = bits.new_empty(sum(map(sum, sizes)))
        stored = []
        for stack, U in zip(self._stacks, whole, strict=True):
            stored.append(stack.in_order(U))
        equal_parts = []
        for stack, U in zip(self._stacks, stored, strict=True):
            parts_of_ranks = stack.equal_parts(U)
            if parts_of_ranks is not None:
                equal_parts.append(parts_of_ranks)
        if len(equal_parts) == len(stored):
            # One copy a stack serves all ranks.
            *places, place_of_bits = buffer.view(ranks, -1).split(sizes[0], dim=1)
            for place, parts_of_ranks in zip(places, equal_parts, strict=True):
                if parts_of_ranks.numel():
                    place.unflatten(1, parts_of_ranks.shape[1:]).copy_(parts_of_ranks)
            place_of_bits.copy_(bits)
            return buffer
        places_by_rank = buffer.split(list(chain(*sizes)))
        parts_per_rank = len(stored) + 1
        places_of_parts: list[Tensor] = []
        parts: list[Tensor] = []
        for i, (stack, U) in enumerate(zip(self._stacks, stored, strict=True)):
            for rank, place in enumerate(places_by_rank[i::parts_per_rank]):
                part = stack.part_of(U, rank)
                parts.append(part)
                places_of_parts.append(place.view(part.shape))
        torch._foreach_copy_(places_of_parts, parts)
        places_of_bits = places_by_rank[parts_per_rank - 1 :: parts_per_rank]
        torch._foreach_copy_(places_of_bits, [bits] * ranks)
        return buffer

    def _sizes(self, owner: int, holder: int) -> list[int]:
        """By stack, the elements of one rank's shards of another one's matrices."""
        sizes = []
        for stack in self._stacks:
            sizes.append(len(stack.runs[owner]) * math.prod(stack.shape_of(holder)))
        return sizes


class _ExchangedStack(NamedTuple):
    """A stack of matrices, and the order of dimensions in which its shards are exchanged."""

    layout: MatrixLayout
    turned: bool  # whether columns come before rows
    runs: list[range]  # of matrices, by owner

    def in_order(self, matrices: Tensor) -> Tensor:
        """Oriented matrices in the order of the exchange, or back."""
        return matrices.mT if self.turned else matrices

    def ranges_of(self, rank: int) -> tuple[range, range]:
        """The part of each matrix that a rank holds, in the order of the exchange."""
        rows, columns = self.layout.parts[rank]
        return (columns, rows) if self.turned else (rows, columns)

    def shape_of(self, rank: int) -> tuple[int, int]:
        """The shape of a rank's part."""
        first, second = self.ranges_of(rank)
        return len(first), len(second)

    def part_of(self, U: Tensor, rank: int) -> Tensor:
        """A rank's part of whole matrices (k, ., .), a view."""
        first, second = self.ranges_of(rank)
        return U[:, first.start : first.stop, second.start : second.stop]

    def equal_parts(self, U: Tensor) -> Tensor | None:
        """The parts of all ranks, (ranks, k, ., .), as a view of whole matrices (k, ., .).

        None if the ranks do not divide one dimension equally.
        """
        for dimension in (1, 2):
            ranges = [self.ranges_of(rank)[dimension - 1] for rank in range(len(self.runs))]
            size = len(ranges[0])
            if not size:
                continue
            equal_ranges = [range(i, i + size) for i in range(0, U.shape[dimension], size)]
            if ranges == equal_ranges:
                parts: Tensor = U.unflatten(dimension, (-1, size))
                return parts.movedim(dimension, 0)
        return None

    def joined(self, parts: Tensors, count: int) -> Tensor:
        """Whole matrices (count, ., .) from the parts of all ranks, which are vectors."""
        ranges_by_rank = [self.ranges_of(rank) for rank in range(len(parts))]
        blocks = []
        for part, (first, second) in zip(parts, ranges_by_rank, strict=True):
            blocks.append(part.view(count, len(first), len(second)))
        for dimension in (1, 2):
            ranges = [pair[dimension - 1] for pair in ranges_by_rank]
            starts = [indices.start for indices in ranges]
            stops = [indices.stop for indices in ranges]
            # Each part begins where the one before ends.
            if starts == [0, *stops[:-1]]:
                return torch.cat(blocks, dim=dimension)
        # Parts are cut along both dimensions, or overlap in a row that ranks share: then each
        # has sent a summand.
        m = max(self.layout.shape)
        n = min(self.layout.shape)
        matrices = self.in_order(blocks[0].new_zeros(count, m, n))
        for rank, block in enumerate(blocks):
            part = self.part_of(matrices, rank)
            part += block
        return matrices


def owners_cost_less(
    layout: MatrixLayout, count: int, sent: torch.dtype, summed: torch.dtype
) -> bool:
    """Whether owners that gather whole matrices cost less than sums of Gram matrices.

    Both costs are bytes that a rank sends for a matrix, and time is counted as bytes.

    Args:
        layout: of a stack's matrices B, (m, n), which have S shards.
        count: of matrices in the stack.
        sent: the dtype in which shards are sent to owners and back.
        summed: the dtype in which Gram matrices are sent.
    """
    n = min(layout.shape)
    m = max(layout.shape)
    ranks = dist.get_world_size(layout.shards)
    # Shards of columns become whole rows before, and shards again afterwards.
    row_elements = 2 * m * n / ranks if layout.columns.group is not None else 0
    # G and Z are packed, n (n + 1) / 2 elements each. For each of them a rank sends the whole
    # line of SharedWork, and 1 / S of it between shares and their owners.
    gram_bytes = (n * (n + 1) * (1 + 1 / ranks) + row_elements) * summed.itemsize
    # A rank sends its shards to owners, and the other ranks' shards of U back to them.
    owner_bytes = 2 * m * n / ranks * sent.itemsize
    # B^T B and B Z are 4 m n^2 operations. Shards divide those of a matrix by S. Owners divide
    # the stack's matrices, and all wait for one with the most, ceil(count / S) of count.
    most_owned = -(-count // ranks)
    waiting_operations = 4 * m * n * n * (most_owned / count - 1 / ranks)
    return owner_bytes + waiting_operations / OPERATIONS_A_BYTE < gram_bytes


def matrix_cost(layout: MatrixLayout) -> int:
    """About the operations of a polar factor: two products of B, and iterations of G."""
    n = min(layout.shape)
    m = max(layout.shape)
    # An iteration is three products of (n, n), 6 n^3 operations: 24 n^3 for four of them.
    return 4 * m * n * n + 24 * n**3


def runs_of(costs: Sequence[int], counts: Sequence[int], ranks: int) -> list[list[range]]:
    """Choose each rank's run of the matrices of each stack, with about equal loads.

    The stacks with the most expensive matrices come first. Every rank gets an equal share of a
    stack, and those with the least load so far get the matrices that are left over.

    Args:
        costs: of a matrix of each stack, in any unit.
        counts: of each stack the number of matrices.
        ranks: how many there are.

    Returns:
        By stack and rank, the indices of the matrices that the rank owns.
    """
    loads = [0] * ranks
    runs_by_stack: list[list[range]] = [[] for _ in costs]
    for stack in sorted(range(len(costs)), key=lambda i: -costs[i]):
        counts_by_rank = [0] * ranks
        least_loaded_first = sorted(range(ranks), key=loads.__getitem__)
        rank_shares = shares(counts[stack], ranks)
        for rank, share in zip(least_loaded_first, rank_shares, strict=True):
            counts_by_rank[rank] = share
            loads[rank] += share * costs[stack]
        runs_by_stack[stack] = spans(counts_by_rank)
    return runs_by_stack
