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
from curvadion.layout.exchange import sums
from curvadion.layout.flat_shard import flat_matrices, flat_shard
from curvadion.layout.matrix import Block, Extent, Options
from curvadion.ops.rows import Moments
from curvadion.ops.tensors import Tensors
from curvadion.plan.parameter import Matrix, Stacks, product_dtype
from curvadion.plan.state import StateKey, StateOwner
from curvadion.update.direction import StepMode
from curvadion.update.polar import Polar

ROW_SECOND_MOMENT = "row_second_moment"


class NorMuon(Polar):
    """Polar factors whose rows are divided by their second moment."""

    capturable = True
    state_keys = (StateKey(ROW_SECOND_MOMENT, StateOwner.REPLICA),)  # one per row

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
        self, stacks: Stacks, U: Tensors, mode: StepMode, masks: Tensors | None = None
    ) -> Tensors:
        if not stacks:  # a rank without experts
            return []
        # By stack: the directions of X (k, rows, columns), and this rank's rows and columns.
        directions = [_turned(u, m) for u, (m, *_) in zip(U, stacks, strict=True)]
        extents = [_rows_and_columns(m) for m, *_ in stacks]
        # The rank on which a column or row begins counts it.
        counted = [
            columns.counted(u.mT).mT for u, (_, columns) in zip(directions, extents, strict=True)
        ]
        # Squared lengths of rows, (k, rows)
        squares = sums(ops.row_sums(counted, 2), [columns.group for _, columns in extents])
        # v <- beta2 v + (1 - beta2) squares / width
        moments = [
            _moments(matrices, None if masks is None else masks[i])
            for i, matrices in enumerate(stacks)
        ]
        factors, energies = ops.second_moments_(squares, moments, mode.moves)
        # U <- c U / (sqrt(v) + eps)
        energies = sums(energies, [rows.group for rows, _ in extents])
        rescaled = ops.rescaled_rows(directions, factors, energies)
        return [_turned(u, m) for u, (m, *_) in zip(rescaled, stacks, strict=True)]


def _turned(U: Tensor, m: Matrix) -> Tensor:
    """U between the orientations of B and X."""
    return U.mT if m.layout.transposed else U


def _rows_and_columns(m: Matrix) -> tuple[Extent, Extent]:
    """The rows and columns of X on this rank."""
    layout = m.layout
    return (layout.columns, layout.rows) if layout.transposed else (layout.rows, layout.columns)


def _moments(matrices: Sequence[Matrix], mask: Tensor | None) -> Moments:
    """What is known of a stack's rows; mask: which columns of B are not zero, (k, n_j)."""
    first = matrices[0]
    width = first.layout.shape[1]
    rows = None
    if mask is not None and first.layout.transposed:
        rows = mask  # it selects rows of X
    elif mask is not None:
        width = first.shard.rank  # it selects as many elements of every row
    return Moments(
        v=[_second_moment(m) for m in matrices],
        width=width,
        beta2=[m.group["betas"][1] for m in matrices],
        eps=[m.group["eps"] for m in matrices],
        mask=rows,
        skipped=int(_rows_and_columns(first)[0].borrowed),
    )


def _second_moment(m: Matrix) -> Tensor:
    """v of this rank's rows, a view, (rows,)."""
    held, view = local(m.parameter.state[ROW_SECOND_MOMENT]), m.shard.view
    if isinstance(view, Block):
        return held[view.stack][view.rows]
    before = sum(len(_rows_and_columns(one)[0]) for one in m.parameter.matrices[: m.index])
    return held[before : before + len(_rows_and_columns(m)[0])]
