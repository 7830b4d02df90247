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
from itertools import chain

import torch
from torch import Tensor

from curvadion import ops
from curvadion.layout.exchange import sums
from curvadion.layout.matrix import Extent, MatrixLayout
from curvadion.ops.tensors import Tensors, adjacent
from curvadion.plan.parameter import Matrix, Stacks, open_shards, product_dtype
from curvadion.plan.plan import Plan, StepTensors
from curvadion.update.direction import Directions, StepMode
from curvadion.update.normuon import NorMuon
from curvadion.update.polar import (
    Polar,
    PolarDirections,
    begin_polar_directions,
    looking_ahead,
    move,
)

# By stack: U (k, m_i, n_j), zero except in the chosen columns; columns (k, r).
_Chosen = tuple[list[Tensor], Tensors]
_Begun = Callable[[], _Chosen]


class Dion2(Polar):
    """Polar factors of the largest columns of oriented momenta."""

    feeds_back = True
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
        stacks = plan.stacks
        U, chosen = begun()
        masks = _masks(stacks, chosen)
        move(stacks, self.rescaled(stacks, U, mode, masks), mode)
        _feed_back_(stacks, masks, mode.moves)
        return PolarDirections(plan, U, [K.shape[1] for K in chosen])


class NorDion2(Dion2, NorMuon):
    """Dion2 with NorMuon's row scaling."""

    capturable = True


def _largest_columns(stacks: Stacks, B: Tensors) -> list[Tensor]:
    """Ascending indices of the largest columns, (k, r) by stack; collective."""
    # Sums over this rank's rows, (k, n)
    norms = []
    for (m, *_), here in zip(stacks, ops.row_sums([b.mT for b in B], 1), strict=True):
        held = m.layout.columns.indices
        n = min(m.layout.shape)
        whole = here
        if len(held) < n:
            whole = here.new_zeros(len(here), n)
            whole[:, held.start : held.stop] = here
        norms.append(whole)
    norms = sums(norms, [m.layout.shards for m, *_ in stacks])
    chosen: dict[int, Tensor] = {}
    for r, numbers in _together([m.shard.rank for m, *_ in stacks], norms):
        # Stable, because ranks must choose the same among equal columns.
        order = _joined([norms[i] for i in numbers]).sort(dim=1, descending=True, stable=True)
        largest = order.indices[:, :r].sort(dim=1).values
        chosen |= zip(numbers, largest.split([len(norms[i]) for i in numbers]), strict=True)
    return [chosen[i] for i in range(len(stacks))]


def _masks(stacks: Stacks, chosen: Tensors) -> list[Tensor]:
    """Which of this rank's columns are chosen, (k, n_j) bool by stack."""
    masks: dict[int, Tensor] = {}
    for n, numbers in _together([min(m.layout.shape) for m, *_ in stacks], chosen):
        K = _joined([chosen[i] for i in numbers])
        mask = K.new_zeros(len(K), n, dtype=torch.bool).scatter_(1, K, value=True)
        masks |= zip(numbers, mask.split([len(chosen[i]) for i in numbers]), strict=True)
    here = []
    for i, (m, *_) in enumerate(stacks):
        held = m.layout.columns.indices
        here.append(masks[i][:, held.start : held.stop])
    return here


def _together(sizes: Sequence[int], rows: Tensors) -> list[tuple[int, list[int]]]:
    """Each size, and the numbers of the stacks that have it and rows of one kind, (k, .)."""
    groups: dict[tuple[int, int, torch.dtype], list[int]] = {}
    for i, (size, of_stack) in enumerate(zip(sizes, rows, strict=True)):
        groups.setdefault((size, of_stack.shape[1], of_stack.dtype), []).append(i)
    return [(size, numbers) for (size, *_), numbers in groups.items()]


def _joined(stacks: Tensors) -> Tensor:
    """Rows of one length, (k, .) by stack, one below the other."""
    return adjacent([rows.reshape(-1) for rows in stacks]).view(-1, stacks[0].shape[1])


def _begin_chosen(stacks: Stacks, B: list[Tensor], chosen: Tensors, mode: StepMode) -> _Begun:
    """Begin to exchange the chosen columns of B; collective.

    Args:
        stacks: the matrices.
        B: their momenta with look-ahead, (k, m_i, n_j) by stack.
        chosen: indices of columns, (k, r) by stack.
        mode: of the step.
    """
    some = []
    layouts = []
    shards = []  # the part of B from which columns are taken
    places = []  # the indices of these columns there
    owners = []  # the stack of each part
    for number, (matrices, b, K) in enumerate(zip(stacks, B, chosen, strict=True)):
        layout = matrices[0].layout
        if layout.columns.group is None:
            some.append(matrices)
            layouts.append(_of_columns(layout, range(K.shape[1])))
            shards.append(b)
            places.append(K)
            owners.append(number)
            continue
        # Ranks hold different numbers of each matrix's chosen columns.
        held = layout.columns.indices
        for i, columns in enumerate(K.tolist()):
            here = [[c - held.start for c in columns if c in held]]
            some.append([matrices[i]])
            layouts.append(_of_columns(layout, columns))
            shards.append(b[i : i + 1])
            places.append(torch.tensor(here, dtype=torch.int64, device=b.device))
            owners.append(number)
    sizes = [shard.shape[2] for shard in shards]
    turned = [shard.stride(1) < shard.stride(2) for shard in shards]
    parts = ops.take_columns(shards, places)
    begun = begin_polar_directions(some, parts, layouts, mode)

    def end() -> _Chosen:
        found = ops.put_columns(begun(), places, sizes, turned)
        U = []
        for number in range(len(chosen)):
            of_stack = [u for u, owner in zip(found, owners, strict=True) if owner == number]
            U.append(of_stack[0] if len(of_stack) == 1 else _stacked(of_stack))
        return U, chosen

    return end


def _stacked(stacks: Tensors) -> Tensor:
    """Matrices (., m_i, n_j) of stacks one after another, in the order of their strides."""
    if stacks[0].stride(1) < stacks[0].stride(2):
        return torch.cat([stack.mT for stack in stacks]).mT
    return torch.cat(list(stacks))


def _of_columns(layout: MatrixLayout, columns: Sequence[int]) -> MatrixLayout:
    """The layout of some columns of an oriented matrix, in ascending order."""

    def places(indices: range) -> range:
        return range(bisect_left(columns, indices.start), bisect_left(columns, indices.stop))

    old = layout.columns
    new = Extent(
        places(old.indices),
        old.group,
        tuple(i for c in old.shared for i in places(range(c, c + 1))),
        borrowed=old.borrowed and bool(places(old.indices[:1])),
        by_rank=tuple(map(places, old.by_rank)),
    )
    parts = tuple((rows, places(held)) for rows, held in layout.parts)
    return replace(layout, shape=(max(layout.shape), len(columns)), columns=new, parts=parts)


def _feed_back_(stacks: Stacks, masks: Tensors, moves: Tensor | None) -> None:
    """M_K <- mu M_K."""
    columns = list(chain(*(mask.unbind() for mask in masks)))
    chosen = list(zip(chain(*stacks), columns, strict=True))
    fed = [(m, mask) for m, mask in chosen if m.parameter.feedback]
    matrices = [m for m, _ in fed]
    with open_shards(matrices, [m.parameter.M for m in matrices]) as (M,):
        ops.scale_rows_(
            [momentum.mT for momentum in M],
            [mask for _, mask in fed],
            [1 - m.parameter.feedback for m in matrices],
            moves,
        )
