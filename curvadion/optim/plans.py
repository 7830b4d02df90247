"""The plan of an optimizer's groups, which frameworks and users may change at any time."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from curvadion import checks
from curvadion.comm.collectives import group_size
from curvadion.comm.replicas import ReplicaGroup
from curvadion.gates import Gate
from curvadion.layout.parameters import global_shape
from curvadion.optim.conversion import fit_right_factors
from curvadion.sync.base import Sync
from curvadion.sync.verify import Listing
from curvadion.update.gradients import same
from curvadion.update.parameter import Parameter, names
from curvadion.update.plan import Plan
from curvadion.update.state import MOMENTUM

# Group keys that say which matrices there are, and those that say how they are batched.
_MATRICES = ("stack_dims", "row_blocks", "input_first")
_FACTORS = (
    *("algorithm", "direction", "right_factor", "rank_fraction", "rank_multiple_of"),
    *("newton_schulz", "newton_schulz_steps", "q_dtype"),
)

_requires_grad = attrgetter("requires_grad")

States = dict[Tensor, dict[str, Any]]


class _Ingredients(NamedTuple):
    """What a plan is made of: another plan is needed if one of the objects or values is another.

    Holding the objects keeps their identities from being given to others.
    """

    objects: list[object]
    values: list[object]

    @classmethod
    def of(
        cls, param_groups: Sequence[Mapping[str, Any]], states: object, gate: Gate
    ) -> _Ingredients:
        objects: list[object] = [states, gate]
        values: list[object] = []
        for group in param_groups:
            objects += (group, *group["params"])
            values.append(_keys_of(group))
            values += map(_requires_grad, group["params"])
        return cls(objects, values)

    def same_as(self, other: _Ingredients) -> bool:
        return same(self.objects, other.objects) and self.values == other.values


def _keys_of(group: Mapping[str, Any]) -> dict[str, Any]:
    keys = {key: group[key] for key in (*_MATRICES, *_FACTORS)}
    if isinstance(keys["row_blocks"], list):
        keys["row_blocks"] = tuple(keys["row_blocks"])  # a list may be changed in place
    return keys


def _keys_by_parameter(
    param_groups: Sequence[Mapping[str, Any]],
) -> dict[Tensor, dict[str, Any]]:
    each = ((group["params"], _keys_of(group)) for group in param_groups)
    return {X: keys for X_of_group, keys in each for X in X_of_group}


class _Known(NamedTuple):
    plan: Plan
    ingredients: _Ingredients


class _Changed(NamedTuple):
    """A matrix parameter whose state fits other keys, ``before``, than its group's, ``after``."""

    group: str
    name: str
    X: Tensor
    state: dict[str, Any]
    before: dict[str, Any]
    after: dict[str, Any]


class Plans:
    """Makes plans, and keeps the one that all ranks share until they agree on another.

    Args:
        replicas: of the optimizer.
        check: called with each new plan and the one before, or None, before it is kept.
        param_groups: those that the states fit, if there are states.
    """

    def __init__(
        self,
        replicas: ReplicaGroup,
        check: Callable[[Plan, Plan | None], None],
        param_groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._replicas, self._check = replicas, check
        self._known: _Known | None = None
        self._keys = _keys_by_parameter(param_groups)  # of the groups that the states fit

    @property
    def known(self) -> Plan | None:
        """The plan of the last step, which all ranks share."""
        return None if self._known is None else self._known.plan

    def group_of_plan(self, parameter: Parameter) -> dict[str, Any]:
        """Its group with the keys that the known plan was made by, whatever has changed since."""
        return parameter.group | self._keys.get(parameter.X, {})

    def changed(self, param_groups: Sequence[dict[str, Any]], states: object, gate: Gate) -> bool:
        """Whether the groups are no longer those of the known plan."""
        now = _Ingredients.of(param_groups, states, gate)
        return self._known is not None and not self._known.ingredients.same_as(now)

    def make(self, param_groups: Sequence[dict[str, Any]], states: Any, **wanted: Any) -> Plan:
        """A plan; the process groups of the plan before are asked for no more.

        wanted: as :meth:`Plan.of` takes it.
        """
        unions = None if self._known is None else self._known.plan.unions
        group, single = self._replicas.process_group, self._replicas.single
        return Plan.of(param_groups, states, group, single=single, unions=unions, **wanted)

    def left_out(self, param_groups: Sequence[dict[str, Any]], states: States) -> Plan:
        """A plan of what has a state and is no part of the known plan, because it was frozen."""
        known = set() if self.known is None else {id(p.X) for p in self.known.parameters}
        plan = self.make(
            param_groups, states, wanted=lambda X: id(X) not in known and bool(states.get(X))
        )
        plan.look_up_states()
        return plan

    def renew(self, param_groups: Sequence[dict[str, Any]], states: Any, gate: Gate) -> Plan:
        """The plan of the groups as they are now, which all ranks must ask for together.

        Right factors follow a changed rank: their first columns stay, new ones are initial. They
        come and go with the direction "low_rank".

        Raises:
            ValueError: if matrices that have a state are to be cut otherwise.
        """
        now = _Ingredients.of(param_groups, states, gate)
        if self._known is None or not self._known.ingredients.same_as(now):
            resized = self._resized(param_groups, states)
            plan = self.make(param_groups, states)
            self._check(plan, self.known)
            for state, fitting in resized:
                _replace(state, fitting)
            self._known, self._keys = _Known(plan, now), _keys_by_parameter(param_groups)
        return self._known.plan

    def follow_rank(self, param_groups: Sequence[dict[str, Any]], states: States) -> None:
        """Give right factors the rank of the groups as they are now, before a copy or a save.

        The next step still finds the change and agrees on it with the other ranks.
        """
        keys = {*_MATRICES, *_FACTORS}
        if any(keys - group.keys() for group in param_groups):
            return  # the next step says which key is missing
        for state, fitting in self._resized(param_groups, states):
            _replace(state, fitting)
        if self._keys or states:
            self._keys = _keys_by_parameter(param_groups)

    def _resized(
        self, param_groups: Sequence[dict[str, Any]], states: States
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """States that fit another direction or rank than their groups', and what fits these."""
        if wrong := self.wrong_cut(param_groups, states):
            raise ValueError(wrong)
        changed = list(self._of_other_keys(param_groups, states))
        _warn_of_ranks(changed)
        return [
            (c.state, fit_right_factors(c.name, c.X, c.state, c.before, c.after)) for c in changed
        ]

    def wrong_cut(self, param_groups: Sequence[dict[str, Any]], states: States) -> str | None:
        """Which matrices that have a state are to be cut otherwise; else None."""
        for c in self._of_other_keys(param_groups, states):
            for key in _MATRICES:
                if c.before[key] != c.after[key]:
                    return (
                        f"{c.group}[{key!r}] was changed from {c.before[key]!r} to "
                        f"{c.after[key]!r}, but {c.name} has a state of the matrices before: set "
                        f"it back, or take the parameter out of optimizer.state to let it start "
                        f"afresh."
                    )
        return None

    def _of_other_keys(
        self, param_groups: Sequence[dict[str, Any]], states: States
    ) -> Iterator[_Changed]:
        for g, group in enumerate(param_groups):
            after = _keys_of(group)
            for X, name in zip(group["params"], names(group, g), strict=True):
                before, state = self._keys.get(X, after), states.get(X, {})
                if before != after and after["algorithm"] == "dion" and MOMENTUM in state:
                    yield _Changed(f"param_groups[{g}]", name, X, state, before, after)


def _warn_of_ranks(changed: Sequence[_Changed]) -> None:
    """Say which groups were given a rank that their direction does not have."""
    groups = {
        c.group
        for c in changed
        if c.before["direction"] == c.after["direction"] == "polar"
        and c.before["rank_fraction"] != c.after["rank_fraction"]
    }
    if groups:
        warnings.warn(
            f"rank_fraction was changed in {sorted(groups)}, but direction='polar' has no rank: it "
            f"has no effect until direction is 'low_rank'.",
            stacklevel=checks.frames_up(),
        )


def _replace(state: dict[str, Any], by: Mapping[str, Any]) -> None:
    """Give a state other contents."""
    for key in state.keys() - by.keys():
        del state[key]
    state.update(by)


def members(param_groups: Sequence[dict[str, Any]]) -> Listing:
    """What ranks must change alike: every parameter, whether it is trained, and how."""
    listed: Listing = []
    for g, group in enumerate(param_groups):
        how = ", ".join(f"{key}={value!r}" for key, value in _keys_of(group).items())
        for X, name in zip(group["params"], names(group, g), strict=True):
            state = "trained" if X.requires_grad else "frozen"
            listed.append((name, f"{state}, {how}, of shape {global_shape(X)}"))
    return listed


def check_one_replica(gate: Gate, sync: Sync, replicas: ReplicaGroup, plan: Plan) -> None:
    """Raise ValueError if processes with whole weights would never come together; or warn."""
    between = gate.share is not None or sync.every_step
    if between and plan.inside is not None and replicas.size == 1:
        raise ValueError(
            f"gate={gate!r} and sync={sync!r} with one replica, which is sharded over "
            f"{group_size(plan.inside)} ranks: there is nothing to bring together, and shards send "
            f"their factors at every step. Use Dion, or pass replicas= if there are several."
        )
    if replicas.single or plan.all_ranks is not None:
        return
    initialized = dist.is_available() and dist.is_initialized()
    if initialized:
        _warn_of_one_rank(gate, replicas)
    averaged = gate.always_open and not sync.every_step  # by whoever else may average gradients
    if averaged or replicas.process_group is not None:
        return
    if initialized and dist.get_world_size() > 1:
        raise ValueError(
            f"replicas=None with gate={gate!r}, sync={sync!r}: there are "
            f"{dist.get_world_size()} processes, each with whole parameters, and none of them "
            f"would ever hear of the others. Pass replicas=torch.distributed.group.WORLD (which "
            f"is None until init_process_group has been called) with keep_gradients_local, or "
            f"replicas='single' if each process trains by itself or something else averages the "
            f"gradients. If the model is to be sharded, make the optimizer's groups after "
            f"fully_shard."
        )
    if not initialized and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        warnings.warn(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but no process group exists and replicas is "
            f"None: each process trains by itself. Call init_process_group and pass "
            f"replicas=torch.distributed.group.WORLD, or replicas='single' if this is meant.",
            stacklevel=checks.frames_up(),
        )


def _warn_of_one_rank(gate: Gate, replicas: ReplicaGroup) -> None:
    """Warn if a process that holds whole weights has no replica, and may be meant to have some."""
    world, text = dist.get_world_size(), None
    if world > 1 and replicas.process_group is not None:
        text = (
            f"replicas is a process group of this rank alone, and there are {world} ranks: its "
            f"weights are never averaged with those of another rank. Pass "
            f"replicas=torch.distributed.group.WORLD or the group of all ranks that train the same "
            f"weights, or replicas='single' if no other rank does."
        )
    elif world == 1 and gate.share is not None:
        text = (
            f"gate={gate!r} with one process: there is no other replica to send anything to. Start "
            f"one process for each replica, as torchrun --nproc-per-node does, or pass "
            f"replicas='single' if there is to be one."
        )
    if text is not None:
        warnings.warn(text, stacklevel=checks.frames_up())
