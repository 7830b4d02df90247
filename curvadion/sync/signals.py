"""What a step's gradients tell all ranks before it is taken: signals for the gate, and faults."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion import ops
from curvadion.gates import Gate
from curvadion.sync.replicas import Agreement, Notice, Settings, agree, held_anywhere
from curvadion.update.low_rank_step import momentum_decay
from curvadion.update.plan import Plan, Pushed


class MomentumNorms(NamedTuple):
    """Frobenius norms of a step's momenta, one per matrix, (k,).

    before: without the step's gradients. after: with them; a matrix without one has decayed.
    """

    before: Tensor
    after: Tensor


def momentum_norms(plan: Plan, pushed: Pushed) -> MomentumNorms:
    """Norms before and after this step's gradients; collective over the shards of a replica."""
    before = plan.stored_norms()
    if not plan.matrices:
        # A rank that holds none of the experts has no norms, but takes part in the decision.
        after = before
    elif pushed.everyone and plan.one_matrix_each:
        after = ops.momentum_norms(pushed.M, pushed.G, pushed.each(momentum_decay))
    else:
        after = ops.momentum_norms(*plan.matrices_with_gradients())
    return MomentumNorms(before, plan.norms_over_shards(after))


def agree_on_gradients(
    gate: Gate,
    plan: Plan,
    pushed: Pushed,
    momenta: MomentumNorms | None,
    *,
    notice: Notice,
    settings: Settings,
    unread: Tensor | None = None,
) -> Agreement:
    """The gate's one collective; ``momenta`` if the gate reads them.

    notice, settings, unread: as :func:`agree` takes them; a missing gradient is noticed here.

    Raises:
        ValueError: if the gate's signals are not one per matrix.
    """
    covered = plan.parameters if momenta is None else plan.elementwise
    gradients = [p.G for p in covered if p.G is not None]
    norms = [ops.norms(gradients)] if gradients else []
    signals = torch.empty(0, dtype=torch.float32, device=plan.device)
    if momenta is not None:
        signals = _signals(gate, plan, pushed, momenta)
        norms.append(momenta.after)
    if not sum(n.numel() for n in norms):
        norms.append(torch.zeros(1, dtype=torch.float32, device=plan.device))
    unsure = plan.elementwise if pushed.everyone else plan.parameters
    # FSDP1 gives no gradient to a parameter of which it holds nothing here.
    if any(p.G is None and p.local.numel() for p in unsure):
        notice = max(notice, Notice.MISSING_GRADIENT)
    return agree(
        signals,
        plan.owners,
        torch.cat(norms),
        notice=notice,
        settings=settings,
        unread=unread,
        group=plan.everyone,
    )


def refuse(gate: Gate, plan: Plan) -> None:
    """Take part in a step's agreement only to tell all ranks that a setting here is impossible.

    The collectives are those of :func:`momentum_norms` and :func:`agree_on_gradients`.
    """
    zero = torch.zeros(1, dtype=torch.float32, device=plan.device)
    if gate.reads_momentum and plan.dion:
        plan.norms_over_shards(zero.expand(len(plan.matrices)))
    agree(
        zero[:0],
        plan.owners,
        zero,
        notice=Notice.INVALID,
        settings=Settings(0, 0),
        group=plan.everyone,
    )


def _signals(gate: Gate, plan: Plan, pushed: Pushed, momenta: MomentumNorms) -> Tensor:
    """The gate's signals; the momentum of a matrix without a gradient is as it was."""
    before, after = momenta
    if not pushed.everyone:
        held = [m.parameter.G is not None for m in plan.matrices]
        after = torch.where(torch.tensor(held, device=after.device), after, before)
    signals = gate.signal(before, after)
    if signals.shape != after.shape:
        raise ValueError(
            f"gate={gate!r}: signal() returned the shape {tuple(signals.shape)}, but "
            f"there is one signal per matrix: {tuple(after.shape)}"
        )
    return signals


def with_gradients(
    plan: Plan, norms: Tensor | None, group: dist.ProcessGroup | None
) -> tuple[Plan, Tensor | None]:
    """The plan of the parameters that have a gradient on some rank of the group, and its norms."""
    keep = held_anywhere([p.G is not None for p in plan.parameters], plan.device, group)
    if norms is not None:
        pieces = norms.split([len(p.matrices) for p in plan.dion])
        kept = [piece for piece, k in zip(pieces, keep, strict=False) if k]
        norms = torch.cat(kept) if kept else norms[:0]
    return plan.select(keep), norms
