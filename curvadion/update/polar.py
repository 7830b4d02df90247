"""The polar factor of the momentum as the direction (Muon's), on shards, without unsharding.

With B the oriented momentum (m x n, m >= n), of which a rank holds rows B_k,

    G = sum_k B_k^T B_k          n (n + 1) / 2 numbers a matrix: a sum over ranks, on one of them
    Z = G^(-1/2), about          Newton-Schulz iterations, each matrix on one of the ranks
    U_k = B_k Z                  n (n + 1) / 2 numbers a matrix: Z for all ranks
    X_k <- (1 - lr wd) X_k - lr scale U_k

At full rank P R^T is the momentum itself: error feedback, M <- M - (1 - mu) P R^T, and the plain
rule, M <- mu M + G, then are the same rule. There is no right factor to remember.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvadion import ops
from curvadion.comm.collectives import Buckets
from curvadion.layout.squares import squares_held
from curvadion.ops.tensors import from_host
from curvadion.update.direction import Direction, Taken
from curvadion.update.gradients import Gradients
from curvadion.update.newton_schulz import (
    MUON,
    SMALLEST,
    SMALLEST_IN_HALF,
    Bound,
    passes_in_half,
    polar_express,
)
from curvadion.update.parameter import (
    Matrix,
    open_shards,
    remember_scales,
    scale_before,
    stacked,
)
from curvadion.update.plan import Plan
from curvadion.update.polar_factor import RowStack, polar_factors
from curvadion.update.row_shards import (
    cut_columns,
    dtype_of_products,
    summands_of_columns,
    whole_rows,
)
from curvadion.update.state import SPECTRUM, SPECTRUM_WEIGHT

TINY = torch.finfo(torch.float32).tiny


class Polar(Direction):
    """The polar factor of M + look_ahead G."""

    keeps_spectrum = True

    def step(
        self,
        batch: Plan,
        gradients: Gradients,
        *,
        step: int,
        inside_replica: bool,
        remember: bool,
    ) -> Taken:
        stacks = batch.stacks
        layouts = [matrices[0].layout for matrices in stacks]
        G = dict(zip(map(id, gradients.parameters), gradients.G, strict=True))
        B = whole_rows([_looking_ahead(matrices, G) for matrices in stacks], layouts)
        factors = polar_factors(
            [_row_stack(matrices, rows) for matrices, rows in zip(stacks, B, strict=True)]
        )
        del B
        U = [of_stack.U for of_stack in factors]
        _move(stacks, cut_columns(U, layouts), step)
        if remember:
            remember_scales(stacks, [of_stack.scale for of_stack in factors])
        return PolarTaken(batch, U)


class PolarTaken(Taken):
    """A step along polar factors. U: their whole rows, (k, m_r, n) by stack."""

    def __init__(self, plan: Plan, U: list[Tensor]) -> None:
        super().__init__(plan)
        self._U = U

    def ranks(self) -> list[int]:
        return [min(matrices[0].layout.shape) for matrices in self.stacks]

    def turn_momenta_(
        self, changes: Sequence[Tensor], shares: Sequence[Tensor], decay: float = 0.0
    ) -> None:
        layouts = [matrices[0].layout for matrices in self.stacks]
        momenta = [stacked([m.M for m in s], s[0]) for s in self.stacks]
        # Both of a size about 1. Every rank of the replica knows the same lengths of momenta.
        lengths = [torch.stack([m.R_scale for m in s])[:, None, None] for s in self.stacks]
        for M, change, length, share in zip(momenta, changes, lengths, shares, strict=True):
            M.div_(length.clamp_min(TINY))
            change.mul_(share[:, None, None])
        summands = summands_of_columns(self._U, whole_rows(momenta, layouts), layouts)
        self._U.clear()
        del momenta
        for S, length in zip(summands.views, lengths, strict=True):
            S.mul_(length)
        weights = self._sum_spectra_(summands, decay)
        turns = []
        whole = whole_rows(changes, layouts)
        for rows, S, weight in zip(whole, summands.views, weights, strict=True):
            size = torch.linalg.vector_norm(S, torch.inf, (1, 2), keepdim=True)
            S.div_(size.clamp_min(TINY))
            dtype = dtype_of_products(rows)
            # (m_r, n) = (m_r, n) (n, n)
            turn = torch.bmm(rows.to(dtype), S.to(dtype))
            turns.append(turn.to(rows.dtype).mul_((size / weight).to(rows.dtype)))
        for matrices, turn in zip(self.stacks, cut_columns(turns, layouts), strict=True):
            ones = [1.0] * len(matrices)
            with open_shards(matrices, [m.parameter.M for m in matrices]) as (opened,):
                ops.local_step_(opened, list(turn), [-1.0] * len(matrices), ones)

    def _sum_spectra_(self, summands: Buckets, decay: float) -> list[Tensor]:
        """Sum up S over the shards, and over openings if their weight decays; the sums' weights.

        Of the earlier S each rank holds a part, which goes into the one sum over ranks.
        """
        if not decay:
            summands.all_reduce_()
            return [S.new_ones(len(S), 1, 1) for S in summands.views]
        weights = {
            p: decay * p.state[SPECTRUM_WEIGHT] + 1 - decay
            for p in (m.parameter for matrices in self.stacks for m in matrices)
        }
        kept = {}
        for p in weights:
            sides = [min(m.layout.shape) for m in p.matrices]
            kept[p] = list(squares_held(p.X, p.state[SPECTRUM], sides))
        earlier, now = list[Tensor](), list[Tensor]()
        for matrices, S in zip(self.stacks, summands.views, strict=True):
            S.mul_(1 - decay)
            for m, flat in zip(matrices, S.flatten(1), strict=True):
                part, where = kept[m.parameter][m.index]
                earlier.append(part)
                now.append(flat[where])
        torch._foreach_add_(now, earlier, alpha=decay)
        summands.all_reduce_()
        torch._foreach_copy_(earlier, now)
        for p, weight in weights.items():
            p.state[SPECTRUM_WEIGHT] = weight
        return [
            from_host([weights[m.parameter] for m in matrices], S.dtype, S.device)[:, None, None]
            for matrices, S in zip(self.stacks, summands.views, strict=True)
        ]


# -------------------------------------------------------------------- before and after


def _row_stack(matrices: Sequence[Matrix], B: Tensor) -> RowStack:
    """What the polar factors of a stack follow from; B: whole rows of it."""
    steps = matrices[0].group["newton_schulz_steps"]
    muon = matrices[0].group["newton_schulz"] == "muon"
    half = dtype_of_products(B) != B.dtype
    least = SMALLEST_IN_HALF if half else SMALLEST
    coefficients = (MUON,) * steps if muon else polar_express(steps, least)
    return RowStack(
        layout=matrices[0].layout,
        B=B,
        scale=scale_before(matrices).to(B.dtype),
        passes=passes_in_half(coefficients) if half else (coefficients,),
        bound=Bound.TRACE if muon else Bound.TIGHT,
        dtype=dtype_of_products(B),
    )


def _looking_ahead(matrices: Sequence[Matrix], G: dict[int, Tensor]) -> Tensor:
    """M + look_ahead G of a stack, (k, m_i, n_j), in the dtype of products."""
    B = stacked([m.M for m in matrices], matrices[0])
    shares = [m.parameter.look_ahead for m in matrices]
    for share in {share for share in shares if share}:
        chosen = [i for i, each in enumerate(shares) if each == share]
        ahead = [matrices[i].read(G[id(matrices[i].parameter)]).to(B.dtype) for i in chosen]
        torch._foreach_add_([B[i] for i in chosen], ahead, alpha=share)
    return B


def _move(stacks: Sequence[Sequence[Matrix]], U: Sequence[Tensor], step: int) -> None:
    """X <- (1 - lr wd) X - lr scale U."""
    by_rounding: dict[bool, list[tuple[Matrix, Tensor]]] = {}
    for matrices, directions in zip(stacks, U, strict=True):
        for m, direction in zip(matrices, directions, strict=True):
            by_rounding.setdefault(m.parameter.stochastic_rounding, []).append((m, direction))
    for random, moves in by_rounding.items():
        chosen = [m for m, _ in moves]
        with open_shards(chosen, [m.parameter.local for m in chosen]) as (X,):
            ops.local_step_(
                X,
                [direction for _, direction in moves],
                [m.group["lr"] * m.update_scale for m in chosen],
                [m.parameter.decay for m in chosen],
                seeds=[m.rounding_seed(step) for m in chosen] if random else None,
            )
