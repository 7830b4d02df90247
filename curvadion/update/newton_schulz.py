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
from collections.abc import MutableSequence, Sequence
from functools import lru_cache
from itertools import chain, groupby, islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion import ops
from curvadion.comm.collectives import SharedWork
from curvadion.comm.groups import Group
from curvadion.layout.exchange import counted, dtype_of_products, pack, sums, unpack
from curvadion.layout.matrix import MatrixLayout, Options
from curvadion.ops.newton_schulz import Bound, Coefficients
from curvadion.ops.tensors import Numbers, Tensors, adjacent

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


def passes_in_half(
    coefficients: tuple[Coefficients, ...],
) -> tuple[tuple[Coefficients, ...], ...]:
    """Passes for float16; the first makes small values grow about thirtyfold."""
    # All but the last shrink values a little, for rounding errors (section 3.4).
    *inner, last = coefficients
    safe = (*((a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in inner), last)
    return (safe[:2], safe[2:]) if len(safe) > 2 else (safe,)


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


class Scaled(NamedTuple):
    """A stack of k matrices or their shards, divided by powers of two for products."""

    B: Tensor  # 2^-e times the shards, (k, m_i, n_j), in the dtype of products
    e: Tensor  # exponents, (k,)
    trace: Tensor  # the sums of squares of B, (k,)


class Scales(NamedTuple):
    """The recent lengths of a stack's matrices: the last ones, and where new ones go."""

    before: Tensors  # k tensors of shape ()
    decays: Numbers  # since then, k factors
    after: Tensors  # k tensors of shape (), or none


class RowStack(NamedTuple):
    """A batch of k matrices with one global shape, sharding and dtype."""

    layout: MatrixLayout
    rows: Scaled  # whole rows of the oriented matrices, (k, m_r, n)
    scales: Scales
    passes: tuple[tuple[Coefficients, ...], ...]  # of iterations
    bound: Bound  # before the first pass


def scaled(stacks: Tensors) -> list[Scaled]:
    """Stacks (k, m_i, n_j) of matrices divided by powers of two, perhaps in place."""
    matrices = [matrix for stack in stacks for matrix in stack]
    if not matrices:  # this rank holds none
        nothing = [stack.new_empty(0, dtype=_wide(stack)) for stack in stacks]
        return [Scaled(B, e, e) for B, e in zip(stacks, nothing, strict=True)]
    found = []
    for stack in stacks:
        dtype = dtype_of_products(stack.new_empty(0, dtype=_wide(stack)))
        found.append(stack if stack.dtype == dtype else torch.empty_like(stack, dtype=dtype))
    e, trace = ops.scale(stacks, found, ops.norms(matrices))
    counts = list(map(len, stacks))
    each = zip(found, e.split(counts), trace.split(counts), strict=True)
    return [Scaled(*of_stack) for of_stack in each]


def _wide(B: Tensor) -> torch.dtype:
    """The dtype of a stack's numbers and products, before half precision."""
    return torch.promote_types(B.dtype, torch.float32)


def row_stack(options: Options, layout: MatrixLayout, rows: Scaled, scales: Scales) -> RowStack:
    """The stack of whole rows with a group's options.

    Args:
        options: the group of the matrices.
        layout: of the matrices.
        rows: whole rows, (k, m_r, n).
        scales: of the k matrices.
    """
    steps = options["newton_schulz_steps"]
    half = rows.B.dtype == torch.float16
    if options["newton_schulz"] == "muon":
        coefficients = (MUON,) * steps
        bound = Bound.TRACE
    else:
        coefficients = polar_express(steps, SMALLEST_IN_HALF if half else SMALLEST)
        bound = Bound.TIGHT
    passes = passes_in_half(coefficients) if half else (coefficients,)
    return RowStack(layout, rows, scales, passes, bound)


def polar_factors(given: MutableSequence[RowStack], moves: Tensor | None = None) -> list[Tensor]:
    """By stack about U = B (B^T B)^(-1/2), (k, m_r, n); collective. Writes new scales.

    A scale is a bound of the largest singular value, or the old one if larger. U is zero if B
    is no longer than ``FALLEN`` times its scale. Matrices with the same smaller side n are
    iterated together, whatever their larger side is.

    Args:
        given: the matrices; emptied, so that their rows are freed after the first pass.
        moves: () bool, or None; false keeps the scales.
    """
    U = [stack.rows.B for stack in given]
    stacks = list(map(_without_rows, given))
    given.clear()
    groups = [stack.layout.shards for stack in stacks]
    largest = sums([stack.rows.e for stack in stacks], groups, dist.ReduceOp.MAX)
    for pass_index in range(max((len(stack.passes) for stack in stacks), default=0)):
        now = [i for i, stack in enumerate(stacks) if pass_index < len(stack.passes)]
        roots = _roots([_Work(stacks[i], pass_index, U[i], largest[i]) for i in now], moves)
        for i, Z in zip(now, roots, strict=True):
            B = U[i]
            # In B's order of strides; Z is symmetric.
            turned = B.stride(-2) < B.stride(-1)
            U[i] = torch.bmm(Z, B.mT).mT if turned else torch.bmm(B, Z)
            del B
        del roots, Z  # before those of the next pass are made
    return U


def _without_rows(stack: RowStack) -> RowStack:
    """The stack with no element of B, but its dtype and device."""
    return stack._replace(rows=stack.rows._replace(B=stack.rows.B.new_empty(0)))


class _Work(NamedTuple):
    """One pass over a stack."""

    stack: RowStack
    pass_index: int
    B: Tensor  # (k, m_r, n), of length about 1 from the second pass on
    e: Tensor  # the exponents of all ranks' rows, the largest of theirs, (k,)

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for works that are iterated together."""
        n = self.B.shape[-1]
        return n, self.B.dtype, self.B.device, self.stack.passes, self.stack.bound


def _roots(works: Sequence[_Work], moves: Tensor | None) -> list[Tensor]:
    """About (B^T B)^(-1/2) of each work's matrices, (k, n, n); collective."""
    together: dict[object, list[int]] = {}
    for i, work in enumerate(works):
        group = work.stack.layout.shards
        # The ranks of sharded matrices share the work, whatever the sides are.
        key = work.kind if group is None else (group, work.B.dtype)
        together.setdefault(key, []).append(i)
    roots: dict[int, Tensor] = {}
    for chosen in together.values():
        some = [works[i] for i in chosen]
        group = some[0].stack.layout.shards
        if group is None:
            found = _own_roots(some, moves)
        else:
            found = _shared_roots(some, group, moves)
        roots |= zip(chosen, found, strict=True)
    return [roots[i] for i in range(len(works))]


def _own_roots(works: Sequence[_Work], moves: Tensor | None) -> list[Tensor]:
    """The roots of unsharded matrices with one smaller side, iterated together."""
    B = [work.B for work in works]
    n = B[0].shape[-1]
    counts = list(map(len, B))
    G = B[0].new_empty(sum(counts), n, n)
    if not len(G):  # this rank owns none
        return list(G.split(counts))
    ops.grams(B, G.split(counts))
    each = [work.stack.scales for work in works]
    scales = Scales(
        list(chain(*(of_stack.before for of_stack in each))),
        list(chain(*(of_stack.decays for of_stack in each))),
        list(chain(*(of_stack.after for of_stack in each))),
    )
    first = works[0]
    e = adjacent([work.e for work in works])
    trace = adjacent([work.stack.rows.trace for work in works]) if first.pass_index == 0 else None
    Z = _root(first.stack, first.pass_index, G, e, trace, scales, moves)
    return list(Z.split(counts))


def _root(
    stack: RowStack,
    pass_index: int,
    G: Tensor,
    e: Tensor,
    trace: Tensor | None,
    scales: Scales,
    moves: Tensor | None,
) -> Tensor:
    """About G^(-1/2), (k, n, n), and zero where that is of no use; writes new scales.

    Args:
        stack: one with the passes and the bound of these matrices.
        pass_index: from 0 on.
        G: Gram matrices, (k, n, n); overwritten.
        e: G is of matrices divided by 2^e, (k,).
        trace: of G, (k,), if known.
        scales: of the k matrices, which the first pass compares and writes.
        moves: () bool, or None; false keeps the scales.
    """
    dtype = stack.rows.B.dtype
    if pass_index:
        root = ops.inverse_root(G, stack.passes[pass_index], Bound.ONE, dtype)
        ops.drop_unusable_(root.Z, root.check)
        return root.Z
    root = ops.inverse_root(G, stack.passes[0], stack.bound, dtype, trace)
    ops.drop_unusable_(root.Z, root.check, root.bound, e, *scales, moves=moves)
    return root.Z


def _shared_roots(works: Sequence[_Work], group: Group, moves: Tensor | None) -> list[Tensor]:
    """All roots, each computed by one rank of the group."""
    summands = []
    for work in works:
        rows = counted(work.B, work.stack.layout)
        k, _, n = rows.shape
        G = ops.symmetric_product(rows.mT, rows, rows.new_empty(k, n, n))
        if not work.pass_index:
            # Values that underflow in half precision are too small to iterate.
            G.mul_(torch.exp2(2 * (work.stack.rows.e - work.e))[:, None, None])
        summands.append(pack(G))
    sides = [work.B.shape[-1] for work in works]
    places = [(s, i) for s, work in enumerate(works) for i in range(len(work.B))]
    shared = SharedWork([sides[s] ** 3 for s, _ in places], group)
    wide = works[0].e.dtype
    grams = shared.sums([row for packed in summands for row in packed], wide)
    own: list[Tensor] = []
    mine = [places[i] for i in shared.mine]
    numbered = zip(mine, grams, strict=True)
    for _, run in groupby(numbered, lambda one: works[one[0][0]].kind):
        own += _packed_roots(works, list(run), wide)
    # Each is followed by the bits of its scale, which is wider.
    behind = wide.itemsize // summands[0].dtype.itemsize
    lengths = [len(packed[0]) + behind for packed in summands for _ in packed]
    results = iter(shared.results(own, lengths, summands[0]))
    roots: list[Tensor] = []
    states: list[Tensor] = []
    scales: list[Tensor] = []
    for work, n in zip(works, sides, strict=True):
        rows = torch.stack(list(islice(results, len(work.B))))
        packed, bits = rows.split([rows.shape[1] - behind, behind], dim=1)
        Z = unpack(packed, n)
        if not work.pass_index:
            Z.mul_(torch.exp2(work.stack.rows.e - work.e)[:, None, None].to(Z.dtype))
            if work.stack.scales.after:
                states += work.stack.scales.after
                # A copy, because wider elements must be aligned.
                scales.append(bits.flatten().clone().view(wide))
        roots.append(Z)
    if states:
        ops.copy_(states, torch.cat(scales), moves)
    return roots


def _packed_roots(
    works: Sequence[_Work],
    run: Sequence[tuple[tuple[int, int], Tensor]],
    wide: torch.dtype,
) -> list[Tensor]:
    """This rank's roots of one kind: each packed, and followed by the bits of its scale.

    Args:
        works: all works of the ranks.
        run: matrices that are iterated together, each as its work, its place in this, and its
            packed Gram matrix.
        wide: dtype of scales.
    """
    first = works[run[0][0][0]]
    n = first.B.shape[-1]
    G = unpack(torch.stack([packed for _, packed in run]), n)
    # Indexing by a list would copy it to the device.
    e = torch.stack([works[s].e[i] for (s, i), _ in run])
    scale = e.new_zeros(len(run), dtype=wide)
    scales = Scales(
        [works[s].stack.scales.before[i] for (s, i), _ in run],
        [works[s].stack.scales.decays[i] for (s, i), _ in run],
        list(scale),
    )
    Z = _root(first.stack, first.pass_index, G, e, None, scales, moves=None)
    packed = pack(Z)
    return list(torch.cat((packed, scale[:, None].view(packed.dtype)), dim=1))
