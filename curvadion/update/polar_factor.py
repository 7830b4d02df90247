"""Polar factors of stacks of matrices, of which ranks hold whole rows.

Each rank scales its rows by its own power of two, so that squares stay in a dtype's range. The
matrices are divided among the ranks that hold their shards: one rank iterates on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion import ops
from curvadion.comm.collectives import SharedWork
from curvadion.comm.groups import Group
from curvadion.layout.matrix import MatrixLayout
from curvadion.ops.operations import LARGE, SMALL
from curvadion.update.newton_schulz import Bound, Coefficients, inverse_root
from curvadion.update.orthonormalize import FALLEN
from curvadion.update.row_shards import counted, pack, sums, unpack

# Up to this exponent and its negative, powers of two and their inverses are finite.
SMALLEST_EXPONENT = -126.0
# Its square is a quarter of float16's largest number.
COLUMN = 2.0**7

_Root = tuple[Tensor, Tensor]  # Z (k, n, n) of a stack, and its matrices' scales, (k,)


@dataclass(frozen=True)
class RowStack:
    """A batch of k matrices with one global shape, sharding and dtype."""

    layout: MatrixLayout
    B: Tensor  # whole rows of the oriented matrices, (k, m_r, n); may be scaled in place
    scale: Tensor  # the recent length of each matrix, (k,), float32 or wider
    passes: tuple[tuple[Coefficients, ...], ...]  # of the Newton-Schulz iterations
    bound: Bound  # by which matrices are divided before the first pass
    dtype: torch.dtype  # of products


class PolarFactors(NamedTuple):
    """The polar factors of a stack, and the new scales of its matrices."""

    U: Tensor  # (k, m_r, n)
    scale: Tensor  # (k,), a bound of the largest singular values, or the stack's scale if larger


def polar_factors(stacks: Sequence[RowStack]) -> list[PolarFactors]:
    """Approximate U = B (B^T B)^(-1/2) of every stack; collective over the ranks with shards.

    U is zero if its matrix is no longer than ``FALLEN`` times its scale, because there has been no
    gradient for long. Sends one number per matrix, and in each pass at most n (n + 1) elements per
    matrix, averaged over ranks; a rank that iterates on all of them sends half as many again.
    """
    rows, exponents = map(list, zip(*map(_scaled, stacks), strict=True)) if stacks else ([], [])
    largest = sums(exponents, [stack.layout.shards for stack in stacks], dist.ReduceOp.MAX)
    factors = [PolarFactors(B, stack.scale) for B, stack in zip(rows, stacks, strict=True)]
    for number in range(max((len(stack.passes) for stack in stacks), default=0)):
        now = [i for i, stack in enumerate(stacks) if number < len(stack.passes)]
        works = [_work(stacks[i], factors[i].U, exponents[i], largest[i], number) for i in now]
        for i, (Z, scale) in zip(now, _roots(works), strict=True):
            if number:
                scale = factors[i].scale
            elif stacks[i].layout.shards is not None:
                Z *= torch.exp2(exponents[i] - largest[i])[:, None, None].to(Z.dtype)
            B = factors[i].U
            # In B's order of strides; Z is symmetric.
            U = torch.bmm(Z, B.mT).mT if B.stride(-2) < B.stride(-1) else torch.bmm(B, Z)
            factors[i] = PolarFactors(U, scale)
    return factors


def _work(stack: RowStack, B: Tensor, e: Tensor, largest: Tensor, number: int) -> _Work:
    """The Gram matrices for a pass, of rows B that were divided by 2^e before the first pass."""
    rows = counted(B, stack.layout)
    k, _, n = rows.shape
    G = ops.symmetric_product(rows.mT, rows, rows.new_empty(k, n, n))
    bound = stack.bound
    if number:
        bound = Bound.ONE
    elif stack.layout.shards is not None:
        # Values that underflow in half precision are too small for the iterations.
        G.mul_(torch.exp2(2 * (e - largest))[:, None, None])
    if stack.layout.shards is not None:
        G = pack(G)
    return _Work(G, largest, stack.layout, stack.passes[number], bound, stack.scale, B.dtype)


def _roots(works: Sequence[_Work]) -> list[_Root]:
    """The root of every matrix; the ranks of a sharded matrix share the work."""
    shared: dict[tuple[Group | None, torch.dtype], list[int]] = {}
    for i, work in enumerate(works):
        shared.setdefault((work.layout.shards, work.G.dtype), []).append(i)
    roots: dict[int, _Root] = {}
    for (group, _), chosen in shared.items():
        some = [works[i] for i in chosen]
        found = map(_root, some) if group is None else _shared_roots(some, group)
        roots |= zip(chosen, found, strict=True)
    return [roots[i] for i in range(len(works))]


def _scaled(stack: RowStack) -> tuple[Tensor, Tensor]:
    """B / 2^e in the dtype of products, its longest column about COLUMN long; and e, (k,).

    This keeps the bits of values that are small beside an outlier in half precision.
    """
    B = stack.B
    if not B.numel():  # no elements, no columns
        return B.to(stack.dtype), B.new_full((len(B),), SMALLEST_EXPONENT)
    longest = _longest_columns(B)
    exponents = torch.frexp(longest / COLUMN).exponent.clamp(SMALLEST_EXPONENT, -SMALLEST_EXPONENT)
    exponents = exponents.where(longest > 0, SMALLEST_EXPONENT).to(B.dtype)
    scaled = B if B.dtype == stack.dtype else torch.empty_like(B, dtype=stack.dtype)
    return torch.mul(B, torch.exp2(-exponents)[:, None, None], out=scaled), exponents


def _longest_columns(B: Tensor) -> Tensor:
    """The length of the longest column of each matrix (k, m, n), (k,)."""
    if B.device.type == "cpu":  # float32 is faster here, and the host does not wait
        longest: Tensor = torch.linalg.vector_norm(B, dim=1).amax(-1)
        if all(SMALL < length < LARGE for length in longest.tolist()):
            return longest
    # float64 holds the squares of tiny and large values.
    longest = torch.linalg.vector_norm(B, dim=1, dtype=torch.float64).amax(-1)
    return longest


class _Work(NamedTuple):
    """Gram matrices of a stack of rows that were divided by 2^e."""

    G: Tensor  # (k, n, n); if sharded, packed summands: (k, n (n + 1) / 2)
    e: Tensor  # (k,)
    layout: MatrixLayout
    coefficients: tuple[Coefficients, ...]
    bound: Bound
    scale: Tensor
    dtype: torch.dtype


def _root(work: _Work) -> _Root:
    Z, bound = inverse_root(work.G, work.coefficients, work.bound, work.dtype)
    # Many iterations may amplify rounding errors of rank-deficient matrices without bound.
    moves = Z.sum(dim=(1, 2), dtype=work.scale.dtype).abs() < torch.inf
    scale = work.scale
    if work.bound is not Bound.ONE:
        length = bound.sqrt() * torch.exp2(work.e)
        moves, scale = moves & (length > FALLEN * scale), torch.maximum(scale, length)
    return Z.masked_fill_(~moves[:, None, None], 0.0), scale


def _shared_roots(works: Sequence[_Work], group: Group) -> list[_Root]:
    """The root of every matrix, each computed by one rank of the group."""
    places = [(s, i) for s, work in enumerate(works) for i in range(len(work.G))]
    shared = SharedWork([min(works[s].layout.shape) ** 3 for s, _ in places], group)
    summands = [row for work in works for row in work.G]
    grams = iter(shared.sums(summands, works[0].scale.dtype))
    own: list[Tensor] = []
    for s, run in groupby([places[number] for number in shared.mine], lambda place: place[0]):
        matrices = [i for _, i in run]
        G = unpack(torch.stack(list(islice(grams, len(matrices)))), min(works[s].layout.shape))
        # Indexing by the list would copy it to the device.
        e, scale = (torch.stack([t[i] for i in matrices]) for t in (works[s].e, works[s].scale))
        Z, scale = _root(works[s]._replace(G=G, e=e, scale=scale))
        # Each packed matrix is followed by its scale, which is wider and keeps its bits.
        packed = pack(Z)
        own += torch.cat((packed, scale[:, None].view(packed.dtype)), dim=1)
    behind = works[0].scale.dtype.itemsize // summands[0].dtype.itemsize
    results = iter(shared.results(own, [len(row) + behind for row in summands], summands[0]))
    roots = []
    for work in works:
        rows = torch.stack(list(islice(results, len(work.G))))
        packed, scale = rows.split([work.G.shape[1], behind], dim=1)
        # A copy, because wider elements must be aligned.
        scale = scale.flatten().clone().view(work.scale.dtype)
        roots.append((unpack(packed, min(work.layout.shape)), scale))
    return roots
