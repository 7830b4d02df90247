"""The step of matrices along their directions, which hooks may change."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from curvadion import ops
from curvadion.ops.tensors import Tensors
from curvadion.plan.opened_states import open_momenta
from curvadion.plan.parameter import (
    Matrix,
    Parameter,
    Stacks,
    open_shards,
    product_dtype,
    rounding_seeds,
    step_sizes,
    weight_decays,
)
from curvadion.update.direction import StepMode
from curvadion.update.update_hooks import MatrixUpdate, UpdateBatch, UpdateHook


def move(stacks: Stacks, U: Sequence[Tensor], mode: StepMode) -> None:
    """X <- (1 - lr wd) X - lr scale U; update hooks come first. Collective if they are.

    Args:
        stacks: the matrices.
        U: shards of their directions, (k, m_i, n_j) by stack; not written.
        mode: of the step.
    """
    matrices = list(chain.from_iterable(stacks))
    directions = list(chain.from_iterable(U))
    seeds = rounding_seeds(matrices, mode.step_index)
    with open_shards(matrices, [m.parameter.local for m in matrices], gaps=False) as (X,):
        if mode.hooks:
            directions, rates, decays = _hooked(matrices, X, directions, mode)
        else:
            rates = step_sizes(matrices)
            decays = weight_decays(matrices)
        ops.local_step_(X, directions, rates, decays, seeds=seeds, moves=mode.moves)


def _hooked(
    matrices: Sequence[Matrix], X: Tensors, U: Tensors, mode: StepMode
) -> tuple[list[Tensor], list[Any], list[Any]]:
    """Directions, step sizes and factors of X, as the hooks leave them.

    Args:
        matrices: k matrices.
        X: shards of their weights, (m_i, n_j), which hooks may write.
        U: shards of their directions, (m_i, n_j); not written.
        mode: of the step.
    """

    @cache  # momenta in 8 bits are opened once, and only if a hook reads them
    def momentum_of(p: Parameter) -> Tensor:
        return open_momenta([p]).tensors[0]

    updates = []
    for m, x, u in zip(matrices, X, U, strict=True):
        # A copy, because corrections at an opening read the directions as they were.
        own = torch.empty_like(u, dtype=product_dtype(u)).copy_(m.own(u))
        updates.append(MatrixUpdate(m, x, own, momentum_of))
    batch = UpdateBatch(updates, mode.moves)
    for hook in mode.hooks:
        hook(batch)
        for update in updates:
            _check_direction(update, hook)
    directions = [update._direction for update in updates]
    rates = [update.lr * update.scale for update in updates]
    decays = [1 - update.lr * update.weight_decay for update in updates]
    return directions, rates, decays


def _check_direction(update: MatrixUpdate, hook: UpdateHook) -> None:
    """Raise an error for a U that cannot be the direction: one that broadcasts would be taken."""
    U = update.U
    shape = tuple(update.X.shape)
    if not isinstance(U, Tensor) or U.shape != shape or not U.is_floating_point():
        found = f"{U.dtype} {tuple(U.shape)}" if isinstance(U, Tensor) else repr(U)
        raise ValueError(
            f"hook={hook!r} has set U of {update.name} to {found}: it must stay a tensor of "
            f"floating dtype and of shape {shape}, as X"
        )
