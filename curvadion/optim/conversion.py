"""A saved state under other arguments: what comes from it, what from them, what is converted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from curvadion.layout.dtensor import local
from curvadion.layout.right_factors import resize_right_factors, right_factor_shapes
from curvadion.optim import hyperparameters as check
from curvadion.optim.progress import Progress, Record, Replica
from curvadion.sync import consensus
from curvadion.update.plan import LR_AT_AGREEMENT, names
from curvadion.update.scalar import STATE_KEYS

# State that only reconcile="quantized" keeps.
ANCHOR_KEYS = (*consensus.STATE_KEYS, LR_AT_AGREEMENT)
# Keys of groups that older versions did not save, because there was one way only.
NEW_KEYS = {"input_first"}


@dataclass(frozen=True)
class Loading:
    """The optimizer that loads: its groups, how its replicas come together, which one it is."""

    param_groups: Sequence[dict[str, Any]]
    reconcile: str
    defaults_by_sync: Mapping[str, Any]
    replica: Replica

    @property
    def quantized(self) -> bool:
        return self.reconcile == "quantized"


@dataclass(frozen=True)
class Converted:
    """A state_dict that fits, the progress to go on from, and what the user should know."""

    state_dict: dict[str, Any]
    progress: Progress
    warnings: list[str]


def convert(saved: Mapping[str, Any], record: Record, into: Loading) -> Converted:
    """Make a saved state fit the optimizer that loads it; ``saved`` stays as it is.

    Groups keep their saved values, as in torch, but for those whose default depends on how
    replicas come together: where the two optimizers' defaults differ, the loading one's groups
    count. Right factors follow the rank; anchors are dropped, or taken from the weights at the
    next step.

    Raises:
        ValueError: if a state lacks a key or has another shape, a group holds an impossible value,
            or weights that differ between replicas would have to serve as an anchor.
    """
    was_quantized = _was_quantized(saved, record, into)
    groups, told = _groups(saved["param_groups"], record, into, was_quantized)
    if wrong := check.settings(groups):
        raise ValueError(f"state_dict holds an impossible value: {wrong}")
    if into.quantized and not was_quantized and saved["state"]:
        _check_together(record, into)
    states, lost = _states(saved, groups, into, keep_anchors=into.quantized and was_quantized)
    told += [text for text in (_lost_steps(record, into.replica), lost) if text]
    state_dict = {**saved, "param_groups": groups, "state": states}
    progress = record.progress
    if was_quantized and not into.quantized:
        progress = _without_parts(progress)
    return Converted(state_dict, replace(progress), told)


def _was_quantized(saved: Mapping[str, Any], record: Record, into: Loading) -> bool:
    if record.reconcile is not None:
        return record.reconcile == "quantized"
    if not saved["state"]:
        return into.quantized
    return any(consensus.AGREED in state for state in saved["state"].values())


# -------------------------------------------------------------------- groups


def _groups(
    saved: Sequence[Mapping[str, Any]], record: Record, into: Loading, was_quantized: bool
) -> tuple[list[dict[str, Any]], list[str]]:
    """The groups to load, and what is said about keys that were missing."""
    following = _follow_the_arguments(record, into, was_quantized)
    groups, missing = [], {}
    for g, (live, held) in enumerate(zip(into.param_groups, saved, strict=True)):
        given = {k: v for k, v in live.items() if k not in ("params", "param_names")}
        own = given.keys() & check.SETTINGS - NEW_KEYS
        if lacking := sorted(own - held.keys()):
            missing[g] = {key: given[key] for key in lacking}
        groups.append({**given, **held, **{key: given[key] for key in following}})
    if not missing:
        return groups, []
    return groups, [
        f"state_dict lacks keys of its param groups, which another version of this optimizer "
        f"saved. They stay as they are here, by group: {missing}."
    ]


def _follow_the_arguments(record: Record, into: Loading, was_quantized: bool) -> set[str]:
    """Keys whose default depends on how replicas come together, and is another one now."""
    now = into.defaults_by_sync
    if record.defaults_by_sync is not None:
        before: Mapping[str, Any] = record.defaults_by_sync
    else:
        before = now if was_quantized == into.quantized else {}
    changed = {key for key in now if key not in before or before[key] != now[key]}
    return changed | ({"rank_multiple_of"} if "rank_fraction" in changed else set())


# -------------------------------------------------------------------- states


def _states(
    saved: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    into: Loading,
    *,
    keep_anchors: bool,
) -> tuple[dict[Any, Any], str | None]:
    """The states to load, and what is said about dropped residuals."""
    states, with_losses = dict(saved["state"]), []
    for g, (live, held) in enumerate(zip(into.param_groups, saved["param_groups"], strict=True)):
        before = {**live, **held}
        for i, name, X in zip(held["params"], names(live, g), live["params"], strict=True):
            if i not in states:
                continue
            # torch's flattened form of a state puts {} where it finds nothing.
            state = {k: v for k, v in states[i].items() if not isinstance(v, dict) or v}
            _check_complete(name, X, state, groups[g], keep_anchors)
            if not keep_anchors:
                residual = state.get(consensus.RESIDUAL)
                if isinstance(residual, Tensor) and not into.quantized and local(residual).any():
                    with_losses.append(name)
                state = {k: v for k, v in state.items() if k not in ANCHOR_KEYS}
            if groups[g]["algorithm"] == "dion":
                state |= _right_factors(name, X, state, before, groups[g])
            states[i] = state
    if not with_losses:
        return states, None
    return states, (
        f"state_dict holds what codes have lost of {len(with_losses)} parameters "
        f"({with_losses[0]} is the first), which reconcile={into.reconcile!r} has no use for: it "
        f"is dropped. Call synchronize(exact=True) before saving to keep it."
    )


def _check_complete(
    name: str, X: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], anchored: bool
) -> None:
    algorithm, needed = group["algorithm"], _needed(X, group)
    if anchored and not state.keys().isdisjoint(consensus.STATE_KEYS):
        needed |= {*consensus.STATE_KEYS}
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
        return {"momentum", "momentum_norm", *right_factor_shapes(X, group)}
    return {"step", *STATE_KEYS[group["algorithm"]]}


def _right_factors(
    name: str,
    X: Tensor,
    state: Mapping[str, Any],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> dict[str, Tensor]:
    """The right factors with the rank that the group has now."""
    wanted = right_factor_shapes(X, after)
    held = {key: state[key] for key in wanted}
    shapes = {key: tuple(Q.shape) for key, Q in held.items()}
    if shapes == wanted:
        return held
    forms = {**after, **{key: before[key] for key in ("rank_fraction", "rank_multiple_of")}}
    if shapes != right_factor_shapes(X, forms):
        raise ValueError(
            f"state_dict holds right factors of shapes {shapes} for {name}, but its "
            f"rank_fraction={before['rank_fraction']} and rank_multiple_of="
            f"{before['rank_multiple_of']} make {right_factor_shapes(X, forms)}: build the "
            f"optimizer with the stack_dims and row_blocks that it was saved with."
        )
    return resize_right_factors(X, held, forms, after)


# -------------------------------------------------------------------- replicas that were apart


def _check_together(record: Record, into: Loading) -> None:
    """Raise ValueError unless the saved weights are what all replicas agreed on."""
    known_apart = record.replica is not None
    perhaps_apart = not record.complete and into.replica.total > 1
    if record.progress.apart and (known_apart or perhaps_apart):
        raise ValueError(
            f"state_dict was saved while its replicas were apart ({_how_far(record.progress)}), "
            f"but reconcile='quantized' needs weights on which they agree to start from: call "
            f"optimizer.synchronize(exact=True) before saving, or load it with "
            f"reconcile='average' first."
        )


def _lost_steps(record: Record, here: Replica) -> str | None:
    """What is lost if another replica's state is loaded; None if nothing is."""
    if not record.differs:
        return None
    far = _how_far(record.progress)
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


def _how_far(progress: Progress) -> str:
    if not progress.apart:
        return f"{progress.steps_since_exact} steps after they were the same"
    parts = f", {progress.parts_apart} parts of the weights" if progress.parts_apart else ""
    return f"{progress.local_steps} local steps{parts}"


def _without_parts(saved: Progress) -> Progress:
    """Only reconcile="quantized" knows parts; others then have all of the weights to average."""
    local_steps = max(saved.local_steps, 1 if saved.parts_apart else 0)
    return replace(saved, local_steps=local_steps, part=0, parts_apart=0)
