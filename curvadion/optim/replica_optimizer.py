"""When and how replicas synchronise around the steps of an inner optimizer."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any, ClassVar, overload
from weakref import WeakSet

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from curvadion import checks
from curvadion.agreement.agreement import Agreement
from curvadion.agreement.meeting import Outcome
from curvadion.agreement.verify import weights_equal
from curvadion.comm.collectives import all_ranks_equal, explain_lost_ranks
from curvadion.comm.replicas import ReplicaGroup, ReplicasArgument
from curvadion.comm.waiting import waiting
from curvadion.gates import Gate, steps_to_opening
from curvadion.layout.dtensor import local
from curvadion.layout.local_gradients import LOCAL_GRADIENTS
from curvadion.layout.matrix import Options
from curvadion.layout.placements import place_gradients
from curvadion.metering import wire
from curvadion.metering.report import StepReport, Summary
from curvadion.ops.precision import full_precision
from curvadion.optim import log_lines
from curvadion.optim.capture import Captures, Obstacle, check_recordable
from curvadion.optim.checkpoint import (
    Progress,
    Record,
    check_sync,
    decode_states,
    read_record,
    record,
    warn_of_others,
)
from curvadion.optim.choices import (
    check_costs,
    check_kinds,
    check_local_gradients,
    check_members,
    check_one_replica,
    set_costs,
)
from curvadion.optim.group_keys import without_effect
from curvadion.optim.inner import Inner, trained, without_addresses
from curvadion.optim.running_ahead import LATER, StepAhead
from curvadion.optim.step_meter import StepMeter
from curvadion.plan.opened_states import check_division
from curvadion.plan.parameter import Parameter
from curvadion.plan.plan import Plan, StepTensors, plan_ingredients
from curvadion.plan.state import ANCHOR, PROGRESS, StateKey
from curvadion.sync import exact_average
from curvadion.sync.base import Step, Sync
from curvadion.update.inner_step import measure
from curvadion.update.registry import feeds_back
from curvadion.update.update_hooks import UpdateHook, is_capturable

MAX_CONSECUTIVE_SKIPS = 10
# Devices on which the host goes on before it has read whether gradients are finite.
RUNS_AHEAD = ("cuda",)
RETRY_AFTER = 0.5  # seconds after an opening that failed, if no step comes between
# The result of a meeting that the host has not read.
UNREAD = Outcome(signal=0.0, parameter=None, finite=True, all_zero=False)


class ReplicaOptimizer(Optimizer):
    """What :class:`curvadion.Dion`, CurvaDion and Replicated have in common.

    Each rank has one. Its inner optimizer steps this rank's replica; around those steps, the
    gate decides when replicas synchronise, and the sync how. The three classes only build
    these parts: construct it as one of them, and use this class for annotations and
    ``isinstance``.

    Args:
        inner: the optimizer of this replica.
        gate: when replicas synchronise.
        sync: how they do; it is not copied.
        replicas: the ranks with replicas, as users give them.
        max_local_steps: most local steps in a row; None: no limit.
        warmup_steps: steps at the start that are always synchronised.
        capture: whether steps are captured in CUDA graphs; None: where they can be.

    Attributes:
        inner: the optimizer of this replica, whose groups and states these are.
        gate: when replicas synchronise. Another one may be assigned between steps.
        max_local_steps: as it was passed; so are ``warmup_steps`` and ``capture``.
        replicas: the ranks with replicas; ``replicas.size`` is the number of replicas.
        agreement: what ranks have agreed on, and whether they must be compared again.
        report: the last step's :class:`curvadion.StepReport`; None before the first step.
        progress: counters of the run: ``steps``, ``local_steps``, ``consecutive_skips``,
            ``steps_since_exact``, ``sent`` (in all-reduces of all gradients) and ``counted``
            (the steps in which it was).

    Raises:
        TypeError, ValueError: naming the argument and its value.
    """

    # A GradScaler then leaves unscaling and skipping to step().
    _step_supports_amp_scaling = True

    # Whether TailAverage.averaged() has put an average in the place of the weights. Any optimizer
    # with such an average has this attribute.
    holds_average = False

    # All optimizers of this process, copies included.
    _existing: ClassVar[WeakSet[ReplicaOptimizer]] = WeakSet()

    # Attributes kept by a copy or a pickle of the optimizer, beside torch's.
    _kept = (
        *("inner", "gate", "_sync", "_first_memory", "progress", "report", "replicas"),
        *("max_local_steps", "warmup_steps", "capture"),
    )

    _plan: Plan | None
    _ingredients: list[object]  # from which the plan was built
    _checked_version: int  # of LOCAL_GRADIENTS, when the plan was last checked
    _planned_gate: Gate
    # The plan whose parameters all have states, and how many states there were then.
    _known_states: tuple[Plan | None, int]
    _captures: Captures
    _meter: StepMeter
    _totals: Summary  # over the reports since construction or loading
    _has_logged: bool  # whether the first line is logged, or nobody reads it

    def __init__(
        self,
        inner: Inner,
        gate: Gate,
        sync: Sync,
        *,
        replicas: ReplicasArgument,
        max_local_steps: int | None = None,
        warmup_steps: int = 0,
        capture: bool | None = None,
    ) -> None:
        if capture is not None and not isinstance(capture, bool):
            raise TypeError(f"capture={capture!r} must be None, True or False")
        self.capture = capture
        checks.integer("warmup_steps", warmup_steps, 0)
        if max_local_steps is not None:
            checks.integer("max_local_steps", max_local_steps, 1)
        self.max_local_steps = max_local_steps
        self.warmup_steps = warmup_steps
        check_kinds(gate, sync)
        if gate.share is None:  # a budget learns the cost of openings later
            gate.check_feasible(max_local_steps)
        self.gate = gate
        self._sync = sync
        self._first_memory = copy.deepcopy(sync.state_dict())
        self.progress = Progress()
        self.report: StepReport | None = None
        self.replicas = ReplicaGroup(replicas)
        check_members(gate, sync, self.replicas)
        self.inner = inner
        # torch's constructor adds the inner optimizer's groups once more, and assigns defaults,
        # groups and states. That has no effect before there is an agreement.
        super().__init__(inner.param_groups, inner.defaults)
        self._existing.add(self)
        self._forget()
        self._keep_record_in_groups()
        if sync.every_step:  # raise now instead of at the first step if a budget is too small
            set_costs(gate, sync, trained(inner.param_groups), sharded=False)
            check_costs(gate, sync, max_local_steps)

    @property
    def sync(self) -> Sync:
        """How replicas synchronise; fixed, because states depend on it."""
        return self._sync

    @property
    def scheduled(self) -> bool:
        """Whether replicas wait for each other at openings only, which they know ahead.

        AlwaysOpen follows a schedule, too, but has no steps between openings: its replicas
        meet at every step, as under a gate that reads momenta.
        """
        gate = self.gate
        silent = gate.follows_schedule and not (gate.always_open or gate.reads_momentum)
        return silent and self.replicas.size > 1

    @property
    def drifted(self) -> bool:
        """Whether there are several replicas and they hold different weights."""
        moved = self.progress.local_steps > 0 or self.sync.fragments_drifted > 0
        return moved and self.replicas.size > 1

    @property
    def next_opening(self) -> int | None:
        """The step at which replicas will next synchronise, counted as ``report.step``.

        None if that depends on momenta or comes after 10,000 steps. A schedule is computed ahead
        at each call. The openings of members that come and go may fail.
        """
        progress = self.progress
        if self.sync.every_step or progress.steps < self.warmup_steps:
            return progress.steps + 1
        wait = steps_to_opening(self.gate, progress.local_steps, self.max_local_steps)
        return None if wait is None else progress.steps + wait

    @property
    def _share(self) -> float | None:
        """What has been sent, as a share of DDP's bytes; None if it is not known."""
        known = self.replicas.size > 1 and self.gate.open_cost > 0 and self.progress.counted > 0
        return self.progress.sent / self.progress.counted if known else None

    @property
    def _states_differ(self) -> bool:
        """Whether weights, or residuals of codes, differ between replicas."""
        if not self.replicas.fixed:  # any member's state may stand for all
            return False
        residuals_differ = self.sync.sends_codes and self.progress.steps_since_exact > 0
        return self.drifted or (residuals_differ and self.replicas.size > 1)

    # --- groups and states, which are the inner optimizer's

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's defaults of group keys."""
        return self.inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        if self._is_complete:
            self.inner.defaults = defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the inner optimizer."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._is_complete:
            self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The states of the inner optimizer, by parameter; a copy in :class:`Replicated`."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._is_complete:
            self.inner.state = state

    @property
    def _is_complete(self) -> bool:
        """Whether torch's constructor has returned."""
        return "agreement" in vars(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose keys override the defaults; a warning names unknown keys.

        Raises:
            ValueError, TypeError: for misspelt keys, invalid values and unsupported
                parameters.
        """
        if not self._is_complete:
            return
        self.inner.add_param_group(param_group)
        self._keep_record_in_groups()
        self.agreement.verified = False

    def _keep_record_in_groups(self) -> None:
        """Give each group the key that holds the record: checkpoint tools save and load those."""
        progress = self._record()
        for group in self.param_groups:
            group.setdefault(PROGRESS, progress)

    # --- the plan

    def _check_settings(self) -> None:
        """Note the groups' values; ValueError if one is invalid."""
        if not self.agreement.settings_changed(self.compared_groups):
            return
        try:
            self.inner.check_groups()
        except ValueError:
            self.agreement.forget_settings()  # checked again at the next step
            raise

    def _collective_plan(self) -> Plan:
        """The plan of the groups, built again if they have changed.

        Building it is collective if parameters are sharded, so all ranks call this at the same
        steps.
        """
        # The gate, because a new plan computes what its openings cost.
        ingredients = [self.inner.states, self.gate, *plan_ingredients(self.param_groups)]
        same = len(ingredients) == len(self._ingredients) and all(
            map(is_, ingredients, self._ingredients)
        )
        if self._plan is None or not same:
            self._check_settings()
            plan = self._make_plan()
            self._check_plan(plan)
            if self._plan is not None:
                self._note_changes(self._plan, plan)
            self._plan = plan
            self._ingredients = ingredients
            self._planned_gate = self.gate
        elif self._checked_version != LOCAL_GRADIENTS.version:
            self._check_local_gradients(self._plan)
        return self._plan

    def _note_changes(self, earlier: Plan, plan: Plan) -> None:
        """Compare two plans; forget what the new one makes invalid.

        Mark replicas as unverified if parameters are new or unfrozen, or there is another gate.
        """
        known = {id(p.X) for p in earlier.parameters}
        new = [p for p in plan.parameters if id(p.X) not in known]
        for p in new:
            if ANCHOR in p.state:  # its weights may have changed while it was frozen
                del p.state[ANCHOR]
        if new or self.gate is not self._planned_gate:
            self.agreement.verified = False

    def _make_plan(self, **wanted: Any) -> Plan:
        """Like :meth:`Plan.of`; reuses the process groups of the previous plan."""
        return Plan.of(
            self.inner.planned_groups,
            self.inner.states,
            self.replicas.process_group,
            feeds_back=feeds_back,
            unions=None if self._plan is None else self._plan.unions,
            **wanted,
        )

    def _check_plan(self, plan: Plan) -> None:
        """Raise if the optimizer cannot use a plan; compute what its steps send."""
        if self.gate.reads_momentum and not any(
            group["algorithm"] == "dion" and group["params"] for group in self.inner.planned_groups
        ):
            raise ValueError(
                f"gate={self.gate!r} reads momenta, but no parameter has algorithm='dion': "
                f"use FixedPeriod or AlwaysOpen()."
            )
        self.inner.check_plan(plan, self.replicas.process_group, begun=self.progress.steps > 0)
        check_division(plan.dion)
        before = [] if self._plan is None else self._plan.parameters
        frozen = [p.name for p in before if not p.X.requires_grad]
        if frozen and self.drifted and self.sync.ends_drift:
            raise RuntimeError(
                f"{frozen[0]} was frozen while replicas had drifted: unfreeze it, "
                f"call synchronize(), and freeze it again."
            )
        self._check_local_gradients(plan)
        check_one_replica(self.gate, self.sync, self.replicas, plan)
        if self.capture and plan.parameters:
            self._check_capture(plan)
        set_costs(self.gate, self.sync, [p.X for p in plan.parameters])
        if plan.parameters:
            check_costs(self.gate, self.sync, self.max_local_steps)

    def _check_local_gradients(self, plan: Plan) -> None:
        """Raise ValueError if nothing would average gradients that a framework leaves to us."""
        check_local_gradients(self.replicas, plan)
        self._checked_version = LOCAL_GRADIENTS.version

    def _check_capture(self, plan: Plan) -> None:
        """Raise ValueError if no step can be captured."""
        why = None
        if self.gate.reads_momentum or not (self.gate.always_open or self.scheduled):
            why = f"at every step the host waits for what gate={self.gate!r} reads"
        elif self.sync.delay or (self.gate.always_open and self.sync.sends_codes):
            why = f"at every step the host takes part in sync={self.sync!r}"
        elif self.gate.always_open and self.replicas.size > 1:
            why = "replicas exchange factors at every step"
        if why is None:
            try:
                check_recordable(plan)
            except Obstacle as obstacle:
                why = str(obstacle)
        if why is not None:
            raise ValueError(f"capture=True: {why}. Pass capture=None.")

    # --- what must be equal on all replicas, besides the parameters

    @property
    def compared_groups(self) -> Sequence[Options]:
        """The groups with those keys that must be equal on all replicas."""
        return self.inner.compared_groups

    @property
    def choices(self) -> dict[str, object]:
        """All other settings that must be equal, and the states of gate and sync."""
        choices: dict[str, object] = {
            "warmup_steps": self.warmup_steps,
            "max_local_steps": self.max_local_steps,
            **self.inner.choices,
        }
        for name, choice in (("gate", self.gate), ("sync", self.sync)):
            choices[name] = without_addresses(repr(choice))
            choices[f"the {name}'s state"] = choice.state_dict()
        choices["the format of the sync's messages"] = self.sync.message_format
        return choices

    @property
    def counters(self) -> tuple[int, ...]:
        """The counters of ``progress`` that are equal on all replicas."""
        return self.progress.shared

    # --- a step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @_disable_dynamo  # torch.compiler.disable would import torch._dynamo with this module
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; collective over the replicas.

        Raises:
            ValueError: if a group holds an invalid value.
            RuntimeError: on every replica, if their gradients are identical or their
                optimizers differ; at the tenth skipped step in a row.
        """
        self.replicas.members.check_ready()
        loss = None
        if closure is not None and not callable(closure):
            raise TypeError(
                f"closure={type(closure).__name__} must be a function that computes gradients and "
                f"returns the loss: after loss.backward() call step() alone."
            )
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._meter.begin()
        if self.sync.every_step:
            # A peer's states and settings may replace these.
            self.replicas.members.meet(ahead=True)
        self._check_settings()
        with explain_lost_ranks("optimizer.step()"):
            plan = self._collective_plan()
        idle = all(p.X.grad is None for p in plan.parameters)
        if plan.parameters and idle and not self.progress.steps:
            warnings.warn(
                "No parameter has a gradient at the first step: call backward() before "
                "step(), and build the optimizer after fully_shard and other wrappers.",
                stacklevel=checks.user_stacklevel(),
            )
        if not self._totals.steps:
            self._warn_of_others()
        scaled = self._unscale(plan.device)
        with full_precision(plan.device), explain_lost_ranks("optimizer.step()"):
            self._step(plan, scaled=scaled)
        return loss

    def _warn_of_others(self) -> None:
        """Warn of parameters of which, since keep_gradients_local, nothing averages gradients."""
        own = [X for group in self.param_groups for X in group["params"]]
        groups = [group for optimizer in self._existing for group in optimizer.param_groups]
        held = [X for group in groups for X in group["params"]]
        names = LOCAL_GRADIENTS.left_to_nobody(own, held)
        if names:
            warnings.warn(
                f"Parameters with gradients are in no CurvaDion, Dion or Replicated: {len(names)} "
                f"in all, such as {names[0]!r}. Since keep_gradients_local nothing averages their "
                f"gradients, and another optimizer would let them drift apart: give them to one "
                f"of these. Replicated takes several optimizers of torch.",
                stacklevel=checks.user_stacklevel(),
            )

    def _step(self, plan: Plan, *, scaled: bool) -> None:
        """Decide with the other ranks how to step, and step.

        docs/architecture.md, "How a step is decided", has a table of its questions, in their
        order here, and one of the ranks that meet.

        Args:
            plan: of the step.
            scaled: whether a GradScaler drives it, so that skipped steps are no error.
        """
        agreement = self.agreement
        last_skipped = self._read_last_step(tolerate=scaled)
        new = self._create_states(plan)
        first = self.progress.steps == 0
        gate_before = self.gate.state_dict() if first else {}
        if plan.sharded:
            place_gradients([p.X for p in plan.parameters], self.replicas.process_group)
        # A schedule is asked before the meeting, any other gate after it, with its signal.
        reason = self._reason_to_open(0.0) if self.scheduled else None
        opens = reason is not None
        # Under a schedule all ranks meet only where replicas wait for each other anyway.
        # Members that come and go meet at openings, in their own way.
        everyone = not self.scheduled or first or (opens and not self.sync.delay)
        everyone = everyone and self.replicas.fixed
        agreement.compare_delayed(self, plan, self.progress.steps)
        if self._runs_ahead(plan, opens=opens):
            self._step_ahead(plan, everyone=everyone, last_skipped=last_skipped)
            return

        tensors = plan.step_tensors()
        momenta = plan.momentum_norms(tensors) if self.gate.reads_momentum else None
        lengths = measure(plan, tensors, momenta, directed=self.inner.directed)
        meet = partial(agreement.meet, self, plan, lengths.norms, tensors, momenta, first=first)
        with waiting(everyone and self.replicas.size > 1):
            met = meet(everyone=everyone).read()
        if met.all_zero and not any(float(group.get("lr", 1.0)) for group in self.param_groups):
            # A dry step of torch's checkpoint tools, which need states.
            self.inner.take_no_step()
            self.gate.load_state_dict(gate_before)
            return
        if everyone and not met.finite:
            self.skip_step(tolerate=scaled)
            return
        if not agreement.verified:
            finite_everywhere = met.finite if everyone else meet(everyone=True).read().finite
            if finite_everywhere:
                agreement.verify(plan, self._comparable(plan, new), delay=self.sync.delay)
        if not self.scheduled:
            reason = self._reason_to_open(met.signal)
            opens = reason is not None
        elif opens and self.sync.delay and self.replicas.fixed:
            agreement.compare_later(self, plan, self.progress.steps + self.sync.delay)

        rests = not met.finite
        step = self._step_of(
            plan,
            tensors,
            norms=None if momenta is None else momenta.after,
            lengths=lengths.by_batch,
            rests=rests,
        )
        opened = self._take(step, opens=opens)
        why = reason if opened else None
        failed = opens and not opened
        self._report(met, why, skipped=rests, last_skipped=last_skipped, failed=failed)
        self._count_skips(skipped=rests, tolerate=scaled)

    def _step_ahead(self, plan: Plan, *, everyone: bool, last_skipped: bool) -> None:
        """Take a step before the host knows whether it is skipped.

        Args:
            plan: of the step.
            everyone: whether all replicas meet, or the ranks of this one.
            last_skipped: whether the last step was, which the host has just read.
        """
        reason = None if self.scheduled else self._reason_to_open(0.0)
        opens = reason is not None
        first = self.progress.steps == 0
        ahead = StepAhead(
            plan,
            self._captures,
            partial(self.agreement.meet, self, everyone=everyone, first=first),
            lambda: self.progress.steps,
            directed=self.inner.directed,
            opened=opens,
            hooks=self.inner.update_hooks,
        )
        opened = self._take(self._step_of(plan, LATER, ahead=ahead), opens=opens)
        self.agreement.read_later(ahead.meeting)
        why = reason if opened else None
        captured = ahead.captured
        self._report(UNREAD, why, skipped=False, last_skipped=last_skipped, captured=captured)

    def register_update_hook(self, hook: UpdateHook) -> RemovableHandle:
        """Call a hook with each batch of matrices before they move along their directions.

        ``hook(batch)`` gets a :class:`curvadion.hooks.UpdateBatch`, at every step along
        directions, openings included, and may change directions, learning rates and weights.
        Hooks are called in the order of registration, and every rank needs the same ones. They
        are not called for parameters of AdamW and Lion, for parameters without a gradient, or
        in local steps along gradients. As in torch, they are not saved, copied or pickled.

        While there is one, a step holds a copy of a batch's directions, "low_rank" also the
        product of its factors, and steps are captured in CUDA graphs only if all hooks have an
        attribute ``capturable`` that is True.

        Args:
            hook: a function or an object with ``__call__``.

        Returns:
            A handle, whose ``remove()`` ends it.

        Raises:
            TypeError: it cannot be called, or the inner optimizer is torch's (Replicated).
            ValueError: capture=True, and the hook is not capturable.
        """
        if not callable(hook):
            raise TypeError(f"hook={hook!r} must be callable: define __call__(self, batch)")
        if self.capture and not is_capturable(hook):
            raise ValueError(
                f"hook={hook!r} is not capturable, but capture=True: set hook.capturable = True "
                f"if a CUDA graph may repeat what it does, or pass capture=None."
            )
        return self.inner.register_update_hook(hook)

    def _runs_ahead(self, plan: Plan, *, opens: bool) -> bool:
        """Whether the host may learn later if gradients are finite."""
        if not self.inner.runs_ahead or not self.sync.runs_ahead:
            return False
        if self.gate.reads_momentum or self.sync.delay or not self.agreement.verified:
            return False  # the host must first read the meeting, or hold one more
        if self.replicas.size == 1:
            # Neither a gate nor residuals depend on whether the step is skipped.
            may = self.gate.always_open and not self.sync.sends_codes
        else:
            may = self.scheduled and not opens
        return may and plan.device.type in RUNS_AHEAD

    def _step_of(self, plan: Plan, tensors: StepTensors, **fields: Any) -> Step:
        """What the sync takes.

        Args:
            plan: of the step.
            tensors: weights, momenta and gradients of its matrices.
            fields: further ones of :class:`Step`.
        """
        return self.inner.step_of(
            plan,
            tensors,
            self.progress.steps,
            members=self.replicas.members,
            local_steps=self.progress.local_steps,
            state_keys=lambda: self._state_keys,
            **fields,
        )

    @property
    def _state_keys(self) -> tuple[StateKey, ...]:
        return self.inner.state_keys(self.sync)

    def _take(self, step: Step, *, opens: bool) -> bool:
        """Take the step; return whether replicas have synchronised."""
        opened = False
        if opens and step.members.arrived():
            opened = self.sync.open_step(step)
            if not isinstance(opened, bool):
                raise TypeError(
                    f"open_step() of sync={self.sync!r} returned {opened!r}: return True, or "
                    f"False if members that come and go could not synchronise."
                )
            self._spend(1 if opened else 0)
        else:
            self.sync.closed_step(step)
        progress = self.progress  # may now be a peer's
        self._count_step()
        progress.local_steps = 0 if opened else progress.local_steps + 1
        progress.steps_since_exact += 1
        return opened

    def open_without_step(self) -> bool:
        """Synchronise a fragment with the members present; return whether all could."""
        plan = self._collective_plan()
        self._create_states(plan)
        members = self.replicas.members
        members.with_step = False
        try:
            with full_precision(plan.device):
                opened = self.sync.open_step(self._resting_step(plan))
        finally:
            members.with_step = True
        if not opened:
            return False
        self._spend(1)
        self.progress.local_steps = 0
        return True

    def _count_step(self) -> None:
        wire.count_step(self)
        self.progress.steps += 1
        if self.gate.open_cost:  # else nobody knows what is sent
            self.progress.counted += 1

    def _spend(self, openings: float) -> None:
        """Count what has been sent: as much as this number of open steps."""
        self.gate.spend(openings)
        self.progress.sent += openings * self.gate.open_cost

    def _resting_step(self, plan: Plan) -> Step:
        """A step that changes no weights, for an opening without one."""
        return self._step_of(plan, plan.step_tensors(), rests=True)

    def _create_states(self, plan: Plan) -> list[Parameter]:
        """Create missing states; return the new parameters."""
        # All are created at a first step, even those that exist, because a framework may have
        # moved, cast or loaded weights since. But members that come and go have theirs from
        # start(), perhaps from a peer.
        first = self.progress.steps == 0 and self.replicas.fixed
        known = plan, self.inner.state_count
        if self.agreement.verified and not first and known == self._known_states:
            return []
        new = [p for p in plan.parameters if first or not p.state]
        for p in new:
            self.inner.create_state(p)
        # Loaded states may lack the sync's; replicas are then verified again.
        if new or not self.agreement.verified:
            self.sync.begin(plan.parameters)
        self._known_states = plan, self.inner.state_count
        return new

    def _comparable(self, plan: Plan, new: Sequence[Parameter]) -> Sequence[Parameter]:
        """The parameters whose weights, or anchors, must be equal on all replicas.

        Args:
            plan: of the step.
            new: those whose states were created in this step, so that they have not moved.
        """
        # An anchor is equal on all replicas although they have drifted.
        anchored = [p for p in plan.parameters if ANCHOR in p.state]
        if anchored:
            return anchored
        equal = self.sync.ends_drift or self.progress.steps == 0
        return plan.parameters if equal and not self.drifted else new

    def _unscale(self, device: torch.device) -> bool:
        """Undo a GradScaler's scale; return whether one drives this step."""
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:
            each = [X.grad for group in self.param_groups for X in group["params"]]
            gradients = [local(G) for G in each if G is not None]
            if gradients:
                torch._foreach_mul_(gradients, scale.to(device).double().reciprocal().float())
        return hasattr(self, "found_inf")

    def _reason_to_open(self, signal: float) -> str | None:
        """Why replicas synchronise at this step, or None."""
        gate = self.gate
        local_steps = self.progress.local_steps
        # Called at every step, because a gate may keep state.
        opens = gate.opens(signal, local_steps)
        if self.progress.steps < self.warmup_steps:
            return "warm-up"
        if opens or self.sync.every_step:
            return gate.reason
        longest = gate.longest_run(self.max_local_steps)
        if longest is not None and local_steps >= longest:
            return "longest local run"
        return None

    # --- skipped steps, and reports

    def skip_step(self, *, tolerate: bool) -> None:
        """Count a step that this optimizer or a framework skipped; tolerate: never raise."""
        self._read_last_step(tolerate=tolerate)
        self._count_step()
        self._report(None, None, skipped=True)
        self._count_skips(skipped=True, tolerate=tolerate)

    def _read_last_step(self, *, tolerate: bool) -> bool:
        """Whether the last step was skipped, if the host did not wait for that."""
        finite = self.agreement.last_step_was_finite()
        if finite is None:
            return False
        self._count_skips(skipped=not finite, tolerate=tolerate)
        return not finite

    def _count_skips(self, *, skipped: bool, tolerate: bool) -> None:
        progress = self.progress
        progress.consecutive_skips = progress.consecutive_skips + 1 if skipped else 0
        if progress.consecutive_skips >= MAX_CONSECUTIVE_SKIPS and not tolerate:
            signal = f", or the signal of gate={self.gate!r} was a NaN"
            raise RuntimeError(
                f"{progress.consecutive_skips} steps in a row were skipped: a gradient had a "
                f"NaN, an Inf or a norm above 1e15{signal if self.gate.reads_momentum else ''}. "
                f"Lower the learning rate and load the last checkpoint."
            )

    def _report(
        self,
        met: Outcome | None,
        reason: str | None,
        *,
        skipped: bool,
        last_skipped: bool = False,
        captured: bool = False,
        failed: bool = False,
    ) -> None:
        """Report a step.

        Args:
            met: what the ranks have told each other; None if they have not met.
            reason: why replicas synchronised; None if they have not.
            skipped: whether this step was skipped.
            last_skipped: whether the last step was, and the host has only now read it.
            captured: whether the step was a replay.
            failed: whether replicas should have synchronised, but could not.
        """
        read = met if self.gate.reads_momentum and not skipped else None
        closed = "no opening" if failed else "closed"
        # A framework may skip a step before there is a plan.
        directions = None if self._plan is None else self._plan.directions
        self.report = StepReport(
            step=self.progress.steps,
            gate_open=reason is not None,
            reason="non-finite gradient" if skipped else reason or closed,
            rmmc=None if read is None else read.signal,
            rmmc_parameter=None if read is None else read.parameter,
            local_steps=self.progress.local_steps,
            skipped=skipped or last_skipped,
            members=self.replicas.members.names,
            diagnostics=self.sync.take_diagnostics(),
            captured=captured,
            directions=directions,
            share=self._share,
            threshold=self.gate.threshold,
            **self._meter.end(),
        )
        if not self._has_logged and self._plan is not None:
            self._has_logged = True
            self._log_beginning(self._plan)
        self._totals.add(self.report)

    # --- between steps

    @torch.no_grad()
    def synchronize(self, *, exact: bool | None = None) -> None:
        """Give all replicas the same weights; collective. A byte budget counts the bytes.

        Call it before an evaluation or a checkpoint, before freezing parameters, and at the end
        of a run: rank 0 then logs what has been sent, and how long it has waited.

        Args:
            exact: True averages weights and all states, for a checkpoint of one replica's
                state; it sends 2 to 4 times as much as an all-reduce of gradients. False
                sends codes of fragments that have drifted, and replicas keep their own
                states. None means False with a sync that sends codes.

        Raises:
            ValueError: if ``exact`` is False with a sync without codes, or True with replicas
                that come and go.
            RuntimeError: inside :meth:`curvadion.TailAverage.averaged`.

        Warns:
            UserWarning: if replicas hold different weights under CodedGradients, because
                something has changed them on some ranks. They are then averaged exactly.
        """
        if self.holds_average:
            raise RuntimeError("Call optimizer.synchronize() before tail.averaged(), not inside.")
        if exact is False and not self.sync.sends_codes:
            raise ValueError(
                f"exact=False needs a sync that sends codes, not {self.sync!r}: leave it out."
            )
        with explain_lost_ranks("optimizer.synchronize()"):
            plan = self._collective_plan()
        if not self.replicas.fixed:
            if exact:
                raise ValueError("exact=True needs a fixed group of replicas: leave it out.")
            self._synchronize_members(plan)
            self._log_totals()
            return
        with full_precision(plan.device), explain_lost_ranks("optimizer.synchronize()"):
            if exact or not self.sync.sends_codes:
                self._average_everything(plan)
            elif self.drifted:
                self._spend(self.sync.sync_weights(self._step_of(plan, LATER, rests=True)))
            elif self.sync.every_step:  # no opening would send weights
                self._check_weights(plan)
        self.progress.local_steps = 0
        self._log_totals()

    def _log_beginning(self, plan: Plan) -> None:
        """Log what is trained, after the first step since construction or loading."""
        if not log_lines.is_logged():
            return
        opened = self.report is not None and self.report.gate_open
        inner = f" ({', '.join(self.inner.names)})" if self.inner.names else ""
        line = log_lines.beginning(
            f"{type(self).__name__}{inner}",
            self.replicas,
            plan,
            self.gate,
            self.sync,
            first_opening=self.progress.steps if opened else self.next_opening,
        )
        log_lines.logger.info(line)

    def _log_totals(self) -> None:
        """Log what has been sent; nobody knows which synchronisation is the last."""
        if self._totals.steps and self.replicas.size > 1 and log_lines.is_logged():
            steps = self.progress.steps
            log_lines.logger.info(log_lines.so_far(steps, self._share, self._totals))

    def _check_weights(self, plan: Plan) -> None:
        """Average replicas if they hold different weights although they share all steps."""
        group = self.replicas.process_group
        if group is None or weights_equal(plan, group):
            return
        warnings.warn(
            "The replicas held different weights although they had not drifted, and have been "
            "averaged: change weights in the same way on every rank.",
            stacklevel=checks.user_stacklevel(),
        )
        self._average_everything(plan)

    def _synchronize_members(self, plan: Plan) -> None:
        while self.drifted:
            if not self.open_without_step():
                time.sleep(RETRY_AFTER)
            self.sync.finish(plan, self._resting_step(plan))

    def _average_everything(self, plan: Plan) -> None:
        states = self.inner.states
        frozen = self._make_plan(wanted=lambda X: not X.requires_grad and bool(states.get(X)))
        dense = 4 * sum(exact_average.sizes([p.X for p in plan.parameters]))
        group = self.replicas.process_group
        keys = self._state_keys
        # Each rank may have created states of other parameters, as some optimizers do.
        names_of_states = [(p.name, sorted(p.state)) for p in plan.parameters]
        if not all_ranks_equal(names_of_states, group, plan.device):
            raise RuntimeError(
                "Replicas hold states of different parameters: use the same on every replica "
                "before synchronize(exact=True)."
            )
        # Weights that were frozen while replicas were equal are still equal.
        differ = self.drifted and not self.sync.ends_drift
        for part, kept in ((plan, ()), (frozen, () if differ else frozen.parameters)):
            exact_average.average_everything_(part, group, self.sync, keys, kept)
            if dense and self.gate.open_cost:  # a budget pays for it
                sent = exact_average.bytes_of_everything(part, keys)
                self._spend(sent / dense / self.gate.open_cost)
        self.progress.local_steps = self.sync.fragments_drifted = 0
        self.progress.steps_since_exact = 0

    def eval(self) -> None:
        """Synchronise replicas that have drifted; collective. Frameworks call it.

        With CodedGradients it compares weights, as :meth:`synchronize` does. Then it calls
        ``eval()`` of inner optimizers that have one, such as schedule-free ones. These compute
        weights from their states, so replicas are synchronised exactly.
        """
        if self.inner.evaluates_states and self._states_differ and not self.sync.every_step:
            self.synchronize(exact=True)
        elif self.drifted or self.sync.every_step:
            self.synchronize()
        self.inner.eval()

    def train(self) -> None:
        """Call ``train()`` of inner optimizers that have one."""
        self.inner.train()

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """As in torch; ``progress`` of every group holds the state of run, gate and sync.

        If replicas differ, this is one replica's state, and a warning says so: let each rank
        save its own, or call ``synchronize(exact=True)`` first.
        ``torch.distributed.checkpoint.save`` would mix their states.
        """
        if self._states_differ:
            warnings.warn(
                "state_dict() while the replicas' states differ: call "
                "synchronize(exact=True) on all ranks first, or save and load on each rank.",
                stacklevel=checks.user_stacklevel(),
            )
        self._settle()
        progress = self._record()
        for group in self.param_groups:
            group[PROGRESS] = progress
        packed = super().state_dict()
        decode_states(self.inner.planned_groups, packed, self.sync.state_keys)
        if self._plan is not None:
            self._leave_out_anchors(packed, self._plan)
        return packed

    def _settle(self) -> None:
        """Wait for what a step has begun to exchange with a delay."""
        with explain_lost_ranks("optimizer.step()"):
            self.sync.settle()

    def _leave_out_anchors(self, packed: dict[str, Any], plan: Plan) -> None:
        """Save no anchors of frozen parameters: once they are trained again, they need new ones.

        Args:
            packed: a state in torch's packed form, whose dictionaries are those of the states.
            plan: of the last step, which knows what was trained.
        """
        trained_ids = {id(p.X) for p in plan.parameters}
        dropped = {key.name for key in self.sync.state_keys if key.like_parameter or key.transient}
        for group, packed_group in zip(self.param_groups, packed["param_groups"], strict=True):
            for X, i in zip(group["params"], packed_group["params"], strict=True):
                state = packed["state"].get(i, {})
                if ANCHOR in state and id(X) not in trained_ids:
                    packed["state"][i] = {k: v for k, v in state.items() if k not in dropped}

    def _record(self) -> str:
        saved_by = self.replicas.replica if self._states_differ else None
        return record(self.progress, self.gate, self.sync, saved_by)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, in the dtypes that were saved.

        A gate or sync of another class starts fresh. For a sync there is a warning, and
        groups keep their right_factor and look_ahead.

        Raises:
            ValueError: if the state is incomplete, or another optimizer's, model's or rank's;
                nothing has changed then.
        """
        saved: dict[str, Any] = dict(state_dict)  # hooks may change it
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            saved = hook(self, saved) or saved
        held = read_record(saved)
        self._settle()
        undo = self._undo_of_load()
        try:
            self._load(saved, held)
        except BaseException as error:  # a signal may have interrupted it
            undo()
            if isinstance(error, ValueError) or not isinstance(error, Exception):
                raise
            raise ValueError(
                f"state_dict is damaged, or another optimizer's: {type(error).__name__}: {error}"
            ) from error
        warn_of_others(saved, held, self.sync, self.replicas.replica)
        self._forget()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _load(self, saved: Mapping[str, Any], held: Record) -> None:
        """Load a state; if this raises an error, some of it may have been loaded.

        Args:
            saved: a :meth:`state_dict`.
            held: the record in it.
        """
        check_sync(saved, held, self.sync)
        self.inner.load(saved, held, self.sync)
        states = self.inner.states
        parameters = [X for group in self.param_groups for X in group["params"]]
        self.sync.after_load({X: states[X] for X in parameters if X in states})
        same_sync = held.sync_class == type(self.sync).__name__
        if held.gate_class == type(self.gate).__name__:
            self.gate.load_state_dict(held.gate)
        memory = held.sync if same_sync else copy.deepcopy(self._first_memory)
        self.sync.load_state_dict(memory)
        self.progress = held.progress
        if same_sync:
            self.sync.fragments_drifted = held.fragments_drifted
        elif held.fragments_drifted:  # this sync has other fragments
            self.progress.local_steps = max(self.progress.local_steps, 1)

    def _undo_of_load(self) -> Callable[[], None]:
        """A function that makes everything what it is now."""
        undo_inner = self.inner.undo_of_load()
        gate = copy.deepcopy(self.gate.state_dict())
        sync = copy.deepcopy(self.sync.state_dict())
        fragments_drifted = self.sync.fragments_drifted
        progress = self.progress

        def undo() -> None:
            undo_inner()
            self.gate.load_state_dict(gate)
            self.sync.load_state_dict(sync)
            self.sync.fragments_drifted = fragments_drifted
            self.progress = progress

        return undo

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return {key: getattr(self, key) for key in self._kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._existing.add(self)
        self._forget()

    def _forget(self) -> None:
        """Drop everything that is derived from the groups."""
        if "_captures" in vars(self):
            self._captures.release()
        self._captures = Captures(self.capture)
        self._plan = None
        self._known_states = None, 0
        self._ingredients = []
        self._planned_gate = self.gate
        self.agreement = Agreement(self.replicas)
        self._meter = StepMeter(self.sync)
        self._totals = Summary()
        self._has_logged = False
        if self.sync.delay:
            wire.install_kernels()  # a meter may start while a thread communicates

    def __repr__(self) -> str:
        kind = " ".join([type(self).__name__, ", ".join(self.inner.names)]).strip()
        groups = []
        for g, group in enumerate(self.param_groups):
            shown = sorted(group.keys() - {"params", PROGRESS} - without_effect(group))
            lines = [f"    {key}: {group[key]}" for key in shown]
            groups.append("\n".join([f"Parameter Group {g}", *lines]))
        settings = "\n\n".join(groups)
        return f"{kind} (\n{settings}\n    gate: {self.gate!r}\n    sync: {self.sync!r}\n)"
