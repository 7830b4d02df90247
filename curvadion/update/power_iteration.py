"""Low-rank factors of the momentum as the direction (Dion, arXiv 2504.05295).

Per oriented matrix B (m x n, m >= n, so of a wide X the transpose), held as a shard B_ij of
rows i and columns j, and Q (n x r):

    B = M + look_ahead G, in the place of M                           _look_ahead_
    P = sum over the column group ( B Q )                             _products
    P = orthonormalize(P, row group)                                  orthonormal_columns
    R = sum over the row group ( B^T P )                              _products
    Q = column_normalize(R, column group), or orthonormalize(R, ...)  _next_right_factors
    X <- (1 - lr wd) X - lr scale P Q^T,  B <- B - (1 - mu) P R^T     _update
    M = B - mu look_ahead G                                           _look_ahead_

At an opening of the papers' sync the sums are means over replicas, too. One collective sends
all P's, another all R's. The rest of this file is how many matrices take few operations:

- Matrices of one shape are a stack. On an accelerator they take one product each way, from a
  copy of them that is made once a step (``_together``).
- Consecutive stacks whose right factors have one shape are a run, and take one operation each
  for R and Q (``_runs``).

If B holds only rounding errors in some direction, this column of Q is zero and that of P
completed, so the direction is used again as soon as B has a signal there. This replaces
Dion's epsilon; ``_floors`` says what counts as a rounding error. Q and R are both zero if a
product is not finite (``_finite``).
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
from curvadion.ops.tensors import Tensors, joined
from curvadion.plan.parameter import (
    Matrix,
    Parameter,
    Stacks,
    dtype_of,
    each_of_group,
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
from curvadion.update.moving import move
from curvadion.update.orthonormalize import (
    GROUPED,
    Floor,
    Orthonormal,
    orthonormal_columns,
    roundoff_of_products,
)

# Products of matrices with so few elements take longer to start than to copy and compute.
SMALL = 2**12


class PowerIteration(Direction):
    """A power iteration of rank r on the momentum with look-ahead, from the last Q.

    M <- M + G                                     mu M + G with the plain rule
    B = M + look_ahead G
    P = orthonormalize(B Q)
    R = B^T P
    Q <- column_normalize(R)                       or orthonormalize(R)
    X <- (1 - lr wd) X - lr scale P Q^T            scale: sqrt(m / n) in the paper, of X itself
    M <- M - (1 - mu) (P R^T - look_ahead G)       not with the plain rule
    """

    shares_factors = True
    feeds_back = True
    capturable = True

    def create_state(self, X: Tensor, options: Options) -> dict[str, Tensor]:
        return create_right_factors(X, options, dtype_of(options["q_dtype"], X))

    def state_shapes(self, X: Tensor, options: Options) -> dict[str, tuple[int, ...]]:
        return right_factor_shapes(X, options)

    def step(self, plan: Plan, tensors: StepTensors, begun: Any, mode: StepMode) -> Directions:
        """The iteration, and what it changes of X and M.

        Args:
            plan: of the batch.
            tensors: weights, momenta and gradients of the batch's parameters.
            begun: None.
            mode: what else a step depends on.
        """
        stacks = plan.stacks
        # B = M + look_ahead G, in the place of M
        _look_ahead_(tensors, lambda p: p.group["look_ahead"], mode.moves)
        layouts = [m.layout for m, *_ in stacks]
        if mode.inside_replica:
            layouts = [layout.inside_replica() for layout in layouts]
        # P = orthonormalize(B Q), R = B^T P, Q = column_normalize(R)
        factors, right = _power_iteration(stacks, layouts)
        # X <- (1 - lr wd) X - lr scale P Q^T,  B <- B - (1 - mu) P R^T
        _update(stacks, factors, right, mode)
        if mode.remember:
            _remember(right, mode.moves)
        # Take look_ahead G away again, but for the (1 - mu) of it that feedback has taken:
        # M <- B - mu look_ahead G, or B - look_ahead G with the plain rule
        _look_ahead_(tensors, lambda p: -p.group["look_ahead"] * (1 - p.feedback), mode.moves)
        if mode.hooks:
            # X <- (1 - lr wd) X - lr scale U with U = P Q^T, which exists for hooks only
            move(stacks, [of_stack.P @ of_stack.Q.mT for of_stack in factors], mode)
        return LowRankDirections(plan, factors)


class LowRankDirections(Directions):
    """A step along U = P Q^T."""

    def __init__(self, plan: Plan, factors: list[Factors]) -> None:
        super().__init__(plan, [of_stack.Q.shape[2] for of_stack in factors])
        self._factors = factors

    def turn_momenta_(self, changes: Tensors, shares: Tensors, decay: float) -> None:
        """M <- M + share C U^T M with U = P Q^T; collective inside the replica.

        Shapes of a stack's k matrices are

            C, M        (k, m_i, n_j)
            C Q         (k, m_i, r)
            M^T P       (k, n_j, r)
        """
        layouts = [m.layout.inside_replica() for m, *_ in self.stacks]
        momenta = _together(self.stacks, [[m.M for m in stack] for stack in self.stacks])
        P = [of_stack.P for of_stack in self._factors]
        Q = [of_stack.Q for of_stack in self._factors]
        # C U^T M = C Q P^T M = (C Q) (M^T P)^T
        right = _products(self.stacks, layouts, momenta, P, transposed=True)
        left = _products(self.stacks, layouts, changes, Q)
        for matrices, CQ, share, MTP in zip(self.stacks, left, shares, right, strict=True):
            # M <- 1 M - 1 (-share C Q) (M^T P)^T
            factor = CQ * -share[:, None, None]
            ones = [1.0] * len(matrices)
            with open_shards(matrices, [m.parameter.M for m in matrices]) as (M,):
                ops.low_rank_update_(M, list(factor), list(MTP), ones, ones, moves=None)


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


class _Run(NamedTuple):
    """Consecutive stacks whose right factors are one tensor, with k matrices in all."""

    stacks: slice
    counts: list[int]  # the number of matrices of each stack
    matrices: list[Matrix]
    columns: Extent  # this rank's columns of these matrices
    roundoff: float  # the relative error of products with B
    last_scale: Tensor  # length of the last R's longest column, decayed, (k,) float64


def _power_iteration(
    stacks: Stacks, layouts: Sequence[MatrixLayout]
) -> tuple[list[Factors], list[Right]]:
    """P, R and the next Q averaged over replicas, by stack and by run of stacks.

    Shapes of a stack's k matrices are

        B         (k, m_i, n_j)      the momentum with look-ahead
        Q, R      (k, n_j, r)
        P         (k, m_i, r)
    """
    B = _together(stacks, [[m.M for m in matrices] for matrices in stacks])
    Q = _together(stacks, [[m.Q for m in matrices] for matrices in stacks])
    roundoff = []
    for m, *_ in stacks:
        dtype = product_dtype(m.parameter.X)
        roundoff.append(roundoff_of_products(dtype, m.parameter.M.dtype))
    # P = sum over the column group ( B Q ), mean over replicas
    products = _products(stacks, layouts, B, Q)
    # P <- orthonormalize(P, row group)
    rows = [layout.rows for layout in layouts]
    left = orthonormal_columns(products, rows, [Floor(error) for error in roundoff])
    P = [of_stack.columns for of_stack in left]
    # R = sum over the row group ( B^T P ), mean over replicas
    runs = _runs(stacks, layouts, roundoff)
    slices = [run.stacks for run in runs]
    R = _products(stacks, layouts, B, P, transposed=True, runs=slices)
    del B
    # Q <- column_normalize(R, column group)
    right = []
    next_factors = _next_right_factors(runs, R, _floors(runs, left))
    for run, R_of_run, next_factor in zip(runs, R, next_factors, strict=True):
        right.append(_finite(run, R_of_run, next_factor))
    # By stack again
    factors = []
    for run, of_run in zip(runs, right, strict=True):
        R_by_stack = of_run.R.split(run.counts)
        Q_by_stack = of_run.Q.split(run.counts)
        for p, r, q in zip(P[run.stacks], R_by_stack, Q_by_stack, strict=True):
            factors.append(Factors(p, r, q))
    return factors, right


def _floors(runs: Sequence[_Run], left: Sequence[Orthonormal]) -> list[Floor]:
    """How short columns of R are rounding errors, by run; left: P, by stack."""
    floors = []
    for run in runs:
        of_run = left[run.stacks]
        dependent = joined([of_stack.dependent for of_stack in of_run])
        error = joined([of_stack.error for of_stack in of_run])
        floors.append(Floor(run.roundoff, run.last_scale, dependent, error))
    return floors


def _finite(run: _Run, R: Tensor, next_factor: _NextFactor) -> Right:
    """The right factors of a run with zeros where a product is not finite, and their scale."""
    longest = next_factor.lengths.amax(dim=-1)
    # There Q is zero already.
    bad = ~(longest < torch.inf)
    scale = torch.maximum(longest.masked_fill_(bad, 0.0), run.last_scale)
    R.masked_fill_(bad[:, None, None], 0.0)
    return Right(run.matrices, R, next_factor.Q, scale)


def _remember(right: Sequence[Right], moves: Tensor | None) -> None:
    """Store the scales that the next step reads."""
    for run in right:
        # In the scales' own dtype, as the operation on a list would otherwise convert one
        # after another.
        scale = run.scale.to(run.matrices[0].R_scale.dtype)
        remember_scales([run.matrices], [scale], moves)


def _runs(stacks: Stacks, layouts: Sequence[MatrixLayout], roundoff: Sequence[float]) -> list[_Run]:
    """Consecutive stacks whose right factors have one shape, dtype and sharding.

    On a CPU each stack is a run, as in :func:`groups_of_equal_rank`.
    """
    starts: list[int] = []
    last_key: object = None
    for i, (m, *_) in enumerate(stacks):
        X = m.parameter.X
        key = (
            layouts[i].columns,
            layouts[i].rows_and_replicas,
            m.Q.shape[1],
            product_dtype(X),
            X.device,
            roundoff[i],
        )
        if key != last_key or X.device.type not in GROUPED:
            starts.append(i)
        last_key = key
    runs = []
    for start, stop in pairwise([*starts, len(stacks)]):
        matrices = list(chain.from_iterable(stacks[start:stop]))
        run = _Run(
            stacks=slice(start, stop),
            counts=list(map(len, stacks[start:stop])),
            matrices=matrices,
            columns=layouts[start].columns,
            roundoff=roundoff[start],
            last_scale=scale_before(matrices),
        )
        runs.append(run)
    return runs


def _together(stacks: Stacks, shards: Sequence[Tensors]) -> list[Tensors | Tensor]:
    """On an accelerator copies (k, m_i, n_j) by stack, for products in one launch."""
    together = list[Tensors | Tensor](shards)
    copies: list[Tensor] = []
    originals: list[Tensor] = []
    for i, ((m, *_), of_stack) in enumerate(zip(stacks, shards, strict=True)):
        if of_stack[0].device.type not in GROUPED:
            # There products of one matrix after another are as fast, and need no copy.
            continue
        dtype = product_dtype(m.parameter.X)
        if len(of_stack) == 1 and of_stack[0].dtype == dtype:
            together[i] = of_stack[0].unsqueeze(0)
            continue
        copy = empty_stack(of_stack[0], len(of_stack), dtype)
        together[i] = copy
        copies += copy.unbind()
        originals += of_stack
    if copies:
        torch._foreach_copy_(copies, originals)
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
        runs: consecutive stacks whose products are one tensor; None: each is one.

    Returns:
        A tensor for each run; k is the number of its matrices.
    """
    if runs is None:
        runs = [slice(i, i + 1) for i in range(len(stacks))]
    slots = []
    extents = []
    for run in runs:
        layout = layouts[run.start]
        if transposed:
            # The columns of B, summed over its rows
            extent = layout.columns
            group = layout.rows_and_replicas
        else:
            extent = layout.rows
            group = layout.columns_and_replicas
        X = stacks[run.start][0].parameter.X
        factor = factors[run.start][0]
        shape = (sum(map(len, stacks[run])), len(extent), factor.shape[1])
        slots.append(Slot(shape, group, product_dtype(X), factor.device))
        extents.append(extent)
    buckets = Buckets(slots)
    outputs: list[Tensor] = []
    for run, view in zip(runs, buckets.views, strict=True):
        outputs += view.split(list(map(len, stacks[run])))
    for B, factor, out in zip(shards, factors, outputs, strict=True):
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
    rows, columns = B[0].shape
    rank = out.shape[2]
    if len(B) > 1 and rows * columns > 0 and max(rows, rank) * columns <= SMALL:
        left = torch.stack(list(B)).to(out.dtype)
        right = torch.stack(list(factor)).to(out.dtype)
        torch.bmm(left.mT if transposed else left, right, out=out)
        return
    for b, right, product in zip(B, factor, out, strict=True):
        b = b.to(out.dtype)
        torch.mm(b.mT if transposed else b, right.to(out.dtype), out=product)


class _NextFactor(NamedTuple):
    """The next right factors of a run, and the lengths of what was normalised."""

    Q: Tensor  # (k, n_j, r)
    lengths: Tensor  # of R's columns, (k, r) float64


def _next_right_factors(
    runs: Sequence[_Run], R: Tensors, floors: Sequence[Floor]
) -> list[_NextFactor]:
    """Q = column_normalize(R), or orthonormalize(R), of every run; collective.

    Args:
        runs: of stacks.
        R: (k, n_j, r) by run.
        floors: of every run.
    """
    columns = [run.columns for run in runs]
    # A batch has one kind of right factors.
    if any(run.matrices[0].group["right_factor"] == "qr" for run in runs):
        results = orthonormal_columns(R, columns, floors, complete=False)
        return [_NextFactor(result.columns, result.lengths) for result in results]
    summands = []
    for extent, r in zip(columns, R, strict=True):
        summands.append(ops.column_sum_of_squares(extent.counted(r)))
    squares = sums(summands, [extent.group for extent in columns])
    next_factors = []
    for r, square, floor in zip(R, squares, floors, strict=True):
        lengths, lowest = floor.of(square, r.dtype)
        Q = ops.column_normalize(r, square, lowest)
        next_factors.append(_NextFactor(Q, lengths))
    return next_factors


def _look_ahead_(
    tensors: StepTensors, share: Callable[[Parameter], float], moves: Tensor | None
) -> None:
    """M <- M + share G, while a direction is computed from it; does not copy M."""
    shares = each_of_group(tensors.parameters, share)
    if any(shares):
        # X <- decay X - step G with M in the place of X
        steps = [-s for s in shares]
        decays = [1.0] * len(shares)
        ops.local_step_(tensors.M, tensors.G, steps, decays, moves=moves)


def _update(
    stacks: Stacks, factors: Sequence[Factors], right: Sequence[Right], mode: StepMode
) -> None:
    """X <- (1 - lr wd) X - lr scale P Q^T; with error feedback M <- M - (1 - mu) P R^T.

    With hooks X stays: it moves when M is what they are to see.

    Args:
        stacks: of the matrices that move.
        factors: of each stack.
        right: the same right factors by run.
        mode: of the step.
    """
    matrices = list(chain.from_iterable(stacks))
    P = [p for of_stack in factors for p in of_stack.P]
    Q = [q for of_stack in factors for q in of_stack.Q]
    for run in right:
        ops.copy_([m.Q for m in run.matrices], run.Q, mode.moves)
    # The plain rule has no feedback, so momenta need not be read again.
    fed_back: list[Matrix] = []
    R: list[Tensor] = []
    if any(m.parameter.feedback for m in matrices):
        fed_back = matrices
        R = [r for of_stack in factors for r in of_stack.R]
    feedback = [m.parameter.feedback for m in fed_back]
    if mode.hooks:
        if fed_back:
            ones = [1.0] * len(fed_back)
            with open_shards(fed_back, [m.parameter.M for m in fed_back]) as (M,):
                ops.low_rank_update_(M, P, R, feedback, ones, moves=mode.moves)
        return
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
            R,
            feedback,
            seeds,
            moves=mode.moves,
        )
