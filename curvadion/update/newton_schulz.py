"""Newton-Schulz iterations for polar factors, by Gram matrices (arXiv 2505.16932).

The polar factor of B = U S V^T is U V^T = B (B^T B)^(-1/2). An iteration takes every singular
value s to p(s) = a s + b s^3 + c s^5, with the p that minimises max |1 - p(s)|. With G = B^T
B it is

    W = a I + b G + c G^2,      B <- B W,      G <- W G W,

and only B Z is computed, with Z the product of all W. All these are symmetric and commute.

In half precision rounding errors of G hide small singular values, so iterations are split
into passes: after a few B <- B Z, whose small singular values are larger, and G <- B^T B.

Ranks hold whole rows of B, scaled by their own powers of two to keep squares in a dtype's
range. One rank iterates on each matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, auto
from functools import lru_cache
from itertools import groupby, islice
from operator import itemgetter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion import ops
from curvadion.comm.collectives import SharedWork
from curvadion.comm.groups import Group
from curvadion.layout.matrix import MatrixLayout, Options
from curvadion.update.orthonormalize import FALLEN
from curvadion.update.row_shards import counted, dtype_of_products, pack, sums, unpack

Coefficients = tuple[float, float, float]

TINY = 2.0**-120  # its root and its thousandth are normal float32 numbers
# Muon's iterations (Jordan et al., 2024): singular values end in [0.7, 1.2].
MUON: Coefficients = (3.4445, -4.7750, 2.0315)
# How far from 1 all but too small singular values may end.
TOLERANCE = 0.2
# The smallest relative singular values above rounding errors of Gram matrices.
SMALLEST, SMALLEST_IN_HALF = 1e-3, 3e-3
# Intervals shorter than this share of their end are too narrow for Remez.
NARROW = 0.01
# Singular values are divided by this before an iteration in half precision.
SAFETY = 1.01
# Its square is a quarter of float16's largest number.
COLUMN = 2.0**7


@lru_cache
def polar_express(steps: int, least: float = SMALLEST) -> tuple[Coefficients, ...]:
    """The best coefficients for singular values from ``least`` on."""
    return tuple(_compose(max(least, smallest(steps)), steps)[0])


@lru_cache
def smallest(steps: int) -> float:
    """The smallest relative singular value that ends near 1."""
    low, high = 1e-16, 1.0
    for _ in range(100):
        middle = math.sqrt(low * high)
        _, error = _compose(middle, steps)
        low, high = (middle, high) if error > TOLERANCE else (low, middle)
    return max(high, SMALLEST)


class Bound(Enum):
    """The bound of G's largest eigenvalue by which G is divided."""

    # |G| sqrt(|(G / |G|)^2|) with Frobenius norms: at most n^(1/4) times the eigenvalue.
    TIGHT = auto()
    TRACE = auto()  # the square of B's norm, as in Muon
    ONE = auto()  # earlier iterations have brought the eigenvalue to about 1


def passes_in_half(
    coefficients: tuple[Coefficients, ...],
) -> tuple[tuple[Coefficients, ...], ...]:
    """Passes for float16; the first makes small values grow about thirtyfold."""
    # All but the last shrink values a little, for rounding errors (section 3.4).
    *inner, last = coefficients
    safe = (*((a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in inner), last)
    return (safe[:2], safe[2:]) if len(safe) > 2 else (safe,)


def most_of_squares(device: torch.device) -> int:
    """The most elements to iterate on at a time, in about six copies."""
    return 2**20 if device.type == "cpu" else 2**27


def inverse_root(
    G: Tensor,
    coefficients: Sequence[Coefficients],
    kind: Bound = Bound.TIGHT,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Z (k, n, n) such that B Z is about B's polar factor, from G = B^T B; and bounds of G.

    dtype: of products, by default G's. Bounds are (k,), or (0,) if all are 1.
    """
    n = G.shape[-1]
    count = max(1, most_of_squares(G.device) // max(1, n * n))
    if len(G) > count:
        roots = (inverse_root(some, coefficients, kind, dtype) for some in G.split(count))
        Z, bounds = map(torch.cat, zip(*roots, strict=True))
        return Z, bounds
    dtype = dtype or G.dtype
    if kind is Bound.ONE:
        bound, G = G.new_empty(0), G.to(dtype, copy=True)
    else:
        if kind is Bound.TIGHT:
            bound = _norm(G)
        else:
            wide = torch.promote_types(G.dtype, torch.float32)
            bound = G.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=wide)
        bound.clamp_min_(TINY)
        G = torch.div(G, bound[:, None, None], out=torch.empty_like(G, dtype=dtype))
    square, spare = ops.symmetric_product(G, G, torch.empty_like(G)), torch.empty_like(G)
    if kind is Bound.TIGHT:
        # Rounding must not leave an eigenvalue above 1. Only a zero matrix is below n^(-1/4).
        tighter = (_norm(square).sqrt() * (1 + 4 * torch.finfo(G.dtype).eps)).clamp_min_(1e-3)
        G /= tighter[:, None, None]
        square /= tighter.square()[:, None, None]
        bound *= tighter
    Z = G  # until the first iteration, whose W it is
    for number, (a, b, c) in enumerate(coefficients, 1):
        W = torch.add(square.mul_(c), G, alpha=b, out=square)
        W.diagonal(dim1=-2, dim2=-1).add_(a)
        if number == 1:
            Z = W.clone()
        else:
            Z, spare = ops.symmetric_product(Z, W, spare), Z
        if number < len(coefficients):
            half = ops.symmetric_product(G, W, spare)
            G, spare = ops.symmetric_product(half, W, G), half
            square = ops.symmetric_product(G, G, W)
    return (Z.div_(bound.sqrt()[:, None, None]) if len(bound) else Z), bound


def _norm(G: Tensor) -> Tensor:
    wide = torch.promote_types(G.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(G, dim=(-2, -1), dtype=wide)
    return norm


def _compose(low: float, steps: int) -> tuple[list[Coefficients], float]:
    """The best polynomials for [low, 1], and their final distance from 1."""
    high, found, error = 1.0, [], 1.0
    for _ in range(steps):
        best, error = _best(low, high)
        found.append(best)
        low, high = 1 - error, 1 + error
    return found, error


def _best(low: float, high: float) -> tuple[Coefficients, float]:
    """The odd polynomial of degree 5 closest to 1 on [low, high], and its error."""
    # Remez: the error alternates at both ends and at extremes q < r.
    if low > (1 - NARROW) * high:  # the limit for narrow intervals, an iteration of order 3
        middle = (low + high) / 2
        a, b, c = 1.875 / middle, -1.25 / middle**3, 0.375 / middle**5
        return (a, b, c), max(abs(1 - (a * s + b * s**3 + c * s**5)) for s in (low, high))
    q, r, error = (3 * low + high) / 4, (low + 3 * high) / 4, math.inf
    for _ in range(100):
        rows = [[s, s**3, s**5, sign] for s, sign in ((low, 1), (q, -1), (r, 1), (high, -1))]
        system = torch.tensor(rows, dtype=torch.float64, device="cpu")
        a, b, c, now = torch.linalg.solve(system, system.new_ones(4)).tolist()
        # p'(s) = a + 3 b s^2 + 5 c s^4 = 0
        root = math.sqrt(max(0.0, 9 * b * b - 20 * a * c))
        q, r = math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))
        if abs(now - error) < 1e-13:
            break
        error = now
    return (a, b, c), error


_Root = tuple[Tensor, Tensor]  # Z (k, n, n) of a stack, and its matrices' scales, (k,)


class RowStack(NamedTuple):
    """A batch of k matrices with one global shape, sharding and dtype."""

    layout: MatrixLayout
    B: Tensor  # whole rows of the oriented matrices, (k, m_r, n); perhaps scaled in place
    scale: Tensor  # the recent length of each matrix, (k,), float32 or wider
    passes: tuple[tuple[Coefficients, ...], ...]  # of iterations
    bound: Bound  # before the first pass
    dtype: torch.dtype  # of products


def row_stack(options: Options, layout: MatrixLayout, B: Tensor, scale: Tensor) -> RowStack:
    """The stack of whole rows B, (k, m_r, n), with a group's options."""
    steps, dtype = options["newton_schulz_steps"], dtype_of_products(B)
    half = dtype != B.dtype
    if options["newton_schulz"] == "muon":
        coefficients, bound = (MUON,) * steps, Bound.TRACE
    else:
        coefficients = polar_express(steps, SMALLEST_IN_HALF if half else SMALLEST)
        bound = Bound.TIGHT
    passes = passes_in_half(coefficients) if half else (coefficients,)
    return RowStack(layout, B, scale.to(B.dtype), passes, bound, dtype)


def polar_factors(stacks: Sequence[RowStack]) -> tuple[list[Tensor], list[Tensor]]:
    """By stack about U = B (B^T B)^(-1/2), (k, m_r, n), and new scales (k,); collective.

    A scale is a bound of the largest singular value, or the old one if larger. U is zero if B
    is no longer than ``FALLEN`` times its scale.
    """
    scaled = list(map(_scaled, stacks))
    U, exponents = [B for B, _ in scaled], [e for _, e in scaled]
    scales = [stack.scale for stack in stacks]
    largest = sums(exponents, [stack.layout.shards for stack in stacks], dist.ReduceOp.MAX)
    for number in range(max((len(stack.passes) for stack in stacks), default=0)):
        now = [i for i, stack in enumerate(stacks) if number < len(stack.passes)]
        works = [_work(stacks[i], U[i], exponents[i], largest[i], number) for i in now]
        for i, (Z, scale) in zip(now, _roots(works), strict=True):
            if not number:
                scales[i] = scale
                if stacks[i].layout.shards is not None:
                    Z *= torch.exp2(exponents[i] - largest[i])[:, None, None].to(Z.dtype)
            B = U[i]
            # In B's order of strides; Z is symmetric.
            U[i] = torch.bmm(Z, B.mT).mT if B.stride(-2) < B.stride(-1) else torch.bmm(B, Z)
    return U, scales


def _work(stack: RowStack, B: Tensor, e: Tensor, largest: Tensor, number: int) -> _Work:
    rows = counted(B, stack.layout)
    k, _, n = rows.shape
    G = ops.symmetric_product(rows.mT, rows, rows.new_empty(k, n, n))
    if stack.layout.shards is not None:
        if not number:
            # Values that underflow in half precision are too small to iterate.
            G.mul_(torch.exp2(2 * (e - largest))[:, None, None])
        G = pack(G)
    return _Work(stack, number, G, largest)


def _roots(works: Sequence[_Work]) -> list[_Root]:
    """All roots; the ranks of sharded matrices share the work."""
    shared: dict[tuple[Group | None, torch.dtype], list[int]] = {}
    for i, work in enumerate(works):
        shared.setdefault((work.stack.layout.shards, work.G.dtype), []).append(i)
    roots: dict[int, _Root] = {}
    for (group, _), chosen in shared.items():
        some = [works[i] for i in chosen]
        found = map(_root, some) if group is None else _shared_roots(some, group)
        roots |= zip(chosen, found, strict=True)
    return [roots[i] for i in range(len(works))]


def _scaled(stack: RowStack) -> tuple[Tensor, Tensor]:
    """B / 2^e in the dtype of products, with longest columns about COLUMN; and e, (k,)."""
    B = stack.B
    # float64 holds the squares of tiny and large values.
    longest = torch.linalg.vector_norm(B, dim=1, dtype=torch.float64).amax(-1)
    # 2^-126 has a finite inverse.
    exponents = torch.frexp(longest / COLUMN).exponent.clamp(-126.0, 126.0)
    exponents = exponents.where(longest > 0, -126.0).to(B.dtype)
    scaled = B if B.dtype == stack.dtype else torch.empty_like(B, dtype=stack.dtype)
    return torch.mul(B, torch.exp2(-exponents)[:, None, None], out=scaled), exponents


class _Work(NamedTuple):
    """Gram matrices of rows divided by 2^e."""

    stack: RowStack
    number: int  # of the pass
    G: Tensor  # (k, n, n); if sharded, packed summands: (k, n (n + 1) / 2)
    e: Tensor  # (k,)


def _root(work: _Work) -> _Root:
    stack, scale = work.stack, work.stack.scale
    kind = Bound.ONE if work.number else stack.bound
    Z, bound = inverse_root(work.G, stack.passes[work.number], kind, stack.dtype)
    # Iterations may amplify rounding errors of rank-deficient matrices without bound.
    moves = Z.sum(dim=(1, 2), dtype=scale.dtype).abs() < torch.inf
    if not work.number:
        length = bound.sqrt() * torch.exp2(work.e)
        moves, scale = moves & (length > FALLEN * scale), torch.maximum(scale, length)
    return Z.masked_fill_(~moves[:, None, None], 0.0), scale


def _shared_roots(works: Sequence[_Work], group: Group) -> list[_Root]:
    """All roots, each computed by one rank of the group."""
    sides, wide = [min(w.stack.layout.shape) for w in works], works[0].stack.scale.dtype
    places = [(s, i) for s, work in enumerate(works) for i in range(len(work.G))]
    shared = SharedWork([sides[s] ** 3 for s, _ in places], group)
    summands = [row for work in works for row in work.G]
    grams = iter(shared.sums(summands, wide))
    own: list[Tensor] = []
    for s, run in groupby(map(places.__getitem__, shared.mine), itemgetter(0)):
        matrices = [i for _, i in run]
        G = unpack(torch.stack(list(islice(grams, len(matrices)))), sides[s])
        # Indexing by the list would copy it to the device.
        stack, number, _, of_all = works[s]
        e, scale = (torch.stack([t[i] for i in matrices]) for t in (of_all, stack.scale))
        Z, scale = _root(_Work(stack._replace(scale=scale), number, G, e))
        # Each is followed by the bits of its scale, which is wider.
        packed = pack(Z)
        own += torch.cat((packed, scale[:, None].view(packed.dtype)), dim=1)
    behind = wide.itemsize // summands[0].dtype.itemsize
    results = iter(shared.results(own, [len(row) + behind for row in summands], summands[0]))
    roots = []
    for work, n in zip(works, sides, strict=True):
        rows = torch.stack(list(islice(results, len(work.G))))
        packed, scale = rows.split([work.G.shape[1], behind], dim=1)
        # A copy, because wider elements must be aligned.
        roots.append((unpack(packed, n), scale.flatten().clone().view(wide)))
    return roots
