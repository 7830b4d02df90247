"""Orthonormal columns for tall matrices whose rows may be sharded over a process group.

The method is Cholesky QR, twice, with Gram matrices in float64, of which each pass sends
r (r + 1) / 2 elements per matrix over the row group.

A column depends on those before it if its part outside their span is no longer than its
rounding errors, as estimated from the root mean square length of all columns, if its length
is zero or not finite, or if the condition of the columns' directions is above 1e6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from curvadion import ops
from curvadion.layout.matrix import Extent
from curvadion.ops.tensors import float64_chunk
from curvadion.update.row_shards import pack, sums, unpack

# Added to diagonals for Cholesky: larger than rounding errors, smaller than DEPENDENT
# squared.
SHIFT = 1e-13
# Rounding errors may be this many times larger than their estimate.
MARGIN = 2.0
# A part outside the others' span that holds only rounding errors, relative to its column.
DEPENDENT = 1e-6
# The error of an entry of a product, in units of one rounding error.
ERRORS_OF_A_PRODUCT = 8.0
# Columns that have shrunk by this factor have had no gradient for long.
FALLEN = 3e-5
# Shorter columns, in units of the smallest normal number, are inaccurate.
SHORTEST = 2.0**10


class Orthonormal(NamedTuple):
    """A stack of k orthonormalised matrices."""

    columns: Tensor  # (k, m_i, r)
    dependent: Tensor  # (k, r) bool: which replace dependent columns
    error: Tensor  # (k, r) float64: rounding errors' lengths in others
    lengths: Tensor  # (k, r) float64: of the original columns


def orthonormal_columns(
    matrices: Sequence[Tensor],
    rows: Sequence[Extent],
    floors: Sequence[Floor] | None = None,
    *,
    complete: bool = True,
) -> list[Orthonormal]:
    """Q (k, m_i, r) of the QR factorisation with diag(R) > 0, by stack; collective.

    complete: replace dependent columns by directions from global row indices, not by zeros.
    floors: by default of products.
    """
    if floors is None:
        floors = [Floor(roundoff_of_products(p.dtype)) for p in matrices]
    nothing = [None] * len(rows)
    first = _cholesky_qr(matrices, rows, floors, nothing)
    columns = _completed(first, rows) if complete else [one.columns for one in first]
    second = _cholesky_qr(columns, rows, nothing, [one.dependent for one in first])
    results = []
    for one, again in zip(first, second, strict=True):
        error = torch.where(one.dependent, again.error, one.error)
        results.append(one._replace(columns=again.columns, error=error))
    return results


def roundoff_of_products(dtype: torch.dtype, factor: torch.dtype | None = None) -> float:
    """The relative error of a product in ``dtype``; factor: the dtype of a factor."""
    stored = 0.0 if factor is None else torch.finfo(factor).eps / 2
    return stored + ERRORS_OF_A_PRODUCT * torch.finfo(dtype).eps / 2


class Floor(NamedTuple):
    """Finds columns of a stack that are too short to hold a signal."""

    roundoff: float  # relative error of the entries
    scale: Tensor | None = None  # the longest column's length before, (k,)
    left: Orthonormal | None = None  # for R = B^T P: the result that contains P

    def of(self, lengths: Tensor, dtype: torch.dtype) -> Tensor:
        """The lengths up to which columns hold no signal, (k, r)."""
        floor = (self.roundoff * _root_mean_square(lengths)).expand_as(lengths)
        if self.left is not None:
            # A completed column of P is orthogonal to the others only up to their errors.
            _, dependent, error, _ = self.left
            lost = _root_mean_square(error.masked_fill(dependent, 0.0) * lengths)
            leak = lost + error * torch.linalg.vector_norm(lengths, dim=-1, keepdim=True)
            floor = torch.where(dependent, torch.maximum(floor, leak), floor)
        longest = lengths.amax(dim=-1)
        least = torch.full_like(longest, SHORTEST * torch.finfo(dtype).tiny)
        if self.scale is not None:
            least = torch.maximum(least, FALLEN * self.scale)
        holds = (longest > least) & longest.isfinite()
        return torch.where(holds.unsqueeze(-1), MARGIN * floor, math.inf)


def _root_mean_square(lengths: Tensor) -> Tensor:
    return lengths.square().mean(dim=-1, keepdim=True).sqrt()


def _cholesky_qr(
    matrices: Sequence[Tensor],
    rows: Sequence[Extent],
    floors: Sequence[Floor | None],
    last: Sequence[Tensor | None],
) -> list[Orthonormal]:
    """One pass over stacks (k, m_i, r); columns of ``last`` come after others."""
    summed = sums(list(map(_gram, matrices, rows)), [extent.group for extent in rows])
    results = []
    for p, gram, extent, floor, after in zip(
        matrices, summed, rows, floors, last, strict=True
    ):
        gram = gram if extent.group is None else unpack(gram, p.shape[2])
        results.append(_orthonormal(p, gram, floor, after))
    return results


def _gram(p: Tensor, rows: Extent) -> Tensor:
    """P^T P of the rows that this rank counts, (k, r, r) float64; packed if sharded."""
    k, m, r = p.shape
    gram = p.new_empty(k, r, r, dtype=torch.float64)
    count = max(1, float64_chunk(p.device) // max(1, m * r))
    for some, out in zip(p.split(count), gram.split(count), strict=True):
        wide = rows.counted(some).double()
        ops.symmetric_product(wide.mT, wide, out)
    return gram if rows.group is None else pack(gram)


def _orthonormal(
    p: Tensor, gram: Tensor, floor: Floor | None, last: Tensor | None
) -> Orthonormal:
    lengths = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    shortest = torch.zeros_like(lengths) if floor is None else floor.of(lengths, p.dtype)
    # After the first pass the columns are far from singular and need no shift.
    shift = 0.0 if floor is None else SHIFT
    count = max(1, float64_chunk(p.device) // p.shape[2] ** 2)
    parts = []
    for start in range(0, len(gram), count):
        some = slice(start, start + count)
        after = None if last is None else last[some]
        parts.append(
            _inverse_triangle(gram[some], lengths[some], shortest[some], shift, after)
        )
    factor, dependent = (
        parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    )
    # A column of P W sums the errors of P with the weights of W.
    error = _root_mean_square(lengths) * factor.square().sum(dim=-2).sqrt()
    if floor is None:
        error = roundoff_of_products(p.dtype) * error
    else:
        error = (floor.roundoff * error).clamp_min(torch.finfo(p.dtype).eps)
        dependent = dependent | ~(MARGIN * error < 1)
    # Powers of two make factors of tiny and large columns fit P's dtype.
    unit = torch.exp2(-lengths.amax(dim=-1).log2().clamp(-126, 126).round())[:, None, None]
    columns = torch.bmm(p * unit.to(p.dtype), (factor / unit).to(p.dtype))
    return Orthonormal(_without(columns, dependent), dependent, error, lengths)


def _inverse_triangle(
    gram: Tensor, lengths: Tensor, floor: Tensor, shift: float, last: Tensor | None
) -> tuple[Tensor, Tensor]:
    """W such that P W has orthonormal columns or zeros, and which are dependent."""
    if last is not None:
        order = last.to(torch.int8).argsort(dim=-1, stable=True)
        each = _permuted(gram, order), lengths.gather(-1, order), floor.gather(-1, order)
        factor, dependent = _inverse_triangle(*each, shift, None)
        back = order.argsort()
        return _permuted(factor, back), dependent.gather(-1, back)
    short = ~(lengths > floor)
    inverse_lengths = torch.where(short, torch.inf, lengths).reciprocal()
    unit = (gram * inverse_lengths.unsqueeze(-1)).mul_(inverse_lengths.unsqueeze(-2))
    # Drop short columns first, so that no other is compared with them.
    unit = _without(_without(unit, short).mT, short).mT
    unit.diagonal(dim1=-2, dim2=-1).fill_(1.0 + shift)
    # cholesky_ex reports failure in a tensor, without a device-to-host read.
    lower, _ = torch.linalg.cholesky_ex(unit)
    left = lower.diagonal(dim1=-2, dim2=-1)
    dependent = short | ~(left > DEPENDENT) | ~(left * lengths > floor)
    # Drop dependent columns, so that later ones are not compared with their noise.
    lower = _without(lower, dependent)
    left.masked_fill_(dependent, 1.0)
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    inverse = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
    # The inverse also amplifies the Gram matrix's errors, relative to the columns' lengths.
    dependent = dependent | ~(DEPENDENT * inverse.square().sum(dim=-1).sqrt() < 1)
    return _without(inverse.mT.mul_(inverse_lengths.unsqueeze(-1)), dependent), dependent


def _permuted(matrix: Tensor, order: Tensor) -> Tensor:
    """Matrices (k, r, r) with rows and columns in an order, (k, r)."""
    rows = matrix.gather(-2, order.unsqueeze(-1).expand_as(matrix))
    return rows.gather(-1, order.unsqueeze(-2).expand_as(matrix))


def _without(p: Tensor, dependent: Tensor) -> Tensor:
    """Set dependent columns to zero, in place, even if not finite."""
    return p.masked_fill_(dependent.unsqueeze(-2), 0.0)


def _completed(stacks: Sequence[Orthonormal], rows: Sequence[Extent]) -> list[Tensor]:
    """The columns, with completing directions for dependent ones."""
    columns, known = [], dict[tuple[Extent, int], Tensor]()
    for (p, dependent, *_), extent in zip(stacks, rows, strict=True):
        if p.device.type != "cpu" or dependent.any():
            key = extent, p.shape[-1]
            if key not in known:
                indices = torch.arange(
                    extent.indices.start, extent.indices.stop, device=p.device
                )
                known[key] = completing_directions(indices, p.shape[-1])
            p = torch.where(dependent.unsqueeze(-2), known[key].to(p), p)
        columns.append(p)
    return columns


def completing_directions(rows: Tensor, columns: int) -> Tensor:
    """Values in [-1, 1), (m_i, columns) float64, from global indices."""
    modulus = 2**31 - 1
    column = torch.arange(1, columns + 1, device=rows.device)
    x = (rows.unsqueeze(-1) + 1) * 48_271 % modulus + column * 69_621 % modulus
    for factor in (16_807, 39_373, 630_360_016):
        x = (x * factor + 12_345) % modulus
        x = x ^ (x >> 13)
    return (x % modulus).double() / (modulus / 2) - 1.0
