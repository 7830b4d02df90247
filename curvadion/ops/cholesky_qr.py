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

# Added to diagonals for Cholesky: larger than rounding errors, smaller than DEPENDENT
# squared.
SHIFT = 1e-13
# Rounding errors may be this many times larger than their estimate.
MARGIN = 2.0
# A part outside the others' span that holds only rounding errors, relative to its column.
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
    """What the first pass multiplies k matrices P by, and what it knows of their columns."""

    W: Tensor  # 2^e W, (k, r, r): P 2^-e times this has orthonormal columns, or zeros
    longest: Tensor  # length of P's longest column, from which ops.exponents gets e, (k,)
    dependent: Tensor  # (k, r) bool: whose columns of W are zero
    error: Tensor  # (k, r) float64: rounding errors' lengths in columns of P W


def column_floors(
    squares: Tensor,
    roundoff: float,
    dtype: torch.dtype,
    scale: Tensor | None = None,
    dependent: Tensor | None = None,
    error: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Lengths of columns, and those up to which they hold no signal; of all if inf or NaN.

    Args:
        squares: of the lengths, (k, r) float64.
        roundoff: the relative error of the columns' entries.
        dtype: of the columns.
        scale: the longest column's length before, (k,) float64.
        dependent: if the columns are those of B^T P, which of P were replaced, (k, r) bool.
        error: rounding errors' lengths in P's columns, (k, r) float64; with ``dependent``.

    Returns:
        Both (k, r) float64.
    """
    result: tuple[Tensor, Tensor] | None = fused(
        "column_floors", squares, roundoff, dtype, scale, dependent, error
    )
    if result is not None:
        return result
    lengths = squares.sqrt()
    norm = torch.linalg.vector_norm(lengths, dim=-1, keepdim=True)
    # Until the last line, in units of sqrt(r): the norm is sqrt(r) root mean squares.
    floor = roundoff * norm
    if error is not None and dependent is not None:
        # A completed column of P is orthogonal to the others only up to their errors.
        others = error.masked_fill(dependent, 0.0) * lengths
        lost = torch.linalg.vector_norm(others, dim=-1, keepdim=True)
        leak = torch.addcmul(lost, error, norm, value=lengths.shape[-1] ** 0.5)
        floor = torch.where(dependent, torch.maximum(floor, leak), floor)
    least: float | Tensor = SHORTEST * torch.finfo(dtype).tiny
    if scale is not None:
        least = (FALLEN * scale).clamp_min(least)
    # No length is above a floor divided by False. If one is not finite, nor is the norm.
    holds = lengths.amax(dim=-1) > least
    unit = MARGIN / lengths.shape[-1] ** 0.5
    lowest = floor * unit / holds.unsqueeze(-1)
    return lengths, lowest.expand_as(lengths)


def first_factor(
    gram: Tensor, lengths: Tensor, floor: Tensor, roundoff: float, dtype: torch.dtype
) -> FirstFactor:
    """W of the first pass of Cholesky QR.

    Args:
        gram: P^T P, (k, r, r) float64.
        lengths: of P's columns, (k, r) float64.
        floor: the lengths up to which they hold no signal, (k, r) float64.
        roundoff: the relative error of P's entries.
        dtype: of P and of the result.
    """
    result: tuple[Tensor, ...] | None = fused("first_factor", gram, lengths, floor, roundoff, dtype)
    if result is not None:
        return FirstFactor(*result)
    factors, sounds = [], []
    for some in _parts_of(gram):
        W, sound = _inverse_triangle(gram[some], lengths[some], floor[some], shift=SHIFT)
        factors.append(W)
        sounds.append(sound)
    W = _joined(factors)
    error = _error_of_product(lengths, W, roundoff)
    error.clamp_min_(torch.finfo(dtype).eps)
    dependent = ~(_joined(sounds) & (error < 1 / MARGIN))
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

    Args:
        gram: P^T P, (k, r, r) float64, of columns that are finite, and zero or not short.
        dependent: which columns come after the others, (k, r) bool.
        error: rounding errors' lengths in the other columns, (k, r) float64.
        roundoff: the relative error of the entries of dependent columns.
        dtype: of P and of the result.

    Returns:
        W, (k, r, r), and errors of all columns, (k, r) float64.
    """
    result: tuple[Tensor, Tensor] | None = fused(
        "second_factor", gram, dependent, error, roundoff, dtype
    )
    if result is not None:
        return result
    lengths = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    W = _ordered_inverse_triangles(gram, dependent)
    own_error = _error_of_product(lengths, W, roundoff)
    return W.to(dtype), torch.where(dependent, own_error, error)


def _error_of_product(lengths: Tensor, W: Tensor, roundoff: float) -> Tensor:
    """The lengths of errors in columns of P W, which sum those of P with weights W, (k, r).

    lengths: of P's columns, (k, r). W: (k, r, r). roundoff: the relative error of P.
    """
    norm = torch.linalg.vector_norm(lengths, dim=-1, keepdim=True)
    root_mean_square = norm * (roundoff / lengths.shape[-1] ** 0.5)
    error: Tensor = root_mean_square * torch.linalg.vector_norm(W, dim=-2)
    return error


def _ordered_inverse_triangles(gram: Tensor, last: Tensor) -> Tensor:
    """W, (k, r, r), such that P W has orthonormal columns or zeros.

    gram: P^T P, (k, r, r) float64. last: (k, r) bool: columns that come after others.
    """
    found = []
    for some in _parts_of(gram):
        order = last[some].to(torch.int8).argsort(dim=-1, stable=True)
        # The place in a Gram matrix of each element of the one with its columns in order.
        places = torch.add(order.unsqueeze(-2), order.unsqueeze(-1), alpha=gram.shape[-1])
        places = places.flatten(1)
        ordered = gram[some].flatten(1).gather(1, places).view_as(gram[some])
        lengths = ordered.diagonal(dim1=-2, dim2=-1).sqrt()
        W, sound = _inverse_triangle(ordered, lengths)
        W.masked_fill_(~sound.unsqueeze(-2), 0.0)
        back = torch.empty_like(places, dtype=W.dtype).scatter_(1, places, W.flatten(1))
        found.append(back.view_as(ordered))
    return _joined(found)


def _parts_of(gram: Tensor) -> list[slice]:
    count = max(1, float64_chunk(gram.device) // gram.shape[-1] ** 2)
    return [slice(i, i + count) for i in range(0, len(gram), count)]


def _joined(parts: Tensors) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _inverse_triangle(
    gram: Tensor, lengths: Tensor, floor: Tensor | None = None, shift: float = 0.0
) -> tuple[Tensor, Tensor]:
    """W such that P W has orthonormal columns, and which columns are sound, not dependent.

    Args:
        gram: P^T P, (k, r, r) float64.
        lengths: of P's columns, (k, r) float64.
        floor: the lengths up to which they hold no signal, (k, r); None for those of the
            second pass, which are finite and whose signals are zero or long.
        shift: is added to the diagonal of the unit columns' Gram matrix.
    """
    sound = lengths > (0.0 if floor is None else floor)
    # Zeros for the others, whose lengths may be zero, infinite or NaN, so that no column is
    # compared with them. Where one is not finite, no column is sound.
    inverse_lengths = (sound / lengths).nan_to_num_(0.0, 0.0, 0.0)
    unit = (gram * inverse_lengths.unsqueeze(-1)).mul_(inverse_lengths.unsqueeze(-2))
    unit.diagonal(dim1=-2, dim2=-1).fill_(1.0 + shift)
    # cholesky_ex reports failure in a tensor, without a device-to-host read.
    lower, _ = torch.linalg.cholesky_ex(unit)
    left = lower.diagonal(dim1=-2, dim2=-1)
    least = DEPENDENT if floor is None else (floor * inverse_lengths).clamp_min_(DEPENDENT)
    sound = sound & (left > least)
    # Drop dependent columns, so that later ones are not compared with their noise.
    dependent = ~sound
    lower.masked_fill_(dependent.unsqueeze(-2), 0.0)
    left.masked_fill_(dependent, 1.0)
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    inverse = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
    # The inverse also amplifies the Gram matrix's errors, relative to the columns' lengths.
    sound = sound & (torch.linalg.vector_norm(inverse, dim=-1) < 1 / DEPENDENT)
    return inverse.mT.mul_(inverse_lengths.unsqueeze(-1)), sound


def complete_(columns: Tensors, dependent: Tensors, rows: Sequence[range]) -> None:
    """Replace dependent columns by directions that follow from global indices; in place.

    Args:
        columns: P, (k, m_i, r) by stack, float32 or float64.
        dependent: (k, r) bool by stack.
        rows: m_i of each stack, by their global indices.
    """
    if fused("complete_", columns, dependent, rows, writes=[columns]):
        return
    for p, lost, directions in zip(columns, dependent, _directions(columns, rows), strict=True):
        torch.where(lost.unsqueeze(-2), directions, p, out=p)


def _directions(stacks: Tensors, rows: Sequence[range]) -> list[Tensor]:
    """Completing directions (m_i, r) like each stack (k, m_i, r), whose rows are given."""
    wanted: dict[tuple[int, torch.dtype, torch.device], set[range]] = {}
    for p, held in zip(stacks, rows, strict=True):
        wanted.setdefault((p.shape[2], p.dtype, p.device), set()).add(held)
    known = {}
    for (r, dtype, device), ranges in wanted.items():
        whole = range(min(i.start for i in ranges), max(i.stop for i in ranges))
        # They depend on the row alone, so one table may hold those of several matrices.
        together = len(whole) <= sum(map(len, ranges))
        for held in {whole} if together else ranges:
            indices = torch.arange(held.start, held.stop, device=device)
            table = completing_directions(indices, r).to(dtype)
            for part in ranges if together else {held}:
                places = slice(part.start - held.start, part.stop - held.start)
                known[r, dtype, device, part] = table[places]
    return [
        known[p.shape[2], p.dtype, p.device, held] for p, held in zip(stacks, rows, strict=True)
    ]


def completing_directions(rows: Tensor, columns: int) -> Tensor:
    """Values in [-1, 1), (m_i, columns) float64, from global indices."""
    first = ROW_STEP + COLUMN_STEP
    column = torch.arange(first, first + COLUMN_STEP * columns, COLUMN_STEP, device=rows.device)
    # ROW_STEP (row + 1) + COLUMN_STEP (column + 1)
    x = torch.add(column, rows.unsqueeze(-1), alpha=ROW_STEP)
    shift = torch.tensor(ADDEND, device="cpu")
    for factor in FACTORS:
        x = torch.add(shift, x, alpha=factor) % MODULUS
        x = x ^ (x >> MIXED_BITS)
    return (x % MODULUS).double() / (MODULUS / 2) - 1.0
