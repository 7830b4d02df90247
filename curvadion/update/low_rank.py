"""Low-rank factors of the momentum as the direction (Dion, arXiv 2504.05295).

Per oriented matrix B (m x n), held as a shard B_ij of rows i and columns j, and Q (n x r):

    P = sum over the column group ( B Q )         and mean over replicas, in one collective
    P = orthonormalize(P, row group)
    R = sum over the row group ( B^T P )          and mean over replicas, in one collective
    Q = column_normalize(R, column group)         or orthonormalize(R, column group)

One collective sends all P's, another all R's.

If B holds only rounding errors in some direction, this column of Q is zero and that of P
completed, so the direction is used again as soon as B has a signal there. This replaces
Dion's epsilon. Q and R are both zero if a product is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvadion import ops
from curvadion.comm.collectives import Buckets, Slot, group_size
from curvadion.layout.matrix import MatrixLayout, Options
from curvadion.layout.states import create_right_factors, right_factor_shapes
from curvadion.ops.tensors import Lists
from curvadion.update.direction import Direction, How, Taken
from curvadion.update.orthonormalize import Floor, orthonormal_columns, roundoff_of_products
from curvadion.update.parameter import (
    Parameter,
    Stacks,
    dtype_of,
    open_shards,
    product_dtype,
    remember_scales,
    rounding_seeds,
    scale_before,
)
from curvadion.update.plan import Gradients, Plan
from curvadion.update.row_shards import sum_shared_, sums

# Products of matrices with so few elements take longer to start than to copy and compute.
SMALL = 2**12


class PowerIteration(Direction):
    """A power iteration of rank r on B = M + look_ahead G.

    X <- (1 - lr wd) X - lr sqrt(m / n) P Q^T
    M <- M - (1 - mu) (P R^T - look_ahead G)
    """

    shares_factors = feeds_back = True

    def create_state(self, X: Tensor, options: Options) -> dict[str, Tensor]:
        return create_right_factors(X, options, dtype_of(options["q_dtype"], X))

    def state_shapes(self, X: Tensor, options: Options) -> dict[str, tuple[int, ...]]:
        return right_factor_shapes(X, options)

    def step(self, batch: Plan, gradients: Gradients, begun: Any, how: How) -> Taken:
        stacks = batch.stacks
        _look_ahead_(gradients, lambda p: float(p.group["look_ahead"]), how.moves)
        layouts = [m.layout for m, *_ in stacks]
        if how.inside_replica:
            layouts = [layout.inside_replica() for layout in layouts]
        factors = _power_iteration(stacks, layouts)
        _update(stacks, factors, how)
        if how.remember:
            scales = [of_stack.scale for of_stack in factors]
            remember_scales(stacks, scales, how.moves)
        _look_ahead_(
            gradients, lambda p: -p.group["look_ahead"] * (1 - p.feedback), how.moves
        )
        return LowRankTaken(batch, factors)


class LowRankTaken(Taken):
    """A step along U = P Q^T."""

    def __init__(self, plan: Plan, factors: list[LowRank]) -> None:
        super().__init__(plan, [of_stack.Q.shape[2] for of_stack in factors])
        self._factors = factors

    def turn_momenta_(self, changes: Lists, shares: Lists, decay: float) -> None:
        layouts = [m.layout.inside_replica() for m, *_ in self.stacks]
        momenta = [[m.M for m in stack] for stack in self.stacks]
        P, Q = ([of_stack[i] for of_stack in self._factors] for i in (0, 2))
        right = _products(self.stacks, layouts, momenta, P, transposed=True)
        left = _products(self.stacks, layouts, changes, Q)
        for matrices, T, share, R in zip(self.stacks, left, shares, right, strict=True):
            # C U^T M = (C Q) (M^T P)^T
            T = T * -share[:, None, None]
            ones = [1.0] * len(matrices)
            with open_shards(matrices, [m.parameter.M for m in matrices]) as (M,):
                ops.low_rank_update_(M, list(T), list(R), ones, ones)


class LowRank(NamedTuple):
    """The factors of a stack of k matrices after a power iteration."""

    P: Tensor  # (k, m_i, r), of orthonormal columns
    R: Tensor  # B^T P, (k, n_j, r)
    Q: Tensor  # the next one, (k, n_j, r)
    scale: Tensor  # length of R's longest column, or the last scale if larger, (k,) float64


def _power_iteration(stacks: Stacks, layouts: Sequence[MatrixLayout]) -> list[LowRank]:
    """P, R and the next Q of every stack, averaged over replicas."""
    B = [[m.M for m in matrices] for matrices in stacks]
    Q = [[m.Q for m in matrices] for matrices in stacks]
    before = list(map(scale_before, stacks))
    heads = [m.parameter for m, *_ in stacks]
    roundoff = [roundoff_of_products(product_dtype(p.X), p.M.dtype) for p in heads]
    rows = [layout.rows for layout in layouts]
    products = _products(stacks, layouts, B, Q)
    left = orthonormal_columns(products, rows, list(map(Floor, roundoff)))
    R = _products(stacks, layouts, B, [one.columns for one in left], transposed=True)
    floors = list(map(Floor, roundoff, before, left))
    next_Q, lengths = _next_right_factors(stacks, R, floors)
    factors = []
    for one, long, r, q, scale in zip(left, lengths, R, next_Q, before, strict=True):
        bad = ~long.isfinite().all(dim=-1)  # Q is zero already
        scale = torch.maximum(long.amax(dim=-1).nan_to_num_(0.0, 0.0, 0.0), scale)
        r.masked_fill_(bad[:, None, None], 0.0)
        factors.append(LowRank(one.columns, r, q, scale))
    return factors


def _products(
    stacks: Stacks,
    layouts: Sequence[MatrixLayout],
    shards: Sequence[Lists | Tensor],
    factors: Sequence[Lists | Tensor],
    *,
    transposed: bool = False,
) -> list[Tensor]:
    """B Q, (k, m_i, r), or B^T P, (k, n_j, r), summed over shards, averaged over replicas."""
    slots, extents = [], []
    for (m, *_), layout, B, factor in zip(stacks, layouts, shards, factors, strict=True):
        extent, group = layout.rows, layout.columns_and_replicas
        if transposed:
            extent, group = layout.columns, layout.rows_and_replicas
        shape = len(B), len(extent), factor[0].shape[1]
        slots.append(Slot(shape, group, product_dtype(m.parameter.X), factor[0].device))
        extents.append(extent)
    buckets = Buckets(slots)
    for layout, B, factor, out in zip(layouts, shards, factors, buckets.views, strict=True):
        rows, columns, r = len(layout.rows), len(layout.columns), out.shape[2]
        if len(B) > 1 and rows * columns > 0 and max(rows, r) * columns <= SMALL:
            left, right = (torch.stack(list(each)).to(out.dtype) for each in (B, factor))
            torch.bmm(left.mT if transposed else left, right, out=out)
            continue
        for b, right, product in zip(B, factor, out, strict=True):
            b = b.to(out.dtype)
            torch.mm(b.mT if transposed else b, right.to(out.dtype), out=product)
    buckets.all_reduce_(divide_by=group_size(layouts[0].replicas) if layouts else 1)
    sum_shared_(buckets.views, extents)
    return buckets.views


def _next_right_factors(
    stacks: Stacks, R: Lists, floors: Sequence[Floor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The next Q of every stack, and the column lengths of its R, (k, r) float64."""
    columns = [m.layout.columns for m, *_ in stacks]
    # A batch has one kind of right factors.
    if any(m.group["right_factor"] == "qr" for m, *_ in stacks):
        found = orthonormal_columns(R, columns, floors, complete=False)
        return [one.columns for one in found], [one.lengths for one in found]
    counted = [held.counted(r) for held, r in zip(columns, R, strict=True)]
    summands = list(map(ops.column_sum_of_squares, counted))
    squares = sums(summands, [held.group for held in columns])
    lengths = [square.sqrt() for square in squares]
    Q = []
    for r, square, long, floor in zip(R, squares, lengths, floors, strict=True):
        Q.append(ops.column_normalize(r, square, floor.of(long, r.dtype)))
    return Q, lengths


def _look_ahead_(
    gradients: Gradients, share: Callable[[Parameter], float], moves: Tensor | None
) -> None:
    """M <- M + share G, while a direction is computed from it; does not copy M."""
    shares = gradients.each(share)
    if any(shares):
        steps, ones = [-s for s in shares], [1.0] * len(shares)
        ops.local_step_(gradients.M, gradients.G, steps, ones, moves=moves)


def _update(stacks: Stacks, factors: Sequence[LowRank], how: How) -> None:
    """X <- (1 - lr wd) X - lr scale P Q^T; with error feedback M <- M - (1 - mu) P R^T."""
    matrices = list(chain(*stacks))
    P, R, Q = ([one for found in factors for one in found[i]] for i in range(3))
    for found, stack in zip(factors, stacks, strict=True):
        ops.copy_([m.Q for m in stack], found.Q, how.moves)
    # The plain rule has no feedback, so momenta need not be read again.
    fed_back = matrices if any(m.parameter.feedback for m in matrices) else ()
    feedback = [m.parameter.feedback for m in fed_back]
    rates = [m.group["lr"] * m.update_scale for m in matrices]
    decays = [m.parameter.decay for m in matrices]
    seeds = rounding_seeds(matrices, how.number)
    with (
        open_shards(matrices, [m.parameter.local for m in matrices]) as (X,),
        open_shards(fed_back, [m.parameter.M for m in fed_back]) as (M,),
    ):
        ops.low_rank_update_(
            X, P, Q, rates, decays, M, R if fed_back else (), feedback, seeds, how.moves
        )
