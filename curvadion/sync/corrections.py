"""Two corrections when replicas have agreed on weights; neither sends a byte between replicas.

Since replicas last agreed, over steps of learning rates lr (with the shape's scale) that add up to
L, replica i has moved by

    D_i = X_i - anchor = -sum over steps of lr U_i,      U_i = P Q^T the direction of its momentum,

and all have now agreed on the mean D of the D_i.

**Momentum alignment.** The part of M_i in the space of U_i is U_i S_i with S_i = U_i^T M_i. Its
average direction was -D_i / L, and the mean direction is -D / L. The momentum takes the mean
direction and keeps its own S_i:

    M_i <- M_i - (D - D_i) S_i / L,              S_i = Q (M_i^T P)^T.

M_i is the momentum after the last step: after its gradient and the error feedback (under the plain
rule, after its gradient), without the look-ahead. P and Q are that step's factors, of the momentum
before the error feedback and with the look-ahead. At full rank without a look-ahead the momentum
before was P R^T, and M_i is mu times it. Noise in M_i, which differs between replicas, gives way to
its mean, as if momenta had been averaged.

**Polar correction.** Each replica moved along orthonormal directions. A singular value of D / L is
1 where replicas took the same direction, and less where noise made them differ. A synchronised step
goes its full length along every direction of the mean momentum. One step of Newton and Schulz's
iteration for the polar factor,

    D <- D + L (V - V V^T V) / 2,                V = D / L,

takes a singular value s of V to s (3 - s^2) / 2 and changes no singular vector (Higham, Functions
of Matrices, 2008, chapter 8).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from curvadion import ops
from curvadion.comm.collectives import group_size
from curvadion.layout.dtensor import local
from curvadion.ops.tensors import largest, saturated
from curvadion.update.dion_step import LowRankStep
from curvadion.update.parameter import Matrix, batches, open_shards, product_dtype
from curvadion.update.plan import Plan
from curvadion.update.power_iteration import left_products, right_products
from curvadion.update.stack import as_stack
from curvadion.update.state import ANCHOR

# State of matrices: the sum of the learning rates of the steps since replicas agreed on the anchor.
LR_SINCE_ANCHOR = "lr_since_anchor"
TINY = torch.finfo(torch.float32).tiny
# The largest (s - s^3) / 2 for a singular value s in [0, 1], at sqrt(1 / 3).
LARGEST_CORRECTION = 1 / (3 * math.sqrt(3))
# Below this L, D holds only what codes made up for, and the cube of D / L could overflow.
SHORTEST = 1e-10


def lengths_since_anchor(plan: Plan) -> list[Tensor]:
    """L = sqrt(fan_out / fan_in) times the sum of lr, one a matrix, (k,) by stack.

    The distance that the steps since the last agreement go if all have one direction. The same on
    every replica: a step counts if some replica has taken it.
    """
    return [
        torch.tensor(
            [m.parameter.state[LR_SINCE_ANCHOR] * m.layout.update_scale for m in stack],
            dtype=product_dtype(stack[0].parameter.X),
            device=stack[0].parameter.X.device,
        )
        for stack in plan.stacks()
    ]


def _clip(factor: Tensor | float, limit: Tensor | float, size: Tensor) -> Tensor:
    """factor / max(limit, size): corrections keep their length up to a limit and shrink beyond.

    Codes move weights further than the steps since the last agreement did if the learning rate has
    fallen: they make up for what they lost when steps were longer.
    """
    within = torch.maximum(torch.as_tensor(limit, dtype=size.dtype, device=size.device), size)
    return factor / within.clamp_min(TINY)


# -------------------------------------------------------------------- momentum alignment


def weights_of(step: LowRankStep) -> list[list[Tensor]]:
    """Copies of the weights that the step has moved, by stack."""
    return [[m.X.clone() for m in stack] for stack in step.stacks]


def align_momenta_(step: LowRankStep, own: Sequence[Sequence[Tensor]]) -> None:
    """Move momenta from the replica's own direction to the mean one. Collective in the replica.

    Args:
        step: the last step, a local one.
        own: the :func:`weights_of` it before replicas agreed; overwritten.
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
    left = left_products(
        [
            replace(stack, B=D, Q=list(factors.Q))
            for stack, factors, D in zip(momenta, step.factors, missing, strict=True)
        ]
    )
    shares = _alignment_shares(step, missing)
    for stack, T, share, R in zip(step.stacks, left, shares, right, strict=True):
        # (m_i, r) = (m_i, n_j) (n_j, r), then (m_i, n_j) = (m_i, r) (r, n_j)
        _subtract(stack, T * share[:, None, None], R)


def _difference_(X: Tensor, own: Tensor) -> Tensor:
    """X - own, in the place of own; saturated, as weights are."""
    return own.neg_().add_(X).clamp_(-largest(X.dtype), largest(X.dtype))


def _alignment_shares(step: LowRankStep, missing: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """1 / L by stack; less where D - D_i is too long.

    Directions differ by no more than sqrt(r) in Frobenius norm. The share is 1 / L up to a length
    of L sqrt(r), and falls with the square of the length beyond.
    """
    shares = []
    lengths, squares = lengths_since_anchor(step.plan), step.plan.squared_norms(missing)
    for L, factors, square in zip(lengths, step.factors, squares, strict=True):
        r = factors.Q.shape[2]
        shares.append(_clip(L * r, L.square() * r, square))
    return shares


def _subtract(matrices: Sequence[Matrix], T: Tensor, R: Tensor) -> None:
    """M <- M - T R^T."""
    for batch in batches(matrices):
        chosen = matrices[batch]
        ones = [1.0] * len(chosen)
        with open_shards(chosen, [m.parameter.M for m in chosen]) as (M,):
            ops.low_rank_update_(M, list(T[batch]), list(R[batch]), ones, ones)


# -------------------------------------------------------------------- polar correction


def anchors_of(plan: Plan) -> list[list[Tensor]]:
    """Copies of the anchors of the plan's matrices, by stack."""
    return [[m.read(_anchor(m)).clone() for m in stack] for stack in plan.stacks()]


def correct_polar_(plan: Plan, before: Sequence[Sequence[Tensor]]) -> None:
    """Move weights and anchors by a Newton-Schulz step of D. Collective inside the replica.

    Replicas hold the same bits before, and compute the same.

    Args:
        plan: the matrices that have come together, the same ones on every replica.
        before: their :func:`anchors_of` before that; overwritten.
    """
    stacks = plan.stacks()
    if not stacks:
        return
    lengths = lengths_since_anchor(plan)
    divisors = [L.where(L > SHORTEST, torch.inf) for L in lengths]
    V = [
        [
            v.neg_().add_(m.read(_anchor(m))).div_(L)
            for m, v, L in zip(stack, each, divisor, strict=True)
        ]
        for stack, each, divisor in zip(stacks, before, divisors, strict=True)
    ]
    changes = _newton_schulz(stacks, V)
    squares = plan.squared_norms(changes)
    for stack, each, length, square in zip(stacks, changes, lengths, squares, strict=True):
        limit = LARGEST_CORRECTION * math.sqrt(min(stack[0].layout.shape))
        share = _clip(limit, limit, square.sqrt())
        _move(
            stack, [change.mul_(alpha) for change, alpha in zip(each, length * share, strict=True)]
        )


def _newton_schulz(
    matrices: Sequence[Sequence[Matrix]], V: Sequence[Sequence[Tensor]]
) -> list[list[Tensor]]:
    """(V - V V^T V) / 2, shards (m_i, n_j) as V's.

    Cut columns are taken in rounds, as many at a time as a rank holds, so that no shard is ever
    put together with the others.
    """
    changes = [[v.clone() for v in each] for each in V]
    rounds = [group_size(stack[0].layout.columns.group) for stack in matrices]
    for number in range(max(rounds)):
        now = [i for i, last in enumerate(rounds) if number < last]
        columns = [_columns_of_round(matrices[i][0], number, rounds[i]) for i in now]
        stacks = [
            replace(
                as_stack(matrices[i], inside_replica=True),
                B=V[i],
                Q=[_unit_columns(matrices[i][0], these, V[i][0])] * len(V[i]),
            )
            for i, these in zip(now, columns, strict=True)
        ]
        chosen = left_products(stacks)  # (m_i, w) = V (n_j, w) of the identity
        grams, _ = right_products(stacks, chosen)  # (n_j, w) = V^T V
        cubes = left_products([replace(s, Q=list(G)) for s, G in zip(stacks, grams, strict=True)])
        for i, these, cube in zip(now, columns, cubes, strict=True):
            _subtract_columns(matrices[i][0], changes[i], cube, these)
    return [[change.mul_(0.5) for change in each] for each in changes]


def _columns_of_round(m: Matrix, number: int, rounds: int) -> range:
    n = min(m.layout.shape)
    width = -(-n // rounds)
    return range(min(n, number * width), min(n, (number + 1) * width))


def _unit_columns(m: Matrix, these: range, like: Tensor) -> Tensor:
    """The rows of these columns of the identity that are the columns held here, (n_j, w)."""
    held = m.layout.columns.positions(like.device)
    wanted = torch.arange(these.start, these.stop, device=like.device)
    return (held[:, None] == wanted).to(like.dtype)


def _subtract_columns(m: Matrix, change: Sequence[Tensor], cube: Tensor, these: range) -> None:
    """Subtract the columns of (k, m_i, w) that are held here."""
    held = m.layout.columns.indices
    first, last = max(held.start, these.start), min(held.stop, these.stop)
    if first >= last:
        return
    for x, c in zip(change, cube, strict=True):
        own = x[:, first - held.start : last - held.start]
        own.sub_(c[:, first - these.start : last - these.start])


def _anchor(m: Matrix) -> Tensor:
    return local(m.parameter.state[ANCHOR])


def _move(matrices: Sequence[Matrix], changes: Sequence[Tensor]) -> None:
    """anchor <- anchor + change, X <- anchor."""
    for m, change in zip(matrices, changes, strict=True):
        with open_shards([m], [_anchor(m)], [m.parameter.local]) as ((anchor,), (X,)):
            X.copy_(saturated(anchor.add_(change), X.dtype))
