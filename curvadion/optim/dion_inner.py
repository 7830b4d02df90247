"""The inner optimizer of Dion and CurvaDion: directions, and AdamW or Lion for the rest."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from curvadion import checks, ops
from curvadion.comm.groups import Group
from curvadion.gates import Gate
from curvadion.layout.matrix import Options
from curvadion.optim import group_keys
from curvadion.optim.checkpoint import (
    Record,
    check_state,
    encode_states,
    fitted,
    restore_dtypes,
    warn_of_state_dtypes,
)
from curvadion.optim.choices import set_costs
from curvadion.optim.inner import (
    load_unless_frozen,
    trained,
    undo_of_loads,
    without_addresses,
)
from curvadion.plan.coded_states import CODED, KEYS
from curvadion.plan.parameter import Parameter, States, check_parameter, names
from curvadion.plan.plan import Plan, StepTensors
from curvadion.plan.state import StateKey
from curvadion.sync.base import Step, Sync
from curvadion.update.elementwise import STATE_KEYS
from curvadion.update.registry import create_state, state_keys
from curvadion.update.update_hooks import UpdateHook


class DionInner(Optimizer):
    """Steps of this package's own, on one replica and its shards.

    Args:
        params: as users give them.
        options: defaults of group keys, with ``lr``; None means the sync's default.
        gate: whose period decides the default of look_ahead.
        sync: whose defaults replace None.
        local_step: "dion", or "gradient" for a local step without directions.
    """

    runs_ahead = True
    evaluates_states = False
    names: Sequence[str] = ()
    update_hooks: OrderedDict[int, UpdateHook]  # by the numbers of their handles

    def __init__(
        self,
        params: group_keys.Params,
        options: Mapping[str, Any],
        gate: Gate,
        sync: Sync,
        local_step: str = "dion",
    ) -> None:
        self.local_step = local_step
        of_sync = {**Sync.group_defaults, **sync.group_defaults}
        # Without a default of its own, a sync computes it from the period of openings.
        sync_computes_look_ahead = "look_ahead" not in sync.group_defaults
        if sync_computes_look_ahead:
            del of_sync["look_ahead"]
        defaults = {**group_keys.with_direction(options), "algorithm": "dion"}
        defaults |= {key: value for key, value in of_sync.items() if defaults[key] is None}
        # look_ahead=None is resolved below, from the cost of the parameters.
        group_keys.check_group(
            {k: v for k, v in defaults.items() if k != "look_ahead" or v is not None}
        )
        super().__init__(params, defaults)
        self._begin_hooks()
        if sync_computes_look_ahead:
            self._set_look_ahead(gate, sync)

    def _begin_hooks(self) -> None:
        self.update_hooks = OrderedDict()
        self._hook_names: dict[int, str] = {}  # that replicas compare

    def _set_look_ahead(self, gate: Gate, sync: Sync) -> None:
        set_costs(gate, sync, trained(self.param_groups), sharded=False)
        period = gate.openings_per_full_sync * gate.expected_period()
        for keys in (self.defaults, *self.param_groups):
            if keys["look_ahead"] is None:
                keys["look_ahead"] = sync.look_ahead(period)

    # --- groups and states

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group_keys.check_group(param_group)
        rated = group_keys.with_rate(param_group, self.defaults["lr"])
        super().add_param_group(group_keys.with_direction(rated))
        group = self.param_groups[-1]
        try:
            X_names = names(group, len(self.param_groups) - 1)
            for x, name in zip(group["params"], X_names, strict=True):
                check_parameter(x, name, group)
            for key in ("lr", "local_lr"):
                if isinstance(group[key], Tensor):
                    group[key] = group[key].view(())  # a scalar tensor promotes no dtype
            for key in group_keys.DTYPE_KEYS:
                known = group_keys.STATE_DTYPES if key == "state_dtype" else group_keys.DTYPES
                group[key] = group_keys.dtype_name(key, group[key], known)
            group_keys.check_coded(group)
            self._check_local_step(group)
        except ValueError:
            self.param_groups.pop()
            raise
        unknown = group_keys.unknown_keys(group)
        if unknown:
            warnings.warn(
                f"The group keys {sorted(unknown)} are unknown, and are kept without effect.",
                stacklevel=checks.user_stacklevel(),
            )

    def _check_local_step(self, group: Options) -> None:
        if not self.directed and group["algorithm"] == "dion" and group["state_dtype"] == CODED:
            raise ValueError(
                f"state_dtype={CODED!r} with local_step={self.local_step!r}: momenta in 8 bits "
                f"need local_step='dion'"
            )

    @property
    def directed(self) -> bool:
        return self.local_step == "dion"

    @property
    def states(self) -> States:
        return self.state

    @property
    def state_count(self) -> int:
        return len(self.state)

    @property
    def planned_groups(self) -> Sequence[dict[str, Any]]:
        return self.param_groups

    @property
    def compared_groups(self) -> Sequence[Options]:
        return self.param_groups

    @property
    def choices(self) -> Mapping[str, object]:
        hooks = [self._hook_names[number] for number in self.update_hooks]
        return {"local_step": self.local_step, "update hooks": hooks}

    def state_keys(self, sync: Sync) -> tuple[StateKey, ...]:
        return (*sync.state_keys, *state_keys())

    def check_groups(self) -> None:
        error = group_keys.first_error(self.param_groups)
        if error is not None:
            raise ValueError(error)
        for group in self.param_groups:
            self._check_local_step(group)

    def check_plan(self, plan: Plan, replicas: Group | None, *, begun: bool) -> None:
        if begun:
            for p in plan.parameters:
                if p.state:
                    _check_form(p)
                    # Codes are of this rank's shard, so their shapes say nothing.
                    whole = {k: p.X.detach() if ops.is_coded(v) else v for k, v in p.state.items()}
                    check_state(p.name, p.X, p.group, whole)

    def create_state(self, p: Parameter) -> None:
        create_state(p)

    def put_state(self, p: Parameter, key: str, value: Any) -> None:
        p.state[key] = value

    # --- a step

    def step_of(self, plan: Plan, tensors: StepTensors, step_index: int, **fields: Any) -> Step:
        hooks = tuple(self.update_hooks.values())
        return Step(plan, tensors, step_index, directed=self.directed, hooks=hooks, **fields)

    def register_update_hook(self, hook: UpdateHook) -> RemovableHandle:
        handle = RemovableHandle(self.update_hooks)
        self.update_hooks[handle.id] = hook
        # Not at each step, because a repr may read the device.
        name = getattr(hook, "__qualname__", None) or without_addresses(repr(hook))
        self._hook_names[handle.id] = name
        return handle

    def take_no_step(self) -> None:
        """Do nothing: states exist already."""

    def eval(self) -> None:
        """Do nothing: the same weights are trained and evaluated."""

    def train(self) -> None:
        """Do nothing."""

    # --- checkpoints

    def undo_of_load(self) -> Callable[[], None]:
        return undo_of_loads([self])

    def load(self, saved: Mapping[str, Any], record: Record, sync: Sync) -> None:
        fitting = fitted(saved, record, self.param_groups, sync)
        for group in fitting["param_groups"]:
            self._check_local_step(group)
        warn_of_state_dtypes(self.param_groups, fitting["param_groups"])
        load_unless_frozen(self, fitting, sync.state_keys)
        # AdamW's moments stay cast, because its kernels need them so.
        restore_dtypes(
            self.param_groups,
            self.state,
            fitting,
            lambda group, key, _: group["algorithm"] != "adamw" or key not in STATE_KEYS["adamw"],
        )
        encode_states(self.param_groups, self.state, fitting)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "local_step": self.local_step}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "update_hooks" not in vars(self):  # torch calls this to load a state, too
            self._begin_hooks()


def _check_form(p: Parameter) -> None:
    """Raise ValueError if states are in 8 bits and their group is not, or the other way round."""
    in_8_bits = p.group["state_dtype"] == CODED
    for key in KEYS:
        if key not in p.state:
            continue
        if p.is_coded(key) != in_8_bits:
            raise ValueError(
                f"state_dtype={p.group['state_dtype']!r} of {p.name}, whose {key!r} is "
                f"{p.state[key].dtype}: call optimizer.load_state_dict(optimizer.state_dict()), "
                f"which changes it"
            )
