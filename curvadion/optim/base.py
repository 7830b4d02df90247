"""What every optimizer of this package does around its steps: groups, plans, agreement, state."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from curvadion import checks
from curvadion.comm.background import Background
from curvadion.comm.replicas import ReplicaGroup, Replicas
from curvadion.gates import Gate
from curvadion.layout.gradients import place_gradients
from curvadion.layout.kept_apart import note_optimizer
from curvadion.layout.parameters import shard_sizes
from curvadion.metering import wire
from curvadion.metering.report import StepReport
from curvadion.optim import saving
from curvadion.optim.checkpoint import check_complete, check_fits, restore_dtypes
from curvadion.optim.conversion import Loading, convert, wrong_algorithm
from curvadion.optim.plans import Plans, check_one_replica, members
from curvadion.optim.record import Progress, read_record, record, remember
from curvadion.sync.agreement import Agreement
from curvadion.sync.base import Sync
from curvadion.sync.decision import GATE_BYTES
from curvadion.sync.exact_average import sizes
from curvadion.sync.verify import Listing, check_alike, listing
from curvadion.update import hyperparameters as check
from curvadion.update.parameter import Parameter, check_parameter, names
from curvadion.update.plan import Plan

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class ReplicaOptimizer(Optimizer):
    """An optimizer on every rank of several replicas: a gate and a sync around the plan of a step.

    Attributes:
        gate: decides when replicas come together. sync: how they do.
        progress: how far the run has come: ``steps``, ``local_steps`` and more.
        report: what happened at the last step.
    """

    # GradScaler then leaves unscaling and skipping to step(), which decides for all replicas.
    _step_supports_amp_scaling = True

    # The attributes that a copy or a pickle of the optimizer takes along, beside torch's.
    _kept: ClassVar[tuple[str, ...]] = (
        *("gate", "_sync", "_first_memory", "progress", "report"),
        *("_replicas", "_group_defaults", "_strangers"),
    )
    # Arguments that concern all groups.
    _for_all_groups: ClassVar[frozenset[str]] = frozenset(
        {"replicas", "gate", "sync", "wire_budget", "threshold"}
        | {"local_step", "max_local_steps", "warmup_steps"}
    )

    gate: Gate
    _sync: Sync
    _algorithms: list[str]  # of the groups, whose states hold what these need

    def _construct(
        self, params: Params, replicas: Replicas, gate: Gate, sync: Sync, **keys: Any
    ) -> None:
        """The common end of constructors; keys: defaults of the group keys but ``algorithm``."""
        _ = gate.late  # raises if its delay cannot work
        checks.integer("sync.delay", sync.delay, 0)
        self.gate, self._sync = gate, sync
        self._first_memory = sync.state_dict()
        self.progress = Progress()
        self.report: StepReport | None = None
        self._replicas = ReplicaGroup(replicas)
        self._strangers: set[str] = set()
        self._group_defaults = {"direction": "low_rank", **sync.group_defaults}
        keys = check.with_direction(keys)
        self._forget()
        for key in ("momentum_dtype", "q_dtype"):
            keys[key] = check.dtype_name(key, keys[key])
        for key, value in self._group_defaults.items():
            keys[key] = value if keys[key] is None else keys[key]
        keys["algorithm"] = "dion"
        # A look-ahead that is None follows from the parameters' costs.
        check.check_group({k: v for k, v in keys.items() if k != "nesterov" or v is not None})
        # Checkpoint tools save and load the keys of groups, so the record is one.
        super().__init__(params, {**keys, check.RECORD: self._record()})
        self._set_look_ahead()

    def _set_look_ahead(self) -> None:
        """Set what ``nesterov=None`` stands for if it depends on what the parameters cost."""
        if "nesterov" not in self._group_defaults:
            self._tell_costs(self._trained(), cut=False)
            period = self.gate.openings_per_agreement * self.gate.expected_period(
                self.gate.open_cost or self.sync.typical_cost
            )
            self._group_defaults["nesterov"] = self.sync.look_ahead(period)
        for keys in (self.defaults, *self.param_groups):
            if keys["nesterov"] is None:
                keys["nesterov"] = self._group_defaults["nesterov"]

    def _trained(self) -> list[Tensor]:
        """The parameters that are trained, in the order of a plan: those of Dion first."""
        each = [(g["algorithm"] != "dion", x) for g in self.param_groups for x in g["params"]]
        return [x for _, x in sorted(each, key=lambda pair: pair[0]) if x.requires_grad]

    @property
    def sync(self) -> Sync:
        """How replicas come together. It is chosen once: state of the parameters belongs to it."""
        return self._sync

    @property
    def scheduled(self) -> bool:
        """Whether replicas know openings beforehand, and wait for nobody at the other steps."""
        gate = self.gate
        silent = gate.follows_schedule and not (gate.always_open or gate.reads_momentum)
        return (silent or gate.late) and self._replicas.size > 1

    @property
    def apart(self) -> bool:
        """Whether there are several replicas and they hold different weights."""
        moved = self.progress.local_steps > 0 or self.sync.fragments_apart > 0
        return moved and self._replicas.size > 1

    # ---------------------------------------------------------------- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its keys override the constructor's defaults.

        Keys of other tools are kept without effect, and a warning names them.

        Raises:
            ValueError, TypeError: for keys that look misspelt, impossible values, and parameters
                that the group's algorithm cannot take.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        check.check_group(param_group, self._for_all_groups)
        if "params" not in param_group:
            raise ValueError(f"param_group has no 'params', only {sorted(param_group)}")
        dtypes: dict[str, Any] = {
            key: check.dtype_name(key, param_group[key])
            for key in ("momentum_dtype", "q_dtype")
            if key in param_group
        }
        super().add_param_group({**check.with_direction(param_group), **dtypes})
        try:
            self._check_last_group()
        except ValueError:
            self.param_groups.pop()
            raise
        self._warn_of_strangers(self.param_groups[-1:])
        self._agreement.verified = False

    def _check_last_group(self) -> None:
        group = self.param_groups[-1]
        X, X_names = group["params"], names(group, len(self.param_groups) - 1)
        if len(X) != len(X_names):
            raise ValueError(f"param_names={X_names!r} names {len(X_names)} of {len(X)} params")
        for x, name in zip(X, X_names, strict=True):
            check_parameter(x, name, group)
        for key in ("lr", "local_lr"):
            group[key] = check.without_dimensions(group[key])

    def _warn_of_strangers(self, groups: Iterable[dict[str, Any]]) -> None:
        """Name the keys that have no effect here, each once."""
        found = set().union(*(check.strangers(group) for group in groups)) - self._strangers
        if found:
            self._strangers |= found
            warnings.warn(
                f"{type(self).__name__} knows no {sorted(found)} in parameter groups: kept for the "
                f"tool that wrote them, without effect here.",
                stacklevel=3,
            )

    def _wrong_settings(self) -> str | None:
        """What is wrong in the groups as they are now."""
        if wrong := check.settings(self.param_groups):
            return wrong
        if wrong := self._cast_since():
            return wrong
        algorithms = [group["algorithm"] for group in self.param_groups]
        if algorithms != self._algorithms:
            if wrong := wrong_algorithm(self.param_groups, self.state):
                return wrong
            self._algorithms = algorithms
        if self._plans.known is None:  # later, all ranks agree on a change before they see it
            return self._plans.wrong_cut(self.param_groups, self.state)
        return None

    def _cast_since(self) -> str | None:
        """Which parameter has another dtype than AdamW's moments of it."""
        for g, group in enumerate(self.param_groups):
            if group["algorithm"] != "adamw":
                continue
            for i, X in enumerate(group["params"]):
                held = self.state.get(X, {}).get("exp_avg")
                if held is not None and held.dtype != X.dtype != torch.float16:
                    return (
                        f"{names(group, g)[i]} has dtype {X.dtype}, and its exp_avg {held.dtype}: "
                        f"cast the model before the optimizer's first step, or cast the state too."
                    )
        return None

    # ---------------------------------------------------------------- the plan

    def _known_plan(self) -> Plan:
        """The plan of the last step, which all ranks share; changes wait for the next step."""
        return self._plans.known or self._plans.renew(self.param_groups, self.state, self.gate)

    def present_plan(self) -> Plan:
        """The plan of the groups as they are now, which the next step may find not to be shared."""
        if self._plans.changed(self.param_groups, self.state, self.gate):
            return self._plans.make(self.param_groups, self.state)
        return self._known_plan()

    def _changed_plan(self, before: Plan) -> Plan:
        """The plan of what was frozen, thawed, added or regrouped on all ranks alike."""
        check_alike(members(self.param_groups), before.all_ranks, before.device)
        return self._plans.renew(self.param_groups, self.state, self.gate)

    def _check_plan(self, plan: Plan, before: Plan | None) -> None:
        """Raise if the optimizer cannot work with a new plan; learn what its steps send."""
        if before is not None:
            self._check_frozen(before)
        if self.gate.reads_momentum and not any(
            g["algorithm"] == "dion" and g["params"] for g in self.param_groups
        ):
            raise ValueError(
                f"gate={self.gate!r} reads momenta, but no parameter has algorithm='dion': "
                f"use gate=FixedPeriod(...) or AlwaysOpen()."
            )
        check_one_replica(self.gate, self.sync, self._replicas, plan)
        note_optimizer([p.X for p in plan.parameters], self)
        self._tell_costs([p.X for p in plan.parameters])
        if plan.parameters:
            self._check_gate()
        self._agreement.follow(plan)

    def _check_gate(self) -> None:
        """Raise ValueError if the gate cannot work with what steps cost."""

    def _check_frozen(self, before: Plan) -> None:
        """Raise RuntimeError if a parameter was frozen while replicas are apart."""
        if not (self.apart and self.sync.brings_weights_together):
            return
        kept = {id(X) for group in self.param_groups for X in group["params"]}
        for p in before.parameters:
            if id(p.X) in kept and not p.X.requires_grad:
                raise RuntimeError(
                    f"{p.name} was frozen while replicas are apart, of which each would keep "
                    f"its own: set requires_grad_(True), call synchronize() and freeze it then."
                )

    def _tell_costs(self, X: Sequence[Tensor], *, cut: bool = True) -> None:
        """Tell the gate what all ranks of a replica send, alike on each, whatever shards it holds.

        X: the parameters that are trained, in the order of a plan. cut: whether in shards.
        """
        each = sizes(X)
        if not (dense := 4 * sum(each)) or (costs := self.sync.prepare(each)) is None:
            return
        shards = [shard_sizes(x) for x in X] if cut else [[n] for n in each]
        # What replicas tell each other at every step, unless they know beforehand.
        told = GATE_BYTES * max(map(len, shards)) / dense
        at_openings = told if self.gate.follows_schedule else 0.0
        opening_bytes = costs.opening_bytes + self.sync.added_by_shards(shards)
        self.gate.open_cost = opening_bytes / dense + at_openings
        self.gate.closed_cost = told - at_openings
        self.gate.openings_per_agreement = costs.openings_per_agreement

    def _spend(self, sent: int, plan: Plan) -> None:
        """Let the gate know of bytes that were sent beside its openings."""
        if sent and self.gate.open_cost:
            dense = 4 * sum(sizes([p.X for p in plan.parameters]))
            self.gate.spend(sent / dense / self.gate.open_cost)

    # ---------------------------------------------------------------- around a step

    def _create_state(self, plan: Plan) -> list[Parameter]:
        """Give every parameter its state, with or without a gradient; return those without any."""
        states = plan.look_up_states()
        each = () if all(states) else zip(plan.parameters, states, strict=True)
        without = [p for p, state in each if not state]
        for p in without:
            p.create_state(self._plans.group_of_plan(p))
        # Whatever brings new states without those of the sync, such as loading, is verified anew.
        if without or not self._agreement.verified:
            self.sync.begin(plan.parameters)
        if without:
            plan.look_up_states()
        return without

    def _background(self, device: torch.device, lane: str = "") -> Background:
        """Exchanges beside the training; the first call is collective over the replicas.

        device: of what is sent. lane: what is sent in another lane is not waited for.
        """
        # A meter may be entered while they communicate.
        wire.keep_kernels()
        return self._replicas.background(device, lane)

    def _place_gradients(self, plan: Plan) -> None:
        if plan.sharded:
            place_gradients([p.X for p in plan.parameters], self._replicas.process_group)

    def _listing(self, plan: Plan) -> Listing:
        """All that must be alike on all ranks of all replicas."""
        more: dict[str, object] = {}
        for name, choice in (("gate", self.gate), ("sync", self.sync)):
            # The repr of a user's own class may tell where an object lies in memory.
            ours = type(choice).__module__.startswith("curvadion.")
            more[name] = repr(choice) if ours else type(choice).__name__
            more[f"the {name}'s state"] = choice.state_dict()
        more["the format of the sync's messages"] = self.sync.message_format
        return listing(self.param_groups, plan, {**more, "progress": self.progress.alike})

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """As torch's; every group also holds ``progress``: what the run, gate and sync remember.

        Replicas hold momenta and, after local steps, weights of their own. A file that one rank
        writes keeps those of one replica: call ``synchronize(exact=True)`` before. A warning says
        so if weights are apart, or if codes owe them something. Ignore it if each rank saves and
        loads its own state, which loses nothing. ``torch.distributed.checkpoint.save`` raises then
        for what ``get_state_dict`` returned, and warns if only momenta differ.
        """
        together, differ = self._replicas.process_group, None
        if together is not None:
            about = self.progress, self.sync, self.param_groups
            differ = saving.difference(*about, apart=self.apart)
        saving.warn_of_weights(differ, self.progress.steps_since_exact)
        self._plans.follow_rank(self.param_groups, self.state)
        self.sync.settle()
        for group in self.param_groups:
            group[check.RECORD] = self._record()
        held = super().state_dict()
        if together is not None and differ is not None:
            saving.mark(held, together, differ)
        return held

    def _present_progress(self) -> Progress:
        """With the signal that decides on the next step; waits for it."""
        return self.progress.with_signal(self._agreement.signal)

    def _record(self) -> str:
        progress, replica = self._present_progress(), self._replicas.replica
        return record(progress, self.gate, self.sync, self._group_defaults, replica)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but every tensor keeps the dtype it was saved with.

        From the saved state come momenta, right factors, moments, counters and the groups' values,
        learning rates among them. The constructor's arguments decide on the gate, the sync and,
        if another sync or period changes their default, the groups' rank_fraction,
        rank_multiple_of, right_factor and nesterov. The saved memory of a gate or sync counts for
        one of the same class. Right factors take the new rank: the first columns stay, others are
        initial. State that only the saved sync knows, such as anchors, is dropped under another,
        whose own begins anew. Warnings say what is lost, and name keys that mean nothing here.

        Raises:
            TypeError: if this is no state_dict.
            ValueError: if the groups or parameters do not match, come from another optimizer, the
                state is damaged, missing or another rank's shard, or anchors are wanted of weights
                that were saved while replicas were apart.
        """
        held = read_record(state_dict)
        check_fits(self, self.sync, state_dict)
        check_complete(self, state_dict, held.progress.steps)
        own = self._group_defaults, self._replicas.replica, self._first_memory
        fitting = convert(state_dict, held, Loading(self.param_groups, self.sync, *own))
        before = self.state, self.param_groups, self.gate.state_dict(), self.sync.state_dict()
        try:
            remember(held, self.gate, self.sync, fitting.sync)
            super().load_state_dict(fitting.state_dict)
            restore_dtypes(self, fitting.state_dict)
        except Exception:
            self.state, self.param_groups, of_gate, of_sync = before
            self.gate.load_state_dict(of_gate)
            self.sync.load_state_dict(of_sync)
            self._forget()
            raise
        self.progress = fitting.progress
        self.sync.fragments_apart = fitting.fragments_apart
        self.sync.after_load()
        self._forget()
        for text in fitting.warnings:
            warnings.warn(text, stacklevel=2)
        self._warn_of_strangers(self.param_groups)

    def __getstate__(self) -> dict[str, Any]:
        self._plans.follow_rank(self.param_groups, self.state)
        self.sync.settle()
        kept = {key: getattr(self, key) for key in self._kept}
        return {**super().__getstate__(), **kept, "progress": self._present_progress()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_replicas" in state:  # torch's load_state_dict comes here too
            arguments = inspect.signature(type(self)).parameters
            for keys in (self.defaults, *self.param_groups):
                # Pickled by a version without some of them.
                for key in check.SETTINGS & arguments.keys() - keys.keys():
                    keys[key] = arguments[key].default
            self._forget()

    def _forget(self) -> None:
        """Drop what is derived from the groups; it is made again at the next use."""
        self._algorithms = []
        self._plans = Plans(self._replicas, self._check_plan, getattr(self, "param_groups", ()))
        self._agreement = Agreement(self._replicas, getattr(self, "_agreement", None))
        self._wire = wire.Reading()
        self._waited = self.sync.waited_seconds

    def __repr__(self) -> str:
        lines = super().__repr__()[:-1].splitlines()
        groups = "\n".join(line for line in lines if not line.startswith("    progress: "))
        return f"{groups}\n    gate: {self.gate!r}\n    sync: {self.sync!r}\n)"
