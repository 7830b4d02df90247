"""The Dion update of all matrices of a plan (arXiv 2504.05295, algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from curvadion import ops
from curvadion.update.plan import Matrix, Parameter, Plan, Pushed, as_stack
from curvadion.update.power_iteration import LowRank, power_iteration

momentum_decay = attrgetter("momentum_decay")


def accumulate_momenta(plan: Plan, pushed: Pushed) -> None:
    """M <- M + G (error feedback) or M <- mu M + G (plain), with the local gradient.

    A gradient that this replica misses counts as zero.
    """
    ops.accumulate_(pushed.M, pushed.G, pushed.each(momentum_decay))
    if not pushed.everyone:
        for p in plan.dion:
            if p.G is None and p.momentum_decay != 1.0:
                p.M.mul_(p.momentum_decay)


def _look_ahead_(pushed: Pushed, share: Callable[[Parameter], float]) -> None:
    """M <- M + share G, for as long as a direction is taken from it; no copy of M is made."""
    shares = pushed.each(share)
    if any(shares):
        # The arithmetic of a local step, which saturates where the dtype of M ends.
        ops.local_step_(pushed.M, pushed.G, [-s for s in shares], [1.0] * len(shares))


class LowRankStep(NamedTuple):
    """What a step was made of: the plan, its matrices in stacks, and the factors of each stack."""

    plan: Plan
    stacks: list[list[Matrix]]
    factors: list[LowRank]

    def among(self, parameters: Sequence[Parameter]) -> LowRankStep:
        """What these parameters had of it."""
        these = set(map(id, parameters))
        plan = self.plan.select([id(p) in these for p in self.plan.parameters])
        if plan is self.plan:
            return self
        places = {id(m): (s, i) for s, stack in enumerate(self.stacks) for i, m in enumerate(stack)}
        stacks, factors = plan.stacks(), []
        for stack in stacks:
            # Matrices of one stack were in one stack before.
            (s, *_), rows = zip(*(places[id(m)] for m in stack), strict=True)
            factors.append(LowRank(*(factor[list(rows)] for factor in self.factors[s])))
        return LowRankStep(plan, stacks, factors)


def low_rank_step(
    plan: Plan,
    pushed: Pushed,
    norms: Tensor | None,
    *,
    step: int,
    inside_replica: bool,
    remember: bool = True,
) -> LowRankStep:
    """Power iteration on the accumulated momenta, then the update of X, M and Q.

    With Nesterov's look-ahead P and R are those of M + nesterov G, and the error feedback is
    M <- M - (1 - mu) (P R^T - nesterov G).

    Args:
        plan: the matrices that take part.
        pushed: those of them that have a gradient, with it.
        norms: Frobenius norms of the accumulated momenta, in the plan's order, (k,); None if no
            gate reads them.
        step: how many steps were taken before, which seeds a stochastic rounding.
        inside_replica: leave the other replicas out.
        remember: note how long R is. What a step shares with the other replicas may depend on
            such notes only if all replicas have made the same ones.

    Returns:
        The factors with what they are of. They take as much memory as 2 r / n of the momenta.
    """
    stacks = plan.stacks()
    _look_ahead_(pushed, lambda p: p.nesterov)
    factors = power_iteration([as_stack(s, inside_replica=inside_replica) for s in stacks])
    _update(stacks, factors, step)
    if remember:
        for stack, factor in zip(stacks, factors, strict=True):
            torch._foreach_copy_([m.R_scale for m in stack], list(factor.scale))
    _look_ahead_(pushed, lambda p: -p.nesterov * (1 - p.feedback))
    taken = LowRankStep(plan, stacks, factors)
    if norms is not None and any(p.nesterov for p in plan.dion):
        measure_momenta(plan)
    elif norms is not None and stacks:
        drops = plan.by_matrix([_drop(*stack) for stack in zip(stacks, factors, strict=True)])
        plan.store_norms(_norms_after(plan, norms, drops))
    return taken


def _update(stacks: Sequence[Sequence[Matrix]], factors: Sequence[LowRank], step: int) -> None:
    together: list[_Update] = []
    for matrices, (P, R, Q, *_) in zip(stacks, factors, strict=True):
        updates = [_Update(*one) for one in zip(matrices, P, Q, R, strict=True)]
        if matrices[0].is_view:
            together += updates
        else:  # padded copies, of which never more than one shall exist
            for update in updates:
                _apply([update], step)
        torch._foreach_copy_([m.Q for m in matrices], list(Q))
    _apply(together, step)


class _Update(NamedTuple):
    matrix: Matrix
    P: Tensor
    Q: Tensor
    R: Tensor


def _apply(updates: Sequence[_Update], step: int) -> None:
    """X <- (1 - lr wd) X - lr scale P Q^T, and M <- M - (1 - mu) P R^T under error feedback."""
    # The plain rule feeds nothing back: its momenta need not be read again.
    for (feeds_back, random), chosen in groupby(updates, key=_kind):
        matrices, P, Q, R = zip(*chosen, strict=True)
        X = [m.X for m in matrices]
        M = [m.M for m in matrices] if feeds_back else []
        ops.low_rank_update_(
            X,
            P,
            Q,
            [m.group["lr"] * m.layout.update_scale for m in matrices],
            [m.parameter.decay for m in matrices],
            M,
            R if feeds_back else (),
            [m.feedback for m in matrices] if feeds_back else (),
            [m.rounding_seed(step) for m in matrices] if random else None,
        )
        for i, m in enumerate(matrices):
            m.write(X[i], M[i] if feeds_back else None)


def _kind(update: _Update) -> tuple[bool, bool]:
    parameter = update.matrix.parameter
    return parameter.error_feedback, parameter.stochastic_rounding


def _drop(matrices: Sequence[Matrix], low_rank: LowRank) -> Tensor:
    """This rank's summand of ||M||^2 - ||M - c P R^T||^2 = 2 c <M^T P, R> - c^2 ||R||^2, (k,).

    float64. Holds for orthonormal P. R may be the mean over replicas; M^T P is this replica's own.
    """
    layout = matrices[0].layout
    c = low_rank.scale.new_tensor([m.feedback for m in matrices])
    # Lengths of about one, whose squares fit into any dtype.
    unit = low_rank.scale.clamp_min(torch.finfo(low_rank.R.dtype).tiny)
    R, own_R = (each / unit.to(each.dtype)[:, None, None] for each in (low_rank.R, low_rank.own_R))
    inner = (own_R * R).sum(dim=(1, 2))
    square = layout.columns.counted(R).square().sum(dim=(1, 2)) * layout.share_of_R()
    return (2 * c * inner - c.square() * square) * unit.square()


def measure_momenta(plan: Plan) -> None:
    """Store the momenta's norms anew."""
    if plan.matrices:
        here = ops.norms([m.elements(m.parameter.M) for m in plan.matrices])
        plan.store_norms(plan.norms_over_shards(here))


def _norms_after(plan: Plan, norms: Tensor, drops: Tensor) -> Tensor:
    """Norms of the momenta after the error feedback, without a second pass over them."""
    return (norms.double().square() - plan.sum_over_shards(drops)).clamp_min(0).sqrt()
