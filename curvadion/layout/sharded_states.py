"""States of matrices, sharded like them: right factors, squares, one number each.

The n x n squares of a parameter's oriented matrices (m x n) are a state (*stack dimensions,
N), where N is the sum of n^2 over the blocks, sharded evenly over all ranks of the
matrices. For a flat shard they are this rank's part of all matrices' N.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from curvadion.division import shares, spans
from curvadion.layout.dtensor import (
    MatrixBlock,
    blocked,
    dimension_shards,
    is_shard,
    local,
    output_first,
    placements_of,
    state_placements,
    zeros,
)
from curvadion.layout.flat_shard import FlatShard, flat_matrices, flat_shard
from curvadion.layout.matrix import MatrixLayout, Options, blocks_of, within
from curvadion.ops.tensors import wide_dtype

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


class StateForm(NamedTuple):
    """The form of a state tensor."""

    shape: tuple[int, ...]  # global for DTensors
    placements: Sequence[Placement]  # () for other tensors


@dataclass(frozen=True)
class QSlot:
    """The place of a right factor in its parameter's state: ``state[key][index]``."""

    key: str
    index: tuple[int | slice, ...]


class QSlots:
    """Locations of the right factors of an unsharded parameter or a DTensor in its state.

    B is a block of X, if that is tall, or its transpose. Q has a row for each column of B.
    With blocks of rows, the right factors of tall blocks are side by side, (n, sum of ranks),
    sharded like X's columns. Those of transposed blocks, (rows of the block, rank), are below
    each other, (m, largest rank), sharded like X's rows. With blocks of columns it is the
    other way round: those of transposed blocks are side by side, (m, sum of ranks), and those
    of tall blocks, (columns of the block, rank), below each other, (n, largest rank).
    """

    def __init__(self, X: Tensor, options: Options) -> None:
        X = output_first(X, options)
        stack_dims = options["stack_dims"]
        stack = X.shape[:stack_dims]
        m, *columns = X.shape[stack_dims:]
        n = math.prod(columns)
        self.layouts = []
        divides_columns = False
        for block_rows, block_columns in blocks_of((m, n), options):
            self.layouts.append(MatrixLayout.whole((len(block_rows), len(block_columns))))
            divides_columns |= len(block_columns) < n
        self.ranks = [layout.rank(options) for layout in self.layouts]
        self._is_beside = [layout.transposed == divides_columns for layout in self.layouts]
        ranks_beside = []
        ranks_below = []
        for is_beside, rank in zip(self._is_beside, self.ranks, strict=True):
            ranks_beside.append(rank if is_beside else 0)
            ranks_below.append(0 if is_beside else rank)
        self._columns_beside = spans(ranks_beside)  # by block; empty if it is below others
        # The dimensions of X along which right factors lie, and their lengths.
        of_rows = (stack_dims, m)
        of_columns = (stack_dims + 1, n)
        beside, below = (of_rows, of_columns) if divides_columns else (of_columns, of_rows)
        self.forms: dict[str, StateForm] = {}  # by key
        width = sum(ranks_beside)
        if width:
            dimension, length = beside
            placements = state_placements(X, stack_dims, dimension)
            self.forms["Q"] = StateForm((*stack, length, width), placements)
        self._key_below = "Q_rows" if width else "Q"
        width = max(ranks_below)
        if width:
            dimension, length = below
            placements = state_placements(X, stack_dims, dimension)
            self.forms[self._key_below] = StateForm((*stack, length, width), placements)

    def of(self, block: int, stack: tuple[int | slice, ...], held: MatrixBlock) -> QSlot:
        """The slot of a block of the matrices at ``stack``; held: what this rank has of it."""
        if self._is_beside[block]:
            columns = self._columns_beside[block]
            return QSlot("Q", (*stack, slice(None), slice(columns.start, columns.stop)))
        is_transposed = self.layouts[block].transposed
        rows_of_Q = held.local_rows if is_transposed else held.local_columns
        return QSlot(self._key_below, (*stack, rows_of_Q, slice(self.ranks[block])))


def flat_key(matrix: int, count: int) -> str:
    """The state key of the Q of one of a flat shard's ``count`` matrices."""
    return "Q" if count == 1 else f"Q_{matrix}"


class _FlatRightFactor(NamedTuple):
    """The right factor of a matrix in a flat shard."""

    key: str  # in the state
    layout: MatrixLayout  # of the unsharded matrix
    rows: range  # of Q, on this rank


def _flat_right_factors(shard: FlatShard, options: Options) -> list[_FlatRightFactor]:
    """The right factors of a flat shard's matrices."""
    matrices = list(flat_matrices(shard, options))
    right_factors = []
    for i, (_, shape, view) in enumerate(matrices):
        layout = MatrixLayout.whole(shape)
        # Q has a row for each column of the oriented matrix, which may be a stored row.
        columns_are_stored_rows = layout.transposed != options["input_first"]
        rows = view.rows if columns_are_stored_rows else range(min(shape))
        right_factors.append(_FlatRightFactor(flat_key(i, len(matrices)), layout, rows))
    return right_factors


def right_factor_shapes(X: Tensor, options: Options) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of right factors, by key: global, or a flat shard's own."""
    shard = flat_shard(X)
    if shard is None:
        return {key: form.shape for key, form in QSlots(X, options).forms.items()}
    shapes: dict[str, tuple[int, ...]] = {}
    for factor in _flat_right_factors(shard, options):
        shapes[factor.key] = (len(factor.rows), factor.layout.rank(options))
    return shapes


def create_right_factors(X: Tensor, options: Options, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of right factors, by key, filled with the initial Q's."""
    tensors: dict[str, Tensor] = {}
    shard = flat_shard(X)
    if shard is not None:
        for factor in _flat_right_factors(shard, options):
            Q = factor.layout.initial_q(options, factor.rows)
            # A copy, because a view would keep the rows of all ranks alive.
            tensors[factor.key] = Q.to(X.device, dtype, copy=True)
        return tensors
    matrices = blocked(X, options)
    slots = QSlots(X, options)
    for key, form in slots.forms.items():
        tensors[key] = zeros(X, form.shape, form.placements, dtype)
    whole_stack = (slice(None),) * options["stack_dims"]
    for b, (block, layout) in enumerate(zip(matrices.blocks, slots.layouts, strict=True)):
        slot = slots.of(b, whole_stack, block)
        rows_of_Q = block.shard_rows if layout.transposed else block.shard_columns
        # All matrices of a stack have the same shape, and so the same initial Q.
        Q = layout.initial_q(options, rows_of_Q)
        local(tensors[slot.key])[slot.index].copy_(Q)
    return tensors


def create_squares(X: Tensor, options: Options) -> Tensor:
    """Zeros for the squares of a parameter's matrices, float32 or wider."""
    form = _form_of_squares(X, options)
    dtype = wide_dtype(X.dtype)
    return zeros(X, form.shape, form.placements, dtype)


def squares_fit(X: Tensor, options: Options, squares: Tensor) -> bool:
    """Whether a tensor has the form of :func:`create_squares`."""
    form = _form_of_squares(X, options)
    same_shape = tuple(squares.shape) == form.shape
    return same_shape and placements_of(squares) == tuple(form.placements)


def _form_of_squares(X: Tensor, options: Options) -> StateForm:
    """The form of a parameter's squares."""
    shard = flat_shard(X)
    if shard is not None:
        numel = sum(min(shape) ** 2 for _, shape, _ in flat_matrices(shard, options))
        return StateForm((len(_flat_part(shard, numel)),), ())
    matrices = blocked(X, options)
    stack_dims = options["stack_dims"]
    shape = matrices.X.shape[:stack_dims]
    numel = sum(min(block.shape) ** 2 for block in matrices.blocks)
    placements: Sequence[Placement] = placements_of(matrices.X)
    if placements:
        from torch.distributed.tensor import Shard

        # Whatever dimension of the matrices an axis shards, it shards the squares evenly.
        even = Shard(stack_dims)
        placements = [even if is_shard(p) and p.dim >= stack_dims else p for p in placements]
    return StateForm((*shape, numel), placements)


def squares_held(
    X: Tensor, squares: Tensor, sides: Sequence[int]
) -> Iterator[tuple[Tensor, slice]]:
    """This rank's part of each square of a parameter's matrices.

    Args:
        X: the parameter.
        squares: its state of :func:`create_squares`.
        sides: n of each of this rank's matrices, in their order.

    Yields:
        For each matrix a view of the part, 1-D, and its place among the n^2 elements of the
        square.
    """
    rows = local(squares)
    # A row for each entry of the stack, all of whose entries have matrices of the same shapes.
    rows = rows.view(math.prod(rows.shape[:-1]), rows.shape[-1])
    sides_in_row = sides[: len(sides) // max(1, len(rows))]
    squares_in_row = spans(n * n for n in sides_in_row)
    shard = flat_shard(X)
    if shard is not None:
        row_part = _flat_part(shard, squares_in_row[-1].stop)
    else:
        row_part = dimension_shards(squares)[-1].indices
    for row in rows:
        for square in squares_in_row:
            part = within(row_part, square)
            # From the place in the square to the place in this rank's row.
            start = square.start + part.start - row_part.start
            yield row[start : start + len(part)], slice(part.start, part.stop)


def _flat_part(shard: FlatShard, numel: int) -> range:
    """This rank's range of ``numel`` elements, divided evenly over a flat shard's ranks."""
    if shard.group is None:
        return range(numel)
    return spans(shares(numel, shard.group.size()))[shard.group.rank()]


def zeros_per_matrix(X: Tensor, options: Options) -> Tensor:
    """A zero for each matrix, float32 or wider: (*stack, number of blocks if several).

    For a flat shard: (matrices,), or () for one.
    """
    dtype = wide_dtype(X.dtype)
    shard = flat_shard(X)
    if shard is not None:
        stack: Sequence[int] = ()
        count = len(list(flat_matrices(shard, options)))
    else:
        stack_dims = options["stack_dims"]
        X = output_first(X, options)
        stack = X.shape[:stack_dims]
        m, *columns = X.shape[stack_dims:]
        count = len(blocks_of((m, math.prod(columns)), options))
    shape = (*stack, count) if count > 1 else (*stack,)
    if not stack:
        return torch.zeros(shape, dtype=dtype, device=X.device)
    return zeros(X, shape, state_placements(X, len(stack), None), dtype)
