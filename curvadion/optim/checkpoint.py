"""What a checkpoint holds besides tensors, and whether a saved state fits."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake  # which has no values

from curvadion import checks, ops
from curvadion.comm.replicas import Replica
from curvadion.gates import Gate
from curvadion.layout.dtensor import local, placements_of
from curvadion.layout.flat_shard import FLAT_SHARD_START, flat_shard
from curvadion.layout.placements import global_shape
from curvadion.layout.sharded_states import squares_fit, zeros_per_matrix
from curvadion.optim import group_keys
from curvadion.plan.coded_states import CODED, KEYS, decoded, encoded
from curvadion.plan.parameter import names
from curvadion.plan.state import (
    ANCHOR,
    MOMENTUM,
    MOMENTUM_NORM,
    PROGRESS,
    R_SCALE,
    RESIDUAL,
    SECOND_MOMENT,
    SPECTRUM,
    SPECTRUM_WEIGHT,
    StateKey,
    is_right_factor,
    like_parameter,
)
from curvadion.sync.base import Sync
from curvadion.sync.in_flight import DUE
from curvadion.update.elementwise import STATE_KEYS
from curvadion.update.normuon import ROW_SECOND_MOMENT
from curvadion.update.registry import DIRECTIONS, state_keys

# Group keys from which the keys of a parameter's state follow, and the tensors' shapes.
OF_STATES = ("algorithm", "direction", "rank_fraction", "rank_multiple_of")
OF_MATRICES = ("stack_dims", "row_blocks", "column_blocks")
OF_SHAPES = (*OF_STATES, *OF_MATRICES)
# Group keys that keep the loading optimizer's values if the sync differs.
OF_SYNCS = ("right_factor", "look_ahead")


@dataclass
class Progress:
    """The progress of a run; only skips may differ between replicas."""

    steps: int = 0  # including skipped ones
    local_steps: int = 0  # since the replicas last synchronised
    consecutive_skips: int = 0  # for non-finite gradients
    steps_since_exact: int = 0  # since all state was last identical on all replicas
    # To other replicas, in all-reduces of all gradients; 0 if the sync does not say what it sends.
    sent: float = 0.0
    counted: int = 0  # steps of this run whose bytes are in ``sent``

    @property
    def shared(self) -> tuple[int, ...]:
        """The counters that are equal on all replicas."""
        return self.steps, self.local_steps, self.steps_since_exact


@dataclass(frozen=True)
class Record:
    """The contents of a checkpoint besides groups and tensors.

    Args:
        progress: of the run.
        gate: the gate's ``state_dict()``.
        sync: the sync's ``state_dict()``.
        gate_class: the name of the gate's class.
        sync_class: the name of the sync's class.
        sync_keys: names of the state keys that only this sync knows.
        fragments_drifted: number of fragments that have moved since they were last
            synchronised.
        replica: the one that saved; None if its state is that of all replicas.
    """

    progress: Progress
    gate: dict[str, Any]
    sync: dict[str, Any]
    gate_class: str
    sync_class: str
    sync_keys: list[str]
    fragments_drifted: int
    replica: Replica | None


def record(progress: Progress, gate: Gate, sync: Sync, replica: Replica | None) -> str:
    """A :class:`Record` as JSON, because checkpoint tools lose parts of dictionaries.

    Args:
        progress: of the run.
        gate: whose class and state are recorded.
        sync: the same.
        replica: the one that saves; None if its state is that of all replicas.
    """
    contents = Record(
        progress,
        gate=gate.state_dict(),
        sync=sync.state_dict(),
        gate_class=type(gate).__name__,
        sync_class=type(sync).__name__,
        sync_keys=[key.name for key in sync.state_keys],
        fragments_drifted=sync.fragments_drifted,
        replica=replica,
    )
    return json.dumps(asdict(contents), sort_keys=True)


def read_record(state_dict: Mapping[str, Any]) -> Record:
    """The record in a state_dict's groups; ValueError if there is none."""
    check_form(state_dict)
    groups = state_dict["param_groups"]
    if any(PROGRESS not in group for group in groups):
        raise ValueError(
            f"state_dict was not saved by an optimizer of curvadion: a group lacks "
            f"{PROGRESS!r}. Take over a state of torch's AdamW or Muon with "
            f"curvadion.load_torch_state(optimizer, state_dict); if the optimizer inside "
            f"Replicated saved it, load it into that one."
        )
    return parse_record(groups[0][PROGRESS])


def check_form(state_dict: Mapping[str, Any]) -> None:
    """Raise ValueError unless a state_dict has torch's packed form: groups, states by number."""
    groups = state_dict.get("param_groups")
    states = state_dict.get("state")
    if not isinstance(groups, list) or not groups:
        raise ValueError(f"state_dict['param_groups']={groups!r} must be a list of groups")
    if not isinstance(states, Mapping):
        raise ValueError(f"state_dict['state'] must be a dictionary, not {type(states).__name__}")
    numbers: list[object] = []
    for g, group in enumerate(groups):
        of_group = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(of_group, list):
            raise ValueError(f"state_dict['param_groups'][{g}] has no list of 'params': {group!r}")
        numbers += of_group
    try:
        distinct = len(set(numbers))
    except TypeError as error:
        raise ValueError(f"state_dict has 'params' that are no numbers: {error}") from error
    if distinct < len(numbers):
        raise ValueError(f"state_dict has the same parameter twice in 'params': {numbers}")
    for i, state in states.items():
        if i in numbers and not isinstance(state, Mapping):
            raise ValueError(f"state_dict['state'][{i!r}]={state!r} must be a dictionary")


def parse_record(text: str) -> Record:
    """The inverse of :func:`record`; ValueError that names the entry that is wrong."""
    try:
        fields = json.loads(text)
        _check_record(fields)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"state_dict's record {PROGRESS!r} is damaged: {error}") from error
    fields["progress"] = Progress(**fields["progress"])
    if fields["replica"] is not None:  # a list of its fields
        fields["replica"] = Replica(*fields["replica"])
    return Record(**fields)


def _check_record(fields: Any) -> None:
    """Raise TypeError or ValueError if the entries of a record are not of their types."""
    _check_keys("record", fields, Record)
    _check_keys("progress", fields["progress"], Progress)
    for key, value in fields["progress"].items():
        if key == "sent":
            checks.number("progress.sent", value)
        else:
            checks.integer(f"progress.{key}", value, 0, checks.LARGEST_COUNTER)
    checks.integer("fragments_drifted", fields["fragments_drifted"], 0, checks.LARGEST_COUNTER)
    for key in ("gate", "sync"):
        if not isinstance(fields[key], dict):
            raise TypeError(f"{key}={fields[key]!r} must be a dictionary")
        if not isinstance(fields[f"{key}_class"], str):
            raise TypeError(f"{key}_class={fields[f'{key}_class']!r} must be a name")
    names_of_keys = fields["sync_keys"]
    if not isinstance(names_of_keys, list) or not all(isinstance(n, str) for n in names_of_keys):
        raise TypeError(f"sync_keys={names_of_keys!r} must be a list of names")
    replica = fields["replica"]
    if replica is None:
        return
    if not isinstance(replica, list) or len(replica) != 2:
        raise TypeError(f"replica={replica!r} must be a pair of numbers")
    checks.integer("replica[1]", replica[1], 1, checks.LARGEST_COUNTER)
    checks.integer("replica[0]", replica[0], 0, replica[1] - 1)


def _check_keys(name: str, entries: Any, kind: type) -> None:
    """Raise unless a dictionary has exactly the fields of a dataclass.

    Args:
        name: of the dictionary.
        entries: what was saved in its place.
        kind: the dataclass.
    """
    if not isinstance(entries, dict):
        raise TypeError(f"{name}={entries!r} must be a dictionary")
    expected = {field.name for field in dataclasses.fields(kind)}
    if entries.keys() != expected:
        raise ValueError(f"{name} has the entries {sorted(entries)} instead of {sorted(expected)}")


def fitted(
    saved: Mapping[str, Any],
    record: Record,
    param_groups: Sequence[dict[str, Any]],
    sync: Sync,
) -> dict[str, Any]:
    """A saved state without that of another sync.

    Args:
        saved: the optimizer's ``state_dict()`` in torch's packed form, with states by number.
        record: its record.
        param_groups: of the optimizer that loads it.
        sync: of the same optimizer.

    Returns:
        ``saved``, without the entries that only another sync knows.

    Raises:
        ValueError: if it does not fit the optimizer.
    """
    check_groups(param_groups, saved["param_groups"])
    check_complete(param_groups, saved, record.progress.steps)
    kept_keys: tuple[str, ...] = ()  # of groups
    dropped_keys: set[str] = set()  # of states
    if record.sync_class != type(sync).__name__:
        kept_keys = OF_SYNCS
        dropped_keys = {*record.sync_keys, *(key.name for key in sync.state_keys)}
    groups = []
    states = dict(saved["state"])
    pairs = zip(param_groups, saved["param_groups"], strict=True)
    for g, (live_group, saved_group) in enumerate(pairs):
        groups.append({**saved_group, **{key: live_group[key] for key in kept_keys}})
        parameters = live_group["params"]
        parameter_names = names(live_group, g)
        for i, name, X in zip(saved_group["params"], parameter_names, parameters, strict=True):
            if i not in states:
                continue
            # torch's flattened form of a state has {} for missing entries.
            states[i] = {
                key: value
                for key, value in states[i].items()
                if key not in dropped_keys and value != {}
            }
            _check_flat_shard(name, X, states[i].get(FLAT_SHARD_START))
            check_state(name, X, saved_group, states[i], sync.state_keys)
            check_values(name, states[i])
    error = group_keys.first_error(groups)
    if error is not None:
        raise ValueError(
            f"state_dict holds an invalid value: {error}. Set it to a valid one before loading."
        )
    return {**saved, "param_groups": groups, "state": states}


def check_sync(saved: Mapping[str, Any], record: Record, sync: Sync) -> None:
    """Raise ValueError if drifted weights would become a new sync's anchors.

    Anchors are equal on all replicas.

    Args:
        saved: a ``state_dict()``.
        record: its record.
        sync: of the optimizer that loads it.
    """
    other_sync = record.sync_class != type(sync).__name__
    drifted = record.progress.local_steps > 0 or record.fragments_drifted > 0
    needs_anchors = any(key.name == ANCHOR for key in sync.state_keys)
    if saved["state"] and other_sync and needs_anchors and drifted and record.replica is not None:
        raise ValueError(
            f"state_dict was saved by replicas that had drifted, but sync={sync!r} needs "
            f"equal weights: call synchronize(exact=True) before saving."
        )


def warn_of_others(saved: Mapping[str, Any], record: Record, sync: Sync, replica: Replica) -> None:
    """Warn if another sync or replica saved what has been loaded.

    Args:
        saved: a ``state_dict()``.
        record: its record.
        sync: of the optimizer that has loaded it.
        replica: the one of this rank.
    """
    if saved["state"] and record.sync_class != type(sync).__name__:
        warnings.warn(
            f"state_dict was saved with another sync ({record.sync_class}): the state of "
            f"sync={sync!r} starts fresh.",
            stacklevel=checks.user_stacklevel(),
        )
    saved_by = record.replica
    if saved_by is not None and saved_by != replica:
        warnings.warn(
            f"state_dict was saved by replica {saved_by.number} of {saved_by.total} while "
            f"states differed, and is loaded by replica {replica.number} of {replica.total}: "
            f"call synchronize(exact=True) before saving, or let each replica load its own.",
            stacklevel=checks.user_stacklevel(),
        )


def warn_of_state_dtypes(
    live_groups: Sequence[dict[str, Any]], saved_groups: Sequence[dict[str, Any]]
) -> None:
    """Warn if loading changes a state_dtype, and with it the memory of states.

    Args:
        live_groups: of the optimizer, which has not loaded the state yet.
        saved_groups: of the state, with the same keys.
    """
    for g, (live, saved) in enumerate(zip(live_groups, saved_groups, strict=True)):
        was = live["state_dtype"]
        becomes = saved["state_dtype"]
        if was != becomes:
            warnings.warn(
                f"state_dtype={was!r} of param group {g} becomes {becomes!r}, as in the loaded "
                f"state_dict. To keep {was!r}, set it in optimizer.param_groups now, and call "
                f"optimizer.load_state_dict(optimizer.state_dict()).",
                stacklevel=checks.user_stacklevel(),
            )
            return


def check_groups(
    live_groups: Sequence[dict[str, Any]], saved_groups: Sequence[dict[str, Any]]
) -> None:
    """Raise ValueError if saved groups do not match the optimizer's."""
    remedy = "Build the optimizer as in the run that saved it."
    if len(live_groups) != len(saved_groups):
        raise ValueError(
            f"state_dict has a different number of parameter groups, {len(saved_groups)} "
            f"instead of {len(live_groups)}. {remedy}"
        )
    for g, (live, saved) in enumerate(zip(live_groups, saved_groups, strict=True)):
        count = len(saved["params"])
        if count != len(live["params"]):
            raise ValueError(
                f"state_dict has {count} parameters instead of {len(live['params'])} in param "
                f"group {g}. {remedy}"
            )
        name_count = len(saved.get("param_names", saved["params"]))
        if name_count != count:
            raise ValueError(
                f"state_dict has {name_count} param_names for {count} parameters in param "
                f"group {g}. {remedy}"
            )
        for key in _keys_that_shape(live):
            if _as_list(live.get(key)) != _as_list(saved.get(key)):
                raise ValueError(
                    f"state_dict has {key}={saved.get(key)!r} in param group {g}, but this "
                    f"optimizer has {live.get(key)!r}. {remedy}"
                )


def _keys_that_shape(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Those of :data:`OF_SHAPES` that have an effect in a group."""
    if group.get("algorithm") != "dion":
        return ("algorithm",)
    if group.get("direction") != "low_rank":
        return ("algorithm", "direction", *OF_MATRICES)
    return OF_SHAPES


def _as_list(value: Any) -> Any:
    """Sizes of blocks, which checkpoint tools turn from a tuple into a list."""
    return list(value) if isinstance(value, tuple) else value


def check_complete(
    param_groups: Sequence[dict[str, Any]], saved: Mapping[str, Any], steps: int
) -> None:
    """Raise ValueError if a run of several steps has saved no state at all."""
    # torch.distributed.checkpoint saves and loads no state while there are gradients.
    trained = any(X.requires_grad for group in param_groups for X in group["params"])
    if steps and trained and not saved["state"]:
        raise ValueError(
            f"state_dict holds no state of any parameter after {steps} steps: call "
            f"optimizer.zero_grad() before torch's get_state_dict."
        )


def _check_flat_shard(name: str, X: Tensor, start: Tensor | None) -> None:
    """Raise ValueError if a state is of another flat shard than its parameter.

    Args:
        name: of the parameter.
        X: the parameter.
        start: the first element of the state's shard, an integer scalar; None if it is of no
            flat shard.
    """
    shard = flat_shard(X)
    live_start = None if shard is None else shard.start
    saved_start = None if start is None else int(start)
    if saved_start != live_start:
        raise ValueError(
            f"state_dict holds the flat shard from element {saved_start} of {name}, this "
            f"rank that from {live_start} (None: no flat shard): use torch.save and torch.load "
            f"on each rank, in the same layout."
        )


def check_state(
    name: str,
    X: Tensor,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    of_sync: Sequence[StateKey] = (),
) -> None:
    """Raise ValueError if keys, shapes or placements of a state do not fit its group.

    Args:
        name: of the parameter.
        X: the parameter.
        group: its group.
        state: its state.
        of_sync: the sync's state keys.
    """
    misfit = _misfit(X, group, state, of_sync)
    if misfit is not None:
        settings = ", ".join(f"{key}={group.get(key)!r}" for key in OF_SHAPES)
        raise ValueError(
            f"The state of {name} of shape {global_shape(X)} has {misfit}: it is incomplete, "
            f"another model's, or of other settings than {settings}. For another layout use "
            f"torch.distributed.checkpoint (for full states with "
            f"StateDictOptions(full_state_dict=True))."
        )


STATE_DTYPES = (torch.float64, torch.float32, torch.bfloat16)
# No number that trains is as large, not even a sum of squares.
LARGEST = 2.0**100
# Entries that are numbers of the host.
NUMBERS = (SPECTRUM_WEIGHT, DUE)
# Entries that are sums of squares, norms or counters.
NOT_NEGATIVE = (SECOND_MOMENT, ROW_SECOND_MOMENT, MOMENTUM_NORM, R_SCALE, SPECTRUM_WEIGHT, "step")


def check_values(name: str, state: Mapping[str, Any]) -> None:
    """Raise ValueError for an entry that would make weights NaN, or fail in a later step.

    Args:
        name: of the parameter.
        state: that was saved.
    """
    for key, value in state.items():
        damage = _damage(key, value)
        if damage is not None:
            raise ValueError(
                f"state_dict holds a {key!r} of {name} that {damage}: it is damaged, or another "
                f"optimizer's. Load an earlier checkpoint."
            )


def _damage(key: str, value: Any) -> str | None:
    """What is wrong with an entry of a state, after "that"; None if nothing is."""
    if isinstance(value, Tensor):
        shard = local(value)
        plain = shard.layout == torch.strided and shard.device.type != "meta"
        if not plain or shard.is_complex() or shard.dtype == torch.bool:
            return f"is a {shard.layout} tensor of {shard.dtype} on {shard.device}"
        strides = zip(shard.shape, shard.stride(), strict=True)
        if any(size > 1 and stride == 0 for size, stride in strides):
            return "has several elements at one place in memory"
        if not shard.is_floating_point() or not shard.numel() or is_fake(shard):
            return None
        # A comparison with NaN is false.
        if not bool(shard.abs().max() < LARGEST):
            return f"has an element that is not finite, or not below {LARGEST:.0e}"
        if key in NOT_NEGATIVE and bool((shard < 0).any()):
            return "is negative"
    elif key in NUMBERS:
        try:
            checks.number(key, value)
        except (TypeError, ValueError) as error:
            return f"is no number ({error})"
    return None


def _misfit(
    X: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], of_sync: Sequence[StateKey]
) -> str | None:
    """What is wrong with a state, after "it has"; None if it fits.

    Args:
        X: the parameter.
        group: its group.
        state: its state.
        of_sync: the sync's state keys.
    """
    shapes = _shapes(X, group, state, of_sync)
    like_X = like_parameter((*of_sync, *state_keys()))
    for key, shape in shapes.items():
        tensor = state.get(key)
        if not isinstance(tensor, Tensor):
            return f"no tensor {key!r} (but {sorted(state)})"
        if local(tensor).dtype not in STATE_DTYPES:
            return f"a {key!r} of {tensor.dtype}"
        if tuple(tensor.shape) != shape:
            return f"a {key!r} of shape {tuple(tensor.shape)} instead of {shape}"
        if key in like_X and placements_of(tensor) != placements_of(X):
            return f"a {key!r} with other placements, {placements_of(tensor)}"
    # Further right factors are of another layout or of other row blocks.
    for key in state:
        if is_right_factor(key) and key not in shapes:
            return f"a {key!r}"
    if SPECTRUM in state:
        if SPECTRUM_WEIGHT not in state:
            return f"no {SPECTRUM_WEIGHT!r}"
        squares = state[SPECTRUM]
        if not isinstance(squares, Tensor) or not squares_fit(X, group, squares):
            return f"a {SPECTRUM!r} of another layout"
    transient = [key.name for key in of_sync if key.transient]
    missing = [key for key in transient if key not in state]
    if transient and 0 < len(missing) < len(transient):
        return f"no {missing[0]!r} beside {sorted(set(transient) - set(missing))}"
    return None


def _shapes(
    X: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], of_sync: Sequence[StateKey]
) -> dict[str, tuple[int, ...]]:
    """Global shapes of the tensors that a state must hold, by key.

    Args:
        X: the parameter.
        group: its group.
        state: its state, which says whether it has tensors of the sync.
        of_sync: the sync's state keys.
    """
    shape = tuple(X.shape)
    shapes: dict[str, tuple[int, ...]]
    if group["algorithm"] == "dion":
        per_matrix = tuple(zeros_per_matrix(X, group).shape)
        shapes = {MOMENTUM: shape, MOMENTUM_NORM: per_matrix, R_SCALE: per_matrix}
        shapes |= DIRECTIONS[group["direction"]].state_shapes(X, group)
    elif group["algorithm"] == "inner":
        shapes = {}  # what it keeps is its own affair
    else:
        shapes = {"step": (), **dict.fromkeys(STATE_KEYS[group["algorithm"]], shape)}
    # A state has all of a sync's tensors of a parameter, or none.
    like_X = [key for key in of_sync if key.like_parameter]
    if any(key.name in state for key in like_X):
        for key in like_X:
            if not key.transient or key.name in state:
                shapes[key.name] = shape
    return shapes


def restore_dtypes(
    param_groups: Sequence[dict[str, Any]],
    states: Mapping[Tensor, dict[str, Any]],
    saved: Mapping[str, Any],
    is_restored: Callable[[Mapping[str, Any], str, Tensor], bool],
) -> None:
    """Undo casts of states by ``torch.optim.Optimizer.load_state_dict`` to the parameter's dtype.

    Args:
        param_groups: of the optimizer that has loaded ``saved``.
        states: its states, by parameter; changed in place.
        saved: the state_dict in torch's packed form.
        is_restored: whether a tensor gets its saved dtype back, from its group, key and value.
    """
    for group, saved_group in zip(param_groups, saved["param_groups"], strict=True):
        for i, X in zip(saved_group["params"], group["params"], strict=True):
            for key, value in saved["state"].get(i, {}).items():
                loaded = states[X].get(key)
                if not isinstance(value, Tensor) or not isinstance(loaded, Tensor):
                    continue
                if value.dtype != loaded.dtype and is_restored(group, key, value):
                    states[X][key] = value.detach().clone().to(loaded.device)


def encode_states(
    param_groups: Sequence[dict[str, Any]],
    states: Mapping[Tensor, dict[str, Any]],
    saved: Mapping[str, Any],
) -> None:
    """Encode what :func:`decode_states` has decoded, in the groups with states in 8 bits.

    Args:
        param_groups: of the optimizer that has loaded ``saved``.
        states: its states, by parameter; changed in place.
        saved: the state_dict in torch's packed form.
    """
    for group, saved_group in zip(param_groups, saved["param_groups"], strict=True):
        if group["state_dtype"] != CODED:
            continue
        for i, X in zip(saved_group["params"], group["params"], strict=True):
            state = saved["state"].get(i, {})
            for key in KEYS:
                if key in state:
                    # torch has cast what it has loaded.
                    states[X][key] = encoded(key, X, state[key], group)


def decode_states(
    planned_groups: Sequence[dict[str, Any]],
    packed: dict[str, Any],
    of_sync: Sequence[StateKey],
) -> None:
    """Replace codes in a state_dict by tensors like their parameters.

    Args:
        planned_groups: of the optimizer.
        packed: its state in torch's packed form, whose dictionaries are those of the states;
            changed in place, but not these.
        of_sync: the sync's state keys.
    """
    keys_of_sync = [key.name for key in of_sync if key.name == RESIDUAL]
    for group, packed_group in zip(planned_groups, packed["param_groups"], strict=True):
        # Other optimizers keep tensors of 8 bits in forms of their own.
        own_keys = () if group["algorithm"] == "inner" else KEYS
        keys = (*own_keys, *keys_of_sync)
        for i, X in zip(packed_group["params"], group["params"], strict=True):
            state = packed["state"].get(i, {})
            whole = {
                key: decoded(key, X, state[key], group)
                for key in keys
                if ops.is_coded(state.get(key))
            }
            if whole:
                packed["state"][i] = {**state, **whole}
