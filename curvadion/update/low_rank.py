"""Low-rank factors of the momentum as the direction (Dion, arXiv 2504.05295), for every layout.

Per oriented matrix B (m x n), held as a shard B_ij of rows i and columns j, and Q (n x r):

    P = sum over the column group ( B Q )         and mean over replicas, in one collective
    P = orthonormalize(P, row group)
    R = sum over the row group ( B^T P )          and mean over replicas, in one collective
    Q = column_normalize(R, column group)         or orthonormalize(R, column group)

One collective sends all P's, another all R's. Rows that several ranks hold in part (Extent.shared)
take one more per group.

If B holds only rounding errors in some direction, this column of Q is zero. Its column of P is
completed, so the direction is used again as soon as B has a signal there. The estimate of these
errors (:mod:`curvadion.update.orthonormalize`) replaces Dion's epsilon. Q and R are both zero if a
product is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion import ops
from curvadion.comm.collectives import Buckets, Slot, group_size
from curvadion.layout.matrix import Extent, MatrixLayout
from curvadion.layout.states import create_right_factors, right_factor_shapes
from curvadion.update.direction import Direction, How, Taken
from curvadion.update.orthonormalize import (
    Floor,
    Orthonormal,
    orthonormal_columns,
    roundoff_of_products,
)
from curvadion.update.parameter import (
    Matrix,
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

# A product of a matrix with so few elements takes longer to start than to compute.
SMALL = 2**12


class PowerIteration(Direction):
    """A power iteration of rank r on B = M + look_ahead G.

    X <- (1 - lr wd) X - lr sqrt(m / n) P Q^T
    M <- M - (1 - mu) (P R^T - look_ahead G)
    """

    shares_factors = True

    def create_state(self, X: Tensor, options: Mapping[str, Any]) -> dict[str, Tensor]:
        return create_right_factors(X, options, dtype_of(options["q_dtype"], X))

    def state_shapes(self, X: Tensor, options: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return right_factor_shapes(X, options)

    def step(self, batch: Plan, gradients: Gradients, begun: Any, how: How) -> Taken:
        stacks = batch.stacks
        _look_ahead_(gradients, lambda p: float(p.group["look_ahead"]))
        factors = _power_iteration([_as_stack(s, how.inside_replica) for s in stacks])
        _update(stacks, factors, how.number)
        if how.remember:
            remember_scales(stacks, [of_stack.scale for of_stack in factors])
        _look_ahead_(gradients, lambda p: -p.group["look_ahead"] * (1 - p.feedback))
        return LowRankTaken(batch, factors)


class LowRankTaken(Taken):
    """A step along U = P Q^T."""

    def __init__(self, plan: Plan, factors: list[LowRank]) -> None:
        super().__init__(plan, [of_stack.Q.shape[2] for of_stack in factors])
        self._factors = factors

    def turn_momenta_(
        self, changes: Sequence[Tensor], shares: Sequence[Tensor], decay: float = 0.0
    ) -> None:
        momenta = [_as_stack(stack, True) for stack in self.stacks]
        right = _right_products(momenta, [factors.P for factors in self._factors])
        each = zip(momenta, self._factors, changes, strict=True)
        left = _left_products([replace(s, B=list(C), Q=list(f.Q)) for s, f, C in each])
        for matrices, T, share, R in zip(self.stacks, left, shares, right, strict=True):
            # C U^T M = (C Q) (M^T P)^T
            T = T * -share[:, None, None]
            ones = [1.0] * len(matrices)
            with open_shards(matrices, [m.parameter.M for m in matrices]) as (M,):
                ops.low_rank_update_(M, list(T), list(R), ones, ones)


@dataclass(frozen=True)
class _Stack:
    """A batch of k matrices with one global shape, sharding, rank and dtype."""

    layout: MatrixLayout
    B: Sequence[Tensor]  # local shards, (m_i, n_j) each
    Q: Sequence[Tensor]  # right factors, (n_j, r) each
    orthonormal: bool  # whether Q is orthonormalised; else its columns are normalised
    dtype: torch.dtype  # of the products P and R, float32 or wider
    scale: Tensor  # the recent length of R's longest column, (k,) float64
    roundoff: float  # relative error of the entries of P and R


class LowRank(NamedTuple):
    """The factors of a stack of k matrices after a power iteration."""

    P: Tensor  # (k, m_i, r), of orthonormal columns
    R: Tensor  # B^T P, (k, n_j, r)
    Q: Tensor  # the next right factor, (k, n_j, r)
    scale: Tensor  # length of R's longest column, or the stack's scale if larger, (k,) float64


def _as_stack(matrices: Sequence[Matrix], inside_replica: bool) -> _Stack:
    layout, parameter = matrices[0].layout, matrices[0].parameter
    dtype = product_dtype(parameter.X)
    return _Stack(
        layout=layout.inside_replica() if inside_replica else layout,
        B=[m.M for m in matrices],
        Q=[m.Q for m in matrices],
        orthonormal=parameter.group["right_factor"] == "qr",
        dtype=dtype,
        scale=scale_before(matrices),
        roundoff=roundoff_of_products(dtype, parameter.M.dtype),
    )


def _power_iteration(stacks: Sequence[_Stack]) -> list[LowRank]:
    """P, R and the next Q of every stack, averaged over replicas."""
    rows, floors = [s.layout.rows for s in stacks], [Floor(s.roundoff) for s in stacks]
    left = orthonormal_columns(_left_products(stacks), rows, floors)
    R = _right_products(stacks, [one.columns for one in left])
    Q, lengths = _next_right_factors(stacks, R, left)
    factors = []
    for stack, one, long, r, q in zip(stacks, left, lengths, R, Q, strict=True):
        bad = ~torch.isfinite(long).all(dim=-1)  # Q is zero then already
        scale = torch.maximum(long.amax(dim=-1).nan_to_num_(0.0, 0.0, 0.0), stack.scale)
        factors.append(LowRank(one.columns, r.masked_fill_(bad[:, None, None], 0.0), q, scale))
    return factors


def _left_products(stacks: Sequence[_Stack]) -> list[Tensor]:
    """B Q of every stack, (k, m_i, r), summed over the column group, averaged over replicas."""
    over = [(s.layout.rows, s.layout.columns_and_replicas) for s in stacks]
    return _products(stacks, [s.Q for s in stacks], over, transposed=False)


def _right_products(stacks: Sequence[_Stack], P: Sequence[Tensor]) -> list[Tensor]:
    """B^T P of every stack, (k, n_j, r), summed over the row group, averaged over replicas."""
    over = [(s.layout.columns, s.layout.rows_and_replicas) for s in stacks]
    return _products(stacks, P, over, transposed=True)


def _products(
    stacks: Sequence[_Stack],
    factors: Sequence[Sequence[Tensor] | Tensor],
    over: Sequence[tuple[Extent, dist.ProcessGroup | None]],
    *,
    transposed: bool,
) -> list[Tensor]:
    """B, or its transposes, times factors; over: the extents and groups of the sums."""
    slots = []
    for s, (extent, group) in zip(stacks, over, strict=True):
        shape = len(s.B), len(extent), s.Q[0].shape[1]
        slots.append(Slot(shape, group, s.dtype, s.Q[0].device))
    buckets = Buckets(slots)
    for stack, factor, out in zip(stacks, factors, buckets.views, strict=True):
        dtype = stack.dtype
        if _small(stack):
            B = torch.stack(list(stack.B)).to(dtype)
            right = torch.stack(list(factor)).to(dtype)
            torch.bmm(B.mT if transposed else B, right, out=out)
            continue
        for B, right, product in zip(stack.B, factor, out, strict=True):
            B = B.to(dtype)
            torch.mm(B.mT if transposed else B, right.to(dtype), out=product)
    buckets.all_reduce_(divide_by=group_size(stacks[0].layout.replicas) if stacks else 1)
    sum_shared_(buckets.views, [extent for extent, _ in over])
    return buckets.views


def _small(stack: _Stack) -> bool:
    """Whether copying all its matrices and factors is cheaper than a call for each."""
    rows, columns, r = len(stack.layout.rows), len(stack.layout.columns), stack.Q[0].shape[1]
    return len(stack.B) > 1 and rows * columns > 0 and max(rows, r) * columns <= SMALL


def _next_right_factors(
    stacks: Sequence[_Stack], R: Sequence[Tensor], left: Sequence[Orthonormal]
) -> tuple[list[Tensor], list[Tensor]]:
    """The next Q of every stack, and the column lengths of its R, (k, r) float64."""
    columns = [s.layout.columns for s in stacks]
    floors = [Floor(s.roundoff, s.scale, P) for s, P in zip(stacks, left, strict=True)]
    if any(s.orthonormal for s in stacks):  # then all are, because batches are of one kind
        found = orthonormal_columns(R, columns, floors, complete=False)
        return [one.columns for one in found], [one.lengths for one in found]
    squares = sums(
        [ops.column_sum_of_squares(held.counted(r)) for held, r in zip(columns, R, strict=True)],
        [held.group for held in columns],
    )
    lengths = [square.sqrt() for square in squares]
    Q = []
    for r, square, long, floor in zip(R, squares, lengths, floors, strict=True):
        Q.append(ops.column_normalize(r, square, floor.of(long, r.dtype)))
    return Q, lengths


def _look_ahead_(gradients: Gradients, share: Callable[[Parameter], float]) -> None:
    """M <- M + share G, while a direction is computed from it; does not copy M."""
    shares = gradients.each(share)
    if any(shares):
        ops.local_step_(gradients.M, gradients.G, [-s for s in shares], [1.0] * len(shares))


def _update(stacks: Stacks, factors: Sequence[LowRank], step: int) -> None:
    """X <- (1 - lr wd) X - lr scale P Q^T, and M <- M - (1 - mu) P R^T under error feedback."""
    matrices = [m for stack in stacks for m in stack]
    if not matrices:
        return
    P, R, Q = ([one for found in factors for one in found[i]] for i in range(3))
    for found, stack in zip(factors, stacks, strict=True):
        ops.copy_([m.Q for m in stack], found.Q)
    # The plain rule has no feedback, so momenta need not be read again.
    feeds_back = any(m.parameter.feedback for m in matrices)
    fed_back = matrices if feeds_back else ()
    with (
        open_shards(matrices, [m.parameter.local for m in matrices]) as (X,),
        open_shards(fed_back, [m.parameter.M for m in fed_back]) as (M,),
    ):
        ops.low_rank_update_(
            X,
            P,
            Q,
            [m.group["lr"] * m.update_scale for m in matrices],
            [m.parameter.decay for m in matrices],
            M,
            R if feeds_back else (),
            [m.parameter.feedback for m in fed_back],
            rounding_seeds(matrices, step),
        )
