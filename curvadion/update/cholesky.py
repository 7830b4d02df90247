"""Inverses of triangular Cholesky factors, without the columns that depend on earlier ones."""

from __future__ import annotations

import torch
from torch import Tensor

# A column depends on those before it if its part outside their span, relative to its own length, is
# smaller than this: the part then holds only rounding errors of the Gram matrix.
DEPENDENT = 1e-6


def inverse_triangle(
    gram: Tensor, lengths: Tensor, floor: Tensor, shift: float, last: Tensor | None
) -> tuple[Tensor, Tensor]:
    """W such that P W has orthonormal columns, and which columns depend on those before them.

    gram: P^T P, (k, r, r) float64. lengths: the roots of its diagonal. floor: what a column must be
    longer than, and so must its part outside the span of those before it. shift: added to the
    diagonal of the scaled Gram matrix. last: columns that come after all others.

    W (k, r, r) is upper triangular except for the columns that come last, and dependent ones are
    zero.
    """
    if last is not None:
        order = last.to(torch.int8).argsort(dim=-1, stable=True)
        sorted_lengths, sorted_floor = lengths.gather(-1, order), floor.gather(-1, order)
        factor, dependent = inverse_triangle(
            _permuted(gram, order), sorted_lengths, sorted_floor, shift, None
        )
        back = order.argsort(dim=-1)
        return _permuted(factor, back), dependent.gather(-1, back)
    short = ~(lengths > floor)
    inverse_lengths = torch.where(short, torch.inf, lengths).reciprocal()
    unit = (gram * inverse_lengths.unsqueeze(-1)).mul_(inverse_lengths.unsqueeze(-2))
    # Drop short columns first, so that no other column is compared with them.
    unit = without(without(unit, short).mT, short).mT
    unit.diagonal(dim1=-2, dim2=-1).fill_(1.0 + shift)
    # cholesky_ex reports a failure in a tensor, which needs no device-to-host read.
    lower, _ = torch.linalg.cholesky_ex(unit)
    left = lower.diagonal(dim1=-2, dim2=-1)
    dependent = short | ~(left > DEPENDENT) | ~(left * lengths > floor)
    # Drop a dependent column, so that later columns are not compared with its noise.
    lower = without(lower, dependent)
    left.masked_fill_(dependent, 1.0)
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    inverse = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
    # The inverse also amplifies errors of the Gram matrix, relative to the columns' own lengths.
    dependent = dependent | ~(DEPENDENT * inverse.square().sum(dim=-1).sqrt() < 1)
    return without(inverse.mT.mul_(inverse_lengths.unsqueeze(-1)), dependent), dependent


def _permuted(matrix: Tensor, order: Tensor) -> Tensor:
    """Matrices (k, r, r) with rows and columns in a new order, (k, r)."""
    rows = matrix.gather(-2, order.unsqueeze(-1).expand_as(matrix))
    return rows.gather(-1, order.unsqueeze(-2).expand_as(matrix))


def without(p: Tensor, dependent: Tensor) -> Tensor:
    """The matrices with dependent columns set to zero, in place, even if these are not finite."""
    return p if none_set(dependent) else p.masked_fill_(dependent.unsqueeze(-2), 0.0)


def none_set(flags: Tensor) -> bool:
    """Whether no flag is set; False on devices where asking takes a device-to-host read."""
    return flags.device.type == "cpu" and not flags.any()
