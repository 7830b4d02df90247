"""What a checkpoint holds besides tensors, and whether a saved state fits."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from curvadion import checks
from curvadion.comm.groups import Replica
from curvadion.gates import Gate
from curvadion.layout.dtensor import placements_of
from curvadion.layout.flat_shard import FLAT_SHARD_START, flat_shard
from curvadion.layout.placements import global_shape
from curvadion.layout.sharded_states import squares_fit, zeros_per_matrix
from curvadion.optim import group_keys
from curvadion.plan.parameter import names
from curvadion.plan.state import (
    ANCHOR,
    MOMENTUM,
    MOMENTUM_NORM,
    PROGRESS,
    R_SCALE,
    SPECTRUM,
    StateKey,
    is_right_factor,
    like_parameter,
)
from curvadion.sync.base import Sync
from curvadion.update.elementwise import STATE_KEYS
from curvadion.update.registry import DIRECTIONS, state_keys

# Group keys from which the keys of a parameter's state follow, and their shapes.
OF_STATES = ("algorithm", "direction", "rank_fraction", "rank_multiple_of")
OF_SHAPES = (*OF_STATES, "stack_dims", "row_blocks")
# Group keys that keep the loading optimizer's values if the sync differs.
OF_SYNCS = ("right_factor", "look_ahead")


@dataclass
class Progress:
    """The progress of a run; only skips may differ between replicas."""

    steps: int = 0  # including skipped ones
    local_steps: int = 0  # since the replicas last synchronised
    consecutive_skips: int = 0  # for non-finite gradients
    steps_since_exact: int = 0  # since all state was last identical on all replicas

    @property
    def shared(self) -> tuple[int, ...]:
        """The counters that are equal on all replicas."""
        return self.steps, self.local_steps, self.steps_since_exact


@dataclass(frozen=True)
class Record:
    """The contents of a checkpoint besides groups and tensors."""

    progress: Progress
    gate: dict[str, Any]  # its state_dict()
    sync: dict[str, Any]
    gate_class: str
    sync_class: str
    sync_keys: list[str]  # state keys that only this sync knows
    fragments_drifted: int
    replica: Replica | None  # the one that saved, if its state cannot stand for all


def record(progress: Progress, gate: Gate, sync: Sync, replica: Replica | None) -> str:
    """A :class:`Record` as JSON, because checkpoint tools lose parts of dictionaries."""
    held = Record(
        progress,
        gate=gate.state_dict(),
        sync=sync.state_dict(),
        gate_class=type(gate).__name__,
        sync_class=type(sync).__name__,
        sync_keys=[key.name for key in sync.state_keys],
        fragments_drifted=sync.fragments_drifted,
        replica=replica,
    )
    return json.dumps(asdict(held), sort_keys=True)


def read_record(state_dict: Mapping[str, Any]) -> Record:
    """The record in a state_dict's groups; ValueError if there is none."""
    groups = state_dict.get("param_groups")
    if not groups or any(PROGRESS not in group for group in groups):
        raise ValueError(
            f"state_dict was not saved by an optimizer of curvadion: a group lacks "
            f"{PROGRESS!r}. Load it into the optimizer inside Replicated, if that has saved it."
        )
    return parse_record(groups[0][PROGRESS])


def parse_record(text: str) -> Record:
    """The inverse of :func:`record`."""
    held = json.loads(text)
    held["progress"] = Progress(**held["progress"])
    held["replica"] = held["replica"] and Replica(*held["replica"])
    return Record(**held)


def fitted(
    saved: Mapping[str, Any],
    record: Record,
    param_groups: Sequence[dict[str, Any]],
    sync: Sync,
) -> dict[str, Any]:
    """A saved state without another sync's; ValueError if it does not fit."""
    check_groups(param_groups, saved["param_groups"])
    _check_complete(param_groups, saved, record.progress.steps)
    same_sync = record.sync_class == type(sync).__name__
    kept = () if same_sync else OF_SYNCS
    dropped = set() if same_sync else {*record.sync_keys, *(key.name for key in sync.state_keys)}
    groups, states = [], dict(saved["state"])
    for g, (live, held) in enumerate(zip(param_groups, saved["param_groups"], strict=True)):
        groups.append({**held, **{key: live[key] for key in kept}})
        for i, name, X in zip(held["params"], names(live, g), live["params"], strict=True):
            if i not in states:
                continue
            # torch's flattened form of a state has {} for missing entries.
            states[i] = {k: v for k, v in states[i].items() if k not in dropped and v != {}}
            _check_flat_shard(name, X, states[i].get(FLAT_SHARD_START))
            check_state(name, X, held, states[i], sync.state_keys)
    if wrong := group_keys.first_error(groups):
        raise ValueError(f"state_dict holds an invalid value: {wrong}")
    return {**saved, "param_groups": groups, "state": states}


def check_sync(saved: Mapping[str, Any], record: Record, sync: Sync, here: Replica) -> None:
    """Warn if another sync or replica saved; drifted weights cannot become anchors."""
    other = record.sync_class != type(sync).__name__
    drifted = record.progress.local_steps > 0 or record.fragments_drifted > 0
    anchors = any(key.name == ANCHOR for key in sync.state_keys)
    if saved["state"] and other:
        if anchors and drifted and record.replica is not None:
            raise ValueError(
                f"state_dict was saved by replicas that had drifted, but sync={sync!r} needs "
                f"equal weights: call synchronize(exact=True) before saving."
            )
        warnings.warn(
            f"state_dict was saved with another sync ({record.sync_class}): the state of "
            f"sync={sync!r} starts fresh.",
            stacklevel=checks.user_stacklevel(),
        )
    if record.replica not in (None, here):
        number, total = record.replica or here
        warnings.warn(
            f"state_dict was saved by replica {number} of {total} while states differed, and "
            f"is loaded by replica {here.number} of {here.total}: call "
            f"synchronize(exact=True) before saving, or let each replica load its own.",
            stacklevel=checks.user_stacklevel(),
        )


def check_groups(here: Sequence[dict[str, Any]], there: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError if saved groups do not match the optimizer's."""
    again = "Build the optimizer as in the run that saved it"
    if len(here) != len(there):
        raise ValueError(
            f"state_dict has a different number of parameter groups, {len(there)} instead of "
            f"{len(here)}. {again}."
        )
    for g, (live, held) in enumerate(zip(here, there, strict=True)):
        if len(held["params"]) != len(live["params"]):
            raise ValueError(
                f"state_dict has {len(held['params'])} parameters instead of "
                f"{len(live['params'])} in param group {g}. {again}."
            )
        if len(held.get("param_names", held["params"])) != len(held["params"]):
            raise ValueError(f"state_dict has param_names of another length in param group {g}.")
        shaping = OF_STATES if live.get("direction") == "low_rank" else OF_STATES[:2]
        for key in shaping if live.get("algorithm") == "dion" else OF_STATES[:1]:
            if live.get(key) != held.get(key):
                raise ValueError(
                    f"state_dict has {key}={held.get(key)!r} in param group {g}, but this "
                    f"optimizer has {live.get(key)!r}. {again}."
                )


def _check_complete(here: Sequence[dict[str, Any]], saved: Mapping[str, Any], steps: int) -> None:
    # torch.distributed.checkpoint saves and loads no state while there are gradients.
    trained = any(X.requires_grad for group in here for X in group["params"])
    if steps and trained and not saved["state"]:
        raise ValueError(
            f"state_dict holds no state of any parameter after {steps} steps: call "
            f"optimizer.zero_grad() before torch's get_state_dict."
        )


def _check_flat_shard(name: str, X: Tensor, start: Tensor | None) -> None:
    here = getattr(flat_shard(X), "start", None)
    held = None if start is None else int(start)
    if held != here:
        raise ValueError(
            f"state_dict holds the flat shard from element {held} of {name}, this rank that "
            f"from {here} (None: no flat shard): use torch.save and torch.load on each rank, "
            f"in the same layout."
        )


def check_state(
    name: str,
    X: Tensor,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    of_sync: Sequence[StateKey] = (),
) -> None:
    """Raise ValueError if keys, shapes or placements of a state do not fit its group."""
    if wrong := _misfit(X, group, state, of_sync):
        settings = ", ".join(f"{key}={group.get(key)!r}" for key in OF_SHAPES)
        raise ValueError(
            f"The state of {name} of shape {global_shape(X)} has {wrong}: it is incomplete, "
            f"another model's, or of other settings than {settings}. For another layout use "
            f"torch.distributed.checkpoint (for full states with "
            f"StateDictOptions(full_state_dict=True))."
        )


def _misfit(
    X: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], of_sync: Sequence[StateKey]
) -> str | None:
    shapes = _shapes(X, group, state, of_sync)
    like_X = like_parameter((*of_sync, *state_keys()))
    for key, shape in shapes.items():
        held = state.get(key)
        if not isinstance(held, Tensor):
            return f"no tensor {key!r} (but {sorted(state)})"
        if tuple(held.shape) != shape:
            return f"a {key!r} of shape {tuple(held.shape)} instead of {shape}"
        if key in like_X and placements_of(held) != placements_of(X):
            return f"a {key!r} with other placements, {placements_of(held)}"
    for key in state:
        if is_right_factor(key) and key not in shapes:
            return f"a {key!r}"
    if SPECTRUM in state and not squares_fit(X, group, state[SPECTRUM]):
        return f"a {SPECTRUM!r} of another layout"
    return None


def _shapes(
    X: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], of_sync: Sequence[StateKey]
) -> dict[str, tuple[int, ...]]:
    """Global shapes of the tensors that a state must hold, by key."""
    whole = tuple(X.shape)
    if group["algorithm"] == "dion":
        one_each = tuple(zeros_per_matrix(X, group).shape)
        shapes = {MOMENTUM: whole, MOMENTUM_NORM: one_each, R_SCALE: one_each}
        shapes |= DIRECTIONS[group["direction"]].state_shapes(X, group)
    else:
        shapes = {"step": (), **dict.fromkeys(STATE_KEYS[group["algorithm"]], whole)}
    # A state has all of a sync's tensors of a parameter, or none.
    like_X = [key for key in of_sync if key.like_parameter]
    if any(key.name in state for key in like_X):
        shapes |= {k.name: whole for k in like_X if not k.passing or k.name in state}
    return shapes


def restore_dtypes(
    param_groups: Sequence[dict[str, Any]],
    states: Mapping[Tensor, dict[str, Any]],
    saved: Mapping[str, Any],
) -> None:
    """Undo torch's casts of states, except AdamW's moments, whose kernels need them."""
    for group, held in zip(param_groups, saved["param_groups"], strict=True):
        cast = STATE_KEYS["adamw"] if group["algorithm"] == "adamw" else ()
        for i, X in zip(held["params"], group["params"], strict=True):
            for key, value in saved["state"].get(i, {}).items():
                if key in cast or not isinstance(value, Tensor):
                    continue
                if value.dtype != states[X][key].dtype:
                    states[X][key] = value.detach().clone().to(states[X][key].device)
