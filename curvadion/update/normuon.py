"""The polar factor with rows of equal length over time (NorMuon, arXiv 2510.05491).

    v <- beta2 v + (1 - beta2) mean over a row of U^2      m elements per matrix (m x n)
    U <- c U / (sqrt(v) + eps)                             by row; c keeps the Frobenius norm

Rows are outputs of X. beta2 and eps are the group's, as in AdamW.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvadion import ops
from curvadion.layout.dtensor import local, output_first, state_placements, zeros
from curvadion.layout.flat_shard import flat_matrices, flat_shard
from curvadion.layout.matrix import Block, Extent, Options
from curvadion.ops.tensors import Lists, from_host
from curvadion.update.direction import How
from curvadion.update.parameter import Matrix, Stacks, product_dtype
from curvadion.update.polar import TINY, Polar
from curvadion.update.row_shards import sums
from curvadion.update.state import Owner, StateKey

ROW_SECOND_MOMENT = "row_second_moment"


class NorMuon(Polar):
    """Polar factors whose rows are divided by their second moment."""

    state_keys = (StateKey(ROW_SECOND_MOMENT, Owner.REPLICA),)  # one per row

    def create_state(self, X: Tensor, options: Options) -> dict[str, Tensor]:
        """v, (*stack dimensions, m), sharded like X's rows; of a flat shard this rank's."""
        dtype = product_dtype(X)
        if (shard := flat_shard(X)) is not None:
            # With the input first, rows of X are columns of the stored tensor.
            matrices, turned = flat_matrices(shard, options), options["input_first"]
            count = sum(shape[0] if turned else len(view.rows) for _, shape, view in matrices)
            return {ROW_SECOND_MOMENT: torch.zeros(count, dtype=dtype, device=X.device)}
        X, stack_dims = output_first(X, options), options["stack_dims"]
        placements = state_placements(X, stack_dims, stack_dims)
        return {ROW_SECOND_MOMENT: zeros(X, X.shape[: stack_dims + 1], placements, dtype)}

    def rescaled(
        self, stacks: Stacks, U: Lists, how: How, masks: Lists | None = None
    ) -> Lists:
        if not stacks:  # a rank without experts
            return []
        rows, columns = zip(*(_rows_and_columns(m) for m, *_ in stacks), strict=True)
        by_row = [_turned(u, m) for u, (m, *_) in zip(U, stacks, strict=True)]
        squares = []
        for u, held in zip(by_row, columns, strict=True):
            # (k, columns, rows) -> (k, rows)
            squares.append(held.counted(u.mT).to(product_dtype(u)).square().sum(-2))
        squares = sums(squares, [held.group for held in columns])
        scales, energies = [], []
        for i, matrices in enumerate(stacks):
            layout, moments = matrices[0].layout, [_moments(m) for m in matrices]
            # Masks select rows of X, or as many elements of every row.
            elements = masks is not None and not layout.transposed
            width = matrices[0].shard.rank if elements else layout.shape[1]
            now = squares[i] / _column([width] * len(matrices), squares[i])
            beta2 = _column([m.group["betas"][1] for m in matrices], now)
            eps = _column([m.group["eps"] for m in matrices], now)
            before = torch.stack(moments).to(now.dtype)
            v = torch.lerp(now, before, beta2)
            if masks is not None and layout.transposed:
                v = torch.where(masks[i], v, before)
            ops.copy_(moments, v, how.moves)
            scales.append(1 / (v.sqrt() + eps).clamp_min(TINY))
            # The rank on which a row begins counts it: (k, rows, 2) -> (k, 2)
            both = torch.stack([squares[i], squares[i] * scales[i].square()], dim=-1)
            energies.append(rows[i].counted(both).sum(1))
        result, energies = [], sums(energies, [held.group for held in rows])
        for u, scale, energy, (m, *_) in zip(by_row, scales, energies, stacks, strict=True):
            length = (energy[:, :1] / energy[:, 1:].clamp_min(TINY)).sqrt()
            result.append(_turned(u * (scale * length).to(u.dtype).unsqueeze(-1), m))
        return result


def _turned(U: Tensor, m: Matrix) -> Tensor:
    """U between the orientations of B and X."""
    return U.mT if m.layout.transposed else U


def _rows_and_columns(m: Matrix) -> tuple[Extent, Extent]:
    """The rows and columns of X on this rank."""
    layout = m.layout
    return (
        (layout.columns, layout.rows) if layout.transposed else (layout.rows, layout.columns)
    )


def _column(numbers: Sequence[float], like: Tensor) -> Tensor:
    """One number per matrix, (k, 1)."""
    return from_host(numbers, like.dtype, like.device).unsqueeze(-1)


def _moments(m: Matrix) -> Tensor:
    """v of this rank's rows, a view, (rows,)."""
    held, view = local(m.parameter.state[ROW_SECOND_MOMENT]), m.shard.view
    if isinstance(view, Block):
        return held[view.stack][view.rows]
    before = sum(len(_rows_and_columns(one)[0]) for one in m.parameter.matrices[: m.index])
    return held[before : before + len(_rows_and_columns(m)[0])]
