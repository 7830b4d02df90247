"""A step that lengthens the directions on which replicas agreed only in part; no byte is sent.

Since replicas last agreed, over steps whose learning rates (with the shape's scale) add up to L,
each has gone along its own orthonormal directions, and all move by the mean of that, D. A singular
value of D / L is 1 where replicas took the same direction and less where noise turned them apart,
while a synchronised step goes its full length along every direction of the mean momentum. One step
of Newton and Schulz's iteration for the polar factor,

    D <- D + L (V - V V^T V) / 2,                V = D / L,

takes a singular value s of V to s (3 - s^2) / 2 and moves no singular vector (Higham, Functions of
Matrices, 2008, chapter 8).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from curvadion.comm.collectives import group_size
from curvadion.layout.dtensor import local
from curvadion.ops.tensors import saturated
from curvadion.sync.consensus import AGREED, lengths_since_agreement
from curvadion.update.plan import Matrix, Plan, as_stack
from curvadion.update.power_iteration import left_products, right_products

# The largest (s - s^3) / 2 for a singular value s in [0, 1], at sqrt(1 / 3).
LONGEST = 1 / (3 * math.sqrt(3))
# Where L is less, D is what codes made up for, and the cube of D / L could overflow.
SHORTEST = 1e-10


def agreements(plan: Plan) -> list[list[Tensor]]:
    """Copies of what replicas have agreed the plan's matrices are, by stack."""
    return [[_agreed(m).clone() for m in stack] for stack in plan.stacks()]


def polar_step_(plan: Plan, before: Sequence[Sequence[Tensor]]) -> None:
    """Move the weights, and what replicas agree they are, by a Newton-Schulz step of D.

    Args:
        plan: the matrices that have come together, the same ones on every replica, whichever of
            them has lacked gradients. Collective inside the replica.
        before: the :func:`agreements` of the time before; overwritten.

    Replicas hold the same bits before and compute the same.
    """
    stacks = plan.stacks()
    if not stacks:
        return
    lengths = lengths_since_agreement(plan)
    divisors = [L.where(L > SHORTEST, torch.inf) for L in lengths]
    V = [
        [v.neg_().add_(_agreed(m)).div_(L) for m, v, L in zip(stack, each, divisor, strict=True)]
        for stack, each, divisor in zip(stacks, before, divisors, strict=True)
    ]
    changes = _newton_schulz(stacks, V)
    shares = _shares(plan, changes)
    for stack, each, length, share in zip(stacks, changes, lengths, shares, strict=True):
        for m, change, alpha in zip(stack, each, length * share, strict=True):
            _move(m, change.mul_(alpha))


def _newton_schulz(
    matrices: Sequence[Sequence[Matrix]], V: Sequence[Sequence[Tensor]]
) -> list[list[Tensor]]:
    """(V - V V^T V) / 2, pieces (m_i, n_j) as V's.

    Columns take turns where they are cut, as many at a time as a rank holds, so that no piece is
    ever put together with the others.
    """
    changes = [[v.clone() for v in each] for each in V]
    turns = [group_size(stack[0].layout.columns.group) for stack in matrices]
    for turn in range(max(turns)):
        now = [i for i, last in enumerate(turns) if turn < last]
        columns = [_columns_of_turn(matrices[i][0], turn, turns[i]) for i in now]
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


def _columns_of_turn(m: Matrix, turn: int, turns: int) -> range:
    n = min(m.layout.shape)
    width = -(-n // turns)
    return range(min(n, turn * width), min(n, (turn + 1) * width))


def _unit_columns(m: Matrix, these: range, like: Tensor) -> Tensor:
    """The rows of these columns of the identity that are the columns held here, (n_j, w)."""
    held = m.layout.columns.positions(like.device)
    wanted = torch.arange(these.start, these.stop, device=like.device)
    return (held[:, None] == wanted).to(like.dtype)


def _subtract_columns(m: Matrix, change: Sequence[Tensor], cube: Tensor, these: range) -> None:
    """Subtract what (k, m_i, w) has of the columns held here."""
    held = m.layout.columns.indices
    first, last = max(held.start, these.start), min(held.stop, these.stop)
    if first >= last:
        return
    for x, c in zip(change, cube, strict=True):
        own = x[:, first - held.start : last - held.start]
        own.sub_(c[:, first - these.start : last - these.start])


def _shares(plan: Plan, changes: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """1 by stack, (k,); less where a change is longer than singular values up to 1 can make it.

    Codes make D too long where the learning rate has fallen: they make up for what they lost when
    steps were longer.
    """
    shares = []
    for stack, square in zip(plan.stacks(), plan.squared_norms(changes), strict=True):
        longest = LONGEST * math.sqrt(min(stack[0].layout.shape))
        shares.append(longest / square.sqrt().clamp_min(longest))
    return shares


def _agreed(m: Matrix) -> Tensor:
    return m.read(local(m.parameter.state[AGREED]))


def _move(m: Matrix, change: Tensor) -> None:
    agreed, X = _agreed(m), m.X
    X.copy_(saturated(agreed.add_(change), X.dtype))
    m.store(local(m.parameter.state[AGREED]), agreed)
    m.write(X, None)
