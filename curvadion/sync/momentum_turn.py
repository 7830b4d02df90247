"""How momenta follow when replicas agree on weights: no byte is sent for it.

Since replicas last agreed, over steps of learning rates lr (with the shape's scale) that add up to
L, replica i has gone

    D_i = X_i - X = -sum over steps of lr U_i,      U_i = P Q^T the direction of its momentum.

The part of M_i in the space of U_i is U_i S_i with S_i = U_i^T M_i, and -D_i / L is the direction
that it had on average. The mean drift D, which replicas have agreed on, gives the mean direction in
the same way. The momentum takes it and keeps its own S_i:

    M_i <- M_i - (D - D_i) S_i / L,              S_i = Q (M_i^T P)^T.

Here M_i is the momentum as the last step left it: after its gradient and the error feedback (or, by
the plain rule, after its gradient), without the look-ahead. P and Q are that step's factors, which
were those of the momentum before the error feedback and with the look-ahead. At full rank without a
look-ahead the momentum before was P R^T, and M_i is mu times it.

Local noise in M_i, which differs between replicas, gives way to its mean, as if momenta had been
averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from curvadion import ops
from curvadion.ops.tensors import largest
from curvadion.sync.consensus import lengths_since_agreement
from curvadion.update.low_rank_step import LowRankStep
from curvadion.update.plan import Matrix, as_stack
from curvadion.update.power_iteration import left_products, right_products

TINY = torch.finfo(torch.float32).tiny


def weights(step: LowRankStep) -> list[list[Tensor]]:
    """Copies of the weights that the step has moved, by stack."""
    return [[m.X.clone() for m in stack] for stack in step.stacks]


def turn_momenta_(step: LowRankStep, own: Sequence[Sequence[Tensor]]) -> None:
    """Turn momenta from the replica's own direction to the mean one.

    Args:
        step: the last step, a local one. Collective inside the replica.
        own: the :func:`weights` after it, before the replicas agreed on those of now; overwritten.
    """
    if not step.stacks:
        return
    # D - D_i, (m_i, n_j) each.
    missing = [
        [_difference_(m.X, x) for m, x in zip(stack, before, strict=True)]
        for stack, before in zip(step.stacks, own, strict=True)
    ]
    momenta = [as_stack(stack, inside_replica=True) for stack in step.stacks]
    right, _ = right_products(momenta, [factors.P for factors in step.factors])
    turned = left_products(
        [
            replace(stack, B=D, Q=list(factors.Q))
            for stack, factors, D in zip(momenta, step.factors, missing, strict=True)
        ]
    )
    shares = _shares(step, missing)
    for stack, T, share, R in zip(step.stacks, turned, shares, right, strict=True):
        # (m_i, r) = (m_i, n_j) (n_j, r), then (m_i, n_j) = (m_i, r) (r, n_j)
        _subtract(stack, T * share[:, None, None], R)


def _difference_(X: Tensor, own: Tensor) -> Tensor:
    """X - own, in the place of own; saturated, as weights are."""
    return own.neg_().add_(X).clamp_(-largest(X.dtype), largest(X.dtype))


def _shares(step: LowRankStep, missing: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """1 / L by stack; less where D - D_i is too long.

    Directions differ by no more than sqrt(r) in Frobenius norm, which codes may exceed where the
    learning rate has fallen: they make up for what they lost when steps were longer. The share is
    1 / L up to a length of L sqrt(r), and falls with its square beyond.
    """
    shares = []
    lengths, squares = lengths_since_agreement(step.plan), step.plan.squared_norms(missing)
    for L, factors, square in zip(lengths, step.factors, squares, strict=True):
        r = factors.Q.shape[2]
        shares.append(L * r / torch.maximum(L.square() * r, square).clamp_min(TINY))
    return shares


def _subtract(matrices: Sequence[Matrix], T: Tensor, R: Tensor) -> None:
    """M <- M - T R^T."""
    if matrices[0].is_view:
        ones = [1.0] * len(matrices)
        ops.low_rank_update_([m.M for m in matrices], list(T), list(R), ones, ones)
        return
    for m, one_T, one_R in zip(matrices, T, R, strict=True):  # padded copies, one at a time
        M = m.M
        ops.low_rank_update_([M], [one_T], [one_R], [1.0], [1.0])
        m.write(m.X, M)
