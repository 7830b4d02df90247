"""The polar factor of the momentum as the direction (Muon's), on shards.

With B the oriented momentum (m x n, m >= n), of which a rank holds rows B_k,

    G = sum_k B_k^T B_k          n (n + 1) / 2 elements per matrix: a sum for one rank
    Z = G^(-1/2), about          Newton-Schulz iterations on this rank
    U_k = B_k Z                  n (n + 1) / 2 elements per matrix: Z for all ranks
    X_k <- (1 - lr wd) X_k - lr scale U_k

At full rank P R^T is the momentum itself, so error feedback and the plain rule are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from curvadion import ops
from curvadion.comm.collectives import Buckets
from curvadion.comm.groups import Group
from curvadion.layout.matrix import MatrixLayout
from curvadion.layout.states import squares_held
from curvadion.ops.tensors import Lists, from_host
from curvadion.update.direction import Direction, How, Taken
from curvadion.update.newton_schulz import polar_factors, row_stack
from curvadion.update.parameter import (
    Matrix,
    Stacks,
    dtype_of,
    empty_stack,
    open_shards,
    remember_scales,
    rounding_seeds,
    scale_before,
    stacked,
)
from curvadion.update.plan import Gradients, Plan
from curvadion.update.row_shards import (
    Owners,
    cut_columns,
    dtype_of_products,
    sends_less,
    summands_of_columns,
    whole_rows,
)
from curvadion.update.state import SPECTRUM, SPECTRUM_WEIGHT

TINY = torch.finfo(torch.float32).tiny
Found = tuple[list[Tensor], list[Tensor]]  # U (k, m_i, n_j) and the scales (k,), by stack
Begun = Callable[[], Found]


class Polar(Direction):
    """The polar factor of M + look_ahead G."""

    keeps_spectrum = True

    def begin(self, batch: Plan, gradients: Gradients) -> Callable[[], Any]:
        stacks, layouts = batch.stacks, [m.layout for m, *_ in batch.stacks]

        def begin() -> Begun:
            return begin_polar_directions(stacks, looking_ahead(stacks, gradients), layouts)

        # Without an exchange these copies need not exist beside the last batch's.
        whole = all(layout.shards is None for layout in layouts)
        return (lambda: begin()()) if whole else begin()

    def step(
        self, batch: Plan, gradients: Gradients, begun: Callable[[], Any], how: How
    ) -> Taken:
        U, scales = begun()
        move(batch.stacks, self.rescaled(batch.stacks, U, how), how)
        if how.remember:
            remember_scales(batch.stacks, scales, how.moves)
        return PolarTaken(batch, U)

    def rescaled(
        self, stacks: Stacks, U: Lists, how: How, masks: Lists | None = None
    ) -> Lists:
        """The final directions from shards of U, (k, m_i, n_j) by stack; collective.

        U is oriented like :class:`Matrix`. A stack's matrices may have different options;
        there may be no stack. Leave U as it is, and write states with
        :func:`curvadion.ops.copy_` and ``how.moves``. Sums over ranks are over
        ``m.layout.shards``, and count ``m.held(u)`` of a flat shard. masks: which columns are
        not zero, (k, n_j); None: all.
        """
        return U


class PolarTaken(Taken):
    """A step along polar factors."""

    def __init__(self, plan: Plan, U: list[Tensor], ranks: list[int] | None = None) -> None:
        super().__init__(plan, ranks or [min(m.layout.shape) for m, *_ in plan.stacks])
        self._U = U

    def turn_momenta_(self, changes: Lists, shares: Lists, decay: float) -> None:
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
                ops.local_step_(opened, list(turn), [-1.0] * len(matrices), ones)

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
    stacks: Stacks, B: list[Tensor], layouts: Sequence[MatrixLayout]
) -> Begun:
    """Begin to exchange B, (k, m_i, n_j) by stack, and clear it; the call computes U."""
    ways: dict[tuple[Group | None, torch.dtype, torch.dtype], list[int]] = {}
    for i, (matrices, shards, layout) in enumerate(zip(stacks, B, layouts, strict=True)):
        ways.setdefault((*_exchange(matrices, shards, layout), shards.dtype), []).append(i)
    begun: list[tuple[list[int], Begun]] = []
    for (group, dtype, _), chosen in ways.items():
        some = (
            [stacks[i] for i in chosen],
            [B[i] for i in chosen],
            [layouts[i] for i in chosen],
        )
        by = partial(_by_gram, *some) if group is None else _by_owners(*some, group, dtype)
        begun.append((chosen, by))
    B.clear()

    def end() -> Found:
        found: dict[int, tuple[Tensor, Tensor]] = {}
        while begun:
            chosen, by = begun.pop(0)
            found |= zip(chosen, zip(*by(), strict=True), strict=True)
            del by
        in_order = [found[i] for i in range(len(stacks))]
        return [U for U, _ in in_order], [scale for _, scale in in_order]

    return end


def _exchange(
    matrices: Sequence[Matrix], B: Tensor, layout: MatrixLayout
) -> tuple[Group | None, torch.dtype]:
    """The group of a stack's owners, if any, and the dtype on the wire."""
    options, half = matrices[0].group, dtype_of_products(B)
    dtype = torch.bfloat16 if half != B.dtype else B.dtype
    if options["exchange_dtype"] is not None:
        dtype = dtype_of(options["exchange_dtype"], B)
    alone = layout.shards is None or options["gather"] == "never"
    if alone or not sends_less(layout, len(matrices), dtype, half):
        return None, B.dtype
    return layout.shards, dtype


def _by_gram(stacks: Stacks, B: Lists, layouts: Sequence[MatrixLayout]) -> Found:
    options, before = [m.group for m, *_ in stacks], map(scale_before, stacks)
    rows = map(row_stack, options, layouts, whole_rows(B, layouts), before)
    U, scales = polar_factors(list(rows))
    return cut_columns(U, layouts), scales


def _by_owners(
    stacks: Stacks,
    B: Lists,
    layouts: Sequence[MatrixLayout],
    group: Group,
    dtype: torch.dtype,
) -> Begun:
    owners = Owners(layouts, list(map(len, stacks)), group)
    whole = owners.begin_gather(B, dtype)

    def end() -> Found:
        rows = []
        each = zip(stacks, layouts, whole(), owners.mine, strict=True)
        for matrices, layout, held, mine in each:
            alone = MatrixLayout.whole(layout.shape)
            scale = scale_before(matrices)[mine.start : mine.stop]
            rows.append(row_stack(matrices[0].group, alone, held, scale))
        return owners.scatter(*polar_factors(rows), dtype)

    return end


def _own_elements(m: Matrix, U: Tensor) -> Tensor:
    """U with zeros for other ranks' elements of a flat shard's rows, (1, m_i, n_j)."""
    if m.shard.view.is_view:
        return U
    flat = torch.empty_like(m.parameter.local, dtype=U.dtype)
    m.elements(flat).copy_(m.held(U[0]))
    return m.read(flat)[None]


def looking_ahead(stacks: Stacks, gradients: Gradients) -> list[Tensor]:
    """B = M + look_ahead G, (k, m_i, n_j) by stack, in the dtype of products."""
    G = dict(zip(gradients.parameters, gradients.G, strict=True))
    M = [[m.M for m in matrices] for matrices in stacks]
    B = [empty_stack(held, stack[0]) for held, stack in zip(M, stacks, strict=True)]
    matrices = list(chain(*stacks))
    ahead = [m.group["look_ahead"] for m in matrices]
    read = [m.read(G[m.parameter]) for m in matrices]
    ops.look_ahead(list(chain(*M)), read, ahead, list(chain(*B)))
    return B


def move(stacks: Stacks, U: Lists, how: How) -> None:
    """X <- (1 - lr wd) X - lr scale U."""
    matrices = list(chain(*stacks))
    rates = [m.group["lr"] * m.update_scale for m in matrices]
    decays = [m.parameter.decay for m in matrices]
    seeds = rounding_seeds(matrices, how.number)
    with open_shards(matrices, [m.parameter.local for m in matrices]) as (X,):
        ops.local_step_(X, list(chain(*U)), rates, decays, seeds=seeds, moves=how.moves)
