"""The fused operations of Cholesky QR, each defined in plain PyTorch.

Two passes make the columns of tall P (m x r) orthonormal, from Gram matrices in float64. The
products with P are torch's; the operations here are what lies between them:

    first:   G = P^T P,  W = D L^-T with L L^T = D G D,  P <- 2^-e P (2^e W)
    then:    columns of P that depend on those before them are replaced
    second:  the same again, with the replaced columns after all others

D divides columns by their lengths. W of the first pass drops dependent columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from curvadion.ops.ahead import exponents
from curvadion.ops.backends import fused
from curvadion.ops.newton_schulz import FALLEN
from curvadion.ops.tensors import Tensors, float64_chunk

# Added to diagonals before Cholesky, which fails on rounding errors below zero: larger than
# these, smaller than DEPENDENT squared.
SHIFT = 1e-13
# Rounding errors may be this many times larger than their estimate.
MARGIN = 2.0
# If the part of a column outside the span of earlier ones is at most this share of the column,
# it holds only rounding errors: the column is dependent.
DEPENDENT = 1e-6
# Shorter columns, in units of the smallest normal number, are inaccurate.
SHORTEST = 2.0**10

# Completing directions are values of a generator modulo this prime, after some rounds that
# mix their bits.
MODULUS = 2**31 - 1
ROW_STEP = 48_271
COLUMN_STEP = 69_621
ADDEND = 12_345
FACTORS = (16_807, 39_373, 630_360_016)
MIXED_BITS = 13


class FirstFactor(NamedTuple):
    """What the first pass multiplies k matrices P by, and what it knows of their columns.

    Attributes:
        W: 2^e W, (k, r, r) in P's dtype: (2^-e P) times this has orthonormal columns, or
            zeros.
        longest: (k,) float64, the length of P's longest column, from which
            :func:`curvadion.ops.ahead.exponents` gets e.
        dependent: (k, r) bool, the columns of W that are zero.
        error: (k, r) float64, the lengths of rounding errors in columns of P W.
    """

    W: Tensor
    longest: Tensor
    dependent: Tensor
    error: Tensor


def column_floors(
    squares: Tensor,
    roundoff: float,
    dtype: torch.dtype,
    scale: Tensor | None = None,
    dependent: Tensor | None = None,
    error: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Lengths of columns, and floors: those up to which a column holds no signal.

        norm  = |lengths|
        floor = MARGIN roundoff norm / sqrt(r)

    A replaced column's floor is higher, if what leaks into it from the others is longer. If
    all columns are too short, or one is infinite or NaN, no length is above its floor.

    Args:
        squares: of the lengths, (k, r) float64.
        roundoff: the relative error of the columns' entries.
        dtype: of the columns.
        scale: (k,) float64, the longest column's length at the last step, decayed since then;
            None for zero.
        dependent: (k, r) bool, if the columns are those of B^T P: which columns of P were
            replaced. None if none was.
        error: (k, r) float64, rounding errors' lengths in P's columns; with ``dependent``.

    Returns:
        Lengths and floors, both (k, r) float64.
    """
    result: tuple[Tensor, Tensor] | None = fused(
        "column_floors", squares, roundoff, dtype, scale, dependent, error
    )
    if result is not None:
        return result
    lengths = squares.sqrt()
    norm = torch.linalg.vector_norm(lengths, dim=-1, keepdim=True)
    # The length of a column's errors, times sqrt(r): the norm is sqrt(r) root mean squares.
    errors = roundoff * norm
    if error is not None and dependent is not None:
        # A replaced column of P is orthogonal to the others only up to their errors, so
        # B^T P holds in its column what leaks from theirs.
        leaking = error.masked_fill(dependent, 0.0) * lengths
        lost = torch.linalg.vector_norm(leaking, dim=-1, keepdim=True)
        # leak = |error lengths of the others| + sqrt(r) error norm
        leak = torch.addcmul(lost, error, norm, value=lengths.shape[-1] ** 0.5)
        errors = torch.where(dependent, torch.maximum(errors, leak), errors)
    least: float | Tensor = SHORTEST * torch.finfo(dtype).tiny
    if scale is not None:
        least = (FALLEN * scale).clamp_min(least).unsqueeze(-1)
    # If a length is not finite, nor is the norm, and so no length is above its floor.
    holds_signal = lengths.amax(dim=-1, keepdim=True) > least
    floors = errors * (MARGIN / lengths.shape[-1] ** 0.5)
    floors = torch.where(holds_signal, floors, torch.inf)
    return lengths, floors.expand_as(lengths)


def first_factor(
    gram: Tensor, lengths: Tensor, floor: Tensor, roundoff: float, dtype: torch.dtype
) -> FirstFactor:
    """W of the first pass of Cholesky QR, with zeros in dependent columns.

        W = D L^-T with L L^T = D G D + SHIFT I, D = diag(1 / lengths)

    Args:
        gram: G = P^T P, (k, r, r) float64.
        lengths: of P's columns, (k, r) float64.
        floor: the lengths up to which they hold no signal, (k, r) float64.
        roundoff: the relative error of P's entries.
        dtype: of P and of the result.
    """
    result: tuple[Tensor, ...] | None = fused("first_factor", gram, lengths, floor, roundoff, dtype)
    if result is not None:
        return FirstFactor(*result)
    factors = []
    soundness = []
    for matrices in _parts_of(gram):
        W, sound = _inverse_triangle(
            gram[matrices], lengths[matrices], floor[matrices], shift=SHIFT
        )
        factors.append(W)
        soundness.append(sound)
    W = _joined(factors)
    error = _error_of_product(lengths, W, roundoff)
    # P W is rounded too.
    error.clamp_min_(torch.finfo(dtype).eps)
    # A column of P W with errors as long as itself holds no signal.
    dependent = ~(_joined(soundness) & (error < 1 / MARGIN))
    W.masked_fill_(dependent.unsqueeze(-2), 0.0)
    # P W = (2^-e P) (2^e W). Powers of two make factors of tiny and large columns fit P's
    # dtype.
    longest = lengths.amax(dim=-1)
    e, _ = exponents(longest)
    W = W.mul_(torch.exp2(e)[:, None, None]).to(dtype)
    return FirstFactor(W, longest, dependent, error)


def second_factor(
    gram: Tensor, dependent: Tensor, error: Tensor, roundoff: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """W of the second pass: P W has orthonormal columns, or zeros; and its errors.

        W = D L^-T with L L^T = D G D, D = diag(1 / lengths)

    with G's rows and columns in order: dependent ones after all others.

    Args:
        gram: G = P^T P, (k, r, r) float64, of columns that are finite, and zero or not short.
        dependent: which columns come after the others, (k, r) bool.
        error: rounding errors' lengths in the other columns, (k, r) float64.
        roundoff: the relative error of the entries of dependent columns.
        dtype: of P and of the result.

    Returns:
        W, (k, r, r) in this dtype, and the lengths of errors in all columns of P W, (k, r)
        float64.
    """
    result: tuple[Tensor, Tensor] | None = fused(
        "second_factor", gram, dependent, error, roundoff, dtype
    )
    if result is not None:
        return result
    lengths = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    W = _ordered_inverse_triangles(gram, dependent)
    new_error = _error_of_product(lengths, W, roundoff)
    return W.to(dtype), torch.where(dependent, new_error, error)


def _error_of_product(lengths: Tensor, W: Tensor, roundoff: float) -> Tensor:
    """The lengths of errors in columns of P W, which sum those of P with weights W.

        error_j = roundoff |lengths| / sqrt(r) |W_j|

    Args:
        lengths: of P's columns, (k, r) float64.
        W: (k, r, r) float64.
        roundoff: the relative error of P's entries.

    Returns:
        (k, r) float64.
    """
    norm = torch.linalg.vector_norm(lengths, dim=-1, keepdim=True)
    root_mean_square = norm * (roundoff / lengths.shape[-1] ** 0.5)
    error: Tensor = root_mean_square * torch.linalg.vector_norm(W, dim=-2)
    return error


def _ordered_inverse_triangles(gram: Tensor, last: Tensor) -> Tensor:
    """W, (k, r, r) float64, such that P W has orthonormal columns or zeros.

    Args:
        gram: P^T P, (k, r, r) float64.
        last: (k, r) bool, the columns that come after the others.
    """
    factors = []
    for matrices in _parts_of(gram):
        order = last[matrices].to(torch.int8).argsort(dim=-1, stable=True)
        # The place in a Gram matrix of each element of the one with its columns in order.
        places = torch.add(order.unsqueeze(-2), order.unsqueeze(-1), alpha=gram.shape[-1])
        places = places.flatten(1)
        ordered = gram[matrices].flatten(1).gather(1, places).view_as(gram[matrices])
        lengths = ordered.diagonal(dim1=-2, dim2=-1).sqrt()
        W, sound = _inverse_triangle(ordered, lengths)
        W.masked_fill_(~sound.unsqueeze(-2), 0.0)
        # Back to the order of P's columns.
        original = torch.empty_like(places, dtype=W.dtype).scatter_(1, places, W.flatten(1))
        factors.append(original.view_as(ordered))
    return _joined(factors)


def _parts_of(gram: Tensor) -> list[slice]:
    """Ranges of matrices whose copies in float64 fit a CPU's caches."""
    count = max(1, float64_chunk(gram.device) // gram.shape[-1] ** 2)
    return [slice(start, start + count) for start in range(0, len(gram), count)]


def _joined(parts: Tensors) -> Tensor:
    """The parts in one tensor, without a copy of a single one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _inverse_triangle(
    gram: Tensor, lengths: Tensor, floor: Tensor | None = None, shift: float = 0.0
) -> tuple[Tensor, Tensor]:
    """W such that P W has orthonormal columns, and which columns are sound, not dependent.

        W = D L^-T with L L^T = D G D + shift I, D = diag(1 / lengths)

    Args:
        gram: G = P^T P, (k, r, r) float64.
        lengths: of P's columns, (k, r) float64.
        floor: the lengths up to which they hold no signal, (k, r) float64; None for those of
            the second pass, which are finite and whose signals are zero or long.
        shift: is added to the diagonal of the unit columns' Gram matrix.

    Returns:
        W, (k, r, r) float64, in whose dependent columns any values are, and (k, r) bool.
    """
    sound = lengths > (0.0 if floor is None else floor)
    # D, with zeros for columns that are not sound, whose lengths may be zero, infinite or NaN:
    # so no column is compared with them. Where one is not finite, no column is sound.
    inverse_lengths = (sound / lengths).nan_to_num_(0.0, 0.0, 0.0)
    # D G D + shift I
    unit = (gram * inverse_lengths.unsqueeze(-1)).mul_(inverse_lengths.unsqueeze(-2))
    unit.diagonal(dim1=-2, dim2=-1).fill_(1.0 + shift)
    # L; cholesky_ex reports failure in a tensor, without a device-to-host read.
    lower, _ = torch.linalg.cholesky_ex(unit)
    # L's diagonal is the length of each unit column's part outside the span of earlier ones.
    remainders = lower.diagonal(dim1=-2, dim2=-1)
    if floor is None:
        sound = sound & (remainders > DEPENDENT)
    else:
        sound = sound & (remainders > (floor * inverse_lengths).clamp_min_(DEPENDENT))
    # Drop dependent columns, so that later ones are not compared with their noise.
    dependent = ~sound
    lower.masked_fill_(dependent.unsqueeze(-2), 0.0)
    remainders.masked_fill_(dependent, 1.0)
    # L^-1
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    inverse = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
    # The inverse also amplifies the Gram matrix's errors, relative to the columns' lengths.
    sound = sound & (torch.linalg.vector_norm(inverse, dim=-1) < 1 / DEPENDENT)
    # D L^-T
    return inverse.mT.mul_(inverse_lengths.unsqueeze(-1)), sound


def complete_(columns: Tensors, dependent: Tensors, rows: Sequence[range]) -> None:
    """Replace dependent columns by directions that follow from global indices; in place.

        P_ij <- 2 x_ij / MODULUS - 1     where column j is dependent

    with numbers x of :func:`completing_directions`.

    Args:
        columns: P, (k, m_i, r) by stack, float32 or float64.
        dependent: (k, r) bool by stack.
        rows: by stack, the global indices of its m_i rows.

    Raises:
        ValueError: the lists have unequal lengths.
    """
    if fused("complete_", columns, dependent, rows, writes=[columns]):
        return
    for p, lost, directions in zip(columns, dependent, _directions(columns, rows), strict=True):
        torch.where(lost.unsqueeze(-2), directions, p, out=p)


class _Table(NamedTuple):
    """What completing directions of a stack are looked up by, besides its rows."""

    columns: int
    dtype: torch.dtype
    device: torch.device


def _directions(stacks: Tensors, rows: Sequence[range]) -> list[Tensor]:
    """Completing directions (m_i, r) for each stack (k, m_i, r), whose rows are given."""
    tables = [_Table(p.shape[2], p.dtype, p.device) for p in stacks]
    ranges_by_table: dict[_Table, set[range]] = {}
    for table, indices in zip(tables, rows, strict=True):
        ranges_by_table.setdefault(table, set()).add(indices)
    directions: dict[tuple[_Table, range], Tensor] = {}
    for table, ranges in ranges_by_table.items():
        # A direction depends on its row alone. So matrices whose ranges overlap share those of
        # all rows from the first to the last, if these are no more than the ranges have.
        start = min(indices.start for indices in ranges)
        stop = max(indices.stop for indices in ranges)
        if stop - start <= sum(map(len, ranges)):
            shared = _rows_of_directions(range(start, stop), table)
            for indices in ranges:
                part = shared[indices.start - start : indices.stop - start]
                directions[table, indices] = part
        else:
            for indices in ranges:
                directions[table, indices] = _rows_of_directions(indices, table)
    return [directions[key] for key in zip(tables, rows, strict=True)]


def _rows_of_directions(rows: range, table: _Table) -> Tensor:
    """Completing directions of consecutive rows, (rows, columns) in the table's dtype."""
    indices = torch.arange(rows.start, rows.stop, device=table.device)
    return completing_directions(indices, table.columns).to(table.dtype)


def completing_directions(rows: Tensor, columns: int) -> Tensor:
    """Values in [-1, 1), equal on all ranks because they follow from global indices.

        x <- ROW_STEP (row + 1) + COLUMN_STEP (column + 1)
        x <- (factor x + ADDEND) mod MODULUS,  x <- x xor (x >> MIXED_BITS),  by each factor
        value = 2 (x mod MODULUS) / MODULUS - 1

    Args:
        rows: (m_i,) int64, global indices.
        columns: r.

    Returns:
        (m_i, r) float64.
    """
    first = ROW_STEP + COLUMN_STEP
    column = torch.arange(first, first + COLUMN_STEP * columns, COLUMN_STEP, device=rows.device)
    # x <- ROW_STEP (row + 1) + COLUMN_STEP (column + 1)
    x = torch.add(column, rows.unsqueeze(-1), alpha=ROW_STEP)
    shift = torch.tensor(ADDEND, device="cpu")
    for factor in FACTORS:
        # x <- (factor x + ADDEND) mod MODULUS
        x = torch.add(shift, x, alpha=factor) % MODULUS
        # Without this the values would be linear in row and column, and so of low rank.
        x = x ^ (x >> MIXED_BITS)
    return (x % MODULUS).double() / (MODULUS / 2) - 1.0
