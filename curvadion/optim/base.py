"""What makes an optimizer of torch: groups, the plan that follows from them, state, checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from curvadion import checks
from curvadion.comm.background import Exchange
from curvadion.comm.collectives import group_size
from curvadion.comm.groups import ReplicaGroup, Replicas
from curvadion.gates import AlwaysOpen, FixedPeriod, Gate
from curvadion.layout.parameters import shard_sizes
from curvadion.metering import wire
from curvadion.metering.report import StepReport
from curvadion.optim.conversion import convert, restore_dtypes, wrong_state
from curvadion.optim.record import Progress, load_memory, read_record, record
from curvadion.sync.base import Sync
from curvadion.sync.exact_average import sizes
from curvadion.sync.meeting import MEETING_BYTES, WORDS_BYTES, Meeting
from curvadion.sync.verify import Listing, Settings, listing
from curvadion.update import hyperparameters as check
from curvadion.update.directions import create_state
from curvadion.update.parameter import Parameter, check_parameter, names
from curvadion.update.plan import Plan, plan_ingredients
from curvadion.update.state import ANCHOR

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class GroupedOptimizer(Optimizer):
    """A torch optimizer with a gate and a sync, on every rank of every replica."""

    # GradScaler then leaves unscaling and skipping to step(), which decides for all replicas.
    _step_supports_amp_scaling = True

    # The attributes that a copy or a pickle of the optimizer takes along, beside torch's.
    _kept: ClassVar[tuple[str, ...]] = (
        *("gate", "_sync", "_first_memory", "progress", "report"),
        *("_replicas", "_unknown_keys"),
    )
    # Arguments that concern all groups.
    _for_all_groups: ClassVar[frozenset[str]] = frozenset(
        {"replicas", "gate", "sync", "wire_budget", "threshold"}
        | {"local_step", "max_local_steps", "warmup_steps"}
    )

    local_step: str = "dion"
    max_local_steps: int | None = None
    warmup_steps: int = 0
    gate: Gate
    _sync: Sync
    _plan: Plan | None
    _made_of: list[object]
    _settings: Settings
    _told: list[tuple[int, Exchange[Tensor]]]  # words to compare, and at which step
    _asked: Meeting | None  # that of the last step, if the host has not read it

    def _construct(
        self, params: Params, replicas: Replicas, gate: Gate, sync: Sync, **keys: Any
    ) -> None:
        """The common end of constructors; keys: defaults of group keys."""
        self.gate, self._sync = gate, sync
        self._first_memory = sync.state_dict()
        self.progress = Progress()
        self.report: StepReport | None = None
        self._replicas = ReplicaGroup(replicas)
        self._unknown_keys: set[str] = set()
        of_sync = {"direction": "low_rank", **sync.group_defaults}
        keys = check.with_direction(keys)
        self._forget()
        for key, value in of_sync.items():
            keys[key] = value if keys[key] is None else keys[key]
        keys["algorithm"] = "dion"
        # A look-ahead that is None follows from the parameters' costs.
        check.check_group({k: v for k, v in keys.items() if k != "look_ahead" or v is not None})
        # Checkpoint tools save and load the keys of groups, so the record is one.
        super().__init__(params, {**keys, check.RECORD: self._record()})
        if "look_ahead" not in of_sync:
            self._set_look_ahead()

    def _set_look_ahead(self) -> None:
        """Set what ``look_ahead=None`` stands for, which depends on what the parameters cost."""
        self._set_gate_costs(self._trained(), sharded=False)
        period = self.gate.openings_per_full_sync * self.gate.expected_period(
            self.gate.open_cost or 1.0
        )
        for keys in (self.defaults, *self.param_groups):
            if keys["look_ahead"] is None:
                keys["look_ahead"] = self.sync.look_ahead(period)

    def _trained(self) -> list[Tensor]:
        """The parameters that are trained, in the order of a plan: those of Dion first."""
        each = [(g["algorithm"] != "dion", x) for g in self.param_groups for x in g["params"]]
        return [x for _, x in sorted(each, key=lambda pair: pair[0]) if x.requires_grad]

    @property
    def sync(self) -> Sync:
        """How replicas synchronise. It is chosen once: state of the parameters belongs to it."""
        return self._sync

    @property
    def scheduled(self) -> bool:
        """Whether replicas know openings beforehand, and wait for nobody at the other steps."""
        gate = self.gate
        silent = gate.follows_schedule and not (gate.always_open or gate.reads_momentum)
        return silent and self._replicas.size > 1

    @property
    def drifted(self) -> bool:
        """Whether there are several replicas and they hold different weights."""
        moved = self.progress.local_steps > 0 or self.sync.fragments_drifted > 0
        return moved and self._replicas.size > 1

    @property
    def _states_differ(self) -> bool:
        """Whether replicas hold different states: weights differ, or codes owe them something."""
        owes = self.sync.sends_codes and self.progress.steps_since_exact > 0
        return self.drifted or (owes and self._replicas.size > 1)

    # ---------------------------------------------------------------- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its keys override the constructor's defaults.

        Keys of other tools are kept without effect, and a warning names them.

        Raises:
            ValueError, TypeError: for misspelt keys, and for impossible values and parameters.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        check.check_group(param_group, self._for_all_groups)
        if "params" not in param_group:
            raise ValueError(f"param_group has no 'params', only {sorted(param_group)}")
        super().add_param_group(check.with_direction(param_group))
        group = self.param_groups[-1]
        try:
            X, X_names = group["params"], names(group, len(self.param_groups) - 1)
            if len(X) != len(X_names):
                raise ValueError(f"param_names={X_names!r} names {len(X_names)} of {len(X)} params")
            for x, name in zip(X, X_names, strict=True):
                check_parameter(x, name, group)
            for key in ("lr", "local_lr"):
                if isinstance(group[key], Tensor):
                    group[key] = group[key].view(())  # which promotes no dtype
            for key in check.DTYPE_KEYS:
                group[key] = check.dtype_name(key, group[key])
        except ValueError:
            self.param_groups.pop()
            raise
        self._warn_unknown_keys([group])
        self._verified = False

    def _warn_unknown_keys(self, groups: Iterable[dict[str, Any]]) -> None:
        """Name the keys that have no effect here, each once."""
        if found := set().union(*map(check.unknown_keys, groups)) - self._unknown_keys:
            self._unknown_keys |= found
            warnings.warn(
                f"{type(self).__name__} knows no {sorted(found)} in parameter groups: kept, "
                f"without effect here.",
                stacklevel=3,
            )

    # ---------------------------------------------------------------- the plan

    def _present_plan(self) -> Plan:
        """The plan of the groups as they are now; made again if anything in them has changed."""
        made_of = [self.state, self.gate, *plan_ingredients(self.param_groups)]
        same = len(made_of) == len(self._made_of) and all(map(is_, made_of, self._made_of))
        if self._plan is None or not same:
            self._check_settings()
            if self.progress.steps and (wrong := wrong_state(self.param_groups, self.state)):
                raise ValueError(wrong)
            plan = self._make_plan()
            self._check_plan(plan)
            if self._plan is not None:  # replicas compare what is new in it
                known = {id(p.X) for p in self._plan.parameters}
                thawed = [p for p in plan.parameters if id(p.X) not in known]
                for p in thawed:
                    p.state.pop(ANCHOR, None)  # its weights may be others since
                self._verified &= not thawed and self._made_of[1] is self.gate
            self._plan, self._made_of = plan, made_of
        return self._plan

    def _check_settings(self) -> None:
        """Raise ValueError for an impossible value of a group; cheap where none has changed."""
        if not self._settings.changed(self.param_groups):
            return
        if wrong := check.settings(self.param_groups):
            self._settings = Settings()  # checked again at the next step
            raise ValueError(wrong)

    def _make_plan(self, **wanted: Any) -> Plan:
        """As :meth:`Plan.of`; process groups of the plan before are used again."""
        unions = None if self._plan is None else self._plan.unions
        group = self._replicas.process_group
        return Plan.of(self.param_groups, self.state, group, unions=unions, **wanted)

    def _check_plan(self, plan: Plan) -> None:
        """Raise if the optimizer cannot work with a new plan; learn what its steps send."""
        if self._plan is not None:
            self._check_frozen(self._plan)
        if self.gate.reads_momentum and not any(
            g["algorithm"] == "dion" and g["params"] for g in self.param_groups
        ):
            raise ValueError(
                f"gate={self.gate!r} reads momenta, but no parameter has algorithm='dion': "
                f"use gate=FixedPeriod(...) or AlwaysOpen()."
            )
        check_one_replica(self.gate, self.sync, self._replicas, plan)
        self._set_gate_costs([p.X for p in plan.parameters])
        if plan.parameters:
            check_costs(self.gate, self.sync, self.max_local_steps)

    def _check_frozen(self, before: Plan) -> None:
        """Raise RuntimeError if a parameter was frozen while replicas have drifted."""
        if not (self.drifted and self.sync.ends_drift):
            return
        kept = {id(X) for group in self.param_groups for X in group["params"]}
        for p in before.parameters:
            if id(p.X) in kept and not p.X.requires_grad:
                raise RuntimeError(
                    f"{p.name} was frozen while replicas have drifted, so that each would keep "
                    f"weights of its own: set requires_grad_(True), and synchronize() first."
                )

    def _set_gate_costs(self, X: Sequence[Tensor], *, sharded: bool = True) -> None:
        """Tell the gate what all ranks of a replica send together, which each of them knows."""
        each = sizes(X)
        shards = [shard_sizes(x) for x in X] if sharded else [[n] for n in each]
        costs, dense = self.sync.prepare(shards), 4 * sum(each)
        if costs is None or not dense:
            return
        # What the meeting sends at every step, or at openings only under a schedule.
        meeting = WORDS_BYTES if self.sync.delay and self.gate.follows_schedule else MEETING_BYTES
        met = meeting * max(map(len, shards)) if self.gate.follows_schedule else 0
        self.gate.open_cost = (costs.opening_bytes + met) / dense
        self.gate.openings_per_full_sync = costs.openings_per_full_sync

    # ---------------------------------------------------------------- around a step

    def _create_state(self, plan: Plan) -> list[Parameter]:
        """Give every parameter its state; return the new ones."""
        # Before a first step all are: frameworks move, cast and load weights until then.
        new = [p for p in plan.parameters if not (self.progress.steps and p.state)]
        for p in new:
            create_state(p)
        # Whatever brings new states without those of the sync, such as loading, is verified anew.
        if new or not self._verified:
            self.sync.begin(plan.parameters)
        return new

    @property
    def _choices(self) -> dict[str, object]:
        """What the optimizer was told beside its groups, and what gate and sync remember."""
        names = ("local_step", "warmup_steps", "max_local_steps")
        told: dict[str, object] = {name: getattr(self, name) for name in names}
        for name, choice in (("gate", self.gate), ("sync", self.sync)):
            # The repr of a user's own class may tell where an object lies in memory.
            ours = type(choice).__module__.startswith("curvadion.")
            told[name] = repr(choice) if ours else type(choice).__name__
            told[f"the {name}'s state"] = choice.state_dict()
        return {**told, "the format of the sync's messages": self.sync.message_format}

    def _listing(self, plan: Plan) -> Listing:
        """All that must be equal on all ranks of all replicas."""
        more = {**self._choices, "progress": self.progress.shared}
        return listing(self.param_groups, plan, more)

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """As torch's; every group also holds ``progress``: what the run, gate and sync remember.

        Replicas hold momenta and, after local steps, weights of their own. A file that one rank
        writes keeps those of one replica, and ``torch.distributed.checkpoint.save`` mixes them:
        call ``synchronize(exact=True)`` before. A warning says so if states differ. Ignore it if
        each rank saves and loads its own.
        """
        if self._states_differ:
            warnings.warn(
                f"state_dict() while the replicas' states differ, "
                f"{self.progress.steps_since_exact} steps after they were the same: a checkpoint "
                f"of one replica loses what the others hold. Call optimizer.synchronize(exact="
                f"True) on all ranks before, or let each rank save and load its own.",
                stacklevel=checks.user_stacklevel(),
            )
        self.sync.settle()
        for group in self.param_groups:
            group[check.RECORD] = self._record()
        return super().state_dict()

    def _record(self) -> str:
        saved_by = self._replicas.replica if self._states_differ else None
        return record(self.progress, self.gate, self.sync, saved_by)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but every tensor keeps the dtype it was saved with.

        From the saved state come momenta, right factors, moments, counters and the groups' values,
        learning rates among them. This optimizer decides on the gate, the sync, the direction and
        the rank: right factors keep their first columns, and others are initial. A gate or sync of
        another class begins anew. Under another sync right_factor and look_ahead are those of this
        optimizer's groups, and a warning says so.

        Raises:
            TypeError: if this is no state_dict.
            ValueError: if groups or parameters do not match, the state is another optimizer's,
                damaged, missing or another rank's shard, or drifted weights would be an anchor.
        """
        held = read_record(state_dict)
        same_sync, here = held.sync_class == type(self.sync).__name__, self._replicas.replica
        fitting = convert(state_dict, held, self.param_groups, self.sync, here)
        before = self.state, self.param_groups, self.gate.state_dict(), self.sync.state_dict()
        try:
            if held.gate_class == type(self.gate).__name__:
                load_memory("gate", self.gate, held.gate)
            load_memory("sync", self.sync, held.sync if same_sync else self._first_memory)
            super().load_state_dict(fitting)
            restore_dtypes(self.param_groups, self.state, fitting)
        except Exception:
            self.state, self.param_groups, of_gate, of_sync = before
            self.gate.load_state_dict(of_gate)
            self.sync.load_state_dict(of_sync)
            self._forget()
            raise
        self.progress = held.progress
        if same_sync:
            self.sync.fragments_drifted = held.fragments_drifted
        elif held.fragments_drifted:  # of which this sync knows nothing: all weights are averaged
            self.progress.local_steps = max(self.progress.local_steps, 1)
        self.sync.after_load()
        self._forget()
        self._warn_unknown_keys(self.param_groups)

    def __getstate__(self) -> dict[str, Any]:
        self.sync.settle()
        return {**super().__getstate__(), **{key: getattr(self, key) for key in self._kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_replicas" in state:  # torch's load_state_dict comes here too
            self._forget()

    def _forget(self) -> None:
        """Drop what is derived from the groups, and is made again at the next use."""
        self._plan, self._made_of = None, []
        self._verified = False  # whether replicas have been compared since
        self._settings = Settings()
        self._told, self._asked = [], None
        self._wire = wire.Reading()
        self._waited = self.sync.waited_seconds

    def __repr__(self) -> str:
        lines = super().__repr__()[:-1].splitlines()
        groups = "\n".join(line for line in lines if not line.startswith("    progress: "))
        return f"{groups}\n    gate: {self.gate!r}\n    sync: {self.sync!r}\n)"


# ---------------------------------------------------------------- gates and syncs together


def check_kinds(gate: Gate, sync: Sync) -> None:
    """Raise if the gate may close, or opens too often, for the sync."""
    checks.integer("sync.delay", sync.delay, 0)
    if sync.every_step and not (gate.always_open or gate.share is not None):
        raise ValueError(
            f"gate={gate!r} may close, but with sync={sync!r} replicas synchronise at every "
            f"step: pass gate=AlwaysOpen(), a ByteBudget (wire_budget=) or no gate."
        )
    if isinstance(gate, (AlwaysOpen, FixedPeriod)) and sync.delay >= (
        period := gate.expected_period(1.0)
    ):
        raise ValueError(
            f"sync={sync!r} with gate={gate!r}: means would arrive after the next opening. Pass a "
            f"delay below {period}, or a longer period."
        )


def check_costs(gate: Gate, sync: Sync, max_local_steps: int | None) -> None:
    """Raise ValueError if the gate, which knows what openings cost, cannot do its work."""
    check_kinds(gate, sync)
    if not sync.every_step:
        gate.check_feasible(max_local_steps)
    elif gate.share and gate.open_cost and gate.open_cost > gate.share:
        raise ValueError(
            f"wire_budget={gate.share!r} is less than sync={sync!r} sends at every step "
            f"({gate.open_cost:.2%} of dense gradients): pass a larger budget, fewer bits (1 takes "
            f"3.3%) or sync=QuantizedAverage()."
        )


def check_one_replica(gate: Gate, sync: Sync, replicas: ReplicaGroup, plan: Plan) -> None:
    """Raise ValueError if processes with whole weights would never synchronise."""
    between = gate.share is not None or sync.every_step
    if between and plan.inside is not None and replicas.size == 1:
        raise ValueError(
            f"gate={gate!r} and sync={sync!r} with one replica, which is sharded over "
            f"{group_size(plan.inside)} ranks: there is nothing to synchronise. Use Dion, or pass "
            f"replicas= if there are several."
        )
    if replicas.single or plan.all_ranks is not None:
        return
    averaged = gate.always_open and not sync.every_step  # by whoever else may average gradients
    if averaged or replicas.process_group is not None:
        return
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"replicas=None with gate={gate!r}, sync={sync!r}: there are "
            f"{dist.get_world_size()} processes, each with whole parameters, and none of them "
            f"would ever hear of the others. Pass replicas=torch.distributed.group.WORLD (after "
            f"init_process_group) with keep_gradients_local, or replicas='single' if each trains "
            f"by itself or something else averages the gradients; to shard the model, make the "
            f"groups after fully_shard."
        )
