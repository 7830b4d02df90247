"""Polar factors of stacks of matrices, of which ranks hold whole rows.

Each rank scales its rows by a power of two of its own, so that no square leaves a dtype's range.
The matrices are divided among the ranks that hold shards of them: each is iterated on by one rank.
That rank holds a Gram matrix from each of the others, every rank one of each matrix of the wave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from curvadion import ops
from curvadion.comm.collectives import all_to_all, divide
from curvadion.comm.groups import Group
from curvadion.layout.matrix import MatrixLayout
from curvadion.update.newton_schulz import Bound, Coefficients, inverse_root
from curvadion.update.orthonormalize import FALLEN
from curvadion.update.row_shards import counted
from curvadion.update.symmetric import pack, packed_size, unpack

# From here to its negative, powers of two and their inverses are numbers.
SMALLEST_EXPONENT = -126.0
# The square is a quarter of the largest number of float16.
COLUMN = 2.0**7


@dataclass(frozen=True)
class RowStack:
    """A batch of k matrices with one global shape, sharding and dtype.

    Attributes:
        layout: the common layout.
        B: whole rows of the oriented matrices, (k, m_r, n); they are scaled in place.
        scale: the recent length of each matrix, (k,), float32 or wider.
        passes: the coefficients of the Newton-Schulz iterations, in one pass or several.
        bound: what matrices are divided by before the first pass.
        dtype: of products.
    """

    layout: MatrixLayout
    B: Tensor
    scale: Tensor
    passes: tuple[tuple[Coefficients, ...], ...]
    bound: Bound
    dtype: torch.dtype


class PolarFactors(NamedTuple):
    """The polar factors of a stack, U (k, m_r, n), and the lengths of its matrices now, (k,).

    The length is a bound of the largest singular value, or the stack's scale if that is larger.
    """

    U: Tensor
    scale: Tensor


def polar_factors(stacks: Sequence[RowStack]) -> list[PolarFactors]:
    """U = B (B^T B)^(-1/2), about, of every stack; collective over the ranks with shards.

    U is zero if its matrix is ``FALLEN`` times its scale or shorter: no gradient has come for long.

    Sends, in each pass: n (n + 1) / 2 numbers a matrix to the rank that iterates on it, and as many
    back; beside these one number there and two back.
    """
    exponents = [_scale_(stack.B) for stack in stacks]
    factors = [PolarFactors(stack.B.to(stack.dtype), stack.scale) for stack in stacks]
    for number in range(max((len(stack.passes) for stack in stacks), default=0)):
        now = [i for i, stack in enumerate(stacks) if number < len(stack.passes)]
        works = [_work(stacks[i], factors[i].U, exponents[i], number) for i in now]
        for i, (Z, e, scale) in zip(now, _roots(works), strict=True):
            Z *= torch.exp2(exponents[i] - e)[:, None, None].to(Z.dtype)
            U = _times(factors[i].U, Z)
            factors[i] = PolarFactors(U, scale if number == 0 else factors[i].scale)
            exponents[i] = torch.zeros_like(exponents[i])
    return factors


def _work(stack: RowStack, B: Tensor, e: Tensor, number: int) -> _Work:
    """The Gram matrices of rows B for a pass."""
    rows = counted(B, stack.layout)
    G = ops.symmetric_product(
        rows.mT, rows, rows.new_empty(len(rows), rows.shape[2], rows.shape[2])
    )
    if number == 0:
        return _Work(G, e, stack.layout, stack.passes[0], stack.bound, stack.scale, B.dtype)
    none = torch.zeros_like(stack.scale)
    return _Work(G, e, stack.layout, stack.passes[number], Bound.ONE, none, B.dtype)


def _roots(works: Sequence[_Work]) -> list[_Root]:
    """The root of every matrix; those of which ranks hold shards are shared among these."""
    alike_works: dict[tuple[Group | None, torch.dtype], list[int]] = {}
    for i, work in enumerate(works):
        alike_works.setdefault((work.layout.shards, work.G.dtype), []).append(i)
    roots: dict[int, _Root] = {}
    for (group, _), chosen in alike_works.items():
        alike = [works[i] for i in chosen]
        found = map(_root, alike) if group is None else _shared_roots(alike, group)
        roots |= zip(chosen, found, strict=True)
    return [roots[i] for i in range(len(works))]


def _scale_(B: Tensor) -> Tensor:
    """Divide each matrix (k, m_r, n) by 2^e, so that its longest column is about COLUMN long.

    Numbers that are small beside an outlier then keep their precision in half, and the Gram matrix
    stays in its range.

    Returns:
        e, (k,), in B's dtype.
    """
    if not B.numel():
        return B.new_full((len(B),), SMALLEST_EXPONENT)
    largest = torch.linalg.vector_norm(B, torch.inf, dim=(1, 2))
    exponents = _exponents(largest)
    B.mul_(torch.exp2(-exponents)[:, None, None])  # whose squares are numbers
    longer = _exponents(torch.linalg.vector_norm(B, dim=1).amax(-1) / COLUMN)
    B.mul_(torch.exp2(-longer)[:, None, None])
    # What has no numbers decides nothing.
    return (exponents + longer).where(largest > 0, SMALLEST_EXPONENT)


def _exponents(lengths: Tensor) -> Tensor:
    exponents = torch.frexp(lengths).exponent.clamp(SMALLEST_EXPONENT, -SMALLEST_EXPONENT)
    return exponents.to(lengths.dtype)


def _times(B: Tensor, Z: Tensor) -> Tensor:
    """B Z, (k, m_r, n), with B's order of strides; Z is symmetric."""
    if B.stride(-2) < B.stride(-1):
        return torch.bmm(Z, B.mT).mT
    return torch.bmm(B, Z)


class _Work(NamedTuple):
    """Gram matrices of a stack, G (k, n, n), of rows that were divided by 2^e, e (k,)."""

    G: Tensor
    e: Tensor
    layout: MatrixLayout
    coefficients: tuple[Coefficients, ...]
    bound: Bound
    scale: Tensor
    dtype: torch.dtype


class _Root(NamedTuple):
    """Z (k, n, n) for rows that are divided by 2^e, e (k,), and the matrices' scales, (k,)."""

    Z: Tensor
    e: Tensor
    scale: Tensor


def _root(work: _Work) -> _Root:
    Z, bound = inverse_root(work.G, work.coefficients, work.bound, work.dtype)
    length = bound.sqrt() * torch.exp2(work.e)
    finite = torch.isfinite(length) & torch.isfinite(Z.sum(dim=(1, 2), dtype=length.dtype))
    moves = (length > FALLEN * work.scale) & finite
    Z.masked_fill_(~moves[:, None, None], 0.0)
    return _Root(Z, work.e, torch.maximum(work.scale, length.nan_to_num(0.0, 0.0, 0.0)))


def _shared_roots(works: Sequence[_Work], group: Group) -> list[_Root]:
    """The root of every matrix; each is found on one rank of the group."""
    places = [(s, i) for s, work in enumerate(works) for i in range(len(work.G))]
    owners = divide([works[s].G.shape[-1] ** 3 for s, _ in places], group.size())
    owned = [
        [p for p, owner in zip(places, owners, strict=True) if owner == rank]
        for rank in range(group.size())
    ]
    mine = owned[group.rank()]
    out = [_with(pack(work.G), work.e) for work in works]
    received = all_to_all(
        [[out[s][i] for s, i in each] for each in owned],
        [[tuple(out[s][i].shape) for s, i in mine]] * group.size(),
        group,
        out[0],
    )
    found: list[Tensor] = []
    for s, run in groupby(range(len(mine)), lambda number: mine[number][0]):
        numbers = list(run)
        matrices = [mine[number][1] for number in numbers]
        summands = torch.stack([torch.stack([of[n] for n in numbers]) for of in received])
        found += _root_of_sum(summands, works[s], matrices)
    # One number more comes back behind each matrix, as wide as the one that went.
    sizes = [
        2 * row.shape[1] - packed_size(w.G.shape[-1]) for row, w in zip(out, works, strict=True)
    ]
    answers = all_to_all(
        [found] * group.size(), [[(sizes[s],) for s, _ in each] for each in owned], group, out[0]
    )
    back = [work.G.new_empty(len(work.G), size) for work, size in zip(works, sizes, strict=True)]
    for of_rank, answer in zip(owned, answers, strict=True):
        for (s, i), row in zip(of_rank, answer, strict=True):
            back[s][i] = row
    roots = []
    for rows, work in zip(back, works, strict=True):
        Z, (e, scale) = _without(rows, work)
        roots.append(_Root(unpack(Z, work.G.shape[-1]), e, scale))
    return roots


def _root_of_sum(summands: Tensor, work: _Work, matrices: list[int]) -> list[Tensor]:
    """What the owner of matrices of a stack sends back: Z, packed, then e and the scale.

    summands: what it was sent by each rank, (ranks, k, ...).
    """
    each = [_without(rank, work) for rank in summands]
    exponents = torch.stack([e for _, (e,) in each])
    largest = exponents.amax(0)
    total = torch.zeros_like(each[0][0], dtype=exponents.dtype)
    for (rank, _), e in zip(each, exponents, strict=True):
        total += rank * torch.exp2(2 * (e - largest))[:, None]
    G = unpack(total, work.G.shape[-1])
    root = _root(work._replace(G=G, e=largest, scale=work.scale[matrices]))
    return list(_with(pack(root.Z), root.e, root.scale))


def _with(packed: Tensor, *numbers: Tensor) -> Tensor:
    """Packed matrices with some wider numbers of each behind them, whose bits are kept."""
    return torch.cat((packed, torch.stack(numbers, dim=1).view(packed.dtype)), dim=1)


def _without(rows: Tensor, work: _Work) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The inverse of :func:`_with`."""
    size = packed_size(work.G.shape[-1])
    packed, behind = rows[:, :size], rows[:, size:]
    return packed, behind.contiguous().view(work.e.dtype).unbind(1)
