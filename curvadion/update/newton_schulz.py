"""Newton-Schulz iterations for polar factors, by Gram matrices (arXiv 2505.16932).

The polar factor of B = U S V^T is U V^T = B (B^T B)^(-1/2). An iteration takes every singular
value s to p(s) = a s + b s^3 + c s^5, with the p that minimises max |1 - p(s)|. With G = B^T
B it is

    W = a I + b G + c G^2,      B <- B W,      G <- W G W.

W and G are symmetric and commute, so only Z, the product of all W, and B Z are computed.

Rounding errors of G hide small singular values, in half precision most, and iterations make
them grow. So iterations are split into passes. After a few of them B <- B Z and G <- B^T B start
the next pass, with larger small singular values.

Ranks hold whole rows of B, and divide them by powers of two, 2^e, that keep squares in a
dtype's range; each rank chooses its own. One rank iterates on each matrix.
"""

from __future__ import annotations

import math
from collections.abc import MutableSequence, Sequence
from functools import lru_cache
from itertools import chain, groupby
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
from curvadion.ops.tensors import Numbers, Tensors, adjacent, is_column_major, wide_dtype

# Muon's iterations (Jordan et al., 2024): singular values end in [0.7, 1.2].
MUON: Coefficients = (3.4445, -4.7750, 2.0315)
# How far from 1 all but too small singular values may end.
TOLERANCE = 0.2
# The smallest relative singular values above rounding errors of Gram matrices.
SMALLEST = 1e-3
SMALLEST_IN_HALF = 3e-3
# What a rounding error of a Gram matrix in float32 may grow by in a pass.
LARGEST_GROWTH = 3e5
# Intervals shorter than this share of their end are too narrow for Remez.
NARROW = 0.01
# Singular values are divided by this before an iteration in half precision.
SAFETY = 1.01


@lru_cache
def polar_express(steps: int, least: float = SMALLEST) -> tuple[Coefficients, ...]:
    """(a, b, c) of every iteration: the best for relative singular values from ``least`` on.

    If so few iterations do not bring ``least`` near 1, they are the best from
    :func:`smallest` on.
    """
    coefficients, _ = _compose(max(least, smallest(steps)), steps)
    return tuple(coefficients)


@lru_cache
def smallest(steps: int) -> float:
    """The smallest relative singular value that ends within ``TOLERANCE`` of 1."""
    # By bisection of the exponent: the longer the interval, the larger the final error.
    too_small = 1e-16
    large_enough = 1.0
    while large_enough > SMALLEST:
        middle = math.sqrt(too_small * large_enough)
        if middle in (too_small, large_enough):
            break
        _, error = _compose(middle, steps)
        if error > TOLERANCE:
            too_small = middle
        else:
            large_enough = middle
    return max(large_enough, SMALLEST)


def passes_in_half(
    coefficients: tuple[Coefficients, ...],
) -> tuple[tuple[Coefficients, ...], ...]:
    """Passes for float16; the first makes small values grow about thirtyfold."""
    *inner, last = coefficients
    # All but the last are p(s / SAFETY): a rounding error may raise a singular value above
    # the interval for which p was chosen (section 3.4).
    safe = [(a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in inner]
    iterations = (*safe, last)
    passes = [iterations[:2]]
    for start in range(2, len(iterations), 3):
        passes.append(iterations[start : start + 3])
    return tuple(passes)


def passes_in_full(
    coefficients: tuple[Coefficients, ...],
) -> tuple[tuple[Coefficients, ...], ...]:
    """Passes for float32 and wider.

    A rounding error of G in the null space of B grows by a^2 in each iteration. One that is
    negative would at last grow without a bound, and make U far too long, or zero.
    """
    passes: list[list[Coefficients]] = []
    growth = math.inf
    for iteration in coefficients:
        a, _, _ = iteration
        growth *= a * a
        if growth > LARGEST_GROWTH:
            passes.append([])
            growth = a * a
        passes[-1].append(iteration)
    return tuple(map(tuple, passes))


def _compose(low: float, steps: int) -> tuple[list[Coefficients], float]:
    """The best polynomials for [low, 1], one after another.

    Returns:
        (a, b, c) of each, and the largest distance from 1 after the last.
    """
    coefficients = []
    high = 1.0
    error = 1.0
    for _ in range(steps):
        best, error = _best(low, high)
        coefficients.append(best)
        # p takes [low, high] to the next interval.
        low = 1 - error
        high = 1 + error
    return coefficients, error


def _best(low: float, high: float) -> tuple[Coefficients, float]:
    """The p(s) = a s + b s^3 + c s^5 closest to 1 on [low, high].

    Returns:
        (a, b, c), and the largest |1 - p(s)| on the interval.
    """
    if low > (1 - NARROW) * high:
        # The limit for narrow intervals, an iteration of order 3, where the equations below
        # are nearly singular: p = 1 and p' = p'' = 0 in the middle.
        middle = (low + high) / 2
        a = 1.875 / middle
        b = -1.25 / middle**3
        c = 0.375 / middle**5
        return (a, b, c), max(abs(1 - (a * s + b * s**3 + c * s**5)) for s in (low, high))
    # Remez: 1 - p has the same size and alternating signs at s = low, q, r and high, where
    # q < r are the extremes of p. Each round solves for p and this size with the last q and r,
    #     a s + b s^3 + c s^5 +- error = 1,
    # and moves q and r to the extremes of the new p.
    q = (3 * low + high) / 4
    r = (low + 3 * high) / 4
    error = math.inf
    for _ in range(100):
        points = ((low, 1), (q, -1), (r, 1), (high, -1))
        equations = [[s, s**3, s**5, sign] for s, sign in points]
        system = torch.tensor(equations, dtype=torch.float64, device="cpu")
        solution = torch.linalg.solve(system, system.new_ones(4))
        a, b, c, new_error = solution.tolist()
        # p'(s) = a + 3 b s^2 + 5 c s^4 = 0
        root = math.sqrt(max(0.0, 9 * b * b - 20 * a * c))
        q = math.sqrt((-3 * b - root) / (10 * c))
        r = math.sqrt((-3 * b + root) / (10 * c))
        if abs(new_error - error) < 1e-13:
            break
        error = new_error
    return (a, b, c), error


class Scaled(NamedTuple):
    """A stack of k matrices or their shards, divided by powers of two for products."""

    B: Tensor  # 2^-e times the shards, (k, m_i, n_j), in the dtype of products
    e: Tensor  # exponents, (k,)
    trace: Tensor  # the sums of squares of B, (k,)


class Scales(NamedTuple):
    """The recent lengths of k matrices: the last ones, and where new ones go."""

    before: Tensors  # k tensors of shape ()
    decays: Numbers  # since then, k factors
    after: Tensors  # k tensors of shape (), or none


class RowStack(NamedTuple):
    """k matrices with one global shape, sharding and dtype."""

    layout: MatrixLayout
    rows: Scaled  # whole rows of the oriented matrices, (k, m_r, n)
    scales: Scales
    passes: tuple[tuple[Coefficients, ...], ...]  # of iterations
    bound: Bound  # before the first pass


def scaled(stacks: Tensors) -> list[Scaled]:
    """Stacks (k, m_i, n_j) of matrices divided by powers of two, perhaps in place."""
    matrices = [matrix for stack in stacks for matrix in stack]
    if not matrices:  # this rank has none
        empty = []
        for stack in stacks:
            nothing = stack.new_empty(0, dtype=wide_dtype(stack.dtype))
            empty.append(Scaled(stack, e=nothing, trace=nothing))
        return empty
    divided = []
    for stack in stacks:
        dtype = dtype_of_products(stack.new_empty(0, dtype=wide_dtype(stack.dtype)))
        in_place = stack.dtype == dtype
        divided.append(stack if in_place else torch.empty_like(stack, dtype=dtype))
    # B <- 2^-e B
    e, trace = ops.scale(stacks, divided, ops.norms(matrices))
    counts = list(map(len, stacks))
    parts = zip(divided, e.split(counts), trace.split(counts), strict=True)
    return [Scaled(B, exponents, traces) for B, exponents, traces in parts]


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
    passes = passes_in_half(coefficients) if half else passes_in_full(coefficients)
    return RowStack(layout, rows, scales, passes, bound)


def polar_factors(
    row_stacks: MutableSequence[RowStack], moves: Tensor | None = None
) -> list[Tensor]:
    """About U = B (B^T B)^(-1/2), (k, m_r, n) by stack; collective. Writes new scales.

    A scale is a bound of the largest singular value, or the old one if larger. U is zero if B
    is no longer than ``FALLEN`` times its scale. Matrices with the same smaller side n are
    iterated together, whatever their larger side is.

    Args:
        row_stacks: the matrices; emptied, so that their rows are freed after the first pass.
        moves: () bool, or None; false keeps the scales.
    """
    U = [stack.rows.B for stack in row_stacks]
    stacks = [_without_rows(stack) for stack in row_stacks]
    row_stacks.clear()
    groups = [stack.layout.shards for stack in stacks]
    # Ranks chose e for their own rows. Sums over ranks are divided by the largest 2^e.
    largest_e = sums([stack.rows.e for stack in stacks], groups, dist.ReduceOp.MAX)
    pass_count = max((len(stack.passes) for stack in stacks), default=0)
    for pass_index in range(pass_count):
        active = [i for i, stack in enumerate(stacks) if pass_index < len(stack.passes)]
        works = [_Work(stacks[i], pass_index, U[i], largest_e[i]) for i in active]
        # Z = (B^T B)^(-1/2)
        roots = _roots(works, moves)
        del works  # they hold B, of which each is freed below as soon as its U is known
        # B <- B Z
        for i, Z in zip(active, roots, strict=True):
            U[i] = _times(U[i], Z)
        del roots, Z  # before those of the next pass are made
    return U


def _without_rows(stack: RowStack) -> RowStack:
    """The stack with no element of B, but its dtype and device."""
    return stack._replace(rows=stack.rows._replace(B=stack.rows.B.new_empty(0)))


def _times(B: Tensor, Z: Tensor) -> Tensor:
    """B Z, (k, m_r, n), with B's order of strides; Z: symmetric, (k, n, n)."""
    if is_column_major(B):
        # B Z = (Z B^T)^T
        return torch.bmm(Z, B.mT).mT
    return torch.bmm(B, Z)


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
    """About (B^T B)^(-1/2), (k, n, n) by work; collective."""
    alike: dict[object, list[int]] = {}
    for i, work in enumerate(works):
        group = work.stack.layout.shards
        if group is None:
            alike.setdefault(work.kind, []).append(i)
        else:
            # The ranks of sharded matrices share the work, whatever the sides are.
            alike.setdefault((group, work.B.dtype), []).append(i)
    roots: dict[int, Tensor] = {}
    for indices in alike.values():
        together = [works[i] for i in indices]
        group = together[0].stack.layout.shards
        if group is None:
            new_roots = _unsharded_roots(together, moves)
        else:
            new_roots = _shared_roots(together, group, moves)
        roots.update(zip(indices, new_roots, strict=True))
    return [roots[i] for i in range(len(works))]


def _unsharded_roots(works: Sequence[_Work], moves: Tensor | None) -> list[Tensor]:
    """The roots of unsharded matrices with one smaller side, iterated together."""
    B = [work.B for work in works]
    n = B[0].shape[-1]
    counts = list(map(len, B))
    G = B[0].new_empty(sum(counts), n, n)
    if not len(G):  # this rank owns none
        return list(G.split(counts))
    # G = B^T B, where B is the matrix divided by 2^e
    ops.grams(B, G.split(counts))
    e = adjacent([work.e for work in works])
    trace = None
    if works[0].pass_index == 0:
        trace = adjacent([work.stack.rows.trace for work in works])
    parts = [work.stack.scales for work in works]
    scales = Scales(
        before=list(chain.from_iterable(part.before for part in parts)),
        decays=list(chain.from_iterable(part.decays for part in parts)),
        after=list(chain.from_iterable(part.after for part in parts)),
    )
    Z = _root(works[0], G, e, trace, scales, moves)
    return list(Z.split(counts))


def _root(
    work: _Work,
    G: Tensor,
    e: Tensor,
    trace: Tensor | None,
    scales: Scales,
    moves: Tensor | None,
) -> Tensor:
    """About G^(-1/2), (k, n, n), and zero where that is of no use; writes new scales.

    Args:
        work: any of those that are iterated together.
        G: Gram matrices, (k, n, n); overwritten.
        e: G is of matrices divided by 2^e, (k,).
        trace: of G, (k,); None if it is not known.
        scales: of the k matrices, which the first pass compares and writes.
        moves: () bool, or None; false keeps the scales.
    """
    stack = work.stack
    coefficients = stack.passes[work.pass_index]
    if work.pass_index > 0:
        root = ops.inverse_root(G, coefficients, Bound.ONE, work.B.dtype)
        ops.drop_unusable_(root.Z, root.check)
        return root.Z
    root = ops.inverse_root(G, coefficients, stack.bound, work.B.dtype, trace)
    ops.drop_unusable_(
        root.Z,
        root.check,
        root.bound,
        e,
        scales.before,
        scales.decays,
        scales.after,
        moves,
    )
    return root.Z


def _shared_roots(works: Sequence[_Work], group: Group, moves: Tensor | None) -> list[Tensor]:
    """The roots of sharded matrices, (k, n, n) by work; collective.

    The Gram matrix of each is summed for one rank, which iterates and sends the root to all.

    Args:
        works: with B of one dtype, whose rows are sharded over the group.
        group: the ranks with shards.
        moves: () bool, or None; false keeps the scales.
    """
    summands: list[Tensor] = []  # of each matrix's G
    matrices: list[tuple[_Work, int]] = []  # the work of each, and its place there
    for work in works:
        summands += _packed_summands(work).unbind()
        matrices += [(work, place) for place in range(len(work.B))]
    shared = SharedWork([work.B.shape[-1] ** 3 for work, _ in matrices], group)
    scale_dtype = works[0].e.dtype
    # G = sum over ranks of B_k^T B_k, for the matrices of this rank, in float32 or wider
    grams = shared.sums(summands, scale_dtype)
    tasks = []
    for i, packed in zip(shared.mine, grams, strict=True):
        work, place = matrices[i]
        tasks.append(_Task(work, place, packed))
    # Z = G^(-1/2)
    sent: list[Tensor] = []
    for _, of_kind in groupby(tasks, lambda task: task.work.kind):
        sent += _solved(list(of_kind), scale_dtype).rows()
    scale_width = scale_dtype.itemsize // summands[0].dtype.itemsize
    lengths = [len(summand) + scale_width for summand in summands]
    received = shared.results(sent, lengths, like=summands[0])
    roots: list[Tensor] = []
    states: list[Tensor] = []
    scales: list[Tensor] = []
    start = 0
    for work in works:
        k, _, n = work.B.shape
        payload = _Payload.of_rows(received[start : start + k], n)
        start += k
        Z = unpack(payload.triangles, n)
        if work.pass_index == 0:
            # This rank's rows are divided by 2^e_k, and those of which Z is the root by 2^e:
            # (2^-e B_k) Z = (2^-e_k B_k) 2^(e_k - e) Z.
            Z.mul_(torch.exp2(work.stack.rows.e - work.e)[:, None, None].to(Z.dtype))
            if work.stack.scales.after:
                states += work.stack.scales.after
                scales.append(payload.scales(scale_dtype))
        roots.append(Z)
    if states:
        ops.copy_(states, torch.cat(scales), moves)
    return roots


def _packed_summands(work: _Work) -> Tensor:
    """This rank's summands of G, packed, (k, n (n + 1) / 2)."""
    rows = counted(work.B, work.stack.layout)
    k, _, n = rows.shape
    # G_k = B_k^T B_k
    G = ops.symmetric_product(rows.mT, rows, rows.new_empty(k, n, n))
    if work.pass_index == 0:
        # These rows are divided by 2^e_k, but the sum is of rows divided by 2^e. Values that
        # underflow in half precision are too small to iterate.
        G.mul_(torch.exp2(2 * (work.stack.rows.e - work.e))[:, None, None])
    return pack(G)


class _Task(NamedTuple):
    """A matrix on which this rank iterates for all ranks."""

    work: _Work  # of the matrix
    place: int  # of the matrix in this work
    packed: Tensor  # its G, (n (n + 1) / 2,)


class _Payload(NamedTuple):
    """What is sent of k matrices: a row each, which is a packed root and the new scale.

    A row has the dtype of products. A scale may be wider, so its bits are sent as ``width``
    elements, which no conversion rounds.
    """

    triangles: Tensor  # packed Z, (k, n (n + 1) / 2)
    scale_bits: Tensor  # (k, width)

    @classmethod
    def of_roots(cls, Z: Tensor, scales: Tensor) -> _Payload:
        """The payload of Z, (k, n, n), and of scales, (k,)."""
        return cls(pack(Z), scales[:, None].view(Z.dtype))

    @classmethod
    def of_rows(cls, rows: Tensors, n: int) -> _Payload:
        """The payload of k received :meth:`rows`."""
        table = torch.stack(list(rows))
        triangle = n * (n + 1) // 2
        return cls(table[:, :triangle], table[:, triangle:])

    def rows(self) -> list[Tensor]:
        """A row to send for each matrix."""
        return list(torch.cat((self.triangles, self.scale_bits), dim=1))

    def scales(self, dtype: torch.dtype) -> Tensor:
        """The scales, (k,), in the dtype that they had."""
        # A copy, because wider elements must be aligned.
        return self.scale_bits.flatten().clone().view(dtype)


def _solved(tasks: Sequence[_Task], scale_dtype: torch.dtype) -> _Payload:
    """The roots and new scales of matrices that are iterated together."""
    first = tasks[0].work
    n = first.B.shape[-1]
    G = unpack(torch.stack([task.packed for task in tasks]), n)
    # Indexing by a list would copy it to the device.
    e = torch.stack([task.work.e[task.place] for task in tasks])
    new_scales = e.new_zeros(len(tasks), dtype=scale_dtype)
    scales = Scales(
        before=[task.work.stack.scales.before[task.place] for task in tasks],
        decays=[task.work.stack.scales.decays[task.place] for task in tasks],
        after=list(new_scales),
    )
    # Here scales are always written. ``moves`` decides where all ranks receive them.
    Z = _root(first, G, e, None, scales, moves=None)
    return _Payload.of_roots(Z, new_scales)
