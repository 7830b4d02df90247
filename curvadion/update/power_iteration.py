"""Low-rank factors of the momentum as the direction (Dion, arXiv 2504.05295).

Per oriented matrix B (m x n), held as a shard B_ij of rows i and columns j, and Q (n x r):

    P = sum over the column group ( B Q )         and mean over replicas, in one collective
    P = orthonormalize(P, row group)
    R = sum over the row group ( B^T P )          and mean over replicas, in one collective
    Q = column_normalize(R, column group)         or orthonormalize(R, column group)

One collective sends all P's, another all R's.

On an accelerator the matrices of a stack take one product each way, from a copy of them that
is made once a step. Right factors of one shape are a run, and take one operation each.

If B holds only rounding errors in some direction, this column of Q is zero and that of P
completed, so the direction is used again as soon as B has a signal there. This replaces
Dion's epsilon. Q and R are both zero if a product is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvadion import ops
from curvadion.comm.collectives import Buckets, Slot, group_size
from curvadion.layout.exchange import sum_shared_, sums
from curvadion.layout.matrix import Extent, MatrixLayout, Options
from curvadion.layout.sharded_states import create_right_factors, right_factor_shapes
from curvadion.ops.tensors import Tensors
from curvadion.plan.parameter import (
    Matrix,
    Parameter,
    Stacks,
    dtype_of,
    empty_stack,
    open_shards,
    product_dtype,
    remember_scales,
    rounding_seeds,
    scale_before,
    step_sizes,
    weight_decays,
)
from curvadion.plan.plan import Plan, StepTensors
from curvadion.update.direction import Direction, Directions, StepMode
from curvadion.update.orthonormalize import (
    GROUPED,
    Floor,
    joined,
    orthonormal_columns,
    roundoff_of_products,
)

# Products of matrices with so few elements take longer to start than to copy and compute.
SMALL = 2**12


class PowerIteration(Direction):
    """A power iteration of rank r on B = M + look_ahead G.

    X <- (1 - lr wd) X - lr sqrt(m / n) P Q^T
    M <- M - (1 - mu) (P R^T - look_ahead G)
    """

    shares_factors = feeds_back = capturable = True

    def create_state(self, X: Tensor, options: Options) -> dict[str, Tensor]:
        return create_right_factors(X, options, dtype_of(options["q_dtype"], X))

    def state_shapes(self, X: Tensor, options: Options) -> dict[str, tuple[int, ...]]:
        return right_factor_shapes(X, options)

    def step(self, plan: Plan, tensors: StepTensors, begun: Any, mode: StepMode) -> Directions:
        stacks = plan.stacks
        _look_ahead_(tensors, lambda p: p.group["look_ahead"], mode.moves)
        layouts = [m.layout for m, *_ in stacks]
        if mode.inside_replica:
            layouts = [layout.inside_replica() for layout in layouts]
        factors, right = _power_iteration(stacks, layouts)
        _update(stacks, factors, right, mode)
        if mode.remember:
            for run in right:
                # In the scales' own dtype, as the operation on a list would otherwise
                # convert one after another.
                scale = run.scale.to(run.matrices[0].R_scale.dtype)
                remember_scales([run.matrices], [scale], mode.moves)
        _look_ahead_(tensors, lambda p: -p.group["look_ahead"] * (1 - p.feedback), mode.moves)
        return LowRankDirections(plan, factors)


class LowRankDirections(Directions):
    """A step along U = P Q^T."""

    def __init__(self, plan: Plan, factors: list[Factors]) -> None:
        super().__init__(plan, [of_stack.Q.shape[2] for of_stack in factors])
        self._factors = factors

    def turn_momenta_(self, changes: Tensors, shares: Tensors, decay: float) -> None:
        layouts = [m.layout.inside_replica() for m, *_ in self.stacks]
        momenta = _together(self.stacks, [[m.M for m in stack] for stack in self.stacks])
        P = [of_stack.P for of_stack in self._factors]
        Q = [of_stack.Q for of_stack in self._factors]
        right = _products(self.stacks, layouts, momenta, P, transposed=True)
        left = _products(self.stacks, layouts, changes, Q)
        for matrices, T, share, R in zip(self.stacks, left, shares, right, strict=True):
            # C U^T M = (C Q) (M^T P)^T
            T = T * -share[:, None, None]
            ones = [1.0] * len(matrices)
            with open_shards(matrices, [m.parameter.M for m in matrices]) as (M,):
                ops.low_rank_update_(M, list(T), list(R), ones, ones, moves=None)


class Factors(NamedTuple):
    """The factors of a stack of k matrices after a power iteration."""

    P: Tensor  # (k, m_i, r), of orthonormal columns
    R: Tensor  # B^T P, (k, n_j, r)
    Q: Tensor  # the next one, (k, n_j, r)


class Right(NamedTuple):
    """The right factors of a run of stacks, with k matrices in all."""

    matrices: list[Matrix]
    R: Tensor  # B^T P, (k, n_j, r)
    Q: Tensor  # the next one, (k, n_j, r)
    scale: Tensor  # length of R's longest column, or the last scale if larger, (k,) float64


def _power_iteration(
    stacks: Stacks, layouts: Sequence[MatrixLayout]
) -> tuple[list[Factors], list[Right]]:
    """P, R and the next Q averaged over replicas, by stack and by run of stacks."""
    B = _together(stacks, [[m.M for m in matrices] for matrices in stacks])
    Q = _together(stacks, [[m.Q for m in matrices] for matrices in stacks])
    heads = [m.parameter for m, *_ in stacks]
    roundoff = [roundoff_of_products(product_dtype(p.X), p.M.dtype) for p in heads]
    # P = orthonormalize(B Q)
    products = _products(stacks, layouts, B, Q)
    left = orthonormal_columns(
        products, [layout.rows for layout in layouts], list(map(Floor, roundoff))
    )
    P = [one.columns for one in left]
    # R = B^T P
    runs = _runs(stacks, layouts, roundoff)
    R = _products(stacks, layouts, B, P, transposed=True, runs=runs)
    del B
    matrices = [list(chain(*stacks[run])) for run in runs]
    before = list(map(scale_before, matrices))
    floors = []
    for run, scale in zip(runs, before, strict=True):
        dependent = joined([one.dependent for one in left[run]])
        error = joined([one.error for one in left[run]])
        floors.append(Floor(roundoff[run.start], scale, dependent, error))
    columns = [layouts[run.start].columns for run in runs]
    next_Q, lengths = _next_right_factors(matrices, columns, R, floors)
    factors = []
    right = []
    for i, run in enumerate(runs):
        longest = lengths[i].amax(dim=-1)
        bad = ~(longest < torch.inf)  # Q is zero already
        scale = torch.maximum(longest.masked_fill_(bad, 0.0), before[i])
        R[i].masked_fill_(bad[:, None, None], 0.0)
        right.append(Right(matrices[i], R[i], next_Q[i], scale))
        counts = list(map(len, stacks[run]))
        parts = R[i].split(counts), next_Q[i].split(counts)
        factors += [Factors(p, r, q) for p, r, q in zip(P[run], *parts, strict=True)]
    return factors, right


def _runs(
    stacks: Stacks, layouts: Sequence[MatrixLayout], roundoff: Sequence[float]
) -> list[slice]:
    """Consecutive stacks whose right factors have one shape, dtype and sharding.

    On a CPU each stack is one, as in :func:`groups_of_equal_rank`.
    """
    starts: list[int] = []
    last: object = None
    for i, (m, *_) in enumerate(stacks):
        X = m.parameter.X
        same = layouts[i].columns, layouts[i].rows_and_replicas, m.Q.shape[1]
        key = *same, product_dtype(X), X.device, roundoff[i]
        if key != last or X.device.type not in GROUPED:
            starts.append(i)
        last = key
    return [slice(*ends) for ends in pairwise([*starts, len(stacks)])]


def _together(stacks: Stacks, shards: Sequence[Tensors]) -> list[Tensors | Tensor]:
    """On an accelerator copies (k, m_i, n_j) by stack, for products in one launch."""
    together = list[Tensors | Tensor](shards)
    copies = list[Tensor]()
    copied = list[Tensor]()
    for i, ((m, *_), each) in enumerate(zip(stacks, shards, strict=True)):
        if each[0].device.type not in GROUPED:
            # There products of one matrix after another are as fast, and need no copy.
            continue
        if len(each) == 1 and each[0].dtype == product_dtype(m.parameter.X):
            together[i] = each[0].unsqueeze(0)
            continue
        stack = empty_stack(each, product_dtype(m.parameter.X))
        together[i] = stack
        copies += stack.unbind()
        copied += each
    if copies:
        torch._foreach_copy_(copies, copied)
    return together


def _products(
    stacks: Stacks,
    layouts: Sequence[MatrixLayout],
    shards: Sequence[Tensors | Tensor],
    factors: Sequence[Tensors | Tensor],
    *,
    transposed: bool = False,
    runs: Sequence[slice] | None = None,
) -> list[Tensor]:
    """B Q, (k, m_i, r), or B^T P, (k, n_j, r), summed over shards, averaged over replicas.

    Args:
        stacks: of matrices B.
        layouts: of each stack.
        shards: B, (k, m_i, n_j) by stack: a list of matrices, or a tensor.
        factors: Q, (k, n_j, r), or P, (k, m_i, r), likewise.
        transposed: whether to multiply B^T by P.
        runs: consecutive stacks whose products are one tensor; by default each is one.
    """
    if runs is None:
        runs = [slice(i, i + 1) for i in range(len(stacks))]
    slots, extents = [], []
    for run in runs:
        (m, *_), layout = stacks[run.start], layouts[run.start]
        extent, group = layout.rows, layout.columns_and_replicas
        if transposed:
            extent, group = layout.columns, layout.rows_and_replicas
        factor = factors[run.start][0]
        shape = sum(map(len, stacks[run])), len(extent), factor.shape[1]
        slots.append(Slot(shape, group, product_dtype(m.parameter.X), factor.device))
        extents.append(extent)
    buckets = Buckets(slots)
    each = zip(runs, buckets.views, strict=True)
    outs = [out for run, view in each for out in view.split(list(map(len, stacks[run])))]
    for B, factor, out in zip(shards, factors, outs, strict=True):
        _multiply(B, factor, out, transposed=transposed)
    buckets.all_reduce_(divide_by=group_size(layouts[0].replicas) if layouts else 1)
    sum_shared_(buckets.views, extents)
    return buckets.views


def _multiply(
    B: Tensors | Tensor, factor: Tensors | Tensor, out: Tensor, *, transposed: bool
) -> None:
    """out <- B Q, (k, m_i, r), or B^T P, (k, n_j, r).

    Args:
        B: (k, m_i, n_j), a list of matrices or a tensor.
        factor: Q, (k, n_j, r), or P, (k, m_i, r), likewise.
        out: of a dtype to which factors are converted.
        transposed: whether to multiply B^T by P.
    """
    grouped = out.device.type in GROUPED
    if grouped and isinstance(B, Tensor) and isinstance(factor, Tensor):
        B = B.to(out.dtype)
        torch.bmm(B.mT if transposed else B, factor.to(out.dtype), out=out)
        return
    (rows, columns), r = B[0].shape, out.shape[2]
    if len(B) > 1 and rows * columns > 0 and max(rows, r) * columns <= SMALL:
        left, right = (torch.stack(list(each)).to(out.dtype) for each in (B, factor))
        torch.bmm(left.mT if transposed else left, right, out=out)
        return
    for b, right, product in zip(B, factor, out, strict=True):
        b = b.to(out.dtype)
        torch.mm(b.mT if transposed else b, right.to(out.dtype), out=product)


def _next_right_factors(
    matrices: Sequence[Sequence[Matrix]],
    columns: Sequence[Extent],
    R: Tensors,
    floors: Sequence[Floor],
) -> tuple[list[Tensor], list[Tensor]]:
    """The next Q of every run, and the column lengths of its R, (k, r) float64.

    Args:
        matrices: of every run.
        columns: of every run, on this rank.
        R: (k, n_j, r) by run.
        floors: of every run.
    """
    # A batch has one kind of right factors.
    if any(m.group["right_factor"] == "qr" for m, *_ in matrices):
        found = orthonormal_columns(R, columns, floors, complete=False)
        return [one.columns for one in found], [one.lengths for one in found]
    counted = [held.counted(r) for held, r in zip(columns, R, strict=True)]
    summands = list(map(ops.column_sum_of_squares, counted))
    squares = sums(summands, [held.group for held in columns])
    Q = []
    lengths = []
    for r, square, floor in zip(R, squares, floors, strict=True):
        of_columns, lowest = floor.of(square, r.dtype)
        lengths.append(of_columns)
        Q.append(ops.column_normalize(r, square, lowest))
    return Q, lengths


def _look_ahead_(
    tensors: StepTensors, share: Callable[[Parameter], float], moves: Tensor | None
) -> None:
    """M <- M + share G, while a direction is computed from it; does not copy M."""
    shares = tensors.each(share)
    if any(shares):
        steps, ones = [-s for s in shares], [1.0] * len(shares)
        ops.local_step_(tensors.M, tensors.G, steps, ones, moves=moves)


def _update(
    stacks: Stacks, factors: Sequence[Factors], right: Sequence[Right], mode: StepMode
) -> None:
    """X <- (1 - lr wd) X - lr scale P Q^T; with error feedback M <- M - (1 - mu) P R^T.

    Args:
        stacks: of the matrices that move.
        factors: of each stack.
        right: the same right factors by run.
        mode: of the step.
    """
    matrices = list(chain(*stacks))
    P = [p for of_stack in factors for p in of_stack.P]
    R = [r for of_stack in factors for r in of_stack.R]
    Q = [q for of_stack in factors for q in of_stack.Q]
    for run in right:
        ops.copy_([m.Q for m in run.matrices], run.Q, mode.moves)
    # The plain rule has no feedback, so momenta need not be read again.
    fed_back = matrices if any(m.parameter.feedback for m in matrices) else ()
    feedback = [m.parameter.feedback for m in fed_back]
    rates = step_sizes(matrices)
    decays = weight_decays(matrices)
    seeds = rounding_seeds(matrices, mode.step_index)
    with (
        open_shards(matrices, [m.parameter.local for m in matrices]) as (X,),
        open_shards(fed_back, [m.parameter.M for m in fed_back]) as (M,),
    ):
        ops.low_rank_update_(
            X,
            P,
            Q,
            rates,
            decays,
            M,
            R if fed_back else (),
            feedback,
            seeds,
            moves=mode.moves,
        )
