"""One power iteration for every layout (Dion, arXiv 2504.05295, algorithm 1 and section 3).

Per oriented matrix B (m x n), held as a shard B_ij of rows i and columns j, and Q (n x r):

    P = sum over the column group ( B Q )         and mean over replicas, in one collective
    P = orthonormalize(P, row group)
    R = sum over the row group ( B^T P )          and mean over replicas, in one collective
    Q = column_normalize(R, column group)         or orthonormalize(R, column group)

One collective sends all P's, another all R's. Rows that several ranks hold in part (Extent.shared)
take one more collective per group, of r elements per row.

If B holds only rounding errors in some direction, this column of Q is zero. Its column of P is
completed from global row indices, so the direction is used again as soon as B has a signal there.
The estimate of these errors (:mod:`curvadion.update.orthonormalize`) replaces Dion's epsilon, and
does not depend on the scale of gradients. All of Q is zero if the longest column of R is ``FALLEN``
times the stack's scale or shorter. Q and R are both zero if a product is not finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion import ops
from curvadion.comm.collectives import Buckets, Slot, group_size
from curvadion.layout.matrix import Extent, MatrixLayout
from curvadion.update.orthonormalize import (
    Floor,
    Orthonormal,
    orthonormal_columns,
    roundoff_of_products,
)
from curvadion.update.row_shards import sum_shared_, sums

RightFactor = Literal["column_normalized", "qr"]

# A product of a matrix with so few elements takes longer to start than to compute.
SMALL = 2**12


@dataclass(frozen=True)
class Stack:
    """A batch of k matrices with one global shape, sharding, rank and dtype."""

    layout: MatrixLayout
    B: Sequence[Tensor]  # local shards, (m_i, n_j) each
    Q: Sequence[Tensor]  # right factors, (n_j, r) each
    right_factor: RightFactor
    dtype: torch.dtype  # of the products P and R, float32 or wider
    stored: torch.dtype | None = None  # dtype to which B was rounded; None if B is exact
    scale: Tensor | None = None  # the recent length of R's longest column, (k,) float64

    @property
    def roundoff(self) -> float:
        """The relative error of the entries of P and R."""
        return roundoff_of_products(self.dtype, self.stored)


class LowRank(NamedTuple):
    """The factors of a stack of k matrices after a power iteration."""

    P: Tensor  # (k, m_i, r), of orthonormal columns
    R: Tensor  # B^T P, (k, n_j, r)
    Q: Tensor  # the next right factor, (k, n_j, r)
    scale: Tensor  # length of R's longest column, or the stack's scale if larger, (k,) float64


def power_iteration(stacks: Sequence[Stack]) -> list[LowRank]:
    """P, R and the next Q of every stack, averaged over replicas."""
    rows, floors = [s.layout.rows for s in stacks], [Floor(s.roundoff) for s in stacks]
    left = orthonormal_columns(left_products(stacks), rows, floors)
    R = right_products(stacks, [one.columns for one in left])
    Q, lengths = _next_right_factors(stacks, R, left)
    factors = []
    for stack, one, long, r, q in zip(stacks, left, lengths, R, Q, strict=True):
        bad = ~torch.isfinite(long).all(dim=-1)  # Q is zero then already
        scale = long.amax(dim=-1).nan_to_num_(0.0, 0.0, 0.0)
        if stack.scale is not None:
            scale = torch.maximum(scale, stack.scale)
        factors.append(LowRank(one.columns, r.masked_fill_(bad[:, None, None], 0.0), q, scale))
    return factors


def left_products(stacks: Sequence[Stack]) -> list[Tensor]:
    """B Q of every stack, (k, m_i, r), summed over the column group, averaged over replicas."""
    over = [(s.layout.rows, s.layout.columns_and_replicas) for s in stacks]
    return _products(stacks, [s.Q for s in stacks], over, transposed=False)


def right_products(stacks: Sequence[Stack], P: Sequence[Tensor]) -> list[Tensor]:
    """B^T P of every stack, (k, n_j, r), summed over the row group, averaged over replicas."""
    over = [(s.layout.columns, s.layout.rows_and_replicas) for s in stacks]
    return _products(stacks, P, over, transposed=True)


def _products(
    stacks: Sequence[Stack],
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


def _small(stack: Stack) -> bool:
    """Whether copying all its matrices and factors is cheaper than a call for each."""
    rows, columns, r = len(stack.layout.rows), len(stack.layout.columns), stack.Q[0].shape[1]
    return len(stack.B) > 1 and rows * columns > 0 and max(rows, r) * columns <= SMALL


def _next_right_factors(
    stacks: Sequence[Stack], R: Sequence[Tensor], left: Sequence[Orthonormal]
) -> tuple[list[Tensor], list[Tensor]]:
    """The next Q of every stack, and the column lengths of its R, (k, r) float64."""
    columns = [s.layout.columns for s in stacks]
    floors = [Floor(s.roundoff, s.scale, P) for s, P in zip(stacks, left, strict=True)]
    found: dict[int, tuple[Tensor, Tensor]] = {}
    orthonormal = [i for i, s in enumerate(stacks) if s.right_factor == "qr"]
    factors = orthonormal_columns(
        [R[i] for i in orthonormal],
        [columns[i] for i in orthonormal],
        [floors[i] for i in orthonormal],
        complete=False,
    )
    for i, factor in zip(orthonormal, factors, strict=True):
        found[i] = factor.columns, factor.lengths
    normalized = [i for i in range(len(stacks)) if i not in found]
    squares = sums(
        [ops.column_sum_of_squares(columns[i].counted(R[i])) for i in normalized],
        [columns[i].group for i in normalized],
    )
    for i, square in zip(normalized, squares, strict=True):
        lengths = square.sqrt()
        floor = floors[i].of(lengths, R[i].dtype)
        found[i] = ops.column_normalize(R[i], square, floor), lengths
    return [found[i][0] for i in range(len(stacks))], [found[i][1] for i in range(len(stacks))]
