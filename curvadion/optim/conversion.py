"""A saved state under other arguments: what comes from it, what from them, what is converted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from curvadion.comm.replicas import Replica
from curvadion.layout.dtensor import local
from curvadion.layout.right_factors import (
    create_right_factors,
    resize_right_factors,
    right_factor_shapes,
)
from curvadion.optim.record import Progress, Record
from curvadion.sync.base import Sync
from curvadion.sync.corrections import LR_SINCE_ANCHOR
from curvadion.update import hyperparameters as check
from curvadion.update.parameter import dtype_of, names
from curvadion.update.scalar import STATE_KEYS
from curvadion.update.state import (
    ANCHOR,
    MOMENTUM,
    MOMENTUM_NORM,
    RESIDUAL,
    SPECTRUM,
    SPECTRUM_WEIGHT,
    is_right_factor,
)


@dataclass(frozen=True)
class Loading:
    """The optimizer that loads: its groups, how its replicas come together, which one it is.

    first_memory: the ``state_dict()`` that its sync had before the first step.
    """

    param_groups: Sequence[dict[str, Any]]
    sync: Sync
    group_defaults: Mapping[str, Any]
    replica: Replica
    first_memory: dict[str, Any]

    @property
    def anchored(self) -> bool:
        """Whether its sync begins from weights on which replicas agree."""
        return any(key.name == ANCHOR for key in self.sync.state_keys)


@dataclass(frozen=True)
class Converted:
    """A state_dict that fits, the progress to go on from, and what the user should know.

    sync: what the loading optimizer's sync is to remember. fragments_apart: likewise.
    """

    state_dict: dict[str, Any]
    progress: Progress
    sync: dict[str, Any]
    fragments_apart: int
    warnings: list[str]


def convert(saved: Mapping[str, Any], record: Record, into: Loading) -> Converted:
    """Make a saved state fit the optimizer that loads it; ``saved`` stays as it is.

    Groups keep their saved values, as in torch, but for those whose default depends on the sync:
    where the two optimizers' defaults differ, the loading one's groups count. Right factors follow
    the rank. The state of another sync kind is dropped; an anchor is then taken from the weights
    at the next step.

    Args:
        saved: a state_dict.
        record: what its groups hold of the run.
        into: the optimizer that loads.

    Raises:
        ValueError: if a state lacks a key or has another shape, a group holds an impossible value,
            or weights that differ between replicas would have to serve as an anchor.
    """
    same_kind = _same_kind(saved, record, into)
    groups, told = _groups(saved["param_groups"], record, into, same_kind)
    if wrong := check.settings(groups):
        raise ValueError(f"state_dict holds an impossible value: {wrong}")
    if into.anchored and not same_kind and saved["state"]:
        _check_together(record, into)
    told += _without_right_factors(groups, saved, into)
    states, lost = _states(saved, groups, into, _dropped_keys(record, into, same_kind))
    told += [text for text in (_lost_steps(record, into.replica), lost) if text]
    state_dict = {**saved, "param_groups": groups, "state": states}
    progress = replace(record.progress)
    if same_kind:
        return Converted(state_dict, progress, record.sync, record.fragments_apart, told)
    # Other kinds know no fragments: all of the weights are then to be averaged.
    progress.local_steps = max(progress.local_steps, 1 if record.fragments_apart else 0)
    return Converted(state_dict, progress, into.first_memory, 0, told)


def _same_kind(saved: Mapping[str, Any], record: Record, into: Loading) -> bool:
    """Whether the replicas came together in the same way when it was saved."""
    if record.sync_class is not None:
        return record.sync_class == type(into.sync).__name__
    if not saved["state"]:
        return True
    return any(ANCHOR in state for state in saved["state"].values()) == into.anchored


def _dropped_keys(record: Record, into: Loading, same_kind: bool) -> set[str]:
    """Keys of states that mean nothing to the loading optimizer's sync.

    Its own are among them: where the saved one was another, a tool has put them there. (torch's
    full states keep what the loading optimizer had and the file lacks.)
    """
    if same_kind:
        return set()
    saved = record.sync_keys
    old = {ANCHOR, RESIDUAL, LR_SINCE_ANCHOR} if saved is None else set(saved)
    return old | {key.name for key in into.sync.state_keys}


# -------------------------------------------------------------------- groups


def _groups(
    saved: Sequence[Mapping[str, Any]], record: Record, into: Loading, same_kind: bool
) -> tuple[list[dict[str, Any]], list[str]]:
    """The groups to load, and what is said about keys that were missing or have other values."""
    following = _follow_the_arguments(record, into, same_kind)
    groups, missing, replaced = [], {}, {}
    for g, (live, held) in enumerate(zip(into.param_groups, saved, strict=True)):
        given = {k: v for k, v in live.items() if k not in ("params", "param_names")}
        own = given.keys() & check.SETTINGS
        if lacking := sorted(own - held.keys()):
            missing[g] = {key: given[key] for key in lacking}
        if was := {k: held[k] for k in following & held.keys() if held[k] != given[k]}:
            replaced[g] = was
        groups.append({**given, **held, **{key: given[key] for key in following}})
    told = []
    if missing:
        told.append(
            f"state_dict lacks keys of its param groups, which another version of this optimizer "
            f"saved. They stay as they are here, by group: {missing}."
        )
    if same_kind and replaced:
        told.append(
            f"state_dict is of a run with another default of {sorted(following)}, so the values of "
            f"this optimizer count. The saved ones, by group: {replaced}. Set them in param_groups "
            f"after loading to go on with them."
        )
    return groups, told


def _without_right_factors(
    groups: Sequence[dict[str, Any]], saved: Mapping[str, Any], into: Loading
) -> list[str]:
    """Let groups keep direction="polar" if the factors of the saved direction were not read.

    A distributed checkpoint gives an optimizer only what it has a place for.
    """
    told = []
    for g, (group, live) in enumerate(zip(groups, into.param_groups, strict=True)):
        if (group["algorithm"], live["direction"], group["direction"]) != (
            "dion",
            "polar",
            "low_rank",
        ):
            continue
        held = [
            saved["state"][i] for i in saved["param_groups"][g]["params"] if i in saved["state"]
        ]
        if held and not any(is_right_factor(key) for state in held for key in state):
            group["direction"] = "polar"
            told.append(
                f"state_dict was saved with direction='low_rank' in param group {g}, but without "
                f"right factors: it goes on with direction='polar', as it is here. To go on with "
                f"'low_rank', build the optimizer with it."
            )
    return told


def _follow_the_arguments(record: Record, into: Loading, same_kind: bool) -> set[str]:
    """Keys whose default depends on how replicas come together, and is another one now."""
    now = into.group_defaults
    if record.group_defaults is not None:
        before: Mapping[str, Any] = record.group_defaults
    else:
        before = now if same_kind else {}
    if same_kind:
        before = {**now, **before}  # a key that it lacks did not follow from the kind then
    changed = {key for key in now if key not in before or before[key] != now[key]}
    return changed | ({"rank_multiple_of"} if "rank_fraction" in changed else set())


# -------------------------------------------------------------------- states


def _states(
    saved: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    into: Loading,
    dropped: set[str],
) -> tuple[dict[Any, Any], str | None]:
    """The states to load, and what is said about dropped residuals."""
    states, with_losses, kept = dict(saved["state"]), [], False
    for g, (live, held) in enumerate(zip(into.param_groups, saved["param_groups"], strict=True)):
        before = {**live, **held}
        for i, name, X in zip(held["params"], names(live, g), live["params"], strict=True):
            if i not in states:
                continue
            # torch's flattened form of a state puts {} where it finds nothing.
            state = {k: v for k, v in states[i].items() if not isinstance(v, dict) or v}
            if RESIDUAL in dropped:
                residual = state.get(RESIDUAL)
                if isinstance(residual, Tensor) and local(residual).any():
                    with_losses.append(name)
                    kept |= ANCHOR in state
            state = {k: v for k, v in state.items() if k not in dropped}
            _check_complete(name, X, state, before, groups[g], into.sync)
            if groups[g]["algorithm"] == "dion":
                state = fit_right_factors(name, X, state, before, groups[g])
            states[i] = state
    if not with_losses:
        return states, None
    return states, (
        f"state_dict holds what codes have lost of {len(with_losses)} parameters "
        f"({with_losses[0]} is the first), which sync={into.sync!r} has no use for: it is dropped. "
        + (
            "Call synchronize(exact=True) before saving to keep it."
            if kept  # an exact synchronisation adds it to weights
            else "It is about what the codes of one step lose."
        )
    )


def _check_complete(
    name: str,
    X: Tensor,
    state: Mapping[str, Any],
    before: Mapping[str, Any],
    group: Mapping[str, Any],
    sync: Sync,
) -> None:
    algorithm, needed = group["algorithm"], _needed(X, group)
    if before.get("direction") != "low_rank":
        needed = {key for key in needed if not is_right_factor(key)}
    # Of the tensors that the sync keeps of a parameter, a state has all or none.
    of_sync = {key.name for key in sync.state_keys if key.like_parameter and not key.passing}
    if not state.keys().isdisjoint(of_sync):
        needed |= of_sync
    if missing := sorted(needed - state.keys()):
        raise ValueError(
            f"state_dict lacks {missing} of {name}, which takes algorithm={algorithm!r} here: it "
            f"holds {sorted(state)}. Load a whole checkpoint, saved with the same algorithm."
        )
    for key in sorted(needed):
        if not isinstance(state[key], Tensor):
            raise TypeError(
                f"state_dict holds {key}={state[key]!r} for {name}: it must be a tensor"
            )


def wrong_algorithm(
    param_groups: Sequence[dict[str, Any]], states: Mapping[Tensor, Mapping[str, Any]]
) -> str | None:
    """Which parameter has a state that its group's algorithm cannot go on from; else None."""
    for g, group in enumerate(param_groups):
        for name, X in zip(names(group, g), group["params"], strict=True):
            state = states.get(X)
            if state and (missing := sorted(_needed(X, group) - state.keys())):
                return (
                    f"{name} has no {missing} in its state, which algorithm="
                    f"{group['algorithm']!r} needs: set the algorithm back, or take the parameter "
                    f"out of optimizer.state to let it start afresh."
                )
    return None


def _needed(X: Tensor, group: Mapping[str, Any]) -> set[str]:
    """Keys that a parameter's state must have, whatever brings replicas together."""
    if group["algorithm"] == "dion":
        return {MOMENTUM, MOMENTUM_NORM, *right_factor_shapes(X, group)}
    return {"step", *STATE_KEYS[group["algorithm"]]}


def fit_right_factors(
    name: str,
    X: Tensor,
    state: Mapping[str, Any],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> dict[str, Any]:
    """The state with right factors of the rank that the group has now, if its direction has any."""
    wanted = right_factor_shapes(X, after)
    rest = {key: value for key, value in state.items() if not is_right_factor(key)}
    if after["direction"] != "low_rank":
        return rest
    for key in (SPECTRUM, SPECTRUM_WEIGHT):
        rest.pop(key, None)
    if before["direction"] != "low_rank":
        return rest | create_right_factors(X, after, dtype_of(after["q_dtype"], X))
    held = {key: state[key] for key in wanted}
    shapes = {key: tuple(Q.shape) for key, Q in held.items()}
    if shapes == wanted:
        return dict(state)
    forms = {**after, **{key: before[key] for key in ("rank_fraction", "rank_multiple_of")}}
    if shapes != right_factor_shapes(X, forms):
        raise ValueError(
            f"state_dict holds right factors of shapes {shapes} for {name}, but its "
            f"rank_fraction={before['rank_fraction']} and rank_multiple_of="
            f"{before['rank_multiple_of']} make {right_factor_shapes(X, forms)}: build the "
            f"optimizer with the stack_dims and row_blocks that it was saved with."
        )
    return rest | resize_right_factors(X, held, forms, after)


# -------------------------------------------------------------------- replicas that were apart


def _check_together(record: Record, into: Loading) -> None:
    """Raise ValueError unless the saved weights are what all replicas agreed on."""
    known_apart = record.replica is not None
    perhaps_apart = not record.complete and into.replica.total > 1
    if record.apart and (known_apart or perhaps_apart):
        raise ValueError(
            f"state_dict was saved while its replicas were apart ({_how_far(record)}), "
            f"but sync={into.sync!r} needs weights on which they agree to start from: call "
            f"optimizer.synchronize(exact=True) before saving, or load it with sync=LowRank() "
            f"first."
        )


def _lost_steps(record: Record, here: Replica) -> str | None:
    """What is lost if another replica's state is loaded; None if nothing is."""
    if not record.differs:
        return None
    far = _how_far(record)
    if record.replica is None:
        if record.complete or here.total == 1:
            return None
        return (
            f"state_dict was saved while replicas were apart ({far}). Unless each replica loads "
            f"what it saved itself, what the others held is lost. Call "
            f"optimizer.synchronize(exact=True) before saving."
        )
    if record.replica == here:
        return None
    number, total = record.replica
    return (
        f"state_dict was saved by replica {number} of {total} while their states differed ({far}), "
        f"and is loaded by replica {here.number} of {here.total}: what the other {total - 1} held "
        f"is lost. Call optimizer.synchronize(exact=True) before saving, or let each replica load "
        f"what it saved itself."
    )


def _how_far(record: Record) -> str:
    if not record.apart:
        return f"{record.progress.steps_since_exact} steps after they were the same"
    count = record.fragments_apart
    fragments = f", {count} fragment{'s' * (count > 1)} of the weights" if count else ""
    return f"{record.progress.local_steps} local steps{fragments}"
