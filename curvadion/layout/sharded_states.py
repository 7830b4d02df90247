"""States of matrices, sharded like them: right factors, squares, one number each.

The n x n squares of a parameter's oriented matrices (m x n) are a state (*stack dimensions,
N), where N is the sum of n^2 over the row blocks, sharded evenly over all ranks of the
matrices. For a flat shard they are this rank's part of all matrices' N.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvadion.division import shares, spans
from curvadion.layout.dtensor import (
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
from curvadion.layout.matrix import MatrixLayout, Options, block_sizes, within

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


@dataclass(frozen=True)
class QSlot:
    """The place of a right factor in its parameter's state: ``state[key][index]``."""

    key: str
    index: tuple[int | slice, ...]


class QSlots:
    """Locations of right factors in a state.

    Those of tall blocks are side by side, (n, sum of ranks), those of transposed blocks below
    each other, (m, largest rank), sharded like X's rows.
    """

    def __init__(self, X: Tensor, options: Options) -> None:
        X, stack_dims = output_first(X, options), options["stack_dims"]
        m, *columns = X.shape[stack_dims:]
        n, sizes = math.prod(columns), block_sizes(m, options["row_blocks"])
        self.layouts = [MatrixLayout.whole((size, n)) for size in sizes]
        self.ranks = [layout.rank(options) for layout in self.layouts]
        each = list(zip(self.ranks, self.layouts, strict=True))
        self._tall = spans(0 if layout.transposed else rank for rank, layout in each)
        # Global shape and placements of each state tensor, by key.
        self.forms: dict[str, tuple[tuple[int, ...], list[Placement]]] = {}
        if side_by_side := self._tall[-1].stop:
            shape = (*X.shape[:stack_dims], n, side_by_side)
            self.forms["Q"] = shape, state_placements(X, stack_dims, stack_dims + 1)
        self._below = "Q_rows" if self.forms else "Q"
        if below := max(rank if layout.transposed else 0 for rank, layout in each):
            shape = (*X.shape[: stack_dims + 1], below)
            self.forms[self._below] = shape, state_placements(X, stack_dims, stack_dims)

    def of(self, block: int, stack: tuple[int | slice, ...], rows: slice) -> QSlot:
        """The slot of a row block of the matrices at ``stack``, with these local rows."""
        if self.layouts[block].transposed:
            return QSlot(self._below, (*stack, rows, slice(self.ranks[block])))
        tall = self._tall[block]
        return QSlot("Q", (*stack, slice(None), slice(tall.start, tall.stop)))


def flat_key(matrix: int, count: int) -> str:
    """The state key of the Q of one of a flat shard's ``count`` matrices."""
    return "Q" if count == 1 else f"Q_{matrix}"


def _flat_right_factors(
    shard: FlatShard, options: Options
) -> Iterator[tuple[str, MatrixLayout, range]]:
    """Of each matrix the key of its Q, the unsharded layout, and this rank's rows of Q."""
    matrices = list(flat_matrices(shard, options))
    for i, (_, shape, view) in enumerate(matrices):
        whole = MatrixLayout.whole(shape)
        # Q has a row for each column of the oriented matrix, which may be a stored row.
        sharded = whole.transposed != options["input_first"]
        yield flat_key(i, len(matrices)), whole, view.rows if sharded else range(min(shape))


def right_factor_shapes(X: Tensor, options: Options) -> dict[str, tuple[int, ...]]:
    """Global shapes of the tensors of right factors, by key."""
    if (shard := flat_shard(X)) is None:
        return {key: shape for key, (shape, _) in QSlots(X, options).forms.items()}
    found = _flat_right_factors(shard, options)
    return {key: (len(held), whole.rank(options)) for key, whole, held in found}


def create_right_factors(X: Tensor, options: Options, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of right factors, by key, filled with the initial Q's."""
    if (shard := flat_shard(X)) is not None:
        found = {}
        for key, whole, held in _flat_right_factors(shard, options):
            # A copy, because a view would keep all of Q alive.
            found[key] = whole.initial_q(options, held).to(X.device, dtype, copy=True)
        return found
    matrices, slots = blocked(X, options), QSlots(X, options)
    tensors = {key: zeros(X, *form, dtype) for key, form in slots.forms.items()}
    for b, (block, layout) in enumerate(zip(matrices.blocks, slots.layouts, strict=True)):
        slot = slots.of(b, (slice(None),) * options["stack_dims"], block.local)
        held = block.held if layout.transposed else matrices.flattened(matrices.columns.held)
        # All matrices of a stack have the same shape, and so the same initial Q.
        local(tensors[slot.key])[slot.index].copy_(layout.initial_q(options, held))
    return tensors


def create_squares(X: Tensor, options: Options) -> Tensor:
    """Zeros for the squares of a parameter's matrices, float32 or wider."""
    shape, placements = _form(X, options)
    return zeros(X, shape, placements, torch.promote_types(X.dtype, torch.float32))


def squares_fit(X: Tensor, options: Options, squares: Tensor) -> bool:
    """Whether a tensor has the form of :func:`create_squares`."""
    shape, placements = _form(X, options)
    return tuple(squares.shape) == shape and placements_of(squares) == tuple(placements)


def _form(X: Tensor, options: Options) -> tuple[tuple[int, ...], Sequence[Placement]]:
    """Shape (global for DTensors) and placements of a parameter's squares."""
    if (shard := flat_shard(X)) is not None:
        sides = (min(shape) for _, shape, _ in flat_matrices(shard, options))
        return (len(_held_of_flat(shard, sum(n * n for n in sides))),), []
    matrices, stack_dims = blocked(X, options), options["stack_dims"]
    total = sum(min(len(block.rows), matrices.n) ** 2 for block in matrices.blocks)
    placements: Sequence[Placement] = placements_of(matrices.X)
    if placements:
        from torch.distributed.tensor import Shard

        even = Shard(stack_dims)
        placements = [even if is_shard(p) and p.dim >= stack_dims else p for p in placements]
    return (*matrices.X.shape[:stack_dims], total), placements


def squares_held(
    X: Tensor, squares: Tensor, sides: Sequence[int]
) -> Iterator[tuple[Tensor, slice]]:
    """A view of this rank's part of each square, and its range; sides: the matrices' n."""
    rows = local(squares)
    rows = rows.view(math.prod(rows.shape[:-1]), rows.shape[-1])
    each = sides[: len(sides) // max(1, len(rows))]  # the same in all entries of a stack
    wholes, shard = spans(n * n for n in each), flat_shard(X)
    held = _held_of_flat(shard, wholes[-1].stop) if shard else dimension_shards(squares)[-1].held
    for row in rows:
        for whole in wholes:
            inside = within(held, whole)
            start = whole.start + inside.start - held.start
            yield row[start : start + len(inside)], slice(inside.start, inside.stop)


def _held_of_flat(shard: FlatShard, total: int) -> range:
    """This rank's range of ``total`` elements."""
    if shard.group is None:
        return range(total)
    return spans(shares(total, shard.group.size()))[shard.group.rank()]


def zeros_per_matrix(X: Tensor, options: Options) -> Tensor:
    """A zero for each matrix, float32 or wider: (*stack, number of blocks if several).

    For a flat shard: (matrices,), or () for one.
    """
    dtype, stack_dims = torch.promote_types(X.dtype, torch.float32), options["stack_dims"]
    if (shard := flat_shard(X)) is not None:
        count, stack_dims = len(list(flat_matrices(shard, options))), 0
    else:
        X = output_first(X, options)
        count = len(block_sizes(X.shape[stack_dims], options["row_blocks"]))
    shape = (*X.shape[:stack_dims], *([count] if count > 1 else []))
    if not stack_dims:
        return torch.zeros(shape, dtype=dtype, device=X.device)
    return zeros(X, shape, state_placements(X, stack_dims, None), dtype)
