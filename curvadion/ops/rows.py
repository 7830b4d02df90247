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
from curvadion.ops.tensors import Numbers, Tensors, from_host, wide_dtype, widened

# The least divisor, also in float64: float32's smallest normal number.
TINY = torch.finfo(torch.float32).tiny


class Moments(NamedTuple):
    """The second moments of the rows of a stack's k matrices, and how they are averaged.

    Attributes:
        v: k tensors (rows,), the states.
        width: how many elements of a row, over all ranks, may differ from zero.
        beta2: k numbers, the decays of v.
        eps: k numbers, added to the roots of v.
        mask: (k, rows) bool, the rows whose v is averaged; None for all.
        skipped: how many rows, from the first on, another rank counts in sums over a matrix.
    """

    v: Tensors
    width: float
    beta2: Numbers
    eps: Numbers
    mask: Tensor | None = None
    skipped: int = 0


def row_sums(U: Tensors, power: Literal[1, 2]) -> list[Tensor]:
    """Sums of |u|^power over each row.

    Args:
        U: stacks (k, rows, columns), of any floating dtypes.
        power: 1 for absolute values, 2 for squares.

    Returns:
        (k, rows) by stack, float32 or wider.
    """
    result: list[Tensor] | None = fused("row_sums", U, power)
    if result is not None:
        return result
    sums = []
    for u in U:
        values = widened(u.mT)
        powers = values.abs() if power == 1 else values.square()
        sums.append(powers.sum(-2))
    return sums


def second_moments_(
    squares: Tensors, stacks: Sequence[Moments], moves: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Average the squares of rows over time.

        v <- beta2 v + (1 - beta2) squares / width     in rows of the mask
        factor = 1 / (sqrt(v) + eps)
        energies = sum of squares, sum of squares factor^2

    Args:
        squares: (k, rows) by stack, float32 or wider.
        stacks: the second moments of each stack, which are written.
        moves: () bool on the device; where it is false, v is not written. None writes.

    Returns:
        Factors (k, rows) and energies (k, 2), by stack, in the dtypes of the squares.

    Raises:
        ValueError: the lists have unequal lengths.
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
        mean_square = squared / _column([stack.width] * len(stack.v), squared)
        old_v = torch.stack(list(stack.v)).to(mean_square.dtype)
        v = torch.lerp(mean_square, old_v, beta2)
        if stack.mask is not None:
            v = torch.where(stack.mask, v, old_v)
        copy_(stack.v, v, moves)
        # factor = 1 / (sqrt(v) + eps)
        factor = 1 / (v.sqrt() + eps).clamp_min(TINY)
        # energies = sum of squares, sum of squares factor^2. A factor's square may overflow
        # where a row is zero, and infinity times zero is NaN.
        square = factor.square().clamp_max(torch.finfo(factor.dtype).max)
        summands = torch.stack([squared, squared * square], dim=-1)
        energies.append(summands[:, stack.skipped :].sum(1))
        factors.append(factor)
    return factors, energies


def rescaled_rows(U: Tensors, factors: Tensors, energies: Tensors) -> list[Tensor]:
    """U with rows times factors, and matrices times a number that keeps their length.

        c = sqrt(energies[0] / energies[1])
        result = c factor U                            by row

    Args:
        U: stacks (k, rows, columns), of any floating dtypes; not written.
        factors: (k, rows) by stack, float32 or wider.
        energies: (k, 2) by stack, in the factors' dtype: the squared lengths of matrices
            before and after their rows are multiplied by factors.

    Returns:
        New stacks (k, rows, columns) in U's dtypes, rounded once; what these cannot hold
        becomes their largest number.

    Raises:
        ValueError: the lists have unequal lengths.
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
        product = widened(u) * scale.unsqueeze(-1)
        largest = torch.finfo(u.dtype).max
        rescaled.append(product.clamp_(-largest, largest).to(u.dtype))
    return rescaled


def scale_rows_(X: Tensors, masks: Tensors, factors: Numbers, moves: Tensor | None = None) -> None:
    """X <- factor X in the rows of a mask, in place.

    Args:
        X: matrices (rows, columns), of any floating dtypes.
        masks: (rows,) bool per matrix.
        factors: a number per matrix.
        moves: () bool on the device; where it is false, nothing is written. None writes.

    Raises:
        ValueError: the lists have unequal lengths.
    """
    if fused("scale_rows_", X, masks, factors, moves, writes=[X]):
        return
    with put_back(moves, X):
        for x, mask, factor in zip(X, masks, factors, strict=True):
            wide = wide_dtype(x.dtype)
            by_row = torch.ones(len(x), 1, dtype=wide, device=x.device)
            by_row.masked_fill_(mask[:, None], factor)
            if wide == x.dtype:
                x.mul_(by_row)
            else:
                x.copy_(x.to(wide) * by_row)


def take_columns(B: Tensors, K: Tensors) -> list[Tensor]:
    """Some columns of each stack: result_j = B_(K_j).

    Args:
        B: stacks (k, m, n), of any dtypes.
        K: indices of columns, (k, r) int64 by stack.

    Returns:
        New stacks (k, m, r) in B's dtypes.

    Raises:
        ValueError: the lists have unequal lengths.
    """
    result: list[Tensor] | None = fused("take_columns", B, K)
    if result is not None:
        return result
    return [b.gather(2, _at_columns(b, indices)) for b, indices in zip(B, K, strict=True)]


def put_columns(
    parts: Tensors, K: Tensors, sizes: Sequence[int], column_major: Sequence[bool]
) -> list[Tensor]:
    """The inverse of :func:`take_columns`: result_(K_j) = part_j, and zero elsewhere.

    Args:
        parts: stacks (k, m, r), of any dtypes.
        K: indices of columns, (k, r) int64 by stack; those of one matrix differ.
        sizes: n of each new stack.
        column_major: by stack, whether elements of a new stack's columns are neighbours in memory,
            else those of its rows.

    Returns:
        New stacks (k, m, n) in the parts' dtypes.

    Raises:
        ValueError: the lists have unequal lengths.
    """
    result: list[Tensor] | None = fused("put_columns", parts, K, sizes, column_major)
    if result is not None:
        return result
    stacks = []
    for part, indices, n, by_column in zip(parts, K, sizes, column_major, strict=True):
        k, m, _ = part.shape
        if by_column:
            stack = part.new_zeros(k, n, m).mT
        else:
            stack = part.new_zeros(k, m, n)
        stacks.append(stack.scatter_(2, _at_columns(part, indices), part))
    return stacks


def _at_columns(stack: Tensor, K: Tensor) -> Tensor:
    """Indices of columns, (k, r), for every row of a stack (k, m, .): (k, m, r)."""
    return K[:, None, :].expand(-1, stack.shape[1], -1)


def _column(numbers: Numbers, like: Tensor) -> Tensor:
    """A number per matrix as (k, 1), in the dtype and on the device of another tensor."""
    return from_host(numbers, like.dtype, like.device).unsqueeze(-1)
