"""Clip gradients by one norm, the same on all replicas and in every layout."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion import checks, ops
from curvadion.comm.collectives import explain_lost_ranks, group_size
from curvadion.layout.placements import place_gradients
from curvadion.ops.tensors import wide_dtype
from curvadion.optim.replica_optimizer import ReplicaOptimizer


@torch.no_grad()
@explain_lost_ranks("curvadion.clip_grad_norm_()")
def clip_grad_norm_(
    optimizer: ReplicaOptimizer,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale an optimizer's gradients by one factor, to a norm of ``max_norm`` or less.

        norm = sqrt( mean over replicas of ||G_i||^2 ),   G_i <- G_i min(1, max_norm / norm)

    G_i is replica i's own gradient, of all parameters and shards. All replicas use the same
    factor, so clipping keeps the direction of their mean gradient. Replicas that come and go
    (ElasticReplicas) do not wait for each other here: each scales by its own norm.

    Collective: call it on all ranks of all replicas, after backward and a GradScaler's
    ``unscale_(optimizer)``. It sends one all-reduce of 8 bytes, and first sums partial
    gradients of sequence parallelism. After a NaN or an Inf on any rank all ranks skip the
    next step (under a schedule all gradients become NaN).

    Args:
        optimizer: a CurvaDion, Dion or Replicated.
        max_norm: >= 0; ``math.inf`` only measures.
        norm_type: must be 2.
        error_if_nonfinite: raise an error if the norm is NaN or Inf; waits for the device.
        foreach: has no effect; torch's function has it.

    Returns:
        The norm before clipping, a float64 scalar tensor, the same on all ranks of fixed replicas.

    Raises:
        TypeError, ValueError: naming the argument and its value.
        RuntimeError: on all ranks, if ``error_if_nonfinite`` and the norm is NaN or Inf.
    """
    if not isinstance(optimizer, ReplicaOptimizer):
        raise TypeError(
            f"optimizer={type(optimizer).__name__} must be a CurvaDion, Dion or Replicated: "
            f"for others use torch.nn.utils.clip_grad_norm_."
        )
    if max_norm != math.inf:
        checks.number("max_norm", max_norm)
    if norm_type != 2:
        raise ValueError(f"norm_type={norm_type!r} must be 2: no other norm is supported")
    plan = optimizer._collective_plan()
    replicas = optimizer.replicas.process_group
    if plan.sharded:
        place_gradients([p.X for p in plan.parameters], replicas)
    # Gradients with the same number of copies, device and dtype take each operation together.
    alike: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = {}
    for p in plan.parameters:
        G = p.G
        if G is not None:
            alike.setdefault((plan.copies_inside(p), G.device, G.dtype), []).append(G)
    # sum over replicas of ||G_i||^2, where each copy of a shard counts in part
    square = torch.zeros((), dtype=torch.float64, device=plan.device)
    for (copies, _, _), gradients in alike.items():
        square += ops.norms(gradients).to(plan.device).double().square().sum() / copies
    if group_size(plan.all_ranks) > 1:
        dist.all_reduce(square, group=plan.all_ranks)
    # norm = sqrt( mean over replicas of ||G_i||^2 )
    norm = (square / group_size(replicas)).sqrt()
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The norm of the gradients is {norm.item()}: with error_if_nonfinite=False "
            f"step() skips the update."
        )
    # Under a schedule replicas do not tell each other of a NaN, so here all gradients become
    # NaN. Otherwise the step does that, and gradients stay as they are.
    factor_of_nan = torch.nan if optimizer.scheduled else 1.0
    # min(1, max_norm / norm); 1e-6 as in torch's function. torch.where waits for no device.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    factor = torch.where(norm.isfinite(), factor, factor_of_nan)
    # G_i <- G_i min(1, max_norm / norm)
    for (_, device, dtype), gradients in alike.items():
        # In half precision the factor itself would be rounded.
        wide = wide_dtype(dtype)
        torch._foreach_mul_(gradients, factor.to(device, wide))
    return norm
