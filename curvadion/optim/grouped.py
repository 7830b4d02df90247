"""Groups and states of :class:`curvadion.Dion`; group keys define how updates are computed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from curvadion.optim.base import Params
from curvadion.optim.conversion import convert, restore_dtypes, wrong_state
from curvadion.optim.outer import ReplicaOptimizer
from curvadion.optim.record import Record
from curvadion.sync.base import Step, Sync
from curvadion.sync.verify import Settings
from curvadion.update import hyperparameters as check
from curvadion.update.directions import create_state, state_keys
from curvadion.update.parameter import Parameter, check_parameter, names
from curvadion.update.plan import Plan
from curvadion.update.state import StateKey


class GroupedOptimizer(ReplicaOptimizer):
    """The outer layer around steps along directions, AdamW and Lion."""

    _kept = (*ReplicaOptimizer._kept, "_unknown_keys")
    local_step: str = "dion"
    # Arguments that apply to all groups.
    _for_all_groups: ClassVar[frozenset[str]] = frozenset(
        {"replicas", "gate", "sync", "wire_budget", "threshold"}
        | {"local_step", "max_local_steps", "warmup_steps"}
    )

    def _construct(self, params: Params, **keys: Any) -> None:
        """End a constructor, after :meth:`_choose`; keys: defaults of group keys."""
        self._unknown_keys: set[str] = set()
        of_sync = {**Sync.group_defaults, **self.sync.group_defaults}
        foresees = "look_ahead" not in self.sync.group_defaults
        keys = check.with_direction(keys)
        for key, value in of_sync.items():
            if not (foresees and key == "look_ahead"):
                keys[key] = value if keys[key] is None else keys[key]
        keys["algorithm"] = "dion"
        # look_ahead=None is resolved later, from the cost of the parameters.
        check.check_group({k: v for k, v in keys.items() if k != "look_ahead" or v is not None})
        # The record is a group key because checkpoint tools save and load those.
        super().__init__(params, {**keys, check.RECORD: self._record()})
        if foresees:
            self._set_look_ahead()

    def _set_look_ahead(self) -> None:
        """Replace ``look_ahead=None``, which depends on the cost of the parameters."""
        self._set_gate_costs(self._trained(), sharded=False)
        period = self.gate.openings_per_full_sync * self.gate.expected_period(
            self.gate.open_cost or 1.0
        )
        for keys in (self.defaults, *self.param_groups):
            if keys["look_ahead"] is None:
                keys["look_ahead"] = self.sync.look_ahead(period)

    def _trained(self) -> list[Tensor]:
        """The trained parameters in the order of a plan: those of Dion first."""
        each = [(g["algorithm"] != "dion", x) for g in self.param_groups for x in g["params"]]
        return [x for _, x in sorted(each, key=lambda pair: pair[0]) if x.requires_grad]

    # ---------------------------------------------------------------- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its keys override the constructor's defaults.

        Unknown keys, for example of other tools, are kept without effect, and a warning names them.

        Raises:
            ValueError, TypeError: for misspelt keys, invalid values and unsupported parameters.
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
                    group[key] = group[key].view(())  # a scalar tensor promotes no dtype
            for key in check.DTYPE_KEYS:
                group[key] = check.dtype_name(key, group[key])
        except ValueError:
            self.param_groups.pop()
            raise
        self._warn_unknown_keys([group])
        self._verified = False

    def _warn_unknown_keys(self, groups: Iterable[dict[str, Any]]) -> None:
        """Warn once about each key that has no effect here."""
        if found := set().union(*map(check.unknown_keys, groups)) - self._unknown_keys:
            self._unknown_keys |= found
            warnings.warn(
                f"{type(self).__name__} does not know the keys {sorted(found)} of parameter "
                f"groups: they are kept without effect.",
                stacklevel=3,
            )

    def _check_settings(self) -> None:
        """Raise ValueError for an invalid value of a group; cheap if none has changed."""
        if not self._settings.changed(self.param_groups):
            return
        if wrong := check.settings(self.param_groups):
            self._settings = Settings()  # checked again at the next step
            raise ValueError(wrong)

    def _check_plan(self, plan: Plan) -> None:
        if self.gate.reads_momentum and not any(
            g["algorithm"] == "dion" and g["params"] for g in self.param_groups
        ):
            raise ValueError(
                f"gate={self.gate!r} reads momenta, but no parameter has algorithm='dion': "
                f"use gate=FixedPeriod(...) or AlwaysOpen()."
            )
        super()._check_plan(plan)

    # ---------------------------------------------------------------- states

    @property
    def _state_keys(self) -> tuple[StateKey, ...]:
        return (*self.sync.state_keys, *state_keys())

    def _create_state(self, p: Parameter) -> None:
        create_state(p)

    def _inner_step(self, *agreed: Any, **more: Any) -> Step:
        return super()._inner_step(*agreed, directed=self.local_step == "dion", **more)

    def _wrong_state(self) -> str | None:
        return wrong_state(self.param_groups, self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but every tensor keeps the dtype it was saved with.

        The saved state provides momenta, right factors, moments, counters and the groups' values,
        including learning rates. This optimizer keeps its own gate, sync, direction and rank: right
        factors keep their first columns, and new columns are initialised. A gate or sync of another
        class starts fresh. With another sync right_factor and look_ahead come from this optimizer's
        groups, and a warning is issued.

        Raises:
            TypeError: if ``state_dict`` is not a state_dict.
            ValueError: if groups or parameters do not match, the state is another optimizer's,
                damaged, missing or another rank's shard, or drifted weights would become an anchor.
        """
        super().load_state_dict(state_dict)
        self._warn_unknown_keys(self.param_groups)

    def _load(self, saved: Mapping[str, Any], held: Record) -> Callable[[], None]:
        fitting = convert(saved, held, self.param_groups, self.sync, self._replicas.replica)
        before = self.state, self.param_groups

        def put_back() -> None:
            self.state, self.param_groups = before

        try:
            Optimizer.load_state_dict(self, fitting)
            restore_dtypes(self.param_groups, self.state, fitting)
        except Exception:
            put_back()
            raise
        return put_back
