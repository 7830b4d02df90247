"""One step of an optimizer, from what ranks agree on to the report."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, overload

import torch
from torch import Tensor

from curvadion.layout.dtensor import local
from curvadion.metering import wire
from curvadion.metering.report import StepReport
from curvadion.optim.base import ReplicaOptimizer
from curvadion.sync.base import Step
from curvadion.sync.decision import GATE_BYTES, Decision, Moving, Notice
from curvadion.sync.verify import GradientWatch
from curvadion.update import hyperparameters as check
from curvadion.update.gradients import Gradients
from curvadion.update.momentum import MomentumNorms, momentum_norms
from curvadion.update.parameter import Parameter
from curvadion.update.plan import Plan

MOST_SKIPS_IN_A_ROW = 10


class Foreseen(NamedTuple):
    """What a schedule says of a step before it begins.

    opens: whether replicas come together; None if no schedule tells. reason: why they do. heard:
    whether this rank must hear the other replicas before the step.
    """

    opens: bool | None = None
    reason: str | None = None
    heard: bool = True


class SteppingOptimizer(ReplicaOptimizer):
    """An optimizer whose ranks agree on each step, take it, and report on it."""

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One optimizer step; collective over the replicas.

        Args:
            closure: reevaluates the model and returns the loss.

        Raises:
            RuntimeError: on every replica alike, if the replicas' gradients are identical although
                this optimizer synchronises them, if their optimizers differ, or at the tenth
                step in a row with a non-finite gradient (under a schedule, at the opening after).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if wrong := self._wrong_settings():
            self._refuse(wrong)
        # Ranks agree by the plan they had: what has changed here may be this rank's alone.
        plan = self._known_plan()
        scaled = self._unscale(plan.device)
        with full_precision(plan.device):
            self._step(plan, scaled=scaled)
        return loss

    def _unscale(self, device: torch.device) -> bool:
        """Divide the gradients by a GradScaler's scale, if one drives this step."""
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:
            each = [X.grad for group in self.param_groups for X in group["params"]]
            gradients = [local(G) for G in each if G is not None]
            if gradients:
                torch._foreach_mul_(gradients, scale.to(device).double().reciprocal().float())
        return hasattr(self, "found_inf")

    def _refuse(self, wrong: str) -> None:
        """Raise ValueError for a setting that is wrong here, and an error on the other ranks."""
        plan = self._plans.known
        if plan is None:
            # The settings that are right are enough to meet the others.
            known = [{**group, **check.valid(group, self.defaults)} for group in self.param_groups]
            try:
                plan = self._plans.make(known, self.state)
            except (KeyError, TypeError, ValueError):
                raise ValueError(wrong) from None
        self._place_gradients(plan)
        self._agreement.refuse(
            self.gate,
            plan,
            heard=self._foresee(plan).heard,
            delay=self.sync.delay,
            background=self._background,
            steps=self.progress.steps,
        )
        raise ValueError(wrong)

    def _step(self, plan: Plan, *, scaled: bool, foreseen: Foreseen | None = None) -> None:
        """foreseen: what the schedule says of this step, if it has been asked already."""
        new = self._create_state(plan)
        self._place_gradients(plan)
        gradients = plan.gradients()
        reads = self.gate.reads_momentum and bool(plan.dion)
        momenta = momentum_norms(plan, gradients) if reads else None
        memory = self.gate.state_dict()
        foreseen = self._foresee(plan) if foreseen is None else foreseen
        decision = self._decide(plan, gradients, momenta, new, foreseen, scaled=scaled)
        if decision.notice == Notice.CHANGED:
            for p in new:  # whose states are as the plan before wants them
                del self.state[p.X]
            self._step(self._changed_plan(plan), scaled=scaled, foreseen=foreseen)
            return
        if decision.notice == Notice.NEW and decision.all_zero:
            self.gate.load_state_dict(memory)  # no step was taken
            return
        # Weights are compared before any of them has moved.
        together = foreseen.heard or not self.progress.steps
        if not decision.finite and together:
            # Each replica may count skips of its own: an opening tells all which has many.
            self.skip_step(tolerate=scaled or foreseen.opens is not None)
            self._spend(GATE_BYTES if foreseen.opens else 0, plan)
            return
        complete = decision.complete
        if decision.notice in (Notice.NEW, Notice.UNVERIFIED) and self._replicas.size > 1:
            complete = self._verify(plan, new)
        if foreseen.heard and self.progress.steps >= GradientWatch.FIRST:
            self._spend(self._agreement.look_at_gradients(plan, self.progress.looks), plan)
            self.progress.looks += 1
        moving = Moving(plan, gradients, None if momenta is None else momenta.after)
        progress, group = self.progress, self._replicas.process_group
        step = Step(
            moving,
            complete,
            group,
            progress.steps,
            progress.local_steps,
            agreed=decision.group,
            rests=not decision.finite,
            background=self._background,
        )
        reason = self._take(step, decision, foreseen)
        self._count(step, foreseen, opened=reason is not None)
        self._report(plan, None if step.rests else decision, reason)
        self._warn_if_stuck(tolerate=scaled)

    def _count(self, step: Step, foreseen: Foreseen, *, opened: bool) -> None:
        """Note in the run's progress that a step was taken; opened: whether the gate was open."""
        progress = self.progress
        if opened:
            progress.local_steps = progress.uneven_steps = 0
        else:
            progress.local_steps += 1
            progress.uneven_steps += not foreseen.heard and (step.rests or not step.complete)
        progress.steps += 1
        progress.steps_since_exact += 1
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if step.rests else 0

    def _foresee(self, plan: Plan) -> Foreseen:
        """What is known of this step before any rank has told anything; asked once a step."""
        return Foreseen()

    def _decide(
        self,
        plan: Plan,
        gradients: Gradients,
        momenta: MomentumNorms | None,
        new: Sequence[Parameter],
        foreseen: Foreseen,
        *,
        scaled: bool,
    ) -> Decision:
        """What ranks agree on before a step; new: the parameters that had no state before."""
        progress = self.progress
        return self._agreement.decide(
            self.gate,
            plan,
            gradients,
            momenta,
            changed=self._plans.changed(self.param_groups, self.state, self.gate),
            still=len(new) == len(plan.parameters)
            and not any(float(g["lr"]) for g in self.param_groups),
            uneven=progress.uneven_steps > 0,
            stuck=progress.skipped_in_a_row >= MOST_SKIPS_IN_A_ROW and not scaled,
            opens=bool(foreseen.opens),
            heard=foreseen.heard,
            delay=self.sync.delay,
            background=self._background,
            steps=progress.steps,
            param_groups=self.param_groups,
            listing=lambda: self._listing(plan),
        )

    def _take(self, step: Step, decision: Decision, foreseen: Foreseen) -> str | None:
        """Take a step that ranks have agreed on; why replicas came together, None if not."""
        self.sync.open_step(step)
        return self.gate.reason

    def _warn_if_stuck(self, *, tolerate: bool) -> None:
        progress = self.progress
        if progress.skipped_in_a_row == MOST_SKIPS_IN_A_ROW and not tolerate:
            warnings.warn(
                f"{MOST_SKIPS_IN_A_ROW} steps in a row had a NaN or an Inf in a gradient of this "
                f"replica (last: step {progress.steps}), which left them out. If the next ones "
                f"have too, all replicas stop when they next come together.",
                stacklevel=6,
            )

    def skip_step(self, *, tolerate: bool) -> None:
        """Count a step at which some replica had a non-finite gradient; touch nothing else.

        For frameworks that see such gradients before ``step`` and do not call it. tolerate: raise
        no error however many steps in a row are skipped, as a loss scaler that looks for its scale
        wants it.
        """
        self.progress.steps += 1
        self.progress.skipped_in_a_row += 1
        self._report(None, None, None)
        if self.progress.skipped_in_a_row >= MOST_SKIPS_IN_A_ROW and not tolerate:
            raise RuntimeError(
                f"{self.progress.skipped_in_a_row} steps in a row had a NaN or an Inf in a "
                f"gradient on some replica (last: step {self.progress.steps}). No state was "
                f"touched at these steps: lower the learning rate or look for the cause in the "
                f"model, then load the last checkpoint."
            )

    def _report(self, plan: Plan | None, decision: Decision | None, opened: str | None) -> None:
        """decision: None for a skipped step. opened: why replicas came together."""
        read = decision is not None and self.gate.reads_momentum
        total, metered = wire.counted_bytes()
        sent = total - self._wire_bytes if metered else None
        self._wire_bytes = total
        named = read and plan is not None and plan.dion
        self.report = StepReport(
            step=self.progress.steps,
            gate_open=opened is not None,
            reason="non-finite gradient" if decision is None else opened or "closed",
            rmmc=decision.signal if decision is not None and read else None,
            rmmc_parameter=(
                plan.parameters[decision.parameter].name
                if named and plan is not None and decision is not None
                else None
            ),
            local_steps=self.progress.local_steps,
            skipped=decision is None,
            wire_bytes=sent,
            waited_seconds=self.sync.waited_seconds - self._waited,
        )
        self._waited = self.sync.waited_seconds


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Keep a caller's autocast from an update's products, which it would take in half precision."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
