"""Converting a saved state to an optimizer with other arguments.

States that depend on direction and rank are converted to those of the loading optimizer. If the
sync differs, the saved sync's state is dropped, and the new sync starts fresh.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from curvadion import checks
from curvadion.comm.groups import Replica
from curvadion.layout.dtensor import is_dtensor, local
from curvadion.layout.flat_shard import FLAT_SHARD_START, flat_shard
from curvadion.layout.parameters import global_shape
from curvadion.layout.states import resize_right_factors, squares_fit, zeros_per_matrix
from curvadion.optim.record import Record
from curvadion.sync.base import Sync
from curvadion.update import hyperparameters as check
from curvadion.update.directions import DIRECTIONS, STATE_KEYS, state_keys
from curvadion.update.parameter import check_parameter, names
from curvadion.update.state import (
    ANCHOR,
    MOMENTUM,
    MOMENTUM_NORM,
    R_SCALE,
    SPECTRUM,
    SPECTRUM_WEIGHT,
    StateKey,
    is_right_factor,
    key_of,
    like_parameter,
)

# Group keys that keep the loading optimizer's values: always, and if the sync differs.
OF_STATES = ("direction", "rank_fraction", "rank_multiple_of")
OF_SYNCS = ("right_factor", "look_ahead")


def convert(
    saved: Mapping[str, Any],
    record: Record,
    param_groups: Sequence[dict[str, Any]],
    sync: Sync,
    here: Replica,
) -> dict[str, Any]:
    """Convert a saved state to the loading optimizer; warn about anything that is not restored.

    record: of the saved run. here: the replica that loads.
    """
    _check_groups(param_groups, saved, record.progress.steps)
    same_sync = record.sync_class == type(sync).__name__
    own = OF_STATES if same_sync else (*OF_STATES, *OF_SYNCS)
    groups = [
        {**held, **{key: live[key] for key in own}}
        for live, held in zip(param_groups, saved["param_groups"], strict=True)
    ]
    if wrong := check.settings(saved["param_groups"]) or check.settings(groups):
        raise ValueError(f"state_dict holds an invalid value: {wrong}")
    check_anchors(saved, record, sync)
    of_sync = {key.name for key in sync.state_keys}
    dropped = set() if same_sync else {*record.sync_keys, *of_sync}
    states = dict(saved["state"])
    for g, (live, held) in enumerate(zip(param_groups, saved["param_groups"], strict=True)):
        for i, name, X in zip(held["params"], names(live, g), live["params"], strict=True):
            if i in states:
                check_parameter(X, name, held)
                # torch's flattened form of a state has {} for missing entries.
                state = {k: v for k, v in states[i].items() if k not in dropped and v != {}}
                states[i] = _fitting(name, X, state, held, groups[g], sync.state_keys)
    warn_of_others(record, sync, here, states, f"{list(OF_SYNCS)} are those of its groups.")
    return {**saved, "param_groups": groups, "state": states}


def check_anchors(saved: Mapping[str, Any], record: Record, sync: Sync) -> None:
    """Raise ValueError if drifted weights would become another sync's anchors."""
    drifted = record.progress.local_steps > 0 or record.fragments_drifted > 0
    anchors = any(key.name == ANCHOR for key in sync.state_keys) and saved["state"]
    other = record.sync_class != type(sync).__name__
    if other and anchors and drifted and record.replica is not None:
        raise ValueError(
            f"state_dict was saved after its replicas had drifted "
            f"({record.progress.steps_since_exact} steps), but sync={sync!r} needs weights on "
            f"which they agree to start from: call synchronize(exact=True) before saving."
        )


def warn_of_others(
    record: Record, sync: Sync, here: Replica, states: Mapping[Any, Any], more: str = ""
) -> None:
    """Warn if another sync, or another replica, saved the state; more: further differences."""
    if states and record.sync_class != type(sync).__name__:
        warnings.warn(
            f"state_dict was saved with another sync ({record.sync_class}): weights, momenta and "
            f"moments are restored, but the state of sync={sync!r} starts fresh. {more}".rstrip(),
            stacklevel=checks.user_stacklevel(),
        )
    if record.replica not in (None, here):
        number, total = record.replica or here
        warnings.warn(
            f"state_dict was saved by replica {number} of {total} while their states differed "
            f"({record.progress.steps_since_exact} steps after they were the same), and is loaded "
            f"by replica {here.number} of {here.total}: what the other {total - 1} held is lost. "
            f"Call optimizer.synchronize(exact=True) before saving, or let each replica load the "
            f"state that it saved itself.",
            stacklevel=checks.user_stacklevel(),
        )


def _check_groups(here: Sequence[dict[str, Any]], saved: Mapping[str, Any], steps: int) -> None:
    there = saved["param_groups"]
    if len(here) != len(there):
        raise ValueError(
            f"state_dict has a different number of parameter groups: {len(there)} instead of "
            f"{len(here)}. Build the optimizer as in the run that saved it, for example with "
            f"param_groups(model) or attach(trainer, ...)."
        )
    for g, (live, held) in enumerate(zip(here, there, strict=True)):
        if len(held["params"]) != len(live["params"]):
            raise ValueError(
                f"state_dict has {held['params']!r} in param group {g}, which does not match the "
                f"size of optimizer's group: {len(live['params'])} parameters."
            )
        if len(given := held.get("param_names", held["params"])) != len(held["params"]):
            raise ValueError(
                f"state_dict has param_names={given!r} in param group {g}, which must hold one "
                f"name for each of its {len(held['params'])} params."
            )
        if live["algorithm"] != held.get("algorithm"):
            raise ValueError(
                f"state_dict has algorithm={held.get('algorithm')!r} in param group {g}, but this "
                f"optimizer's group has {live['algorithm']!r}: pass the groups in the order in "
                f"which they were saved."
            )
    # torch.distributed.checkpoint silently saves and loads no state while there are gradients.
    trained = any(X.requires_grad for group in here for X in group["params"])
    if steps and trained and not saved["state"]:
        raise ValueError(
            f"state_dict holds no state of any parameter, although it was saved after {steps} "
            f"steps. With torch.distributed.checkpoint call optimizer.zero_grad() before "
            f"get_state_dict."
        )


def _fitting(
    name: str,
    X: Tensor,
    state: dict[str, Any],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    of_sync: Sequence[StateKey],
) -> dict[str, Any]:
    """Fit a state to the group's direction and rank; before, after: the group as saved and here."""
    _check_flat_shard(name, X, state.get(FLAT_SHARD_START))
    turns = after["algorithm"] == "dion" and before["direction"] != after["direction"]
    if turns:  # the saved direction's own state may be missing
        gone = DIRECTIONS[before["direction"]].state_shapes(X, before)
        state = {k: v for k, v in state.items() if k not in gone and not is_right_factor(k)}
    checked = {**before, "direction": "polar"} if turns else before
    if wrong := _misfit(X, checked, state, of_sync):
        raise ValueError(
            f"state_dict holds {wrong} for {name} of shape {global_shape(X)}: load a complete "
            f"checkpoint of the same parameters, algorithm, stack_dims and row_blocks. To load a "
            f"state in another layout use "
            f"torch.distributed.checkpoint.state_dict.set_optimizer_state_dict (for a full state "
            f"with StateDictOptions(full_state_dict=True))."
        )
    if after["algorithm"] != "dion":
        return state
    direction = DIRECTIONS[after["direction"]]
    if not direction.keeps_spectrum:
        for key in (SPECTRUM, SPECTRUM_WEIGHT):
            state.pop(key, None)
    if turns:
        return state | direction.create_state(X, after)
    if direction.state_shapes(X, before) == direction.state_shapes(X, after):
        return state
    Q = {key: state.pop(key) for key in list(state) if is_right_factor(key)}
    return state | (
        resize_right_factors(X, Q, before, after) if Q else direction.create_state(X, after)
    )


def _misfit(
    X: Tensor,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    of_sync: Sequence[StateKey] = (),
    *,
    reads: bool = True,
) -> str | None:
    """Describe how a state does not fit its group; reads: also check elements."""
    shapes = _shapes(X, group, state, of_sync)
    for key, shape in shapes.items():
        held = state.get(key)
        if not isinstance(held, Tensor):
            return f"no tensor {key!r} (but {sorted(state)})"
        if tuple(held.shape) != shape:
            return f"a {key!r} of shape {tuple(held.shape)} instead of {shape}"
        like_X = key in like_parameter((*of_sync, *state_keys()))
        if like_X and _placements(held) != _placements(X):
            return f"a {key!r} with the placements {_placements(held)} instead of {_placements(X)}"
    for key, held in state.items():
        if is_right_factor(key) and key not in shapes:
            return f"a {key!r}"
        read = reads and (key in shapes or key == SPECTRUM)
        if read and not (held.is_floating_point() and _all_finite(local(held))):
            return f"a {key!r} with a NaN or an Inf, or of dtype {held.dtype},"
        rule = key_of(key, state_keys())
        if read and rule is not None and rule.nonnegative and bool((local(held) < 0).any()):
            return f"a {key!r} with a negative element"
    spectrum, dion = state.get(SPECTRUM), group["algorithm"] == "dion"
    if dion and spectrum is not None and not squares_fit(X, group, spectrum):
        return f"a {SPECTRUM!r} of another layout"
    return None


def _all_finite(held: Tensor) -> bool:
    # torch has no isfinite for float8.
    return bool((held.float() if held.dtype.itemsize == 1 else held).isfinite().all())


def _shapes(
    X: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], of_sync: Sequence[StateKey]
) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that a state must hold, by key; global shapes for DTensors."""
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


def _placements(tensor: Tensor) -> tuple[object, ...] | None:
    """The placements of a DTensor, None for other tensors."""
    return tuple(tensor.placements) if is_dtensor(tensor) else None


def _check_flat_shard(name: str, X: Tensor, start: Tensor | None) -> None:
    declared, held = flat_shard(X), None if start is None else int(start)
    here = None if declared is None else declared.start
    if held != here:
        raise ValueError(
            f"state_dict holds the flat shard from element {held} of {name} of shape "
            f"{global_shape(X)}, but this rank has the one from element {here} (None: no flat "
            f"shard). Flat shards cannot move to another rank or layout, or through "
            f"torch.distributed.checkpoint: save and load them on each rank with torch.save and "
            f"torch.load."
        )


def wrong_state(
    param_groups: Sequence[dict[str, Any]], states: Mapping[Tensor, Mapping[str, Any]]
) -> str | None:
    """An error for the first parameter whose state does not fit its group; else None."""
    for g, group in enumerate(param_groups):
        for name, X in zip(names(group, g), group["params"], strict=True):
            state = states.get(X)
            if state and group["algorithm"] == "adamw":
                held = state["exp_avg"].dtype if "exp_avg" in state else X.dtype
                if held != X.dtype:
                    return (
                        f"{name} has dtype {X.dtype}, and its exp_avg {held}: cast the model "
                        f"before the optimizer's first step, or cast the state too."
                    )
            if state and (wrong := _misfit(X, group, state, reads=False)):
                return (
                    f"{name} holds {wrong}: algorithm={group['algorithm']!r}, "
                    f"direction={group['direction']!r}, rank_fraction={group['rank_fraction']!r}, "
                    f"rank_multiple_of={group['rank_multiple_of']!r}, "
                    f"stack_dims={group['stack_dims']!r} or row_blocks={group['row_blocks']!r} was "
                    f"changed after the first step. Set it back, or load this state_dict() into a "
                    f"new optimizer."
                )
    return None


def restore_dtypes(
    param_groups: Sequence[dict[str, Any]],
    states: Mapping[Tensor, dict[str, Any]],
    saved: Mapping[str, Any],
) -> None:
    """Undo torch's casts of loaded states, except for AdamW's moments, whose kernels need them."""
    for group, held in zip(param_groups, saved["param_groups"], strict=True):
        cast = group["algorithm"] == "adamw"
        for i, X in zip(held["params"], group["params"], strict=True):
            for key, value in saved["state"].get(i, {}).items():
                if cast and key in STATE_KEYS["adamw"]:
                    continue
                if isinstance(value, Tensor) and value.dtype != states[X][key].dtype:
                    states[X][key] = value.detach().clone().to(states[X][key].device)
