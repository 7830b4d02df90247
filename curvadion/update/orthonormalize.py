"""Orthonormal columns for tall matrices whose rows may be cut over a process group.

Cholesky QR, twice, with Gram matrices in float64. A Gram matrix squares the condition number;
float64 leaves room for that where float32 breaks down near 1e4, and r x r numbers are all that
crosses the row group. The triangular factor has a positive diagonal, so the result is
the unique QR factor: it does not depend on the cut, nor on the signs a Householder QR picks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from curvadion.comm.collectives import Buckets, Slot
from curvadion.layout.matrix import Extent

# A column whose part outside the span of the columns before it is smaller than this, relative
# to its own length, holds rounding errors of the Gram matrix only.
DEPENDENT = 1e-6
# Keeps the Cholesky factorisation of a singular float64 Gram matrix of unit diagonal from failing:
# above the rounding errors of its entries, below DEPENDENT squared.
SHIFT = 1e-13
# Rounding errors may be so many times longer than they are estimated to be.
MARGIN = 2.0
# Products add up rounding errors; a number that is stored has one.
ERRORS_OF_A_PRODUCT = 8.0
# Columns that are so many times shorter than they once were have had nothing new for long.
FALLEN = 3e-5
# Shorter columns, in units of the smallest normal number of their dtype, have lost their digits.
SHORTEST = 2.0**10
# Numbers of float64 that slices of stacks may take at a time: 128 MiB, or those of one matrix.
WORKSPACE = 2**24


class Orthonormal(NamedTuple):
    """A stack of orthonormalised matrices, and how far their columns can be trusted.

    columns: (k, m_i, r), the orthonormal columns. dependent: (k, r) of bool, which of them stand
    for columns that depended on those before them. error: (k, r) float64, the length of the
    rounding errors in each of the others. lengths: (k, r) float64, of the columns given, over all
    rows.
    """

    columns: Tensor
    dependent: Tensor
    error: Tensor
    lengths: Tensor


def orthonormalize(
    matrices: Sequence[Tensor], rows: Sequence[Extent], *, complete: bool = True
) -> list[Tensor]:
    """The ``columns`` of :func:`orthonormal_columns`, in the shapes of the matrices."""
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
    """Orthonormalise the columns of each matrix: the Q of its QR factorisation, diag(R) > 0.

    Args:
        matrices: stacks of shape (k, m_i, r), float32 or float64, m = sum of m_i >= r. Each
            rank holds the m_i rows of its place in the row group; m_i may be 0.
        rows: per stack, which rows are held here and who holds the others.
        complete: columns that depend linearly on those before them are replaced by directions
            that follow from the global row index and are orthogonal to all others: the result has
            r orthonormal columns whatever the input. If not, such columns become zero.
        floors: per stack, what tells columns that hold a signal; by default for entries with the
            rounding errors of a product.

    Returns:
        One per stack. Per pass one collective per row group: r (r + 1) / 2 float64 numbers a
        matrix.

    A column depends on those before it if what is left of it outside their span is not longer than
    the rounding errors there. Such errors go by the root mean square length of all columns, not by
    the column's own, and by how much of the other columns is subtracted. Of well-conditioned
    columns in float32 one may be 1e5 times shorter than that length and is still followed, and
    hundreds of times where bfloat16 holds what the columns are products of. Columns of length
    zero, of lengths that are not finite, and of more than 1e6 times the condition of their
    directions alone are dependent in any dtype.
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
    """The relative error of entries of a product taken in ``dtype``, one factor stored in another.

    factor: the dtype in which numbers that were wider have been stored; None for exact numbers.
    """
    stored = 0.0 if factor is None else torch.finfo(factor).eps / 2
    return stored + ERRORS_OF_A_PRODUCT * torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Floor:
    """Tells which columns of a stack are too short to hold a signal.

    roundoff: relative error of the entries. scale: (k,), a length that the longest column once had;
    where all are ``FALLEN`` times shorter, nothing new has come for long. left: for columns of
    R = B^T P, where P came from.
    """

    roundoff: float
    scale: Tensor | None = None
    left: Orthonormal | None = None

    def of(self, lengths: Tensor, dtype: torch.dtype) -> Tensor:
        """The longest lengths without a signal, (k, r) float64; infinite for lengths that are not.

        lengths: of all columns, (k, r) float64. dtype: of the columns.
        """
        floor = (self.roundoff * _root_mean_square(lengths)).expand_as(lengths)
        if self.left is not None:
            # What B has in the span of P, but for the errors there, is left for other directions.
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
        """That of some of the stack's matrices."""
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
    """One pass over (k, m_i, r): orthonormalised, dependent columns zero.

    floors: per stack; None asks for zero columns only. last: columns, (k, r) of bool per stack, to
    be orthonormalised after all others, which then do not depend on them.
    """
    results = []
    summed = _summed_triangles(matrices, rows)
    for i, p in enumerate(matrices):
        r = p.shape[-1]
        floor = None if floors is None else floors[i]
        found = []
        for these in _slices(p):
            gram = _unpacked(summed[i][these], r) if i in summed else _gram(p[these], rows[i])
            after = None if last is None else last[i][these]
            here = None if floor is None else floor.sliced(these)
            found.append(_orthonormal(p[these], gram, here, after))
        results.append(found[0] if len(found) == 1 else _joined(found, p))
    return results


def _joined(found: Sequence[Orthonormal], p: Tensor) -> Orthonormal:
    if not found:
        numbers = p.new_empty(0, p.shape[-1], dtype=torch.float64)
        return Orthonormal(torch.empty_like(p), numbers.bool(), numbers, numbers)
    return Orthonormal(*map(torch.cat, zip(*found, strict=True)))


def _orthonormal(p: Tensor, gram: Tensor, floor: Floor | None, last: Tensor | None) -> Orthonormal:
    lengths = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    shortest = torch.zeros_like(lengths) if floor is None else floor.of(lengths, p.dtype)
    # What the first pass leaves is far from singular.
    shift = 0.0 if floor is None else SHIFT
    factor, dependent = _inverse_triangle(gram, lengths, shortest, shift, last)
    # Errors in P reach a column of P W as W adds them up.
    eps = torch.finfo(p.dtype).eps
    error = _root_mean_square(lengths) * factor.square().sum(dim=-2).sqrt()
    if floor is None:
        error = roundoff_of_products(p.dtype) * error
    else:
        error = (floor.roundoff * error).clamp_min(eps)
        dependent = dependent | ~(MARGIN * error < 1)
    # Powers of two bring P to lengths of about one: factors of tiny and of large columns fit then
    # into the dtype of P.
    unit = torch.exp2(-lengths.amax(dim=-1).log2().clamp(-126, 126).round())[:, None, None]
    # (k, m_i, r) = (k, m_i, r) (k, r, r)
    columns = torch.bmm(p * unit.to(p.dtype), (factor / unit).to(p.dtype))
    return Orthonormal(_without(columns, dependent), dependent, error, lengths)


def _slices(p: Tensor) -> list[slice]:
    """As many matrices of a stack at a time as bound what float64 takes beside them."""
    k, m, r = p.shape
    count = max(1, WORKSPACE // max(1, m * r + 6 * r * r))
    return [slice(first, first + count) for first in range(0, k, count)]


def _completed(p: Tensor, dependent: Tensor, rows: Extent) -> Tensor:
    if _none(dependent):
        return p
    directions = completing_directions(rows.positions(p.device), p.shape[-1])
    return torch.where(dependent.unsqueeze(-2), directions.to(p), p)


def _without(p: Tensor, dependent: Tensor) -> Tensor:
    """Those columns zero, whatever they hold."""
    return p if _none(dependent) else p.masked_fill_(dependent.unsqueeze(-2), 0.0)


def _none(flags: Tensor) -> bool:
    """Whether it is known that no flag is set: asked only where no device-to-host read is due."""
    return flags.device.type == "cpu" and not flags.any()


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


def _inverse_triangle(
    gram: Tensor, lengths: Tensor, floor: Tensor, shift: float, last: Tensor | None
) -> tuple[Tensor, Tensor]:
    """W with orthonormal columns in P W, and which columns depend on those before them.

    gram: (k, r, r) float64; lengths: the roots of its diagonal, (k, r); floor: what columns, and
    what is left of them outside the span of those before, must be longer than, (k, r) -> W
    (k, r, r), upper triangular but for the columns that come last; dependent (k, r) of bool, whose
    columns of W are zero.
    """
    if last is not None:
        order = last.to(torch.int8).argsort(dim=-1, stable=True)
        sorted_lengths, sorted_floor = lengths.gather(-1, order), floor.gather(-1, order)
        factor, dependent = _inverse_triangle(
            _permuted(gram, order), sorted_lengths, sorted_floor, shift, None
        )
        back = order.argsort(dim=-1)
        return _permuted(factor, back), dependent.gather(-1, back)
    short = ~(lengths > floor)
    inverse_lengths = torch.where(short, torch.inf, lengths).reciprocal()
    # Short columns are dropped before anything is measured against them.
    either = short.unsqueeze(-1) | short.unsqueeze(-2)
    unit = gram * inverse_lengths.unsqueeze(-1) * inverse_lengths.unsqueeze(-2)
    unit = unit.masked_fill(either, 0.0)
    unit.diagonal(dim1=-2, dim2=-1).fill_(1.0 + shift)
    # The Ex form reports failure in a tensor: no device-to-host read.
    lower, _ = torch.linalg.cholesky_ex(unit)
    left = lower.diagonal(dim1=-2, dim2=-1)
    dependent = short | ~(left > DEPENDENT) | ~(left * lengths > floor)
    # A dependent column is dropped: later columns must not be measured against its noise.
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    lower = torch.where(dependent.unsqueeze(-2), identity, lower)
    inverse = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
    # Errors of the Gram matrix, relative to the columns' own lengths, reach as far.
    dependent = dependent | ~(DEPENDENT * inverse.square().sum(dim=-1).sqrt() < 1)
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
