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

import torch
from torch import Tensor

from curvadion import ops
from curvadion.layout.matrix import Extent, MatrixLayout
from curvadion.ops.tensors import Lists
from curvadion.update.direction import How, Taken
from curvadion.update.normuon import NorMuon
from curvadion.update.parameter import Stacks, open_shards, remember_scales
from curvadion.update.plan import Gradients, Plan
from curvadion.update.polar import (
    Polar,
    PolarTaken,
    begin_polar_directions,
    looking_ahead,
    move,
)
from curvadion.update.row_shards import sums

# By stack: U (k, m_i, n_j), zero except in the chosen columns; scales (k,); columns (k, r).
_Chosen = tuple[list[Tensor], list[Tensor], Lists]
_Begun = Callable[[], _Chosen]


class Dion2(Polar):
    """Polar factors of the largest columns of oriented momenta."""

    feeds_back = True
    keeps_spectrum = False  # each step chooses other columns

    def begin(self, batch: Plan, gradients: Gradients) -> _Begun:
        B = looking_ahead(batch.stacks, gradients)
        return _begin_chosen(batch.stacks, B, _largest_columns(batch.stacks, B))

    def step(self, batch: Plan, gradients: Gradients, begun: _Begun, how: How) -> Taken:
        stacks, (U, scales, chosen) = batch.stacks, begun()
        masks = []  # which columns here are chosen, (k, n_j)
        for (m, *_), K in zip(stacks, chosen, strict=True):
            held = m.layout.columns.indices
            mask = K.new_zeros(len(K), min(m.layout.shape), dtype=torch.bool)
            masks.append(mask.scatter_(1, K, value=True)[:, held.start : held.stop])
        move(stacks, self.rescaled(stacks, U, how, masks), how)
        _feed_back_(stacks, masks, how.moves)
        if how.remember:
            remember_scales(stacks, scales, how.moves)
        return PolarTaken(batch, U, [K.shape[1] for K in chosen])


class NorDion2(Dion2, NorMuon):
    """Dion2 with NorMuon's row scaling."""


def _largest_columns(stacks: Stacks, B: Lists) -> list[Tensor]:
    """Ascending indices of the largest columns, (k, r) by stack; collective."""
    norms = []
    for (m, *_), b in zip(stacks, B, strict=True):
        held = m.layout.columns.indices
        norms.append(b.new_zeros(len(b), min(m.layout.shape)))
        norms[-1][:, held.start : held.stop] = b.abs().sum(1)
    norms = sums(norms, [m.layout.shards for m, *_ in stacks])
    # Stable, because ranks must choose the same among equal columns.
    largest = []
    for (m, *_), each in zip(stacks, norms, strict=True):
        order = each.sort(dim=1, descending=True, stable=True).indices
        largest.append(order[:, : m.shard.rank].sort(dim=1).values)
    return largest


def _begin_chosen(stacks: Stacks, B: list[Tensor], chosen: Lists) -> _Begun:
    """Begin to exchange the chosen columns of B, whose place U takes; collective."""
    some, parts, layouts = [], [], []
    places = []  # of each part: matrices and columns
    for matrices, b, K in zip(stacks, B, chosen, strict=True):
        layout = matrices[0].layout
        if layout.columns.group is None:
            whole = [(matrices, b, K)]
            layouts.append(_of_columns(layout, range(K.shape[1])))
        else:  # ranks hold different numbers of each matrix's chosen columns
            whole, held = [], layout.columns.indices
            for i, columns in enumerate(K.tolist()):
                layouts.append(_of_columns(layout, columns))
                here = [[c - held.start for c in columns if c in held]]
                index = torch.tensor(here, dtype=torch.int64, device=b.device)
                whole.append(([matrices[i]], b[i : i + 1], index))
        for these, where, index in whole:
            index = index[:, None, :].expand(-1, b.shape[1], -1)
            some.append(these)
            parts.append(where.gather(2, index))
            places.append((where, index))
    begun = begin_polar_directions(some, parts, layouts)

    def end() -> _Chosen:
        U, scales = begun()
        for b in B:
            b.zero_()
        for (where, index), part in zip(places, U, strict=True):
            where.scatter_(2, index, part.to(where.dtype))
        by_stack = torch.cat(scales).split([len(K) for K in chosen]) if scales else ()
        return B, list(by_stack), chosen

    return end


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


def _feed_back_(stacks: Stacks, masks: Lists, moves: Tensor | None) -> None:
    """M_K <- mu M_K."""
    for matrices, mask in zip(stacks, masks, strict=True):
        with open_shards(matrices, [m.parameter.M for m in matrices]) as (M,):
            for m, momentum, chosen in zip(matrices, M, mask, strict=True):
                if feedback := m.parameter.feedback:
                    factor = torch.where(chosen, 1 - feedback, 1.0)
                    factor = ops.if_moving(factor, torch.ones_like(factor), moves)
                    momentum.mul_(factor.to(momentum.dtype))
