"""Orthonormal columns for tall matrices whose rows may be sharded over a process group.

The method is Cholesky QR, twice, with Gram matrices in float64. A Gram matrix squares the condition
number: in float32 the method would fail near a condition of 1e4, and float64 leaves room. On a CPU
the second pass takes products of some rows, and divides by the triangle, in the columns' own dtype
if the first found none dependent: their condition is then about one. Elsewhere the host would have
to wait for the answer.

Only r x r numbers cross the row group. The triangular factor has a positive diagonal, so the result
is the unique QR factor. It does not depend on the sharding, nor on the signs that a Householder QR
chooses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from curvadion import ops
from curvadion.comm.collectives import Buckets, Slot
from curvadion.layout.matrix import Extent
from curvadion.update.cholesky import inverse_triangle, none_set, without
from curvadion.update.sizes import most_together

# Added to the diagonal of a float64 Gram matrix, which is one, so that the Cholesky factorisation
# does not fail if it is singular. Larger than rounding errors, smaller than DEPENDENT squared.
SHIFT = 1e-13
# Rounding errors may be this many times larger than their estimate.
MARGIN = 2.0
# The rounding errors in an entry of a product, in units of the error of one rounding.
ERRORS_OF_A_PRODUCT = 8.0
# If all columns have become this many times shorter than they were, no gradient has come for long.
FALLEN = 3e-5
# Columns shorter than this, in units of their dtype's smallest normal number, are inaccurate.
SHORTEST = 2.0**10
# In a product with more, rounding errors of float32 sums may show.
ROWS_IN_A_PRODUCT = 2**10
# After the first pass the diagonal of the Cholesky factor is about one. Where it is larger than
# this, rounding errors of the matrices' own dtype are not amplified.
NEARLY_ONE = 0.5


class Orthonormal(NamedTuple):
    """A stack of k orthonormalised matrices, and how accurate their columns are.

    Attributes:
        columns: (k, m_i, r), the orthonormal columns.
        dependent: (k, r) of bool, which columns replace one that depended on those before it.
        error: (k, r) float64, the length of the rounding errors in each of the other columns.
        lengths: (k, r) float64, of the columns before orthonormalisation, over all rows.
    """

    columns: Tensor
    dependent: Tensor
    error: Tensor
    lengths: Tensor


def orthonormalize(
    matrices: Sequence[Tensor], rows: Sequence[Extent], *, complete: bool = True
) -> list[Tensor]:
    """The ``columns`` of :func:`orthonormal_columns`, for matrices of shape (..., m_i, r)."""
    stacks = [p.reshape(math.prod(p.shape[:-2]), *p.shape[-2:]) for p in matrices]
    found = orthonormal_columns(stacks, rows, complete=complete)
    return [one.columns.view(p.shape) for one, p in zip(found, matrices, strict=True)]


def orthonormal_columns(
    matrices: Sequence[Tensor],
    rows: Sequence[Extent],
    *,
    complete: bool = True,
    floors: Sequence[Floor] | None = None,
) -> list[Orthonormal]:
    """Orthonormalise the columns of each matrix: the Q of its QR factorisation with diag(R) > 0.

    A column counts as dependent on those before it if its part outside their span is not longer
    than the rounding errors there. The estimate of these errors follows from the root mean square
    length of all columns (not from the column's own length), and from how much of the other columns
    is subtracted. If the directions are well conditioned, a float32 column is still used when it is
    1e5 times shorter than that length. If the columns are products with a bfloat16 factor, it may
    be some hundred times shorter. In any dtype a column is dependent if its length is zero or not
    finite, or if the condition of the columns' directions is above 1e6.

    Each of two passes takes one collective per row group: r (r + 1) / 2 float64 numbers per matrix.

    Args:
        matrices: stacks of shape (k, m_i, r), float32 or float64, where m = sum of m_i >= r. Each
            rank holds m_i rows, given by its rank in the row group; m_i may be 0.
        rows: for each stack, which rows are held here, and the group that holds the others.
        complete: whether to replace dependent columns by directions that follow from global row
            indices and are orthogonal to all others. The result then always has r orthonormal
            columns. If False, dependent columns become zero.
        floors: for each stack, the test for columns that hold a signal. The default suits entries
            with the rounding errors of a product.

    Returns:
        The columns of each stack, and their errors.
    """
    if floors is None:
        floors = [Floor(roundoff_of_products(p.dtype)) for p in matrices]
    first = _cholesky_qr(matrices, rows, floors)
    if complete:
        completed = [
            _completed(one.columns, one.dependent, extent)
            for one, extent in zip(first, rows, strict=True)
        ]
    else:
        completed = [one.columns for one in first]
    second = _cholesky_qr(completed, rows, last=[one.dependent for one in first])
    return [
        Orthonormal(
            again.columns,
            one.dependent,
            torch.where(one.dependent, again.error, one.error),
            one.lengths,
        )
        for one, again in zip(first, second, strict=True)
    ]


def roundoff_of_products(dtype: torch.dtype, factor: torch.dtype | None = None) -> float:
    """The relative error of the entries of a product.

    Args:
        dtype: in which the product is taken.
        factor: the dtype to which one of the factors was rounded; None if it is exact.
    """
    stored = 0.0 if factor is None else torch.finfo(factor).eps / 2
    return stored + ERRORS_OF_A_PRODUCT * torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Floor:
    """Tells which columns of a stack are too short to hold a signal.

    Attributes:
        roundoff: relative error of the entries.
        scale: (k,), an earlier length of the longest column. If all columns are shorter than
            ``FALLEN`` times this length, none holds a signal. None for no such test.
        left: for the columns of R = B^T P, the result that P comes from.
    """

    roundoff: float
    scale: Tensor | None = None
    left: Orthonormal | None = None

    def of(self, lengths: Tensor, dtype: torch.dtype) -> Tensor:
        """The lengths up to which columns hold no signal, (k, r) float64.

        They are infinite for matrices without any signal, and with a length that is not finite.

        Args:
            lengths: of all columns, (k, r) float64.
            dtype: of the columns.
        """
        floor = (self.roundoff * _root_mean_square(lengths)).expand_as(lengths)
        if self.left is not None:
            # A completed column of P is orthogonal to the others up to their errors only. So its
            # column of R also holds a little of what B has in their span.
            error, dependent = self.left.error, self.left.dependent
            lost = _root_mean_square(error.masked_fill(dependent, 0.0) * lengths)
            leak = lost + error * _norm(lengths)
            floor = torch.where(dependent, torch.maximum(floor, leak), floor)
        longest = lengths.amax(dim=-1)
        least = torch.full_like(longest, SHORTEST * torch.finfo(dtype).tiny)
        if self.scale is not None:
            least = torch.maximum(least, FALLEN * self.scale)
        holds = (longest > least) & torch.isfinite(longest)
        return torch.where(holds.unsqueeze(-1), MARGIN * floor, math.inf)

    def sliced(self, these: slice) -> Floor:
        """The floor of some matrices of the stack."""
        scale = None if self.scale is None else self.scale[these]
        left = None if self.left is None else Orthonormal(*(part[these] for part in self.left))
        return Floor(self.roundoff, scale, left)


def _root_mean_square(lengths: Tensor) -> Tensor:
    return lengths.square().mean(dim=-1, keepdim=True).sqrt()


def _norm(numbers: Tensor) -> Tensor:
    return numbers.square().sum(dim=-1, keepdim=True).sqrt()


def _cholesky_qr(
    matrices: Sequence[Tensor],
    rows: Sequence[Extent],
    floors: Sequence[Floor] | None = None,
    last: Sequence[Tensor] | None = None,
) -> list[Orthonormal]:
    """One pass of Cholesky QR over stacks (k, m_i, r); dependent columns become zero.

    Args:
        matrices: the stacks; they are not changed.
        rows: for each stack, which rows are held here.
        floors: for each stack; None if only columns of length zero are too short.
        last: for each stack, (k, r) of bool: columns to orthonormalise after all others, so that
            the others do not depend on them.
    """
    results = []
    summed = _summed_triangles(matrices, rows, last)
    for i, p in enumerate(matrices):
        r = p.shape[-1]
        floor = None if floors is None else floors[i]
        found = []
        for these in _slices(p):
            after = None if last is None else last[i][these]
            here = None if floor is None else floor.sliced(these)
            if i in summed:
                gram = _unpacked(summed[i][these], r)
            else:
                gram = _gram(p[these], rows[i], after)
            refined = _refined(p[these], gram) if _near(after) else None
            found.append(refined or _orthonormal(p[these], gram.double(), here, after))
        results.append(found[0] if len(found) == 1 else _joined(found, p))
    return results


def _near(last: Tensor | None) -> bool:
    """Whether columns are known to be nearly orthonormal: a first pass found none dependent."""
    return last is not None and none_set(last)


def _refined(p: Tensor, gram: Tensor) -> Orthonormal | None:
    """Nearly orthonormal columns made orthonormal in their own dtype; None if they are not near.

    The result does not say how accurate they are, because that is known from the first pass.
    """
    lower, _ = torch.linalg.cholesky_ex(gram.to(p.dtype))
    if not (lower.diagonal(dim1=-2, dim2=-1) > NEARLY_ONE).all():
        return None
    columns = torch.linalg.solve_triangular(lower.mT, p, upper=True, left=False).contiguous()
    lengths = gram.diagonal(dim1=-2, dim2=-1).double().sqrt()
    return Orthonormal(
        columns, torch.zeros_like(lengths).bool(), torch.zeros_like(lengths), lengths
    )


def _joined(found: Sequence[Orthonormal], p: Tensor) -> Orthonormal:
    if not found:
        numbers = p.new_empty(0, p.shape[-1], dtype=torch.float64)
        return Orthonormal(torch.empty_like(p), numbers.bool(), numbers, numbers)
    return Orthonormal(*map(torch.cat, zip(*found, strict=True)))


def _orthonormal(p: Tensor, gram: Tensor, floor: Floor | None, last: Tensor | None) -> Orthonormal:
    lengths = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    shortest = torch.zeros_like(lengths) if floor is None else floor.of(lengths, p.dtype)
    # After the first pass the columns are far from singular, and need no shift.
    shift = 0.0 if floor is None else SHIFT
    factor, dependent = inverse_triangle(gram, lengths, shortest, shift, last)
    # A column of P W adds up the errors in P with the weights in W.
    eps = torch.finfo(p.dtype).eps
    error = _root_mean_square(lengths) * factor.square().sum(dim=-2).sqrt()
    if floor is None:
        error = roundoff_of_products(p.dtype) * error
    else:
        error = (floor.roundoff * error).clamp_min(eps)
        dependent = dependent | ~(MARGIN * error < 1)
    # Scale P by a power of two to lengths of about one. Then the factors of tiny and of large
    # columns fit into the dtype of P.
    unit = torch.exp2(-lengths.amax(dim=-1).log2().clamp(-126, 126).round())[:, None, None]
    # (k, m_i, r) = (k, m_i, r) (k, r, r)
    columns = torch.bmm(p * unit.to(p.dtype), (factor / unit).to(p.dtype))
    return Orthonormal(without(columns, dependent), dependent, error, lengths)


def _slices(p: Tensor) -> list[slice]:
    """Slices of a stack that bound the memory of float64 copies."""
    k, m, r = p.shape
    count = max(1, most_together(p.device).wide // max(1, m * r + 6 * r * r))
    return [slice(first, first + count) for first in range(0, k, count)]


def _completed(p: Tensor, dependent: Tensor, rows: Extent) -> Tensor:
    if none_set(dependent):
        return p
    directions = completing_directions(rows.positions(p.device), p.shape[-1])
    return torch.where(dependent.unsqueeze(-2), directions.to(p), p)


def _gram(p: Tensor, rows: Extent, last: Tensor | None) -> Tensor:
    """P^T P of the rows that this rank counts, (k, r, r) float64.

    For nearly orthonormal columns, products of some rows are taken in their own dtype: rounding
    errors are then no larger than those of the columns. Sums of many rows are not, because some
    libraries add them up one by one. Ranks whose slices differ may add up both kinds.
    """
    counted = rows.counted(p)
    k, m, r = counted.shape
    if not _near(last) or p.dtype == torch.float64:
        wide = counted.double()
        return ops.symmetric_product(wide.mT, wide, wide.new_empty(k, r, r))
    gram = counted.new_zeros(k, r, r, dtype=torch.float64)
    product = counted.new_empty(k, r, r)
    for some in counted.split(ROWS_IN_A_PRODUCT, dim=1) if m else ():
        gram += ops.symmetric_product(some.mT, some, product)
    return gram


def _summed_triangles(
    matrices: Sequence[Tensor], rows: Sequence[Extent], last: Sequence[Tensor] | None
) -> dict[int, Tensor]:
    """Packed upper triangles of P^T P, (k, r (r + 1) / 2), of each sharded P, by its index."""
    sharded = [i for i, extent in enumerate(rows) if extent.group is not None]
    slots = []
    for i in sharded:
        k, _, r = matrices[i].shape
        size = r * (r + 1) // 2
        slots.append(Slot((k, size), rows[i].group, torch.float64, matrices[i].device))
    buckets = Buckets(slots)
    for i, view in zip(sharded, buckets.views, strict=True):
        upper, lower = _triangle(matrices[i].shape[-1], view.device)
        for these in _slices(matrices[i]):
            after = None if last is None else last[i][these]
            view[these] = _gram(matrices[i][these], rows[i], after)[:, upper, lower]
    buckets.all_reduce_()
    return dict(zip(sharded, buckets.views, strict=True))


def _unpacked(triangles: Tensor, r: int) -> Tensor:
    """Symmetric matrices, (k, r, r), from their packed upper triangles."""
    gram = triangles.new_empty(len(triangles), r, r)
    upper, lower = _triangle(r, triangles.device)
    gram[:, upper, lower] = triangles
    gram[:, lower, upper] = triangles
    return gram


def _triangle(r: int, device: torch.device) -> Tensor:
    return torch.triu_indices(r, r, device=device)


def completing_directions(rows: Tensor, columns: int) -> Tensor:
    """Pseudo-random numbers in [-1, 1) that follow from global row and column indices alone.

    They are the same on every device and for every sharding.

    Args:
        rows: global row indices, (m_i,) int64.
        columns: number of columns.

    Returns:
        (m_i, columns) float64.
    """
    modulus = 2**31 - 1
    column = torch.arange(1, columns + 1, device=rows.device)
    x = (rows.unsqueeze(-1) + 1) * 48_271 % modulus + column * 69_621 % modulus
    for factor in (16_807, 39_373, 630_360_016):
        x = (x * factor + 12_345) % modulus
        x = x ^ (x >> 13)
    return (x % modulus).double() / (modulus / 2) - 1.0
