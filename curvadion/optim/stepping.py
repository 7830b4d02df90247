"""One step of an optimizer, from what ranks agree on to the report."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from curvadion import checks
from curvadion.comm.collectives import explain_lost_ranks
from curvadion.layout.dtensor import local
from curvadion.metering.report import StepReport
from curvadion.optim.base import ReplicaOptimizer
from curvadion.sync.base import Step
from curvadion.sync.decision import GATE_BYTES, Decision, Moving, Notice, Signal, signal_of
from curvadion.sync.told import Foreseen
from curvadion.sync.verify import GradientWatch
from curvadion.update import hyperparameters as check
from curvadion.update.gradients import Gradients
from curvadion.update.momentum import MomentumNorms, momentum_norms
from curvadion.update.parameter import Parameter
from curvadion.update.plan import Plan
from curvadion.update.state import ANCHOR

MOST_SKIPS_IN_A_ROW = 10


class SteppingOptimizer(ReplicaOptimizer):
    """An optimizer whose ranks agree on each step, take it, and report on it."""

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @_disable_dynamo  # torch.compiler.disable would import torch._dynamo with this module
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One optimizer step; collective over the replicas.

        Args:
            closure: reevaluates the model and returns the loss.

        Raises:
            RuntimeError: on every replica alike, if the replicas' gradients are identical although
                this optimizer synchronises them, if their optimizers differ, or at the tenth
                step in a row with a non-finite gradient (under a schedule, at the opening after;
                with a gate that decides one step late, two steps after).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if wrong := self._wrong_settings():
            self.refuse(wrong)
        # Ranks agree by the plan they had: what has changed here may be this rank's alone.
        plan = self._known_plan()
        if plan.device.type == "meta":
            raise ValueError(
                f"{plan.parameters[0].name} is on the meta device, and has no elements to step: "
                f"call model.to_empty(device=...) and initialise it before training."
            )
        scaled = self._unscale(plan.device)
        with full_precision(plan.device), explain_lost_ranks("optimizer.step()"):
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

    def refuse(self, wrong: str) -> None:
        """Raise ValueError for what is wrong here, and an error on the other ranks.

        Instead of ``step``, on one rank or several; also for frameworks that find an error before
        it. Replicas that do not wait for each other hear it when they next come together.
        """
        plan = self._plans.known
        if plan is None:
            # The settings that are right are enough to meet the others.
            known = [{**group, **check.valid(group, self.defaults)} for group in self.param_groups]
            try:
                plan = self._plans.make(known, self.state)
            except (KeyError, TypeError, ValueError):
                raise ValueError(wrong) from None
        self._place_gradients(plan)
        steps = self.progress.steps
        self._agreement.refuse(self.gate, plan, self._foresee(plan), steps=steps)
        raise ValueError(wrong)

    def _step(self, plan: Plan, *, scaled: bool, foreseen: Foreseen | None = None) -> None:
        """foreseen: what is known of this step beforehand, if that has been asked already."""
        new = self._create_state(plan)
        self._place_gradients(plan)
        still = len(new) == len(plan.parameters) and not self._moves
        memory = self.gate.state_dict() if still else {}
        foreseen = self._foresee(plan) if foreseen is None else foreseen
        gradients = plan.gradients()
        reads = self.gate.reads_momentum and plan.dion
        momenta = momentum_norms(plan, gradients) if reads else None
        stuck = self._stuck and not scaled
        decision = self._decide(plan, gradients, momenta, foreseen, still=still, stuck=stuck)
        if decision.notice == Notice.CHANGED:
            for p in new:  # whose states are as the plan before wants them
                del self.state[p.X]
            # Ranks that have made the same change at different steps meet once more, to tell so.
            foreseen = foreseen._replace(heard=foreseen.heard or foreseen.late)
            self._step(self._changed_plan(plan), scaled=scaled, foreseen=foreseen)
            return
        if decision.notice == Notice.NEW and decision.all_zero:
            self.gate.load_state_dict(memory)  # no step was taken
            return
        # Weights are compared before any of them has moved.
        together = foreseen.heard or not self.progress.steps
        if not decision.finite and together:
            self._skip_together(plan, foreseen, scaled=scaled)
            return
        complete = decision.complete
        if decision.notice in (Notice.NEW, Notice.UNVERIFIED) and self._replicas.size > 1:
            complete = self._verify(plan, new, foreseen)
        if foreseen.heard and self.progress.steps >= GradientWatch.FIRST:
            self._spend(self._agreement.look_at_gradients(plan, self.progress.looks), plan)
            self.progress.looks += 1
        moving = Moving(plan, gradients, None if momenta is None else momenta.after)
        step = Step(
            moving,
            complete,
            self._replicas.process_group,
            self.progress.steps,
            self.progress.local_steps,
            agreed=decision.group,
            rests=not decision.finite,
            background=partial(self._background, plan.device),
        )
        reason = self._take(step, decision, foreseen)
        self._count(step, foreseen, opened=reason is not None)
        signal = (
            self.progress.signal_told if foreseen.late else signal_of(decision.signal_word, plan)
        )
        self._report(None if step.rests else signal, reason, skipped=step.rests)
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
        foreseen: Foreseen,
        *,
        still: bool,
        stuck: bool,
    ) -> Decision:
        """What ranks agree on before a step; still, stuck: as :meth:`Agreement.decide` takes it."""
        progress = self.progress
        return self._agreement.decide(
            self.gate,
            plan,
            gradients,
            momenta,
            changed=self._plans.changed(self.param_groups, self.state, self.gate),
            still=still,
            uneven=progress.uneven_steps > 0,
            stuck=stuck,
            foreseen=foreseen,
            steps=progress.steps,
            param_groups=self.param_groups,
            listing=partial(self._listing, plan),
        )

    def _verify(self, plan: Plan, new: Sequence[Parameter], foreseen: Foreseen) -> bool:
        """Compare the replicas; return whether all have all gradients, and have had them.

        new: the parameters that had no state before this step.
        """
        together = self.sync.brings_weights_together or self.progress.steps == 0
        comparable = [p for p in plan.parameters if ANCHOR in p.state]
        if not comparable:
            comparable = plan.parameters if together and not self.apart else list(new)
        uneven = self.progress.uneven_steps > 0
        complete = self._agreement.verify(plan, self._listing(plan), comparable, uneven=uneven)
        if foreseen.delay:  # its group is made while all are here: later one may be ahead
            foreseen.background()
        return complete

    def _take(self, step: Step, decision: Decision, foreseen: Foreseen) -> str | None:
        """Take a step that ranks have agreed on; why replicas came together, None if not."""
        self.sync.open_step(step)
        return self.gate.reason

    def _skip_together(self, plan: Plan, foreseen: Foreseen, *, scaled: bool) -> None:
        # Each replica may count skips of its own: an opening tells all which has many.
        of_its_own = foreseen.opens is not None and self._replicas.size > 1
        self.skip_step(tolerate=scaled or of_its_own)
        # A gate that hears of every step has counted what they tell each other.
        self._spend(GATE_BYTES if foreseen.opens and not foreseen.late else 0, plan)

    @property
    def _moves(self) -> bool:
        """Whether any learning rate is not zero."""
        return any(float(group["lr"]) for group in self.param_groups)

    @property
    def _stuck(self) -> bool:
        return self.progress.skipped_in_a_row >= MOST_SKIPS_IN_A_ROW

    def _warn_if_stuck(self, *, tolerate: bool) -> None:
        progress = self.progress
        if progress.skipped_in_a_row == MOST_SKIPS_IN_A_ROW and not tolerate:
            warnings.warn(
                f"{MOST_SKIPS_IN_A_ROW} steps in a row had a NaN or an Inf in a gradient of this "
                f"replica (last: step {progress.steps}), which left them out. If the next ones "
                f"have too, all replicas stop when they next come together.",
                stacklevel=checks.frames_up(),
            )

    def skip_step(self, *, tolerate: bool) -> None:
        """Count a step at which some replica had a non-finite gradient; touch nothing else.

        For frameworks that see such gradients before ``step`` and do not call it. tolerate: raise
        no error however many steps in a row are skipped, as a loss scaler that looks for its scale
        wants it.
        """
        self.progress.steps += 1
        self.progress.skipped_in_a_row += 1
        self._report(None, None, skipped=True)
        if self._stuck and not tolerate:
            raise RuntimeError(
                f"{self.progress.skipped_in_a_row} steps in a row had a NaN or an Inf in a "
                f"gradient on some replica (last: step {self.progress.steps}). No state was "
                f"touched at these steps: lower the learning rate or look for the cause in the "
                f"model, then load the last checkpoint."
            )

    def _report(self, signal: Signal | None, opened: str | None, *, skipped: bool) -> None:
        """signal: that decided, if one did. opened: why replicas came together."""
        read = signal if self.gate.reads_momentum else None
        sent = self._wire.take()
        waited = self.sync.waited_seconds + self._agreement.waiting.seconds
        self.report = StepReport(
            step=self.progress.steps,
            gate_open=opened is not None,
            reason="non-finite gradient" if skipped else opened or "closed",
            rmmc=None if read is None else read.largest,
            rmmc_parameter=None if read is None else read.parameter,
            local_steps=self.progress.local_steps,
            skipped=skipped,
            wire_bytes=None if sent is None else sum(sent.values()),
            wire_bytes_by_ranks=sent,
            waited_seconds=waited - self._waited,
        )
        self._waited = waited


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Keep a caller's autocast from an update's products, which it would take in half precision."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
