"""CurvaDion: steps of each replica's own, and a gate that says when replicas synchronise."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from curvadion import checks
from curvadion.comm.collectives import explain_lost_ranks
from curvadion.comm.groups import Replicas
from curvadion.gates import RMMC, AlwaysOpen, ByteBudget, Gate
from curvadion.optim.base import Params, check_costs, check_kinds
from curvadion.optim.dion import Dion, DirectionName
from curvadion.optim.outer import full_precision
from curvadion.sync.base import Sync
from curvadion.sync.low_rank import LowRank
from curvadion.sync.quantized_average import QuantizedAverage
from curvadion.update import hyperparameters as check


class CurvaDion(Dion):
    """Low-rank orthonormal updates, synchronised over replicas only when a gate opens.

    Three choices compose (CurvaDion, arXiv 2512.13728):

        gate        when replicas synchronise: RMMC, every k steps, a byte budget, always
        sync        how they do: LowRank, the papers' step; in a few bits, QuantizedAverage, the
                    mean of what weights have moved, or CodedGradients, that of gradients
        group keys  what a step of a matrix is made of: rank, momentum rule, look-ahead, ...

    While the gate is closed each replica takes a step of its own, and replicas send each other the
    meeting's 24 bytes, or nothing if the gate follows a schedule. Parameters that are not matrices
    take AdamW or Lion under the same gate.

    Args:
        params, lr, replicas: as of :class:`curvadion.Dion`.
        gate: RMMC(0.3) by default, and AlwaysOpen() with CodedGradients().
        sync: LowRank() by default, and QuantizedAverage() with a gate that counts bytes. The
            optimizer takes a copy, ``optimizer.sync``.
        wire_budget: short for gate=ByteBudget(wire_budget), a share in (0, 1] of the bytes of an
            all-reduce of all float32 gradients at every step.
        threshold: tau, short for gate=RMMC(threshold).
        local_step: what a matrix does while the gate is closed: "dion", a step along its direction
            inside the replica, or "gradient", X <- (1 - lr wd) X - local_lr G (the paper's).
        local_lr: learning rate of the "gradient" local step; None takes lr.
        max_local_steps: longest run of local steps, which a byte budget may double; None: no bound.
        warmup_steps: that many first steps are always synchronised.
        momentum, betas, eps, weight_decay: as of Dion. So are rank_multiple_of, stack_dims,
            row_blocks, input_first, momentum_rule, newton_schulz, newton_schulz_steps, gather,
            exchange_dtype, update_scale, momentum_dtype, q_dtype and stochastic_rounding.
        look_ahead, direction, rank_fraction, right_factor: as of Dion; None takes the sync's
            default. LowRank: 0, "low_rank", 1/4 and "column_normalized". QuantizedAverage: 1.6
            times the root of the steps from one agreement on a weight to the next (3.9 for six
            steps), "polar", 1 and "qr"; with a rank_fraction below 1 the direction is "low_rank".
            CodedGradients: the same, and 2 for look_ahead. ``repr(optimizer)`` shows them.

    The arguments ``gate`` to ``warmup_steps``, but for ``local_lr``, concern all groups; the others
    are defaults of group keys.

    Raises:
        TypeError, ValueError: naming the argument or group key and the value.
    """

    _kept = (*Dion._kept, "local_step", "max_local_steps", "warmup_steps")

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.02,
        *,
        replicas: Replicas = None,
        gate: Gate | None = None,
        sync: Sync | None = None,
        wire_budget: float | None = None,
        threshold: float | None = None,
        local_step: Literal["dion", "gradient"] = "dion",
        local_lr: float | None = None,
        max_local_steps: int | None = 50,
        warmup_steps: int = 0,
        momentum: float = 0.95,
        look_ahead: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        direction: DirectionName | None = None,
        rank_fraction: float | None = None,
        rank_multiple_of: int = 1,
        stack_dims: int = 0,
        row_blocks: int | Sequence[int] = 1,
        input_first: bool = False,
        momentum_rule: Literal["error_feedback", "plain"] = "error_feedback",
        right_factor: Literal["column_normalized", "qr"] | None = None,
        newton_schulz: Literal["polar_express", "muon"] = "polar_express",
        newton_schulz_steps: int = 4,
        gather: Literal["auto", "never"] = "auto",
        exchange_dtype: torch.dtype | str | None = None,
        update_scale: Literal["spectral", "original", "match_rms_adamw"] = "spectral",
        momentum_dtype: torch.dtype | str | None = None,
        q_dtype: torch.dtype | str | None = None,
        stochastic_rounding: bool = False,
    ) -> None:
        keys = {k: v for k, v in locals().items() if k in check.SETTINGS}
        _check_local_steps(local_step, max_local_steps, warmup_steps)
        self.local_step: str = local_step
        self.max_local_steps, self.warmup_steps = max_local_steps, warmup_steps
        gate = _gate(gate, threshold, wire_budget, sync)
        sync = _sync(sync, gate)
        check_kinds(gate, sync)
        if gate.share is None:  # a budget knows later what openings cost
            gate.check_feasible(max_local_steps)
        self._construct(params, replicas, gate, sync, **keys)
        if sync.every_step:  # raise now, and not at the first step, if a budget cannot pay for all
            self._set_gate_costs(self._trained(), sharded=False)
            check_costs(gate, sync, max_local_steps)

    @torch.no_grad()
    def synchronize(self, *, exact: bool | None = None) -> None:
        """Synchronise replicas, so that they hold the same weights; collective.

        For before an evaluation or a checkpoint, and before parameters are frozen. A byte budget
        counts it, and opens the gate less often until it is paid back.

        Args:
            exact: True averages weights, momenta and moments exactly, as a checkpoint needs it that
                keeps one replica's state for all. It sends 2 (direction="polar") to 2.6 times as
                much as an all-reduce of all gradients. All state is then the same on every
                replica, that of frozen parameters too, whose weights stay as they are.
                False needs a sync that sends codes, such as QuantizedAverage. It sends those of the
                fragments that have drifted (0.065 times in 2 bits, if all have). Weights are then
                the same on every replica; momenta, moments and residuals remain its own.
                None takes False with such a sync, and True without.

        Raises:
            ValueError: if ``exact`` is False with a sync that sends no codes.
        """
        if exact or not self.sync.sends_codes:
            super().synchronize(exact=exact)
            return
        plan = self._present_plan()
        if self.drifted:
            with full_precision(plan.device), explain_lost_ranks("optimizer.synchronize()"):
                self.gate.spend(self.sync.sync_weights(plan, self._replicas.process_group))
        self.progress.local_steps = 0


def _check_local_steps(local_step: str, max_local_steps: int | None, warmup_steps: int) -> None:
    checks.one_of("local_step", local_step, ("dion", "gradient"))
    checks.integer("warmup_steps", warmup_steps, 0)
    if max_local_steps is not None:
        checks.integer("max_local_steps", max_local_steps, 1)


def _gate(gate: Any, threshold: float | None, wire_budget: float | None, sync: object) -> Gate:
    ways = {"gate": gate, "threshold": threshold, "wire_budget": wire_budget}
    given = [f"{key}={value!r}" for key, value in ways.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)}: each is a gate; pass one of them.")
    if wire_budget is not None:
        return ByteBudget(wire_budget)
    if gate is None and threshold is None and isinstance(sync, Sync) and sync.every_step:
        return AlwaysOpen()
    if gate is None:
        return RMMC(0.3 if threshold is None else threshold)
    if not isinstance(gate, Gate):
        raise TypeError(
            f"gate={gate!r} must be a Gate, such as curvadion.RMMC(0.3), got {type(gate).__name__}"
        )
    return gate


def _sync(given: Any, gate: Gate) -> Sync:
    """A copy of the sync, with the defaults that the gate asks for."""
    if given is None:
        given = LowRank() if gate.share is None else QuantizedAverage()
    if not isinstance(given, Sync):
        raise TypeError(
            f"sync={given!r} must be a Sync, such as curvadion.LowRank() or "
            f"curvadion.QuantizedAverage(), got {type(given).__name__}"
        )
    sync: Sync = copy.deepcopy(given)
    if gate.share is not None and sync.prepare([[1]]) is None:
        raise ValueError(
            f"sync={sync!r} with gate={gate!r}: a budget needs a sync that knows what an opening "
            f"sends, such as QuantizedAverage()."
        )
    sync.choose_defaults(gate.share)
    return sync
