"""A saved state under other arguments: what comes from it, what from them, what is converted.

States that depend on the direction and the rank follow the optimizer that loads. Under another sync
that kind's state is dropped, and its own begins anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvadion.comm.replicas import Replica
from curvadion.layout.matrices import zeros_per_matrix
from curvadion.layout.right_factors import resize_right_factors, right_factor_shapes
from curvadion.optim.record import Record
from curvadion.sync.base import Sync
from curvadion.update import hyperparameters as check
from curvadion.update.directions import DIRECTIONS
from curvadion.update.parameter import names
from curvadion.update.scalar import STATE_KEYS
from curvadion.update.state import (
    ANCHOR,
    MOMENTUM,
    MOMENTUM_NORM,
    R_SCALE,
    SPECTRUM,
    SPECTRUM_WEIGHT,
    is_right_factor,
)

# Group keys whose values are those of the optimizer that loads; and, under another sync, too.
OF_STATES = ("direction", "rank_fraction", "rank_multiple_of")
OF_SYNCS = ("right_factor", "look_ahead")


@dataclass(frozen=True)
class Converted:
    """A state_dict that fits, whether it is of the same sync, and what the user should know."""

    state_dict: dict[str, Any]
    same_sync: bool
    warnings: list[str]


def convert(
    saved: Mapping[str, Any],
    record: Record,
    param_groups: Sequence[dict[str, Any]],
    sync: Sync,
    here: Replica,
) -> Converted:
    """Make a saved state fit the optimizer that loads it; ``saved`` stays as it is.

    Args:
        saved: a state_dict.
        record: what its groups hold of the run.
        param_groups: of the optimizer that loads.
        sync: likewise.
        here: likewise, which of how many replicas it is.

    Raises:
        ValueError: if a state lacks a key or has another shape, a group holds an impossible value,
            or weights that differ between replicas would have to serve as an anchor.
    """
    same_sync = record.sync_class == type(sync).__name__
    own = OF_STATES if same_sync else (*OF_STATES, *OF_SYNCS)
    groups = [
        {**held, **{key: live[key] for key in own}}
        for live, held in zip(param_groups, saved["param_groups"], strict=True)
    ]
    if wrong := check.settings(groups):
        raise ValueError(f"state_dict holds an impossible value: {wrong}")
    warnings = []
    if not same_sync and saved["state"]:
        _check_agreed(record, sync)
        warnings.append(
            f"state_dict was saved with another sync ({record.sync_class}): weights, momenta and "
            f"moments go on, and what sync={sync!r} keeps begins anew. {list(OF_SYNCS)} are those "
            f"of this optimizer's groups."
        )
    if record.replica not in (None, here):
        warnings.append(_other_replica(record, here))
    of_sync = {key.name for key in sync.state_keys}
    dropped = set() if same_sync else {*record.sync_keys, *of_sync}
    states = dict(saved["state"])
    for g, (live, held) in enumerate(zip(param_groups, saved["param_groups"], strict=True)):
        for i, name, X in zip(held["params"], names(live, g), live["params"], strict=True):
            if i in states:
                state = {k: v for k, v in states[i].items() if k not in dropped}
                states[i] = _fitting(name, X, state, held, groups[g], sync)
    return Converted({**saved, "param_groups": groups, "state": states}, same_sync, warnings)


def _fitting(
    name: str,
    X: Tensor,
    state: dict[str, Any],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    sync: Sync,
) -> dict[str, Any]:
    """A state for the group's direction and rank; before: the group as it was saved."""
    # torch's flattened form of a state puts {} where it finds nothing.
    state = {key: value for key, value in state.items() if not isinstance(value, dict) or value}
    # Right factors are dropped where the direction has none now: then they may be missing, too.
    needed = _needed(X, before if after["direction"] == "low_rank" else after)
    # Of the tensors that the sync keeps of a parameter, a state has all or none.
    of_sync = {key.name for key in sync.state_keys if key.like_parameter and not key.passing}
    if not state.keys().isdisjoint(of_sync):
        needed |= of_sync
    if missing := sorted(needed - state.keys()):
        raise ValueError(
            f"state_dict lacks {missing} of {name}, which takes algorithm="
            f"{after['algorithm']!r} here: it holds {sorted(state)}. Load a whole checkpoint, "
            f"saved with the same algorithm."
        )
    for key in sorted(needed):
        if not isinstance(state[key], Tensor):
            raise TypeError(
                f"state_dict holds {key}={state[key]!r} for {name}: it must be a tensor"
            )
    if after["algorithm"] == "dion":
        return _with_right_factors(name, X, state, before, after)
    return state


def _with_right_factors(
    name: str,
    X: Tensor,
    state: Mapping[str, Any],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> dict[str, Any]:
    """The state with right factors of the rank that the group has now, if its direction has any.

    Of another rank the first columns stay, and others are initial.
    """
    rest = {key: value for key, value in state.items() if not is_right_factor(key)}
    if after["direction"] != "low_rank":
        return rest
    for key in (SPECTRUM, SPECTRUM_WEIGHT):
        rest.pop(key, None)
    if before["direction"] != "low_rank":
        return rest | DIRECTIONS["low_rank"].create_state(X, after)
    held = {key: Q for key, Q in state.items() if is_right_factor(key)}
    forms = {**after, **{key: before[key] for key in OF_STATES}}
    shapes = {key: tuple(Q.shape) for key, Q in held.items()}
    if shapes == right_factor_shapes(X, after):
        return dict(state)
    if shapes != right_factor_shapes(X, forms):
        raise ValueError(
            f"state_dict holds right factors of shapes {shapes} for {name}, but its "
            f"rank_fraction={before['rank_fraction']} and rank_multiple_of="
            f"{before['rank_multiple_of']} make {right_factor_shapes(X, forms)}: build the "
            f"optimizer with the stack_dims and row_blocks that it was saved with."
        )
    return rest | resize_right_factors(X, held, forms, after)


def _needed(X: Tensor, group: Mapping[str, Any]) -> set[str]:
    """Keys that a parameter's state must have, whatever synchronises replicas."""
    if group["algorithm"] == "dion":
        return {MOMENTUM, MOMENTUM_NORM, R_SCALE, *right_factor_shapes(X, group)}
    return {"step", *STATE_KEYS[group["algorithm"]]}


def wrong_state(
    param_groups: Sequence[dict[str, Any]], states: Mapping[Tensor, Mapping[str, Any]]
) -> str | None:
    """Which parameter has a state that its group cannot go on from; else None."""
    for g, group in enumerate(param_groups):
        for name, X in zip(names(group, g), group["params"], strict=True):
            state = states.get(X)
            if not state:
                continue
            missing = sorted(_needed(X, {**group, "direction": "polar"}) - state.keys())
            if missing:
                return (
                    f"{name} has no {missing} in its state, which algorithm="
                    f"{group['algorithm']!r} needs: set the algorithm back."
                )
            if group["algorithm"] == "adamw":
                held = state["exp_avg"].dtype
                if held != X.dtype != torch.float16:
                    return (
                        f"{name} has dtype {X.dtype}, and its exp_avg {held}: cast the model "
                        f"before the optimizer's first step, or cast the state too."
                    )
            elif group["algorithm"] == "dion" and (text := _other_matrices(X, group, state)):
                return f"{name}: {text}"
    return None


def _other_matrices(X: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> str | None:
    """Why a state is of other matrices or another rank than the group's."""
    held = {key: tuple(Q.shape) for key, Q in state.items() if is_right_factor(key)}
    norms = tuple(zeros_per_matrix(X, group).shape)
    if held == right_factor_shapes(X, group) and tuple(state[MOMENTUM_NORM].shape) == norms:
        return None
    return (
        f"direction={group['direction']!r}, rank_fraction={group['rank_fraction']!r}, "
        f"rank_multiple_of={group['rank_multiple_of']!r}, stack_dims={group['stack_dims']!r} or "
        f"row_blocks={group['row_blocks']!r} was changed after the first step. Set it back, or "
        f"build an optimizer with it and load this one's state_dict()."
    )


def _check_agreed(record: Record, sync: Sync) -> None:
    """Raise ValueError unless the saved weights can serve as the anchor that the sync wants."""
    anchored = any(key.name == ANCHOR for key in sync.state_keys)
    if anchored and record.drifted and record.replica is not None:
        raise ValueError(
            f"state_dict was saved after its replicas had drifted ({_how_far(record)}), but "
            f"sync={sync!r} needs weights on which they agree to start from: call "
            f"optimizer.synchronize(exact=True) before saving, or load it with sync=LowRank() "
            f"first."
        )


def _other_replica(record: Record, here: Replica) -> str:
    number, total = record.replica or here
    return (
        f"state_dict was saved by replica {number} of {total} while their states differed "
        f"({_how_far(record)}), and is loaded by replica {here.number} of {here.total}: what the "
        f"other {total - 1} held is lost. Call optimizer.synchronize(exact=True) before saving, or "
        f"let each replica load what it saved itself."
    )


def _how_far(record: Record) -> str:
    if not record.drifted:
        return f"{record.progress.steps_since_exact} steps after they were the same"
    count = record.fragments_drifted
    fragments = f", {count} fragment{'s' * (count > 1)} of the weights" if count else ""
    return f"{record.progress.local_steps} local steps{fragments}"
