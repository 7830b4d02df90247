"""Orthonormal columns for tall matrices whose rows may be cut over a process group.

Cholesky QR, twice, with Gram matrices in float64. A Gram matrix squares the condition number;
float64 leaves room for that where float32 breaks down near 1e4, and r x r numbers are all that
crosses the row group. The triangular factor has a positive diagonal, so the result is
the unique QR factor: it does not depend on the cut, nor on the signs a Householder QR picks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from curvadion.collectives import Buckets, Slot
from curvadion.layout import Extent

# A column whose part outside the span of the columns before it is smaller than this, relative
# to its own length, holds rounding errors of float32 products only.
DEPENDENT = 1e-6
# Keeps the Cholesky factorisation of a singular float64 Gram matrix of unit diagonal from failing:
# above the rounding errors of its entries, below DEPENDENT squared.
SHIFT = 1e-13
# Lengths whose reciprocal float32 cannot hold count as zero.
SHORTEST = 1e-37
# Numbers of float64 that slices of stacks may take at a time: 128 MiB, or those of one matrix.
WORKSPACE = 2**24


def orthonormalize(
    matrices: Sequence[Tensor], rows: Sequence[Extent], *, complete: bool = True
) -> list[Tensor]:
    """Orthonormalise the columns of each matrix: the Q of its QR factorisation, diag(R) > 0.

    Args:
        matrices: stacks of shape (..., m_i, r), float32 or float64, m = sum of m_i >= r. Each
            rank holds the m_i rows of its place in the row group; m_i may be 0.
        rows: per stack, which rows are held here and who holds the others.
        complete: columns that depend linearly on those before them are replaced by directions
            that follow from the global row index and are orthogonal to all others: the result has
            r orthonormal columns whatever the input. If not, such columns become zero.

    Returns:
        Stacks of the same shapes and dtypes. Per pass one collective per row group:
        r (r + 1) / 2 float64 numbers a matrix.

    The condition number may be up to 1e6; columns that reach beyond count as dependent.
    """
    stacks = [p.reshape(math.prod(p.shape[:-2]), *p.shape[-2:]) for p in matrices]
    first, dependent = _cholesky_qr(stacks, rows)
    if complete:
        first = [_completed(*stack) for stack in zip(first, dependent, rows, strict=True)]
    second, _ = _cholesky_qr(first, rows, last=dependent)
    return [q.view(p.shape) for q, p in zip(second, matrices, strict=True)]


def _cholesky_qr(
    matrices: Sequence[Tensor], rows: Sequence[Extent], last: Sequence[Tensor] | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """One pass over (k, m_i, r): orthonormalised, dependent columns zero, and which these are.

    last: columns, (k, r) of bool per stack, to be orthonormalised after all others, which then
    do not depend on them.
    """
    results, dependents = [], []
    summed = _summed_triangles(matrices, rows)
    for i, p in enumerate(matrices):
        k, _, r = p.shape
        result, dependent = p.new_empty(p.shape), p.new_empty((k, r), dtype=torch.bool)
        for these in _slices(p):
            gram = _unpacked(summed[i][these], r) if i in summed else _gram(p[these], rows[i])
            after = None if last is None else last[i][these]
            factor, dependent[these] = _inverse_triangle(gram, after)
            # (k, m_i, r) = (k, m_i, r) (k, r, r)
            torch.bmm(p[these], factor.to(p.dtype), out=result[these])
        results.append(result)
        dependents.append(dependent)
    return results, dependents


def _slices(p: Tensor) -> list[slice]:
    """As many matrices of a stack at a time as bound what float64 takes beside them."""
    k, m, r = p.shape
    count = max(1, WORKSPACE // max(1, m * r + 6 * r * r))
    return [slice(first, first + count) for first in range(0, k, count)]


def _completed(p: Tensor, dependent: Tensor, rows: Extent) -> Tensor:
    # Asking first saves work where the answer needs no device-to-host read.
    if p.device.type == "cpu" and not dependent.any():
        return p
    directions = completing_directions(rows.positions(p.device), p.shape[-1])
    return torch.where(dependent.unsqueeze(-2), directions.to(p), p)


def _gram(p: Tensor, rows: Extent) -> Tensor:
    """P^T P of the rows that count here, (k, r, r) float64."""
    wide = rows.counted(p).double()
    return wide.mT @ wide


def _summed_triangles(matrices: Sequence[Tensor], rows: Sequence[Extent]) -> dict[int, Tensor]:
    """Upper triangles of P^T P of each P that is cut, packed, (k, r (r + 1) / 2), by its place."""
    cut = [i for i, extent in enumerate(rows) if extent.group is not None]
    slots = []
    for i in cut:
        k, _, r = matrices[i].shape
        size = r * (r + 1) // 2
        slots.append(Slot((k, size), rows[i].group, torch.float64, matrices[i].device))
    buckets = Buckets(slots)
    for i, view in zip(cut, buckets.views, strict=True):
        upper, lower = _triangle(matrices[i].shape[-1], view.device)
        for these in _slices(matrices[i]):
            view[these] = _gram(matrices[i][these], rows[i])[:, upper, lower]
    buckets.all_reduce_()
    return dict(zip(cut, buckets.views, strict=True))


def _unpacked(triangles: Tensor, r: int) -> Tensor:
    """The symmetric matrices, (k, r, r), of packed upper triangles."""
    gram = triangles.new_empty(len(triangles), r, r)
    upper, lower = _triangle(r, triangles.device)
    gram[:, upper, lower] = triangles
    gram[:, lower, upper] = triangles
    return gram


def _triangle(r: int, device: torch.device) -> Tensor:
    return torch.triu_indices(r, r, device=device)


def _inverse_triangle(gram: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor]:
    """W with orthonormal columns in P W, and which columns depend on those before them.

    gram: (k, r, r) float64 -> W (k, r, r), upper triangular but for the columns that come
    last; dependent (k, r) of bool, whose columns of W are zero.
    """
    if last is not None:
        order = last.to(torch.int8).argsort(dim=-1, stable=True)
        factor, dependent = _inverse_triangle(_permuted(gram, order), None)
        back = order.argsort(dim=-1)
        return _permuted(factor, back), dependent.gather(-1, back)
    lengths = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    inverse_lengths = torch.where(lengths > SHORTEST, lengths, torch.inf).reciprocal()
    unit = gram * inverse_lengths.unsqueeze(-1) * inverse_lengths.unsqueeze(-2)
    unit.diagonal(dim1=-2, dim2=-1).fill_(1.0 + SHIFT)
    # The Ex form reports failure in a tensor: no device-to-host read.
    lower, _ = torch.linalg.cholesky_ex(unit)
    dependent = (lengths <= SHORTEST) | (lower.diagonal(dim1=-2, dim2=-1) < DEPENDENT)
    # A dependent column is dropped: later columns must not be measured against its noise.
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    lower = torch.where(dependent.unsqueeze(-2), identity, lower)
    inverse = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
    factor = inverse_lengths.unsqueeze(-1) * inverse.mT
    return factor.masked_fill(dependent.unsqueeze(-2), 0.0), dependent


def _permuted(matrix: Tensor, order: Tensor) -> Tensor:
    """Rows and columns of (k, r, r) in a new order, (k, r)."""
    rows = matrix.gather(-2, order.unsqueeze(-1).expand_as(matrix))
    return rows.gather(-1, order.unsqueeze(-2).expand_as(matrix))


def completing_directions(rows: Tensor, columns: int) -> Tensor:
    """Pseudo-random numbers in [-1, 1), a function of global row and column indices alone.

    rows: (m_i,) int64 -> (m_i, columns) float64, the same on every device and for every cut.
    """
    modulus = 2**31 - 1
    column = torch.arange(1, columns + 1, device=rows.device)
    x = (rows.unsqueeze(-1) + 1) * 48_271 % modulus + column * 69_621 % modulus
    for factor in (16_807, 39_373, 630_360_016):
        x = (x * factor + 12_345) % modulus
        x = x ^ (x >> 13)
    return (x % modulus).double() / (modulus / 2) - 1.0
