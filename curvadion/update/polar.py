"""The polar factor of the momentum as the direction (Muon's), on shards.

With B the oriented momentum (m x n, m >= n, so of a wide X the transpose), of which rank k holds
rows B_k,

    G = sum_k B_k^T B_k          n (n + 1) / 2 elements per matrix: a sum for one rank
    Z = G^(-1/2), about          Newton-Schulz iterations on this rank
    U_k = B_k Z                  n (n + 1) / 2 elements per matrix: Z for all ranks
    X_k <- (1 - lr wd) X_k - lr scale U_k

Where that costs less, a rank that owns the matrix receives all B_k instead and sends U_k
back: m n / ranks elements per matrix each way.

``scale`` is :attr:`Matrix.update_scale`: its m and n are the sides of X itself.

At full rank P R^T is the momentum itself, so error feedback and the plain rule are the same.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvadion import ops
from curvadion.comm.collectives import Buckets
from curvadion.comm.groups import Group
from curvadion.layout.exchange import (
    cut_columns,
    dtype_of_products,
    summands_of_columns,
    whole_rows,
)
from curvadion.layout.matrix import MatrixLayout
from curvadion.layout.owners import MatrixOwners, owners_cost_less
from curvadion.layout.sharded_states import squares_held
from curvadion.ops.tensors import Tensors, from_host
from curvadion.plan.parameter import (
    Matrix,
    Parameter,
    Stacks,
    dtype_of,
    each_of_group,
    empty_stack,
    gradients_without_gaps,
    open_shards,
    product_dtype,
    scale_decay,
    shards_without_gaps,
    stacked,
)
from curvadion.plan.plan import Plan, StepTensors
from curvadion.plan.state import MOMENTUM, SPECTRUM, SPECTRUM_WEIGHT
from curvadion.update.direction import Direction, Directions, StepMode
from curvadion.update.moving import move
from curvadion.update.newton_schulz import (
    RowStack,
    Scaled,
    Scales,
    polar_factors,
    row_stack,
    scaled,
)

TINY = torch.finfo(torch.float32).tiny
# Shards (k, m_i, n_j) of matrices: as they are, or scaled for products already.
Prepared = Tensor | Scaled
Begun = Callable[[], list[Tensor]]  # U, (k, m_i, n_j) by stack


class Polar(Direction):
    """The polar factor of M + look_ahead G.

    M <- mu M + G
    U <- polar factor of B = M + look_ahead G
    X <- (1 - lr wd) X - lr scale U
    """

    keeps_spectrum = True
    adds_gradients = True
    opens_momenta = True
    capturable = True

    def measures(self, matrices: Sequence[Matrix]) -> bool:
        return _scales_first(matrices)

    def begin(self, plan: Plan, tensors: StepTensors, mode: StepMode) -> Callable[[], Any]:
        stacks = plan.stacks
        layouts = [m.layout for m, *_ in stacks]

        def exchange() -> Begun:
            prepared = _prepared(stacks, tensors, mode)
            return begin_polar_directions(stacks, prepared, layouts, mode)

        if all(layout.shards is None for layout in layouts):
            # Nothing is exchanged, so copies of the momenta need not exist beside those of
            # the last batch: all begins when the directions are wanted.
            return lambda: exchange()()
        return exchange()

    def step(
        self, plan: Plan, tensors: StepTensors, begun: Callable[[], Any], mode: StepMode
    ) -> Directions:
        """X <- (1 - lr wd) X - lr scale U.

        Args:
            plan: of the batch.
            tensors: weights, momenta and gradients of the batch's parameters.
            begun: of :meth:`begin`; the call returns U, (k, m_i, n_j) by stack.
            mode: what else a step depends on.
        """
        U = begun()
        move(plan.stacks, self.rescaled(plan.stacks, U, mode), mode)
        return PolarDirections(plan, U)

    def rescaled(
        self, stacks: Stacks, U: Tensors, mode: StepMode, masks: Tensors | None = None
    ) -> Tensors:
        """The final directions; collective. A subclass may override it.

        U is oriented like :class:`Matrix`. A stack's matrices may have different options;
        there may be no stack. Leave U as it is, and write states with
        :func:`curvadion.ops.copy_` and ``mode.moves``. Sums over ranks are over
        ``m.layout.shards``, and count ``m.held(u)`` of a flat shard.

        Args:
            stacks: the matrices.
            U: shards of their polar factors, (k, m_i, n_j) by stack.
            mode: what else the step depends on.
            masks: which columns are not zero, (k, n_j) bool by stack; None: all.

        Returns:
            Directions like U.
        """
        return U


class PolarDirections(Directions):
    """A step along polar factors."""

    def __init__(self, plan: Plan, U: list[Tensor], ranks: list[int] | None = None) -> None:
        super().__init__(plan, ranks or [min(m.layout.shape) for m, *_ in plan.stacks])
        self._U = U

    def turn_momenta_(self, changes: Tensors, shares: Tensors, decay: float) -> None:
        """M_i <- M_i + share C S_i with S_i = U_i^T M_i; collective inside the replica.

        Shapes of a stack's k matrices are

            C, U, M   (k, m_i, n_j) as shards, (k, m_r, n) as whole rows
            S         (k, n, n), the same on all ranks of the shards
            C S       (k, m_r, n), cut to (k, m_i, n_j)
        """
        layouts = [m.layout for m, *_ in self.stacks]
        # C <- share C
        for change, share in zip(changes, shares, strict=True):
            change.mul_(share[:, None, None])
        # S = U^T M, times a weight if it is a mean over openings
        summands = self._spectra()
        weights = self._sum_spectra_(summands, decay)
        # C S
        turns = []
        rows_of_changes = whole_rows(changes, layouts)
        for C, S, weight in zip(rows_of_changes, summands.views, weights, strict=True):
            # The product is of S / max |S|, which half precision can hold.
            size = torch.linalg.vector_norm(S, torch.inf, (1, 2), keepdim=True)
            S.div_(size.clamp_min(TINY))
            dtype = dtype_of_products(C)
            product = torch.bmm(C.to(dtype), S.to(dtype)).to(C.dtype)
            turns.append(product.mul_((size / weight).to(C.dtype)))
        # M <- M + C S
        for matrices, turn in zip(self.stacks, cut_columns(turns, layouts), strict=True):
            # decay M - step C S
            decays = [1.0] * len(matrices)
            steps = [-1.0] * len(matrices)
            with open_shards(matrices, [m.parameter.M for m in matrices], gaps=False) as (M,):
                ops.local_step_(M, list(turn), steps, decays, moves=None)

    def _spectra(self) -> Buckets:
        """This rank's summands of S = U^T M, (k, n, n) by stack; frees the directions."""
        layouts = [m.layout for m, *_ in self.stacks]
        # M / length is about 1. All ranks of the replica know these lengths.
        lengths = [torch.stack([m.R_scale for m in s])[:, None, None] for s in self.stacks]
        momenta = []
        for matrices in self.stacks:
            shards = shards_without_gaps(matrices, [m.parameter.M for m in matrices])
            momenta.append(stacked(shards, matrices[0]))
        for M, length in zip(momenta, lengths, strict=True):
            M.div_(length.clamp_min(TINY))
        U = [_own_elements(m, u) for (m, *_), u in zip(self.stacks, self._U, strict=True)]
        self._U.clear()
        U = whole_rows(U, layouts)
        # U^T (M / length)
        summands = summands_of_columns(U, whole_rows(momenta, layouts), layouts)
        for S, length in zip(summands.views, lengths, strict=True):
            S.mul_(length)
        return summands

    def _sum_spectra_(self, summands: Buckets, decay: float) -> list[Tensor]:
        """Sum S over shards, and over openings if earlier ones count.

            weight <- decay weight + 1 - decay
            T      <- decay T + (1 - decay) sum over shards ( S )

        Each rank stores a part of T of every matrix. It adds this part to its summand, so
        that the sum over shards contains each part once.

        Args:
            summands: of S, (k, n, n) by stack; become T, or the sums over shards.
            decay: the factor of earlier openings; zero: they do not count.

        Returns:
            The weight of each sum, (k, 1, 1) by stack: divided by it T is a mean.
        """
        parameters = {m.parameter for matrices in self.stacks for m in matrices}
        if not decay or any(SPECTRUM not in p.state for p in parameters):
            summands.all_reduce_()
            return [S.new_ones(len(S), 1, 1) for S in summands.views]
        # The stored part of T of every matrix, and its range among the n^2 elements.
        spectra: dict[Parameter, list[tuple[Tensor, slice]]] = {}
        for p in parameters:
            p.state[SPECTRUM_WEIGHT] = decay * p.state[SPECTRUM_WEIGHT] + 1 - decay
            sides = [min(m.layout.shape) for m in p.matrices]
            spectra[p] = list(squares_held(p.X, p.state[SPECTRUM], sides))
        stored_parts = []
        new_parts = []
        for matrices, S in zip(self.stacks, summands.views, strict=True):
            for m, flat in zip(matrices, S.mul_(1 - decay).flatten(1), strict=True):
                stored, elements = spectra[m.parameter][m.index]
                stored_parts.append(stored)
                new_parts.append(flat[elements])
        torch._foreach_add_(new_parts, stored_parts, alpha=decay)
        summands.all_reduce_()
        torch._foreach_copy_(stored_parts, new_parts)
        weights = []
        for matrices, S in zip(self.stacks, summands.views, strict=True):
            numbers = [m.parameter.state[SPECTRUM_WEIGHT] for m in matrices]
            weights.append(from_host(numbers, S.dtype, S.device)[:, None, None])
        return weights


def begin_polar_directions(
    stacks: Stacks,
    prepared: MutableSequence[Prepared] | list[Tensor],
    layouts: Sequence[MatrixLayout],
    mode: StepMode,
) -> Begun:
    """Begin to exchange shards; the call computes U and writes new scales.

    Args:
        stacks: the matrices.
        prepared: their shards, or some of their columns, by stack; cleared.
        layouts: of what is prepared.
        mode: of the step.
    """
    by_route: dict[tuple[_Route, torch.dtype], list[int]] = {}
    for i, (matrices, layout) in enumerate(zip(stacks, layouts, strict=True)):
        dtype = product_dtype(matrices[0].parameter.X)
        by_route.setdefault((_route(matrices, layout), dtype), []).append(i)
    begun: list[tuple[list[int], Begun]] = []
    for (route, _), indices in by_route.items():
        stacks_of_route = [stacks[i] for i in indices]
        layouts_of_route = [layouts[i] for i in indices]
        B = [prepared[i] for i in indices]
        end: Begun
        if route.owners is None:
            end = partial(_by_gram, stacks_of_route, B, layouts_of_route, mode)
        else:
            end = _by_owners(stacks_of_route, B, layouts_of_route, mode, route.owners, route.dtype)
        begun.append((indices, end))
    prepared.clear()

    def end_all() -> list[Tensor]:
        U: dict[int, Tensor] = {}
        while begun:
            # What one route's stacks hold is freed before the next ones are computed.
            indices, end = begun.pop(0)
            U.update(zip(indices, end(), strict=True))
        return [U[i] for i in range(len(stacks))]

    return end_all


class _Route(NamedTuple):
    """How shards become directions."""

    owners: Group | None  # the ranks that own whole matrices; None: Gram matrices are summed
    dtype: torch.dtype  # of shards on the wire, or of numbers if there is no owner


def _route(matrices: Sequence[Matrix], layout: MatrixLayout) -> _Route:
    """The cheaper route of a stack, unless its group forbids owners.

    Args:
        matrices: of the stack.
        layout: of what is exchanged of them.
    """
    options = matrices[0].group
    parameter = matrices[0].parameter
    like = parameter.local.new_empty(0, dtype=product_dtype(parameter.X))
    half = dtype_of_products(like)
    dtype = torch.bfloat16 if half != like.dtype else like.dtype
    if options["exchange_dtype"] is not None:
        dtype = dtype_of(options["exchange_dtype"], like)
    by_gram = _Route(None, like.dtype)
    if layout.shards is None or options["gather"] == "never":
        return by_gram
    if not owners_cost_less(layout, len(matrices), dtype, half):
        return by_gram
    return _Route(layout.shards, dtype)


def _scales_first(matrices: Sequence[Matrix]) -> bool:
    """Whether shards are scaled for products before anything is exchanged.

    Ranks choose their own scales, so what they exchange or add up as rows must not be scaled.
    """
    layout = matrices[0].layout
    if _route(matrices, layout).owners is not None:
        return False
    return layout.columns.group is None and not layout.rows.shared


def _by_gram(
    stacks: Stacks,
    prepared: MutableSequence[Prepared],
    layouts: Sequence[MatrixLayout],
    mode: StepMode,
) -> list[Tensor]:
    """U, (k, m_i, n_j) by stack, of matrices whose Gram matrices are summed over ranks.

    Args:
        stacks: the matrices.
        prepared: their shards by stack; emptied.
        layouts: of what is prepared.
        mode: of the step.
    """
    row_stacks = _whole_row_stacks(stacks, prepared, layouts, mode)
    # Nothing else may hold the rows, which are freed after the first pass.
    prepared.clear()
    return cut_columns(polar_factors(row_stacks, mode.moves), layouts)


def _whole_row_stacks(
    stacks: Stacks,
    prepared: Sequence[Prepared],
    layouts: Sequence[MatrixLayout],
    mode: StepMode,
) -> list[RowStack]:
    """Shards as scaled whole rows, (k, m_r, n) by stack; collective.

    Args:
        stacks: the matrices.
        prepared: their shards, (k, m_i, n_j) by stack. Scaled ones are whole rows already.
        layouts: of what is prepared.
        mode: of the step.
    """
    rows: dict[int, Scaled] = {}
    unscaled: dict[int, Tensor] = {}
    for i, B in enumerate(prepared):
        if isinstance(B, Scaled):
            rows[i] = B
        else:
            unscaled[i] = B
    exchanged = whole_rows(list(unscaled.values()), [layouts[i] for i in unscaled])
    rows.update(zip(unscaled, scaled(exchanged), strict=True))
    row_stacks = []
    for i, (matrices, layout) in enumerate(zip(stacks, layouts, strict=True)):
        scales = _scales(matrices, mode)
        row_stacks.append(row_stack(matrices[0].group, layout, rows[i], scales))
    return row_stacks


def _by_owners(
    stacks: Stacks,
    prepared: Sequence[Prepared],
    layouts: Sequence[MatrixLayout],
    mode: StepMode,
    group: Group,
    dtype: torch.dtype,
) -> Begun:
    """Begin to send shards to the ranks that own matrices; the call computes U.

    Args:
        stacks: the matrices.
        prepared: their shards, not scaled, (k, m_i, n_j) by stack.
        layouts: of what is prepared.
        mode: of the step.
        group: the ranks with shards.
        dtype: on the wire.
    """
    turned = list(map(_lies_turned, stacks))
    owners = MatrixOwners(layouts, list(map(len, stacks)), turned, group)
    end_gather = owners.begin_gather([B for B in prepared if isinstance(B, Tensor)], dtype)

    def end() -> list[Tensor]:
        matrices = end_gather()
        counts = list(map(len, matrices))
        # A new scale for each matrix that this rank owns.
        numbers = matrices[0].new_empty(sum(counts), dtype=product_dtype(matrices[0]))
        new_scales = numbers.split(counts)
        row_stacks = []
        for i, (indices, rows) in enumerate(zip(owners.mine, scaled(matrices), strict=True)):
            owned = stacks[i][indices.start : indices.stop]
            scales = _scales(owned, mode)._replace(after=list(new_scales[i]))
            layout = MatrixLayout.whole(layouts[i].shape)
            row_stacks.append(row_stack(stacks[i][0].group, layout, rows, scales))
        directions = polar_factors(row_stacks, mode.moves)
        # The same on ranks that own no matrix.
        narrow = dtype_of_products(numbers)
        U, numbers_of_all = owners.scatter(directions, numbers, dtype, narrow)
        if mode.remember:
            states = owners.by_owner([[m.R_scale for m in of_stack] for of_stack in stacks])
            ops.copy_(states, numbers_of_all, mode.moves)
        return U

    return end


def _lies_turned(matrices: Sequence[Matrix]) -> bool:
    """Whether the transposes of a stack's oriented matrices are exchanged.

    So directions come back with the strides of weights, and an accelerator copies none. On a
    CPU copies cost little, and all matrices are exchanged as oriented: rounding errors depend
    on strides there, but should not depend on how weights lie in memory.
    """
    m = matrices[0]
    lies_turned = m.layout.transposed != m.shard.view.input_first
    return lies_turned and m.parameter.X.device.type != "cpu"


def _scales(matrices: Sequence[Matrix], mode: StepMode) -> Scales:
    """The last scales of a stack; new ones take their place if the step keeps notes."""
    states = [m.R_scale for m in matrices]
    decays = each_of_group([m.parameter for m in matrices], scale_decay)
    return Scales(states, decays, states if mode.remember else ())


def _own_elements(m: Matrix, U: Tensor) -> Tensor:
    """U with zeros for other ranks' elements of a flat shard's rows, (k, m_i, n_j)."""
    # A flat shard is a stack of its own.
    return U if m.shard.view.is_view else m.own(U[0])[None]


def _prepared(stacks: Stacks, tensors: StepTensors, mode: StepMode) -> list[Prepared]:
    """The momenta with look-ahead, by stack, and scaled where they may be."""
    scales_first = list(map(_scales_first, stacks))
    prepared: dict[int, Prepared] = {}
    # B = M + look_ahead G, which is exchanged
    unscaled = [i for i, first in enumerate(scales_first) if not first]
    dtypes = []
    for i in unscaled:
        dtypes.append(_route(stacks[i], stacks[i][0].layout).dtype)
    ahead = looking_ahead([stacks[i] for i in unscaled], tensors, mode, dtypes)
    prepared.update(zip(unscaled, ahead.B, strict=True))
    # B = 2^-e (M + look_ahead G), which is multiplied as it is
    scaled_first = [i for i, first in enumerate(scales_first) if first]
    dtypes = []
    for i in scaled_first:
        m = stacks[i][0]
        X = m.parameter.local
        wide = X.new_empty(0, dtype=product_dtype(X))
        dtypes.append(dtype_of_products(wide))
    ahead = looking_ahead([stacks[i] for i in scaled_first], tensors, mode, dtypes, scaled=True)
    counts = [len(stacks[i]) for i in scaled_first]
    exponents = ahead.e.split(counts)
    traces = ahead.trace.split(counts)
    for i, B, e, trace in zip(scaled_first, ahead.B, exponents, traces, strict=True):
        prepared[i] = Scaled(B, e, trace)
    return [prepared[i] for i in range(len(stacks))]


def _is_column_major(m: Matrix) -> bool:
    """Whether columns of its shard lie one after another in memory."""
    rows, columns = m.strides
    return rows < columns


class LookAhead(NamedTuple):
    """Momenta with look-ahead of a batch."""

    B: list[Tensor]  # 2^-e (M + look_ahead G), (k, m_i, n_j) by stack
    e: Tensor  # (number of matrices,), or (0,) if B is not scaled
    trace: Tensor  # the sums of squares of B, like e


def looking_ahead(
    stacks: Stacks,
    tensors: StepTensors,
    mode: StepMode,
    dtypes: Sequence[torch.dtype],
    *,
    scaled: bool = False,
) -> LookAhead:
    """M <- mu M + G, and B = 2^-e (M + look_ahead G), in one pass over them.

    Args:
        stacks: the matrices.
        tensors: weights, momenta and gradients of all parameters that move.
        mode: of the step; its ``lengths`` are of these matrices if scaled.
        dtypes: of B, by stack.
        scaled: whether e brings B to the range of float16; otherwise it is zero.
    """
    matrices = list(chain.from_iterable(stacks))
    if not matrices:
        nothing = torch.empty(0)
        return LookAhead([], nothing, nothing)
    gradients = dict(zip(tensors.parameters, tensors.G, strict=True))
    momenta = dict(zip(tensors.parameters, tensors.M, strict=True))
    G = gradients_without_gaps(matrices, [gradients[m.parameter] for m in matrices])
    owners = [m.parameter for m in matrices]
    mu = each_of_group(owners, attrgetter("momentum_decay"))
    look_ahead = each_of_group(owners, lambda p: p.group["look_ahead"])
    M_of_matrices = [momenta[m.parameter] for m in matrices]
    step = mode.step_index
    stay_coded = []
    for stack in stacks:
        # B has the order of the first one's shard in memory, in which operations take codes.
        stay = [m.stays_coded for m in stack]
        if any(stay):
            column_major = _is_column_major(stack[0])
            stay = [m.stays_coded and _is_column_major(m) == column_major for m in stack]
        stay_coded += stay
    seeds = None
    if any(stay_coded):
        seeds = [m.parameter.state_seed(step, MOMENTUM, m.index) for m in matrices]
    with open_shards(matrices, M_of_matrices, gaps=False, stay_coded=stay_coded, step=step) as (M,):
        lengths = None
        if scaled:
            lengths = mode.lengths
        if scaled and lengths is None:
            # Of mu M + G + look_ahead G
            lengths, _ = ops.lengths(M, G, mu, [1 + share for share in look_ahead])
        B = []
        start = 0
        for stack, dtype in zip(stacks, dtypes, strict=True):
            of_stack = M[start]
            if ops.is_coded(of_stack):
                of_stack = stack[0].read(stack[0].parameter.local)
            B.append(empty_stack(of_stack, len(stack), dtype))
            start += len(stack)
        outputs = list(chain.from_iterable(B))
        e, trace = ops.ahead_(M, G, mu, look_ahead, outputs, lengths, mode.moves, seeds)
    return LookAhead(B, e, trace)
