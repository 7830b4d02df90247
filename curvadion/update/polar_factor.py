"""Polar factors of stacks of matrices, of which ranks hold whole rows.

Each rank scales its rows by a power of two of its own, so that no square leaves float32's range.
The matrices are divided among the ranks that hold shards of them: each is iterated on by one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from curvadion import ops
from curvadion.comm.collectives import all_to_all, divide
from curvadion.comm.groups import Group
from curvadion.layout.matrix import MatrixLayout
from curvadion.update.newton_schulz import Coefficients, inverse_root
from curvadion.update.orthonormalize import FALLEN
from curvadion.update.row_shards import counted
from curvadion.update.symmetric import pack, unpack

# Exponents of powers of two that are numbers, as are their inverses.
SMALLEST = -126.0


@dataclass(frozen=True)
class RowStack:
    """A batch of k matrices with one global shape, sharding and dtype.

    Attributes:
        layout: the common layout.
        B: whole rows of the oriented matrices, (k, m_r, n); they are scaled in place.
        scale: the recent length of each matrix, (k,).
        coefficients: of the Newton-Schulz iterations.
        tight: how matrices are scaled before (:func:`inverse_root`).
    """

    layout: MatrixLayout
    B: Tensor
    scale: Tensor
    coefficients: tuple[Coefficients, ...]
    tight: bool


class PolarFactors(NamedTuple):
    """The polar factors of a stack, U (k, m_r, n), and the lengths of its matrices now, (k,).

    The length is a bound of the largest singular value, or the stack's scale if that is larger.
    """

    U: Tensor
    scale: Tensor


def polar_factors(stacks: Sequence[RowStack]) -> list[PolarFactors]:
    """U = B (B^T B)^(-1/2), about, of every stack; collective over the ranks with shards.

    U is zero if its matrix is ``FALLEN`` times its scale or shorter: no gradient has come for long.

    Sends: n (n + 1) / 2 + 1 numbers a matrix to the rank that iterates on it, and one more back.
    """
    exponents = [_scale_(stack.B) for stack in stacks]
    works = []
    for stack, e in zip(stacks, exponents, strict=True):
        rows = counted(stack.B, stack.layout)
        G = rows.new_empty(len(rows), rows.shape[2], rows.shape[2])
        works.append(_Work(ops.symmetric_product(rows.mT, rows, G), e, stack))
    by_group: dict[Group | None, list[int]] = {}
    for i, stack in enumerate(stacks):
        by_group.setdefault(stack.layout.shards, []).append(i)
    roots: dict[int, _Root] = {}
    for group, chosen in by_group.items():
        alike = [works[i] for i in chosen]
        found = map(_root, alike) if group is None else _shared_roots(alike, group)
        roots |= zip(chosen, found, strict=True)
    factors = []
    for i, (stack, e) in enumerate(zip(stacks, exponents, strict=True)):
        Z, exponent, scale = roots.pop(i)
        Z *= torch.exp2(e - exponent)[:, None, None]
        factors.append(PolarFactors(_times(stack.B, Z), scale))
    return factors


def _scale_(B: Tensor) -> Tensor:
    """Divide each matrix (k, m_r, n) by 2^e, about its largest number; e, (k,) in B's dtype."""
    if not B.numel():
        return B.new_full((len(B),), SMALLEST)
    largest = torch.linalg.vector_norm(B, torch.inf, dim=(1, 2))
    exponents = torch.frexp(largest).exponent.clamp(SMALLEST, -SMALLEST).to(B.dtype)
    exponents = exponents.where(largest > 0, SMALLEST)  # what has no numbers decides nothing
    B.mul_(torch.exp2(-exponents)[:, None, None])
    return exponents


def _times(B: Tensor, Z: Tensor) -> Tensor:
    """B Z, (k, m_r, n), with B's order of strides; Z is symmetric."""
    if B.stride(-2) < B.stride(-1):
        return torch.bmm(Z, B.mT).mT
    return torch.bmm(B, Z)


class _Work(NamedTuple):
    """Gram matrices of a stack, G (k, n, n), of rows that were divided by 2^e, e (k,)."""

    G: Tensor
    e: Tensor
    stack: RowStack


class _Root(NamedTuple):
    """Z (k, n, n) for rows that are divided by 2^e, e (k,), and the matrices' scales, (k,)."""

    Z: Tensor
    e: Tensor
    scale: Tensor


def _root(work: _Work) -> _Root:
    G, e, stack = work
    Z, bound = inverse_root(G, stack.coefficients, tight=stack.tight)
    length = bound.sqrt() * torch.exp2(e)
    moves = (length > FALLEN * stack.scale) & torch.isfinite(length)
    Z.masked_fill_(~moves[:, None, None], 0.0)
    return _Root(Z, e, torch.maximum(stack.scale, length.nan_to_num(0.0, 0.0, 0.0)))


def _shared_roots(works: Sequence[_Work], group: Group) -> list[_Root]:
    """The root of every matrix; each is found on one rank of the group."""
    places = [(s, i) for s, work in enumerate(works) for i in range(len(work.G))]
    owners = divide([works[s].G.shape[-1] ** 3 for s, _ in places], group.size())
    owned = [
        [p for p, owner in zip(places, owners, strict=True) if owner == rank]
        for rank in range(group.size())
    ]
    mine = owned[group.rank()]
    out = [torch.cat((pack(work.G), work.e[:, None]), dim=1) for work in works]
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
        found += _root_of_sum(summands, works[s].stack, matrices)
    sizes = [row.shape[1] + 1 for row in out]
    answers = all_to_all(
        [found] * group.size(), [[(sizes[s],) for s, _ in each] for each in owned], group, out[0]
    )
    back = [work.G.new_empty(len(work.G), size) for work, size in zip(works, sizes, strict=True)]
    for of_rank, answer in zip(owned, answers, strict=True):
        for (s, i), row in zip(of_rank, answer, strict=True):
            back[s][i] = row
    return [
        _Root(unpack(rows[:, :-2], work.G.shape[-1]), rows[:, -2], rows[:, -1])
        for rows, work in zip(back, works, strict=True)
    ]


def _root_of_sum(summands: Tensor, stack: RowStack, matrices: list[int]) -> list[Tensor]:
    """What the owner of matrices of a stack sends back: Z, packed, then e and the scale.

    summands: what it was sent, (ranks, k, n (n + 1) / 2 + 1).
    """
    e = summands[:, :, -1].amax(0)
    total = torch.zeros_like(summands[0, :, :-1])
    for rank in summands:
        total += rank[:, :-1] * torch.exp2(2 * (rank[:, -1] - e))[:, None]
    chosen = replace(stack, scale=stack.scale[matrices])
    root = _root(_Work(unpack(total, stack.B.shape[2]), e, chosen))
    return list(torch.cat((pack(root.Z), root.e[:, None], root.scale[:, None]), dim=1))
