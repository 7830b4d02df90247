"""The step of all matrices of a plan: momenta take the gradients, then weights their directions."""

from __future__ import annotations

import torch
from torch import Tensor

from curvadion.update.direction import Direction, Taken
from curvadion.update.gradients import Gradients
from curvadion.update.low_rank import PowerIteration
from curvadion.update.momentum import accumulate_momenta, measure_momenta
from curvadion.update.plan import Plan
from curvadion.update.polar import Polar

DIRECTIONS: dict[str, Direction] = {"low_rank": PowerIteration(), "polar": Polar()}


def matrix_step(
    plan: Plan,
    gradients: Gradients,
    norms: Tensor | None,
    *,
    step: int,
    inside_replica: bool,
    remember: bool = True,
) -> None:
    """M <- M + G, then what each direction makes of M, wave after wave; collective.

    Args:
        plan: the parameters that move.
        gradients: of its matrices.
        norms: Frobenius norms of the momenta with these gradients, in the plan's order, (k,); None
            if no gate reads them.
        step: how many steps were taken before, which seeds a stochastic rounding.
        inside_replica: leave the other replicas out of the means.
        remember: see :meth:`Direction.step`.
    """
    accumulate_momenta(gradients)
    drops: dict[int, Tensor] = {}  # by matrix
    for wave in plan.matrix_waves():
        taken = wave_step(
            wave, gradients, step=step, inside_replica=inside_replica, remember=remember
        )
        if norms is not None and (dropped := taken.drops()):
            matrices = [m for stack in taken.stacks for m in stack]
            drops |= zip(map(id, matrices), torch.cat(dropped).unbind(), strict=True)
        del taken  # before the next wave takes its memory
    if norms is None or not plan.matrices:
        return
    if any(p.nesterov and p.feedback for p in plan.dion):
        measure_momenta(plan)
    else:
        plan.store_norms(_norms_after(plan, norms, drops))


def wave_step(
    wave: Plan, gradients: Gradients, *, step: int, inside_replica: bool, remember: bool = True
) -> Taken:
    """The direction of a wave's momenta, which hold the gradients already; see matrix_step.

    gradients: those of the wave's matrices are among them.
    """
    return DIRECTIONS[wave.direction].step(
        wave,
        gradients.among(wave.dion),
        step=step,
        inside_replica=inside_replica,
        remember=remember,
    )


def _norms_after(plan: Plan, norms: Tensor, drops: dict[int, Tensor]) -> Tensor:
    """Norms of the momenta after the error feedback, without a second pass over them."""
    if not any(p.error_feedback for p in plan.dion):  # the same on ranks that hold no matrix
        return norms
    none = torch.zeros((), dtype=torch.float64, device=norms.device)
    dropped = torch.stack([drops.get(id(m), none) for m in plan.matrices])
    return (norms.double().square() - plan.sum_over_shards(dropped)).clamp_min(0).sqrt()
