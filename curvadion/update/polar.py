"""The polar factor of the momentum as the direction (Muon's), on shards.

With B the oriented momentum (m x n, m >= n), of which a rank holds rows B_k,

    G = sum_k B_k^T B_k          n (n + 1) / 2 elements per matrix: a sum for one rank
    Z = G^(-1/2), about          Newton-Schulz iterations on this rank
    U_k = B_k Z                  n (n + 1) / 2 elements per matrix: Z for all ranks
    X_k <- (1 - lr wd) X_k - lr scale U_k

At full rank P R^T is the momentum itself, so error feedback and the plain rule are the same.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from curvadion import ops
from curvadion.comm.collectives import Buckets
from curvadion.comm.groups import Group
from curvadion.layout.exchange import (
    MatrixOwners,
    cut_columns,
    dtype_of_products,
    sends_less,
    summands_of_columns,
    whole_rows,
)
from curvadion.layout.matrix import MatrixLayout
from curvadion.layout.sharded_states import squares_held
from curvadion.ops.tensors import Tensors, from_host
from curvadion.plan.parameter import (
    Matrix,
    Stacks,
    dtype_of,
    each_of_group,
    empty_stack,
    open_shards,
    product_dtype,
    rounding_seeds,
    scale_decay,
    stacked,
    step_sizes,
    weight_decays,
)
from curvadion.plan.plan import Plan, StepTensors
from curvadion.plan.state import SPECTRUM, SPECTRUM_WEIGHT
from curvadion.update.direction import Direction, Directions, StepMode
from curvadion.update.newton_schulz import (
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
    """The polar factor of M + look_ahead G."""

    keeps_spectrum = adds_gradients = capturable = True

    def measures(self, matrices: Sequence[Matrix]) -> bool:
        return _scales_first(matrices)

    def begin(self, plan: Plan, tensors: StepTensors, mode: StepMode) -> Callable[[], Any]:
        stacks = plan.stacks
        layouts = [m.layout for m, *_ in stacks]

        def begin() -> Begun:
            prepared = _prepared(stacks, tensors, mode)
            return begin_polar_directions(stacks, prepared, layouts, mode)

        # Without an exchange these copies need not exist beside the last batch's.
        whole = all(layout.shards is None for layout in layouts)
        return (lambda: begin()()) if whole else begin()

    def step(
        self, plan: Plan, tensors: StepTensors, begun: Callable[[], Any], mode: StepMode
    ) -> Directions:
        U = begun()
        move(plan.stacks, self.rescaled(plan.stacks, U, mode), mode)
        return PolarDirections(plan, U)

    def rescaled(
        self, stacks: Stacks, U: Tensors, mode: StepMode, masks: Tensors | None = None
    ) -> Tensors:
        """The final directions from shards of U, (k, m_i, n_j) by stack; collective.

        U is oriented like :class:`Matrix`. A stack's matrices may have different options;
        there may be no stack. Leave U as it is, and write states with
        :func:`curvadion.ops.copy_` and ``mode.moves``. Sums over ranks are over
        ``m.layout.shards``, and count ``m.held(u)`` of a flat shard. masks: which columns are
        not zero, (k, n_j); None: all.
        """
        return U


class PolarDirections(Directions):
    """A step along polar factors."""

    def __init__(self, plan: Plan, U: list[Tensor], ranks: list[int] | None = None) -> None:
        super().__init__(plan, ranks or [min(m.layout.shape) for m, *_ in plan.stacks])
        self._U = U

    def turn_momenta_(self, changes: Tensors, shares: Tensors, decay: float) -> None:
        layouts = [m.layout for m, *_ in self.stacks]
        momenta = [stacked([m.M for m in s], s[0]) for s in self.stacks]
        # Scale both to about 1; all ranks of the replica know these lengths.
        lengths = [torch.stack([m.R_scale for m in s])[:, None, None] for s in self.stacks]
        for M, change, length, share in zip(momenta, changes, lengths, shares, strict=True):
            M.div_(length.clamp_min(TINY))
            change.mul_(share[:, None, None])
        U = [_own_elements(m, u) for (m, *_), u in zip(self.stacks, self._U, strict=True)]
        self._U.clear()
        U = whole_rows(U, layouts)
        summands = summands_of_columns(U, whole_rows(momenta, layouts), layouts)
        del momenta, U
        for S, length in zip(summands.views, lengths, strict=True):
            S.mul_(length)
        weights = self._sum_spectra_(summands, decay)
        turns, whole = [], whole_rows(changes, layouts)
        for rows, S, weight in zip(whole, summands.views, weights, strict=True):
            size = torch.linalg.vector_norm(S, torch.inf, (1, 2), keepdim=True)
            S.div_(size.clamp_min(TINY))
            dtype = dtype_of_products(rows)
            turn = torch.bmm(rows.to(dtype), S.to(dtype))
            turns.append(turn.to(rows.dtype).mul_((size / weight).to(rows.dtype)))
        for matrices, turn in zip(self.stacks, cut_columns(turns, layouts), strict=True):
            ones = [1.0] * len(matrices)
            with open_shards(matrices, [m.parameter.M for m in matrices]) as (opened,):
                ops.local_step_(opened, list(turn), [-1.0] * len(matrices), ones, moves=None)

    def _sum_spectra_(self, summands: Buckets, decay: float) -> list[Tensor]:
        """Sum S over shards, and openings if earlier ones count; return the weights."""
        parameters = {m.parameter for matrices in self.stacks for m in matrices}
        if not decay or any(SPECTRUM not in p.state for p in parameters):
            summands.all_reduce_()
            return [S.new_ones(len(S), 1, 1) for S in summands.views]
        kept = {}
        for p in parameters:
            p.state[SPECTRUM_WEIGHT] = decay * p.state[SPECTRUM_WEIGHT] + 1 - decay
            sides = [min(m.layout.shape) for m in p.matrices]
            kept[p] = list(squares_held(p.X, p.state[SPECTRUM], sides))
        earlier, now = [], []
        for matrices, S in zip(self.stacks, summands.views, strict=True):
            for m, flat in zip(matrices, S.mul_(1 - decay).flatten(1), strict=True):
                part, where = kept[m.parameter][m.index]
                earlier.append(part)
                now.append(flat[where])
        torch._foreach_add_(now, earlier, alpha=decay)
        summands.all_reduce_()
        torch._foreach_copy_(earlier, now)
        found = []
        for matrices, S in zip(self.stacks, summands.views, strict=True):
            weights = [m.parameter.state[SPECTRUM_WEIGHT] for m in matrices]
            found.append(from_host(weights, S.dtype, S.device)[:, None, None])
        return found


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
    ways: dict[tuple[Group | None, torch.dtype, torch.dtype], list[int]] = {}
    for i, (matrices, layout) in enumerate(zip(stacks, layouts, strict=True)):
        dtype = product_dtype(matrices[0].parameter.X)
        ways.setdefault((*_route(matrices, layout), dtype), []).append(i)
    begun: list[tuple[list[int], Begun]] = []
    for (group, dtype, _), chosen in ways.items():
        some = [stacks[i] for i in chosen]
        B = [prepared[i] for i in chosen]
        of_some = [layouts[i] for i in chosen]
        end: Begun
        if group is None:
            end = partial(_by_gram, some, B, of_some, mode)
        else:
            end = _by_owners(some, B, of_some, mode, group, dtype)
        begun.append((chosen, end))
        del B
    prepared.clear()

    def end_all() -> list[Tensor]:
        found: dict[int, Tensor] = {}
        while begun:
            chosen, end = begun.pop(0)
            found |= zip(chosen, end(), strict=True)
            del end
        return [found[i] for i in range(len(stacks))]

    return end_all


def _route(matrices: Sequence[Matrix], layout: MatrixLayout) -> tuple[Group | None, torch.dtype]:
    """The group of a stack's owners, if any, and the dtype on the wire."""
    options = matrices[0].group
    parameter = matrices[0].parameter
    like = parameter.local.new_empty(0, dtype=product_dtype(parameter.X))
    half = dtype_of_products(like)
    dtype = torch.bfloat16 if half != like.dtype else like.dtype
    if options["exchange_dtype"] is not None:
        dtype = dtype_of(options["exchange_dtype"], like)
    alone = layout.shards is None or options["gather"] == "never"
    if alone or not sends_less(layout, len(matrices), dtype, half):
        return None, like.dtype
    return layout.shards, dtype


def _scales_first(matrices: Sequence[Matrix]) -> bool:
    """Whether shards are scaled for products before anything is exchanged.

    Ranks choose their own scales, so what they exchange or add up as rows must not be scaled.
    """
    layout = matrices[0].layout
    group, _ = _route(matrices, layout)
    return group is None and layout.columns.group is None and not layout.rows.shared


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
    unscaled = [i for i, B in enumerate(prepared) if isinstance(B, Tensor)]
    shards = [B for B in prepared if isinstance(B, Tensor)]
    whole = whole_rows(shards, [layouts[i] for i in unscaled])
    rows = dict(zip(unscaled, scaled(whole), strict=True))
    row_stacks = []
    for i, (matrices, B, layout) in enumerate(zip(stacks, prepared, layouts, strict=True)):
        of_stack = B if isinstance(B, Scaled) else rows[i]
        scales = _scales(matrices, mode)
        row_stacks.append(row_stack(matrices[0].group, layout, of_stack, scales))
    # Nothing else may hold the rows, which are freed after the first pass.
    prepared.clear()
    rows.clear()
    del B, of_stack, shards, whole
    return cut_columns(polar_factors(row_stacks, mode.moves), layouts)


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
    whole = owners.begin_gather([B for B in prepared if isinstance(B, Tensor)], dtype)

    def end() -> list[Tensor]:
        matrices = whole()
        counts = list(map(len, matrices))
        lengths = matrices[0].new_empty(sum(counts), dtype=product_dtype(matrices[0]))
        new = lengths.split(counts)
        row_stacks = []
        for i, (mine, of_stack) in enumerate(zip(owners.mine, scaled(matrices), strict=True)):
            owned = stacks[i][mine.start : mine.stop]
            scales = _scales(owned, mode)._replace(after=list(new[i]))
            alone = MatrixLayout.whole(layouts[i].shape)
            row_stacks.append(row_stack(stacks[i][0].group, alone, of_stack, scales))
        directions = polar_factors(row_stacks, mode.moves)
        # The same on ranks that own no matrix.
        narrow = dtype_of_products(lengths)
        U, found = owners.scatter(directions, lengths, dtype, narrow)
        if mode.remember:
            states = owners.by_owner([[m.R_scale for m in of_stack] for of_stack in stacks])
            ops.copy_(states, found, mode.moves)
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
    decays = each_of_group(matrices, scale_decay)
    return Scales(states, decays, states if mode.remember else ())


def _own_elements(m: Matrix, U: Tensor) -> Tensor:
    """U with zeros for other ranks' elements of a flat shard's rows, (1, m_i, n_j)."""
    if m.shard.view.is_view:
        return U
    flat = torch.empty_like(m.parameter.local, dtype=U.dtype)
    m.elements(flat).copy_(m.held(U[0]))
    return m.read(flat)[None]


def _prepared(stacks: Stacks, tensors: StepTensors, mode: StepMode) -> list[Prepared]:
    """The momenta with look-ahead, by stack, and scaled where they may be."""
    first = list(map(_scales_first, stacks))
    now = [i for i, scales in enumerate(first) if scales]
    later = [i for i, scales in enumerate(first) if not scales]
    prepared: dict[int, Prepared] = {}
    dtypes = []
    for i in later:
        dtypes.append(_route(stacks[i], stacks[i][0].layout)[1])
    B, *_ = looking_ahead([stacks[i] for i in later], tensors, mode, dtypes)
    prepared |= zip(later, B, strict=True)
    some = [stacks[i] for i in now]
    dtypes = []
    for stack in some:
        wide = stack[0].M.new_empty(0, dtype=product_dtype(stack[0].parameter.X))
        dtypes.append(dtype_of_products(wide))
    B, e, trace = looking_ahead(some, tensors, mode, dtypes, scaled=True)
    counts = list(map(len, some))
    each = zip(now, B, e.split(counts), trace.split(counts), strict=True)
    prepared |= {i: Scaled(b, exponents, traces) for i, b, exponents, traces in each}
    return [prepared[i] for i in range(len(stacks))]


def looking_ahead(
    stacks: Stacks,
    tensors: StepTensors,
    mode: StepMode,
    dtypes: Sequence[torch.dtype],
    *,
    scaled: bool = False,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """M <- mu M + G, and B = 2^-e (M + look_ahead G), in one pass over them.

    Args:
        stacks: the matrices.
        tensors: weights, momenta and gradients of all parameters that move.
        mode: of the step; its ``lengths`` are of these matrices if scaled.
        dtypes: of B, by stack.
        scaled: whether e brings B to the range of float16; otherwise it is zero.

    Returns:
        B, (k, m_i, n_j) by stack; e and the sums of squares of B, both (number of matrices,),
        or empty if not scaled.
    """
    matrices = list(chain(*stacks))
    if not matrices:
        nothing = torch.empty(0)
        return [], nothing, nothing
    G = dict(zip(tensors.parameters, tensors.G, strict=True))
    read = [m.read(G[m.parameter]) for m in matrices]
    mu = each_of_group(matrices, attrgetter("momentum_decay"))
    ahead = each_of_group(matrices, lambda p: p.group["look_ahead"])
    momenta = dict(zip(tensors.parameters, tensors.M, strict=True))
    with open_shards(matrices, [momenta[m.parameter] for m in matrices]) as (M,):
        lengths = None
        if scaled:
            lengths = mode.lengths
            if lengths is None:
                lengths, _ = ops.lengths(M, read, mu, [1 + share for share in ahead])
        B = []
        start = 0
        for stack, dtype in zip(stacks, dtypes, strict=True):
            B.append(empty_stack(M[start : start + len(stack)], dtype))
            start += len(stack)
        e, trace = ops.ahead_(M, read, mu, ahead, list(chain(*B)), lengths, mode.moves)
    return B, e, trace


def move(stacks: Stacks, U: Tensors, mode: StepMode) -> None:
    """X <- (1 - lr wd) X - lr scale U."""
    matrices = list(chain(*stacks))
    rates = step_sizes(matrices)
    decays = weight_decays(matrices)
    seeds = rounding_seeds(matrices, mode.step_index)
    with open_shards(matrices, [m.parameter.local for m in matrices]) as (X,):
        ops.local_step_(X, list(chain(*U)), rates, decays, seeds=seeds, moves=mode.moves)
