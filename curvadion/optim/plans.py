"""The plan of an optimizer's groups, which frameworks and users may change at any time."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from curvadion.comm.collectives import group_size
from curvadion.comm.replicas import ReplicaGroup
from curvadion.gates import Gate
from curvadion.layout.parameters import global_shape
from curvadion.optim.conversion import fit_right_factors
from curvadion.sync.verify import Listing
from curvadion.update.gradients import same
from curvadion.update.parameter import names
from curvadion.update.plan import Plan
from curvadion.update.state import MOMENTUM

# Group keys that say which matrices there are, and those that say how they are batched.
_MATRICES = ("stack_dims", "row_blocks", "input_first")
_FACTORS = ("algorithm", "right_factor", "rank_fraction", "rank_multiple_of")

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


class _Known(NamedTuple):
    plan: Plan
    ingredients: _Ingredients
    keys: dict[int, dict[str, Any]]  # of each group, by the id of one of the ingredients


class Plans:
    """Makes plans, and keeps the one that all ranks share until they agree on another.

    Args:
        replicas: of the optimizer.
        check: called with each new plan and the one before, or None, before it is kept.
    """

    def __init__(self, replicas: ReplicaGroup, check: Callable[[Plan, Plan | None], None]) -> None:
        self._replicas, self._check = replicas, check
        self._known: _Known | None = None

    @property
    def known(self) -> Plan | None:
        """The plan of the last step, which all ranks share."""
        return None if self._known is None else self._known.plan

    def group_of_plan(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group with the keys that the known plan was made by, whatever has changed since."""
        return group | ({} if self._known is None else self._known.keys.get(id(group), {}))

    def changed(self, param_groups: Sequence[dict[str, Any]], states: object, gate: Gate) -> bool:
        """Whether the groups are no longer those of the known plan."""
        now = _Ingredients.of(param_groups, states, gate)
        return self._known is not None and not self._known.ingredients.same_as(now)

    def make(self, param_groups: Sequence[dict[str, Any]], states: Any) -> Plan:
        """A plan; the process groups of the plan before are asked for no more."""
        unions = None if self._known is None else self._known.plan.unions
        replicas = self._replicas
        return Plan.of(
            param_groups, states, replicas.process_group, single=replicas.single, unions=unions
        )

    def renew(self, param_groups: Sequence[dict[str, Any]], states: Any, gate: Gate) -> Plan:
        """The plan of the groups as they are now, which all ranks must ask for together.

        Right factors follow a changed rank: their first columns stay, new ones are initial.

        Raises:
            ValueError: if matrices that have a state are to be cut otherwise.
        """
        now = _Ingredients.of(param_groups, states, gate)
        if self._known is None or not self._known.ingredients.same_as(now):
            keys = {id(group): _keys_of(group) for group in param_groups}
            self._follow_rank(param_groups, keys, states)
            plan = self.make(param_groups, states)
            self._check(plan, self.known)
            self._known = _Known(plan, now, keys)
        return self._known.plan

    def _follow_rank(
        self,
        param_groups: Sequence[dict[str, Any]],
        keys: Mapping[int, dict[str, Any]],
        states: Mapping[Tensor, dict[str, Any]],
    ) -> None:
        known = {} if self._known is None else self._known.keys
        for g, group in enumerate(param_groups):
            before, after = known.get(id(group)), keys[id(group)]
            if before is None or before == after or after["algorithm"] != "dion":
                continue
            for X, name in zip(group["params"], names(group, g), strict=True):
                state = states.get(X)
                if state and MOMENTUM in state:
                    _check_uncut(f"param_groups[{g}]", name, before, after)
                    state |= fit_right_factors(name, X, state, before, after)


def _check_uncut(
    group: str, name: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> None:
    for key in _MATRICES:
        if before[key] != after[key]:
            raise ValueError(
                f"{group}[{key!r}] was changed from {before[key]!r} to {after[key]!r}, but {name} "
                f"has a state of the matrices before: set it back, or take the parameter out of "
                f"optimizer.state to let it start afresh."
            )


def members(param_groups: Sequence[dict[str, Any]]) -> Listing:
    """What ranks must change alike: every parameter, whether it is trained, and how."""
    listed: Listing = []
    for g, group in enumerate(param_groups):
        how = ", ".join(f"{key}={value!r}" for key, value in _keys_of(group).items())
        for X, name in zip(group["params"], names(group, g), strict=True):
            state = "trained" if X.requires_grad else "frozen"
            listed.append((name, f"{state}, {how}, of shape {global_shape(X)}"))
    return listed


def check_one_replica(gate: Gate, replicas: ReplicaGroup, plan: Plan) -> None:
    """Raise ValueError if processes with whole weights would never come together."""
    if gate.share is not None and plan.inside is not None and replicas.size == 1:
        raise ValueError(
            f"gate={gate!r} with one replica, which is sharded over {group_size(plan.inside)} "
            f"ranks: there is nothing to bring together, and shards send their factors at every "
            f"step. Use Dion, or pass replicas= if there are several."
        )
    meant = replicas.single or replicas.process_group is not None
    if meant or gate.always_open or plan.all_ranks is not None:
        return
    initialized = dist.is_available() and dist.is_initialized()
    if initialized and dist.get_world_size() > 1:
        raise ValueError(
            f"replicas=None with gate={gate!r}: there are {dist.get_world_size()} processes, each "
            f"with whole parameters, and none of them would ever hear of the others. Pass "
            f"replicas=torch.distributed.group.WORLD (which is None until init_process_group has "
            f"been called) with keep_gradients_local, or replicas='single' if each process trains "
            f"by itself or something else averages the gradients. If the model is to be sharded, "
            f"make the optimizer's groups after fully_shard."
        )
    if not initialized and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        warnings.warn(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but no process group exists and replicas is "
            f"None: each process trains by itself. Call init_process_group and pass "
            f"replicas=torch.distributed.group.WORLD, or replicas='single' if this is meant.",
            stacklevel=7,
        )
