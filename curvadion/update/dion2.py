"""The polar factor of the largest rows or columns of the momentum (Dion2, arXiv 2512.16928).

    M <- M + G
    K = the share rank_fraction of the columns of B with the largest 1-norms
    X_K <- (1 - lr wd) X_K - lr scale U_K,   U_K the polar factor of B_K
    M_K <- mu M_K                            error feedback; the rest of M waits for its turn

B is the oriented momentum (m x n, m >= n): K selects columns of a tall X and rows of a wide
one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from curvadion import ops
from curvadion.layout.exchange import sums
from curvadion.layout.matrix import Extent, MatrixLayout
from curvadion.ops.tensors import Tensors, is_column_major, joined
from curvadion.plan.parameter import Matrix, Stacks, open_shards, product_dtype
from curvadion.plan.plan import Plan, StepTensors
from curvadion.update.direction import Directions, StepMode
from curvadion.update.moving import move
from curvadion.update.normuon import NorMuon
from curvadion.update.polar import (
    Polar,
    PolarDirections,
    begin_polar_directions,
    looking_ahead,
)

# By stack: U (k, m_i, n_j), zero except in the chosen columns; columns (k, r).
_Chosen = tuple[list[Tensor], Tensors]
_Begun = Callable[[], _Chosen]


class Dion2(Polar):
    """Polar factors of the largest columns of oriented momenta."""

    feeds_back = True
    opens_momenta = False
    capturable = True
    keeps_spectrum = False  # each step chooses other columns

    def obstacle(self, m: Matrix) -> str | None:
        if m.layout.columns.group is None:
            return None
        return "its columns are sharded, so the host reads which are the largest"

    def measures(self, matrices: Sequence[Matrix]) -> bool:
        return False  # the chosen columns are not known yet

    def begin(self, plan: Plan, tensors: StepTensors, mode: StepMode) -> _Begun:
        stacks = plan.stacks
        dtypes = [product_dtype(m.parameter.X) for m, *_ in stacks]
        B, *_ = looking_ahead(stacks, tensors, mode, dtypes)
        return _begin_chosen(stacks, B, _largest_columns(stacks, B), mode)

    def step(self, plan: Plan, tensors: StepTensors, begun: _Begun, mode: StepMode) -> Directions:
        """Step along the chosen columns, as :meth:`Direction.step`.

        Args:
            plan: of the batch.
            tensors: weights, momenta and gradients of the batch's parameters.
            begun: gives U and the chosen columns.
            mode: of the step.
        """
        stacks = plan.stacks
        U, chosen = begun()
        masks = _masks(stacks, chosen)
        _feed_back_(stacks, masks, mode.moves)
        move(stacks, self.rescaled(stacks, U, mode, masks), mode)
        return PolarDirections(plan, U, [K.shape[1] for K in chosen])


class NorDion2(Dion2, NorMuon):
    """Dion2 with NorMuon's row scaling."""

    capturable = True


def _largest_columns(stacks: Stacks, B: Tensors) -> list[Tensor]:
    """Ascending indices of the columns with the largest 1-norms; collective.

    Args:
        stacks: the matrices.
        B: their momenta with look-ahead, (k, m_i, n_j) by stack.

    Returns:
        (k, r) int64 by stack, the same on all ranks of a matrix.
    """
    norms = []
    column_sums = ops.row_sums([b.mT for b in B], 1)
    for matrices, norms_here in zip(stacks, column_sums, strict=True):
        # Sums of |B| over this rank's rows, (k, n): zero in the columns of other ranks.
        layout = matrices[0].layout
        n = min(layout.shape)
        columns = layout.columns.indices
        if len(columns) == n:
            norms.append(norms_here)
            continue
        padded = norms_here.new_zeros(len(norms_here), n)
        padded[:, columns.start : columns.stop] = norms_here
        norms.append(padded)
    norms = sums(norms, [matrices[0].layout.shards for matrices in stacks])
    ranks = [matrices[0].shard.rank for matrices in stacks]
    chosen: dict[int, Tensor] = {}
    for r, numbers in _together(ranks, norms):
        # Stable, because ranks must choose the same among equal columns.
        order = joined([norms[i] for i in numbers]).sort(dim=1, descending=True, stable=True)
        largest = order.indices[:, :r].sort(dim=1).values
        counts = [len(norms[i]) for i in numbers]
        chosen.update(zip(numbers, largest.split(counts), strict=True))
    return [chosen[i] for i in range(len(stacks))]


def _masks(stacks: Stacks, chosen: Tensors) -> list[Tensor]:
    """Which of this rank's columns are chosen, (k, n_j) bool by stack."""
    widths = [min(matrices[0].layout.shape) for matrices in stacks]
    masks: dict[int, Tensor] = {}
    for n, numbers in _together(widths, chosen):
        K = joined([chosen[i] for i in numbers])
        mask = K.new_zeros(len(K), n, dtype=torch.bool).scatter_(1, K, value=True)
        counts = [len(chosen[i]) for i in numbers]
        masks.update(zip(numbers, mask.split(counts), strict=True))
    masks_here = []
    for i, matrices in enumerate(stacks):
        columns = matrices[0].layout.columns.indices
        masks_here.append(masks[i][:, columns.start : columns.stop])
    return masks_here


def _together(sizes: Sequence[int], rows: Tensors) -> list[tuple[int, list[int]]]:
    """The stacks that one operation can take, as each launch takes time.

    Args:
        sizes: a number by stack.
        rows: (k, l) by stack.

    Returns:
        For each size, l and dtype: the size, and the numbers of the stacks that have these.
    """
    numbers_of: dict[tuple[int, int, torch.dtype], list[int]] = {}
    for i, (size, rows_of_stack) in enumerate(zip(sizes, rows, strict=True)):
        key = (size, rows_of_stack.shape[1], rows_of_stack.dtype)
        numbers_of.setdefault(key, []).append(i)
    return [(size, numbers) for (size, _, _), numbers in numbers_of.items()]


class _Part(NamedTuple):
    """Matrices of a stack of whose chosen columns this rank holds equally many.

    Args:
        number: of their stack.
        matrices: k matrices.
        layout: of their chosen columns.
        B: their momenta with look-ahead, (k, m_i, n_j).
        places: of the chosen columns in B, (k, r_j) int64.
    """

    number: int
    matrices: Sequence[Matrix]
    layout: MatrixLayout
    B: Tensor
    places: Tensor


def _parts(number: int, matrices: Sequence[Matrix], B: Tensor, K: Tensor) -> list[_Part]:
    """A stack by the number of chosen columns that this rank holds.

    Args:
        number: of the stack.
        matrices: k matrices.
        B: their momenta with look-ahead, (k, m_i, n_j).
        K: indices of their chosen columns, (k, r).
    """
    layout = matrices[0].layout
    if layout.columns.group is None:
        # The rank holds all columns, so the first r have the layout of any r.
        return [_Part(number, matrices, _of_columns(layout, range(K.shape[1])), B, K)]
    parts = []
    indices = layout.columns.indices
    for i, columns in enumerate(K.tolist()):
        places = [[column - indices.start for column in columns if column in indices]]
        parts.append(
            _Part(
                number,
                [matrices[i]],
                _of_columns(layout, columns),
                B[i : i + 1],
                torch.tensor(places, dtype=torch.int64, device=B.device),
            )
        )
    return parts


def _begin_chosen(stacks: Stacks, B: list[Tensor], chosen: Tensors, mode: StepMode) -> _Begun:
    """Begin to exchange the chosen columns of B; collective.

    Args:
        stacks: the matrices.
        B: their momenta with look-ahead, (k, m_i, n_j) by stack.
        chosen: indices of columns, (k, r) by stack.
        mode: of the step.
    """
    parts: list[_Part] = []
    for number, (matrices, b, K) in enumerate(zip(stacks, B, chosen, strict=True)):
        parts += _parts(number, matrices, b, K)
    # All that end() needs of the parts, which would keep B in memory until it is called.
    numbers = [part.number for part in parts]
    places = [part.places for part in parts]
    widths = [part.B.shape[2] for part in parts]
    column_major = [is_column_major(part.B) for part in parts]
    begun = begin_polar_directions(
        [part.matrices for part in parts],
        ops.take_columns([part.B for part in parts], places),
        [part.layout for part in parts],
        mode,
    )

    def end() -> _Chosen:
        U_of_parts = ops.put_columns(begun(), places, widths, column_major)
        U_of_stack: list[list[Tensor]] = [[] for _ in chosen]
        for number, u in zip(numbers, U_of_parts, strict=True):
            U_of_stack[number].append(u)
        U = [_stacked(of_parts) for of_parts in U_of_stack]
        return U, chosen

    return end


def _stacked(stacks: Tensors) -> Tensor:
    """Matrices (k, m_i, n_j) of stacks one after another, in the order of their strides."""
    if len(stacks) == 1:
        return stacks[0]
    if is_column_major(stacks[0]):
        return torch.cat([stack.mT for stack in stacks]).mT
    return torch.cat(list(stacks))


def _of_columns(layout: MatrixLayout, columns: Sequence[int]) -> MatrixLayout:
    """The layout of some columns of B, which are given in ascending order."""

    def places(indices: range) -> range:
        """Where these columns of B are among the chosen ones."""
        return range(bisect_left(columns, indices.start), bisect_left(columns, indices.stop))

    extent = layout.columns
    shared: list[int] = []
    for column in extent.shared:
        shared += places(range(column, column + 1))
    chosen = Extent(
        places(extent.indices),
        extent.group,
        tuple(shared),
        # Its first column begins on another rank only if it is among the chosen ones.
        borrowed=extent.borrowed and len(places(extent.indices[:1])) > 0,
        by_rank=tuple(map(places, extent.by_rank)),
    )
    parts = tuple((rows, places(indices)) for rows, indices in layout.parts)
    return replace(layout, shape=(max(layout.shape), len(columns)), columns=chosen, parts=parts)


def _feed_back_(stacks: Stacks, masks: Tensors, moves: Tensor | None) -> None:
    """M_K <- mu M_K, of the matrices with error feedback.

    Args:
        stacks: the matrices.
        masks: which columns of B are chosen, (k, n_j) bool by stack.
        moves: () bool on the device, or None; false cancels the step.
    """
    fed_back: list[Matrix] = []
    chosen: list[Tensor] = []
    for matrices, mask in zip(stacks, masks, strict=True):
        for m, columns in zip(matrices, mask.unbind(), strict=True):
            if m.parameter.feedback:
                fed_back.append(m)
                chosen.append(columns)
    with open_shards(fed_back, [m.parameter.M for m in fed_back]) as (M,):
        ops.scale_rows_(
            [momentum.mT for momentum in M],
            chosen,
            [1 - m.parameter.feedback for m in fed_back],
            moves,
        )
