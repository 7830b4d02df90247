"""One power iteration for every layout (Dion, arXiv 2504.05295, algorithm 1 and section 3).

Per oriented matrix B (m x n), held as a shard B_ij of rows i and columns j, and Q (n x r):

    P = sum over the column group ( B Q )         and mean over replicas, in one collective
    P = orthonormalize(P, row group)
    R = sum over the row group ( B^T P )          and mean over replicas, in one collective
    Q = column_normalize(R, column group)         or orthonormalize(R, column group)

The update leaves out columns of P and R that hold only rounding errors, and all columns of a matrix
whose R has become far smaller than it was.

All P's cross a process group in one collective, and all R's in another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from curvadion import ops
from curvadion.comm.collectives import Buckets, Slot, group_size
from curvadion.layout.matrix import MatrixLayout
from curvadion.update.orthonormalize import (
    Floor,
    Orthonormal,
    orthonormal_columns,
    roundoff_of_products,
)
from curvadion.update.row_shards import sum_shared_

RightFactor = Literal["column_normalized", "qr"]

# A product of a matrix with so few numbers takes longer to start than to compute.
SMALL = 2**12


@dataclass(frozen=True)
class Stack:
    """A batch of k matrices with one global shape, sharding, rank and dtype.

    Attributes:
        layout: the common layout.
        B: local shards, (m_i, n_j) each, of any floating dtype and any strides. Unless they are
            small they are read one at a time, so the sequence may create each one when it is read.
        Q: right factors, (n_j, r) each.
        right_factor: how R becomes the next Q.
        dtype: of the products P and R: float32, or float64 for float64 parameters.
        stored: the dtype to which B has been rounded; None if B is exact.
        scale: the recent length of the longest column of R, (k,) float64; None if there is no
            record of the past.
    """

    layout: MatrixLayout
    B: Sequence[Tensor]
    Q: Sequence[Tensor]
    right_factor: RightFactor
    dtype: torch.dtype
    stored: torch.dtype | None = None
    scale: Tensor | None = None

    @property
    def roundoff(self) -> float:
        """The relative error of the entries of P and R before they are orthonormalised."""
        return roundoff_of_products(self.dtype, self.stored)

    @property
    def P_shape(self) -> tuple[int, int, int]:
        return len(self.B), len(self.layout.rows), self.Q[0].shape[1]

    @property
    def R_shape(self) -> tuple[int, int, int]:
        return len(self.B), len(self.layout.columns), self.Q[0].shape[1]


class LowRank(NamedTuple):
    """The factors of a stack of k matrices after a power iteration.

    Attributes:
        P: (k, m_i, r), orthonormal columns.
        R: (k, n_j, r), B^T P.
        Q: (k, n_j, r), the next right factor.
        own_R: (k, n_j, r), this rank's summand of R; the same tensor as R if no other rank has one.
        scale: (k,) float64, the length of the longest column of R, or the stack's scale if that is
            larger.
    """

    P: Tensor
    R: Tensor
    Q: Tensor
    own_R: Tensor
    scale: Tensor


def power_iteration(stacks: Sequence[Stack]) -> list[LowRank]:
    """P, R and the next Q of every stack, averaged over replicas (see the module's docstring).

    Rows that several ranks hold in part (Extent.shared) take one more collective per group, which
    adds up their summands: r numbers per row.

    If B holds only rounding errors in some direction, this column of Q is zero. Its column of P is
    completed from global row indices, so the direction is used again as soon as B has something
    there. The size of rounding errors is estimated from the root mean square length of the columns
    of R (:func:`curvadion.update.orthonormalize.orthonormal_columns`). This replaces Dion's epsilon
    and does not depend on the scale of gradients.

    All of Q is zero if the longest column of R is :data:`curvadion.update.orthonormalize.FALLEN`
    times ``scale`` or shorter. Q and R are both zero if a product is not finite.

    Args:
        stacks: the same ones on every rank of every group involved, each with the rank's shards.

    Returns:
        The factors of each stack.
    """
    left = orthonormal_columns(
        left_products(stacks),
        [s.layout.rows for s in stacks],
        floors=[Floor(s.roundoff) for s in stacks],
    )
    R, own_R = right_products(stacks, [one.columns for one in left])
    Q, lengths = _next_right_factors(stacks, R, left)
    return [
        LowRank(one.columns, *_finite(r, q, own, long), _scale(long, stack.scale))
        for stack, one, long, r, q, own in zip(stacks, left, lengths, R, Q, own_R, strict=True)
    ]


def _scale(lengths: Tensor, before: Tensor | None) -> Tensor:
    longest = lengths.amax(dim=-1).nan_to_num_(0.0, 0.0, 0.0)
    return longest if before is None else torch.maximum(longest, before)


def _finite(R: Tensor, Q: Tensor, own_R: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The factors, with R zero if a column's length is not finite; Q is zero then already."""
    bad = ~torch.isfinite(lengths).all(dim=-1)
    # On the CPU it is cheaper to ask first; elsewhere asking is a device-to-host read.
    if bad.device.type != "cpu" or bad.any():
        for product in {id(product): product for product in (R, own_R)}.values():
            product.masked_fill_(bad[:, None, None], 0.0)
    return R, Q, own_R


def left_products(stacks: Sequence[Stack]) -> list[Tensor]:
    """B Q of every stack, (k, m_i, r), summed over the column group, averaged over replicas."""
    buckets = Buckets(
        [Slot(s.P_shape, s.layout.columns_and_replicas, s.dtype, s.Q[0].device) for s in stacks]
    )
    for stack, P in zip(stacks, buckets.views, strict=True):
        if _small(stack):
            torch.bmm(_stacked(stack.B, stack.dtype), _stacked(stack.Q, stack.dtype), out=P)
            continue
        for B, Q, out in zip(stack.B, stack.Q, P, strict=True):
            # (m_i, r) = (m_i, n_j) (n_j, r)
            torch.mm(B.to(stack.dtype), Q.to(stack.dtype), out=out)
    buckets.all_reduce_(divide_by=_replicas(stacks))
    sum_shared_(buckets.views, [s.layout.rows for s in stacks])
    return buckets.views


def right_products(
    stacks: Sequence[Stack], P: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """B^T P of every stack, (k, n_j, r), summed over the row group, averaged over replicas.

    Returns:
        These products, and this rank's summands of them: the same tensors if no other rank has one.
    """
    buckets = Buckets(
        [Slot(s.R_shape, s.layout.rows_and_replicas, s.dtype, s.Q[0].device) for s in stacks]
    )
    for stack, P_stack, R in zip(stacks, P, buckets.views, strict=True):
        if _small(stack):
            torch.bmm(_stacked(stack.B, stack.dtype).mT, P_stack, out=R)
            continue
        for B, P_one, out in zip(stack.B, P_stack, R, strict=True):
            # (n_j, r) = (n_j, m_i) (m_i, r)
            torch.mm(B.to(stack.dtype).mT, P_one, out=out)
    own = [
        R.clone() if s.layout.rows_and_replicas is not None or s.layout.columns.shared else R
        for s, R in zip(stacks, buckets.views, strict=True)
    ]
    buckets.all_reduce_(divide_by=_replicas(stacks))
    sum_shared_(buckets.views, [s.layout.columns for s in stacks])
    return buckets.views, own


def _small(stack: Stack) -> bool:
    """Whether a copy of all its matrices and factors costs less than a call for each."""
    k, rows, r = stack.P_shape
    columns = len(stack.layout.columns)
    return k > 1 and rows * columns > 0 and max(rows, r) * columns <= SMALL


def _stacked(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.stack(list(matrices)).to(dtype)


def _next_right_factors(
    stacks: Sequence[Stack], R: Sequence[Tensor], left: Sequence[Orthonormal]
) -> tuple[list[Tensor], list[Tensor]]:
    """Q of every stack, and the lengths of the columns of its R, (k, r) float64."""
    columns = [s.layout.columns for s in stacks]
    floors = [Floor(s.roundoff, s.scale, P) for s, P in zip(stacks, left, strict=True)]
    normalized = [i for i, s in enumerate(stacks) if s.right_factor == "column_normalized"]
    orthonormal = [i for i, s in enumerate(stacks) if s.right_factor == "qr"]
    squares = Buckets(
        [
            Slot((R[i].shape[0], R[i].shape[2]), columns[i].group, torch.float64, R[i].device)
            for i in normalized
        ]
    )
    for i, view in zip(normalized, squares.views, strict=True):
        view.copy_(ops.column_sum_of_squares(columns[i].counted(R[i])))
    squares.all_reduce_()
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for i, view in zip(normalized, squares.views, strict=True):
        lengths = view.sqrt()
        floor = floors[i].of(lengths, R[i].dtype)
        found[i] = ops.column_normalize(R[i], view, floor), lengths
    factors = orthonormal_columns(
        [R[i] for i in orthonormal],
        [columns[i] for i in orthonormal],
        complete=False,
        floors=[floors[i] for i in orthonormal],
    )
    for i, factor in zip(orthonormal, factors, strict=True):
        found[i] = factor.columns, factor.lengths
    Q, all_lengths = (
        zip(*(found[i] for i in range(len(stacks))), strict=True) if stacks else ((), ())
    )
    return list(Q), list(all_lengths)


def _replicas(stacks: Sequence[Stack]) -> int:
    return group_size(stacks[0].layout.replicas) if stacks else 1
