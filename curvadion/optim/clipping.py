"""Clip gradients by one norm, the same on all replicas and in every layout."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion import checks, ops
from curvadion.comm.collectives import group_size
from curvadion.layout.parameters import place_gradients
from curvadion.optim.outer import ReplicaOptimizer
from curvadion.update.plan import Plan


@torch.no_grad()
def clip_grad_norm_(
    optimizer: ReplicaOptimizer,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale an optimizer's gradients by one factor, so that their norm is at most ``max_norm``.

        norm = sqrt( mean over replicas of ||G_i||^2 ),   G_i <- G_i min(1, max_norm / norm)

    G_i is replica i's own gradient, of all parameters and all shards together. All replicas use the
    same factor, so clipping keeps the direction of their mean gradient, whose norm is at most
    ``norm``. ``torch.nn.utils.clip_grad_norm_`` would scale each replica by its own norm.

    Collective: call it on all ranks of all replicas, after backward and before ``step``. It sends
    one all-reduce of 8 bytes, and under sequence parallelism first sums partial gradients. For
    one unsharded replica it equals torch's function. With a GradScaler call
    ``scaler.unscale_(optimizer)`` first.

    If a gradient on any rank holds a NaN or an Inf, no gradient is scaled, and all ranks skip the
    next step. Under a schedule all gradients are set to NaN to achieve this.

    Args:
        optimizer: a CurvaDion, Dion or Replicated, whose parameters' gradients are clipped.
        max_norm: >= 0; ``math.inf`` only measures.
        norm_type: must be 2.
        error_if_nonfinite: raise an error if the norm is NaN or Inf; waits for the device.
        foreach: accepted for compatibility with torch; has no effect.

    Returns:
        The norm before clipping, a float64 scalar tensor, the same on all ranks.

    Raises:
        TypeError, ValueError: naming the argument and its value.
        RuntimeError: on all ranks, if ``error_if_nonfinite`` and the norm is NaN or Inf.
    """
    _check_arguments(optimizer, max_norm, norm_type, error_if_nonfinite)
    plan, replicas = optimizer._present_plan(), optimizer._replicas.process_group
    if plan.sharded:
        place_gradients([p.X for p in plan.parameters], replicas)
    batches = _batches(plan)
    square = torch.zeros((), dtype=torch.float64, device=plan.device)
    for (copies, _, _), gradients in batches.items():
        square += ops.norms(gradients).to(plan.device).double().square().sum() / copies
    if group_size(plan.all_ranks) > 1:
        dist.all_reduce(square, group=plan.all_ranks)
    norm = (square / group_size(replicas)).sqrt()
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The norm of the gradients is {norm.item()}: a gradient on some rank has a NaN or an "
            f"Inf. Pass error_if_nonfinite=False to leave the gradients unchanged and let step() "
            f"skip the update."
        )
    # Under a schedule replicas do not learn of each other's NaN, and would step with unclipped
    # gradients. No host read.
    otherwise = torch.nan if optimizer.scheduled else 1.0
    factor = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), otherwise)
    for (_, device, dtype), gradients in batches.items():
        wide = torch.promote_types(dtype, torch.float32)
        torch._foreach_mul_(gradients, factor.to(device, wide))
    return norm


def _check_arguments(
    optimizer: object, max_norm: object, norm_type: float, error_if_nonfinite: object
) -> None:
    if not isinstance(optimizer, ReplicaOptimizer):
        raise TypeError(
            f"optimizer={type(optimizer).__name__} must be the CurvaDion, Dion or Replicated "
            f"optimizer itself, not its parameters or a wrapper: for other optimizers use "
            f"torch.nn.utils.clip_grad_norm_."
        )
    if max_norm != math.inf:
        checks.number("max_norm", max_norm)
    if norm_type != 2:
        raise ValueError(f"norm_type={norm_type!r} must be 2: no other norm is supported")
    checks.boolean("error_if_nonfinite", error_if_nonfinite)


def _batches(plan: Plan) -> dict[tuple[int, torch.device, torch.dtype], list[Tensor]]:
    """This rank's gradients by number of ranks of the replica that hold them, device and dtype."""
    batches: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = {}
    for p in plan.parameters:
        if (G := p.G) is not None:
            batches.setdefault((plan.copies_inside(p), G.device, G.dtype), []).append(G)
    return batches
