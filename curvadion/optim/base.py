"""What an optimizer of replicas holds between steps."""

from __future__ import annotations

import copy
import re
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from curvadion import checks
from curvadion.agreement.meeting import MEETING_BYTES, WORDS_BYTES, Meeting
from curvadion.agreement.verify import Listing, Settings, listing
from curvadion.comm.collectives import group_size
from curvadion.comm.exchange_thread import Exchange
from curvadion.comm.groups import ReplicaGroup, ReplicasArgument
from curvadion.gates import RMMC, AlwaysOpen, ByteBudget, FixedPeriod, Gate
from curvadion.layout.placements import shard_sizes
from curvadion.metering import wire
from curvadion.metering.report import StepReport
from curvadion.optim.capture import Captures, Obstacle, check_recordable
from curvadion.optim.checkpoint import Progress, Record, read_record, record
from curvadion.plan.parameter import Parameter, States
from curvadion.plan.plan import Plan, plan_ingredients
from curvadion.plan.state import ANCHOR, PROGRESS, StateKey
from curvadion.sync.base import Sync
from curvadion.sync.exact_average import sizes
from curvadion.sync.low_rank import LowRank
from curvadion.sync.quantized_average import QuantizedAverage
from curvadion.update.registry import feeds_back

NO_GATE = (
    "CurvaDion has no default for when replicas synchronise. Pass one of: wire_budget=0.01 "
    "(recommended; 1 % of the bytes of dense gradients); gate= or threshold=, such as "
    "gate=FixedPeriod(50); or, for the paper's method, use CurvaDion.paper(params), which is "
    "threshold=0.3 with local_step='gradient'."
)

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class OuterLayer(Optimizer):
    """A torch optimizer with a gate and a sync, on every rank of every replica."""

    # A GradScaler then leaves unscaling and skipping to step().
    _step_supports_amp_scaling = True

    # Attributes that must be equal on all replicas, beside the groups.
    _told: ClassVar[tuple[str, ...]] = ("warmup_steps", "max_local_steps")
    # Attributes kept by a copy or a pickle of the optimizer, beside torch's.
    _kept: ClassVar[tuple[str, ...]] = (
        *("gate", "_sync", "_first_memory", "progress", "report", "replicas", "capture"),
        *_told,
    )

    _plan: Plan | None
    _ingredients: list[object]  # from which the plan was built
    _planned_gate: Gate
    _verified: bool
    _captures: Captures | None = None

    def _choose(
        self,
        replicas: ReplicasArgument,
        gate: Gate,
        sync: Sync,
        max_local_steps: int | None = None,
        warmup_steps: int = 0,
        capture: bool | None = None,
    ) -> None:
        """Begin a constructor.

        Args:
            replicas: the ranks with replicas, as users give them.
            gate: when replicas synchronise.
            sync: how they do; already a copy.
            max_local_steps: most local steps in a row; None: no limit.
            warmup_steps: steps at the start that are always synchronised.
            capture: whether steps are captured in CUDA graphs; None: where they can be.
        """
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
        self._forget()

    @property
    def sync(self) -> Sync:
        """How replicas synchronise; fixed, because states depend on it."""
        return self._sync

    @property
    def scheduled(self) -> bool:
        """Whether replicas know openings ahead, and wait for each other at these only."""
        gate = self.gate
        silent = gate.follows_schedule and not (gate.always_open or gate.reads_momentum)
        return silent and self.replicas.size > 1

    @property
    def drifted(self) -> bool:
        """Whether there are several replicas and they hold different weights."""
        moved = self.progress.local_steps > 0 or self.sync.fragments_drifted > 0
        return moved and self.replicas.size > 1

    @property
    def _states_differ(self) -> bool:
        """Whether weights, or residuals of codes, differ between replicas."""
        if self.replicas.members is not None:  # any member's state may stand for all
            return False
        owes = self.sync.sends_codes and self.progress.steps_since_exact > 0
        return self.drifted or (owes and self.replicas.size > 1)

    # --- the inner optimizer

    def _check_settings(self) -> None:
        """Note the groups' values; ValueError if one is invalid."""
        self._settings.changed(self._compared_groups)

    @abstractmethod
    def _create_state(self, p: Parameter) -> None:
        """Create the state that a parameter needs before its first step."""

    @abstractmethod
    def _load(self, saved: dict[str, Any], held: Record) -> None:
        """Load groups and states of a saved optimizer, or change nothing and raise."""

    def _put_state(self, p: Parameter, key: str, value: Any) -> None:
        """Set or add an entry of a parameter's state."""
        p.state[key] = value

    @property
    def _takes_directions(self) -> bool:
        """Whether a closed step moves matrices along directions."""
        return True

    @property
    def _states(self) -> States:
        """The state of each parameter."""
        return self.state

    @property
    def _groups(self) -> Sequence[dict[str, Any]]:
        """The groups from which plans are built."""
        return self.param_groups

    @property
    def _compared_groups(self) -> Sequence[dict[str, Any]]:
        """The groups with only those keys that must be equal on all replicas."""
        return self.param_groups

    @property
    def _state_keys(self) -> tuple[StateKey, ...]:
        """State keys beside the table of curvadion.plan.state."""
        return self.sync.state_keys

    # --- the plan

    def _collective_plan(self) -> Plan:
        """The plan of the groups, built again if they have changed.

        Building it is collective if parameters are sharded, so all ranks call this at the same
        steps.
        """
        ingredients = [self._states, self.gate, *plan_ingredients(self.param_groups)]
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
        return self._plan

    def _note_changes(self, earlier: Plan, plan: Plan) -> None:
        """Let replicas compare new parameters, or what another gate decides."""
        known = {id(p.X) for p in earlier.parameters}
        thawed = [p for p in plan.parameters if id(p.X) not in known]
        for p in thawed:
            if ANCHOR in p.state:  # its weights may have changed since
                del p.state[ANCHOR]
        if thawed or self.gate is not self._planned_gate:
            self._verified = False

    def _make_plan(self, **wanted: Any) -> Plan:
        """Like :meth:`Plan.of`; reuses the process groups of the previous plan."""
        unions = None if self._plan is None else self._plan.unions
        group = self.replicas.process_group
        return Plan.of(
            self._groups, self._states, group, feeds_back=feeds_back, unions=unions, **wanted
        )

    def _check_plan(self, plan: Plan) -> None:
        """Raise if the optimizer cannot use a plan; compute what its steps send."""
        before = [] if self._plan is None else self._plan.parameters
        frozen = [p.name for p in before if not p.X.requires_grad]
        if frozen and self.drifted and self.sync.ends_drift:
            raise RuntimeError(
                f"{frozen[0]} was frozen while replicas had drifted: unfreeze it, "
                f"call synchronize(), and freeze it again."
            )
        check_one_replica(self.gate, self.sync, self.replicas, plan)
        if self.capture and plan.parameters:
            self._check_capture(plan)
        self._set_gate_costs([p.X for p in plan.parameters])
        if plan.parameters:
            check_costs(self.gate, self.sync, self.max_local_steps)

    def _check_capture(self, plan: Plan) -> None:
        """Raise ValueError if no step can be captured."""
        why = None
        if self.gate.reads_momentum or not (self.gate.always_open or self.scheduled):
            why = f"at every step the host waits for what gate={self.gate!r} reads"
        elif self.sync.delay or (self.gate.always_open and self.sync.sends_codes):
            why = f"at every step the host may work for sync={self.sync!r}"
        elif self.gate.always_open and self.replicas.size > 1:
            why = "replicas exchange factors at every step"
        if why is None:
            try:
                check_recordable(plan)
            except Obstacle as obstacle:
                why = str(obstacle)
        if why is not None:
            raise ValueError(f"capture=True: {why}. Pass capture=None.")

    def _set_gate_costs(self, X: Sequence[Tensor], *, sharded: bool = True) -> None:
        """Tell the gate what all ranks of a replica send together."""
        each = sizes(X)
        shards = [shard_sizes(x) for x in X] if sharded else [[n] for n in each]
        self.sync.prepare(shards)
        costs = self.sync.costs(shards)
        dense = 4 * sum(each)
        if costs is None or not dense:
            return
        met = 0
        if self.gate.follows_schedule:  # only openings hold meetings
            met = (WORDS_BYTES if self.sync.delay else MEETING_BYTES) * max(map(len, shards))
        self.gate.open_cost = (costs.opening_bytes + met) / dense
        self.gate.openings_per_full_sync = costs.openings_per_full_sync

    # --- what ranks must share

    @property
    def _choices(self) -> dict[str, object]:
        """The settings beside the groups, and the states of gate and sync."""
        told: dict[str, object] = {name: getattr(self, name) for name in self._told}
        for name, choice in (("gate", self.gate), ("sync", self.sync)):
            # Addresses of objects differ between ranks.
            told[name] = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(choice))
            told[f"the {name}'s state"] = choice.state_dict()
        return {**told, "the format of the sync's messages": self.sync.message_format}

    def _listing(self, plan: Plan) -> Listing:
        more = {**self._choices, "progress": self.progress.shared}
        return listing(self._compared_groups, plan, more)

    # --- state

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
        self.sync.settle()
        for group in self.param_groups:
            group[PROGRESS] = self._record()
        return super().state_dict()

    def _record(self) -> str:
        saved_by = self.replicas.replica if self._states_differ else None
        return record(self.progress, self.gate, self.sync, saved_by)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, in the dtypes that were saved.

        A gate or sync of another class starts fresh. For a sync there is a warning, and
        groups keep their right_factor and look_ahead.

        Raises:
            ValueError: if the state is incomplete, or another optimizer's, model's or rank's;
                nothing has changed then.
        """
        held = read_record(state_dict)
        self.sync.settle()
        same_sync = held.sync_class == type(self.sync).__name__
        self._load(state_dict, held)
        if held.gate_class == type(self.gate).__name__:
            self.gate.load_state_dict(held.gate)
        memory = held.sync if same_sync else copy.deepcopy(self._first_memory)
        self.sync.load_state_dict(memory)
        self.progress = held.progress
        if same_sync:
            self.sync.fragments_drifted = held.fragments_drifted
        elif held.fragments_drifted:  # this sync has other fragments
            self.progress.local_steps = max(self.progress.local_steps, 1)
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        self.sync.settle()
        return {**super().__getstate__(), **{key: getattr(self, key) for key in self._kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "replicas" in state:  # torch's load_state_dict also calls this
            self._forget()

    def _forget(self) -> None:
        """Drop everything that is derived from the groups."""
        if self._captures is not None:
            self._captures.release()
        self._captures = Captures(self.capture)
        self._plan = None
        self._ingredients = []
        self._planned_gate = self.gate
        self._verified = False  # whether replicas have been compared since then
        self._settings = Settings()
        self._words: list[tuple[int, Exchange[Tensor]]] = []  # (step, words to compare at it)
        self._asked: Meeting | None = None  # the last step's, if the host has not read it
        self._wire = wire.Reading()
        self._waited = self.sync.waited_seconds

    def __repr__(self) -> str:
        lines = super().__repr__()[:-1].splitlines()
        groups = "\n".join(line for line in lines if not line.startswith("    progress: "))
        return f"{groups}\n    gate: {self.gate!r}\n    sync: {self.sync!r}\n)"


# --- gates and syncs together


def chosen_gate(
    gate: Any,
    wire_budget: float | None,
    threshold: float | None,
    sync: object,
    default: Gate | None,
) -> Gate:
    """Return the gate, given as an object or by a short form.

    Args:
        gate: an object, or None.
        wire_budget: short for ``ByteBudget(wire_budget)``, or None.
        threshold: short for ``RMMC(threshold)``, or None.
        sync: as users give it; one that needs every step needs no gate.
        default: the gate without any of these; None: that is an error.
    """
    ways = {"gate": gate, "threshold": threshold, "wire_budget": wire_budget}
    given = [f"{key}={value!r}" for key, value in ways.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)}: each is a gate; pass one of them.")
    if wire_budget is not None:
        return ByteBudget(wire_budget)
    if threshold is not None:
        return RMMC(threshold)
    if gate is None:
        if isinstance(sync, Sync) and sync.every_step:
            return AlwaysOpen()
        if default is None:
            raise ValueError(NO_GATE)
        return default
    if not isinstance(gate, Gate):
        raise TypeError(f"gate={gate!r} must be a Gate, such as curvadion.RMMC(0.3)")
    return gate


def chosen_sync(given: Any, gate: Gate) -> Sync:
    """Return a copy of the sync, with the defaults that suit the gate."""
    if given is None:
        given = LowRank() if gate.share is None else QuantizedAverage()
    if not isinstance(given, Sync):
        raise TypeError(f"sync={given!r} must be a Sync, such as curvadion.LowRank()")
    sync: Sync = copy.deepcopy(given)
    if gate.share is not None and sync.costs([[1]]) is None:
        raise ValueError(
            f"gate={gate!r} needs a sync of known cost, such as QuantizedAverage(), not {sync!r}"
        )
    sync.choose_defaults(gate.share)
    return sync


def check_kinds(gate: Gate, sync: Sync) -> None:
    """Raise ValueError if the gate opens too rarely or too often for the sync."""
    checks.integer("sync.delay", sync.delay, 0)
    if sync.every_step and not (gate.always_open or gate.share is not None):
        raise ValueError(
            f"gate={gate!r} may close, but sync={sync!r} needs every step: pass "
            f"AlwaysOpen(), wire_budget= or no gate."
        )
    if isinstance(gate, (AlwaysOpen, FixedPeriod)) and sync.delay >= gate.expected_period():
        raise ValueError(
            f"sync={sync!r} with gate={gate!r}: means would arrive after the next opening, "
            f"so pass a delay below {gate.expected_period()}."
        )


def check_costs(gate: Gate, sync: Sync, max_local_steps: int | None) -> None:
    """Raise ValueError if the gate cannot pay for its openings."""
    check_kinds(gate, sync)
    if not sync.every_step:
        gate.check_feasible(max_local_steps)
    elif gate.share and gate.open_cost > gate.share:
        raise ValueError(
            f"wire_budget={gate.share!r} is less than sync={sync!r} sends at every step, "
            f"{gate.open_cost:.4f}: raise it, or pass fewer bits or sync=QuantizedAverage()."
        )


def check_members(gate: Gate, sync: Sync, replicas: ReplicaGroup) -> None:
    """Raise ValueError if gate or sync do not work with replicas that come and go."""
    if replicas.members is None:
        return
    scheduled = sync.every_step or (gate.follows_schedule and not gate.reads_momentum)
    if not (sync.elastic and scheduled):
        raise ValueError(
            f"gate={gate!r}, sync={sync!r} with replicas that come and go: pass "
            f"QuantizedAverage() with a schedule, such as wire_budget=0.01, or "
            f"CodedGradients()."
        )


def check_one_replica(gate: Gate, sync: Sync, replicas: ReplicaGroup, plan: Plan) -> None:
    """Raise ValueError if processes with whole weights would never synchronise.

    Args:
        gate: when replicas synchronise.
        sync: how they do.
        replicas: as the user has given them.
        plan: whose groups say on how many ranks this replica is.
    """
    between = gate.share is not None or sync.every_step
    if between and plan.inside is not None and replicas.size == 1:
        raise ValueError(
            f"gate={gate!r} with one replica on {group_size(plan.inside)} ranks: use Dion, "
            f"or pass replicas= if there are several."
        )
    named = replicas.single or replicas.members is not None
    if replicas.process_group is not None:
        named = True
    # Something else may average gradients.
    averaged = gate.always_open and not sync.every_step
    if named or averaged or plan.all_ranks is not None:
        return
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"replicas=None with gate={gate!r}: {dist.get_world_size()} processes with whole "
            f"parameters would never synchronise. Pass "
            f"replicas=torch.distributed.group.WORLD with keep_gradients_local, or 'single' "
            f"if each trains alone; with fully_shard, build the groups after it."
        )
