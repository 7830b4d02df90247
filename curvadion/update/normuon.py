"""The polar factor with rows of equal length over time (NorMuon, arXiv 2510.05491).

    v <- beta2 v + (1 - beta2) mean over a row of U^2      m elements per matrix (m x n)
    U <- c U / (sqrt(v) + eps)                             by row; c keeps the Frobenius norm

Rows are outputs of X. beta2 and eps are the group's, as in AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from curvadion import ops
from curvadion.layout.dtensor import local, output_first, state_placements, zeros
from curvadion.layout.exchange import sums
from curvadion.layout.flat_shard import flat_matrices, flat_shard
from curvadion.layout.matrix import Block, Options, block_sizes
from curvadion.ops.rows import Moments
from curvadion.ops.tensors import Tensors
from curvadion.plan.parameter import Matrix, Stacks, product_dtype
from curvadion.plan.state import StateKey, StateOwner
from curvadion.update.direction import StepMode
from curvadion.update.polar import Polar

ROW_SECOND_MOMENT = "row_second_moment"


class NorMuon(Polar):
    """Polar factors whose rows are divided by the roots of their second moments."""

    capturable = True
    state_keys = (StateKey(ROW_SECOND_MOMENT, StateOwner.REPLICA),)  # one per row

    def create_state(self, X: Tensor, options: Options) -> dict[str, Tensor]:
        """v, (*stack dimensions, m), sharded like X's rows; of a flat shard this rank's rows.

        With c blocks of columns, which have rows of their own, it is (*stack dimensions, c, m).
        """
        dtype = product_dtype(X)
        shard = flat_shard(X)
        if shard is not None:
            count = 0
            for _, (rows, _), view in flat_matrices(shard, options):
                # With the input first, rows of X are columns of the stored tensor. A rank
                # has a part of each, and keeps v of all.
                count += rows if options["input_first"] else len(view.rows)
            return {ROW_SECOND_MOMENT: torch.zeros(count, dtype=dtype, device=X.device)}
        stack_dims = options["stack_dims"]
        X = output_first(X, options)
        stack = X.shape[:stack_dims]
        m, *columns = X.shape[stack_dims:]
        count = len(block_sizes(math.prod(columns), options["column_blocks"], "column_blocks"))
        blocks = (count,) if count > 1 else ()
        placements = state_placements(X, stack_dims, stack_dims, len(blocks))
        return {ROW_SECOND_MOMENT: zeros(X, (*stack, *blocks, m), placements, dtype)}

    def rescaled(
        self, stacks: Stacks, U: Tensors, mode: StepMode, masks: Tensors | None = None
    ) -> Tensors:
        """U with rows of X divided by the roots of their second moments; collective.

        Args:
            stacks: the matrices; none on a rank without experts.
            U: shards of polar factors, (k, m_i, n_j) by stack.
            mode: of the step.
            masks: which columns of U are not zero, (k, n_j) bool by stack; None: all.
        """
        if not stacks:
            return []
        heads = [matrices[0] for matrices in stacks]
        # U as directions of X, (k, rows, columns).
        directions = [m.reoriented(u) for u, m in zip(U, heads, strict=True)]
        rows = [m.rows_of_X for m in heads]
        columns = [m.columns_of_X for m in heads]
        counted = []
        for u, extent in zip(directions, columns, strict=True):
            # A column of which two ranks hold parts is counted where it begins.
            counted.append(extent.counted(u.mT).mT)
        # |U_row|^2 of whole rows, (k, rows)
        squares = sums(ops.row_sums(counted, 2), [extent.group for extent in columns])
        moments = []
        for i, matrices in enumerate(stacks):
            moments.append(_moments(matrices, None if masks is None else masks[i]))
        # v <- beta2 v + (1 - beta2) |U_row|^2 / width
        factors, energies = ops.second_moments_(squares, moments, mode.moves)
        energies = sums(energies, [extent.group for extent in rows])
        # U <- c U / (sqrt(v) + eps)
        rescaled = ops.rescaled_rows(directions, factors, energies)
        return [m.reoriented(u) for u, m in zip(rescaled, heads, strict=True)]


def _moments(matrices: Sequence[Matrix], mask: Tensor | None) -> Moments:
    """What is known of a stack's rows.

    Args:
        matrices: k matrices.
        mask: which columns of B are not zero, (k, n_j) bool; None: all.
    """
    head = matrices[0]
    width = head.layout.shape[1]
    row_mask = None
    if mask is not None:
        if head.layout.transposed:
            # The columns of B are rows of X.
            row_mask = mask
        else:
            # The same number of columns is chosen for every row.
            width = head.shard.rank
    return Moments(
        v=[_second_moment(m) for m in matrices],
        width=width,
        beta2=[m.group["betas"][1] for m in matrices],
        eps=[m.group["eps"] for m in matrices],
        mask=row_mask,
        skipped=int(head.rows_of_X.borrowed),
    )


def _second_moment(m: Matrix) -> Tensor:
    """v of this rank's rows, a view, (rows,)."""
    v = local(m.parameter.state[ROW_SECOND_MOMENT])
    view = m.shard.view
    if isinstance(view, Block):
        v = v[view.stack]
        if v.dim() > 1:
            v = v[m.shard.block]
        return v[view.rows]
    # In a flat shard those of all matrices follow one another.
    start = sum(len(earlier.rows_of_X) for earlier in m.parameter.matrices[: m.index])
    return v[start : start + len(m.rows_of_X)]
