"""What directions do with the rows of stacks of matrices, in one launch for all stacks.

A stack has shape (k, rows, columns) and any strides. So a view with the last two dimensions
exchanged makes the rows of these operations the columns of a stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from curvadion.ops.backends import fused
from curvadion.ops.operations import copy_, put_back
from curvadion.ops.tensors import Numbers, Tensors, from_host

# What is smaller, also in float64, counts as this much in a divisor.
TINY = torch.finfo(torch.float32).tiny


class Moments(NamedTuple):
    """The second moments of the rows of a stack's k matrices, and how they are averaged."""

    v: Tensors  # k tensors (rows,), the states
    width: float  # elements of a whole row that are not zero for certain
    beta2: Numbers  # k
    eps: Numbers  # k
    mask: Tensor | None = None  # (k, rows) bool: rows that take part; None: all
    skipped: int = 0  # first rows that another rank counts in sums over a matrix


def row_sums(U: Tensors, power: Literal[1, 2]) -> list[Tensor]:
    """Sums of |u| or of u^2 over each row: (k, rows, columns) -> (k, rows), by stack.

    The sums are float32 or wider.
    """
    result: list[Tensor] | None = fused("row_sums", U, power)
    if result is not None:
        return result
    sums = []
    for u in U:
        values = _wide(u.mT)
        sums.append((values.abs() if power == 1 else values.square()).sum(-2))
    return sums


def second_moments_(
    squares: Tensors, stacks: Sequence[Moments], moves: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Average the squares of rows over time.

        v <- beta2 v + (1 - beta2) squares / width     in rows of the mask
        factor = 1 / (sqrt(v) + eps)
        energies = sum of squares, sum of squares factor^2

    Returns the factors (k, rows) and the energies (k, 2), by stack, as wide as the squares.
    ``squares``: (k, rows) by stack, float32 or wider. Where ``moves`` is false v stays.
    """
    states = [stack.v for stack in stacks]
    result: tuple[list[Tensor], list[Tensor]] | None = fused(
        "second_moments_", squares, stacks, moves, writes=states
    )
    if result is not None:
        return result
    factors = []
    energies = []
    for squared, stack in zip(squares, stacks, strict=True):
        beta2 = _column(stack.beta2, squared)
        eps = _column(stack.eps, squared)
        # v <- beta2 v + (1 - beta2) squares / width
        now = squared / _column([stack.width] * len(stack.v), squared)
        before = torch.stack(list(stack.v)).to(now.dtype)
        v = torch.lerp(now, before, beta2)
        if stack.mask is not None:
            v = torch.where(stack.mask, v, before)
        copy_(stack.v, v, moves)
        # factor = 1 / (sqrt(v) + eps)
        factor = 1 / (v.sqrt() + eps).clamp_min(TINY)
        # A factor's square may overflow where a row is zero; infinity times zero is NaN.
        square = factor.square().clamp_max(torch.finfo(factor.dtype).max)
        both = torch.stack([squared, squared * square], dim=-1)
        energies.append(both[:, stack.skipped :].sum(1))
        factors.append(factor)
    return factors, energies


def rescaled_rows(U: Tensors, factors: Tensors, energies: Tensors) -> list[Tensor]:
    """U with rows times factors, and matrices times a number that keeps their length.

        c = sqrt(energies[0] / energies[1])
        U <- c factor U                                by row

    New stacks in U's dtype, rounded once; what it cannot hold becomes its largest number.

    Args:
        U: stacks (k, rows, columns).
        factors: (k, rows) by stack, float32 or wider.
        energies: (k, 2) by stack, squared lengths before and after; of the factors' dtype.
    """
    result: list[Tensor] | None = fused("rescaled_rows", U, factors, energies)
    if result is not None:
        return result
    rescaled = []
    for u, factor, energy in zip(U, factors, energies, strict=True):
        # c = sqrt(energies[0] / energies[1])
        c = (energy[:, :1] / energy[:, 1:].clamp_min(TINY)).sqrt()
        # In a narrower dtype a factor of a row of zeros would overflow, and zero times
        # infinity is NaN.
        scale = (factor * c).clamp_max(torch.finfo(factor.dtype).max)
        product = _wide(u) * scale.unsqueeze(-1)
        largest = torch.finfo(u.dtype).max
        rescaled.append(product.clamp_(-largest, largest).to(u.dtype))
    return rescaled


def scale_rows_(X: Tensors, masks: Tensors, factors: Numbers, moves: Tensor | None = None) -> None:
    """X <- factor X in the rows of a mask, in place.

    Args:
        X: matrices (rows, columns).
        masks: (rows,) bool for each matrix.
        factors: a number for each matrix.
        moves: () bool on the device, or None; false changes nothing.
    """
    if fused("scale_rows_", X, masks, factors, moves, writes=[X]):
        return
    with put_back(moves, X):
        for x, mask, factor in zip(X, masks, factors, strict=True):
            wide = torch.promote_types(x.dtype, torch.float32)
            by_row = torch.ones(len(x), 1, dtype=wide, device=x.device)
            by_row.masked_fill_(mask[:, None], factor)
            if wide == x.dtype:
                x.mul_(by_row)
            else:
                x.copy_(x.to(wide) * by_row)


def take_columns(B: Tensors, K: Tensors) -> list[Tensor]:
    """Some columns of each stack: (k, m, n) and indices (k, r), int64 -> (k, m, r)."""
    result: list[Tensor] | None = fused("take_columns", B, K)
    if result is not None:
        return result
    return [b.gather(2, _at_columns(b, indices)) for b, indices in zip(B, K, strict=True)]


def put_columns(
    parts: Tensors, K: Tensors, sizes: Sequence[int], turned: Sequence[bool]
) -> list[Tensor]:
    """The inverse of :func:`take_columns`, with zeros in all other columns.

    Args:
        parts: (k, m, r) by stack.
        K: indices (k, r) by stack, int64; of a matrix they differ.
        sizes: n of each new stack (k, m, n).
        turned: whether elements of a new stack's columns are neighbours in memory, else those
            of its rows.
    """
    result: list[Tensor] | None = fused("put_columns", parts, K, sizes, turned)
    if result is not None:
        return result
    stacks = []
    for part, indices, n, by_column in zip(parts, K, sizes, turned, strict=True):
        k, m, _ = part.shape
        stack = part.new_zeros(k, n, m).mT if by_column else part.new_zeros(k, m, n)
        stacks.append(stack.scatter_(2, _at_columns(part, indices), part))
    return stacks


def _at_columns(stack: Tensor, K: Tensor) -> Tensor:
    """The index of columns K, (k, r), in every row of a stack (k, m, .)."""
    return K[:, None, :].expand(-1, stack.shape[1], -1)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _column(numbers: Numbers, like: Tensor) -> Tensor:
    """One number per matrix, (k, 1)."""
    return from_host(numbers, like.dtype, like.device).unsqueeze(-1)
