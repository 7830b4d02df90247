"""Does a saved state fit the optimizer, and what torch changes when it loads one."""

from __future__ import annotations

import functools
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from curvadion import checks
from curvadion.layout.dtensor import local
from curvadion.layout.flat_shard import FLAT_SHARD_START, flat_shard
from curvadion.layout.lazy import is_dtensor
from curvadion.layout.matrices import zeros_per_matrix
from curvadion.layout.parameters import global_shape
from curvadion.layout.squares import squares_fit
from curvadion.sync.base import Sync
from curvadion.update import hyperparameters as check
from curvadion.update.parameter import check_parameter, names
from curvadion.update.state import (
    MOMENTUM_NORM,
    R_SCALE,
    SPECTRUM,
    SPECTRUM_WEIGHT,
    is_right_factor,
    key_of,
    like_parameter,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader


def check_fits(optimizer: Optimizer, sync: Sync, saved: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the group or parameter, if a state_dict is another optimizer's."""
    here, there = optimizer.param_groups, saved["param_groups"]
    if len(here) != len(there):
        raise ValueError(
            f"state_dict has a different number of parameter groups: {len(there)} instead of "
            f"{len(here)}. Make the optimizer as it was made when it was saved: from the same "
            f"model with param_groups(model), or attach(trainer, ...), and the same arguments."
        )
    for g, (live, held) in enumerate(zip(here, there, strict=True)):
        if not isinstance(held.get("params"), list) or len(held["params"]) != len(live["params"]):
            raise ValueError(
                f"state_dict has {held.get('params')!r} in param group {g}, which does not match "
                f"the size of optimizer's group: {len(live['params'])} parameters."
            )
        named = held.get("param_names")
        right = isinstance(named, list) and all(isinstance(name, str) for name in named)
        if named is not None and not (right and len(named) == len(live["params"])):
            raise ValueError(
                f"state_dict has param_names={named!r} in param group {g}, which must be one name "
                f"for each of its {len(live['params'])} parameters: load another checkpoint."
            )
        if live["algorithm"] != held["algorithm"]:
            raise ValueError(
                f"state_dict has algorithm={held['algorithm']!r} in param group {g}, which has "
                f"{live['algorithm']!r} here: give the groups in the order in which they were "
                f"saved."
            )
    if wrong := check.settings(there):
        raise ValueError(f"state_dict holds an impossible value: {wrong}")
    of_sync = {SPECTRUM, *like_parameter(sync.state_keys)}
    for name, X, group, state in _states(optimizer, saved):
        check_parameter(X, name, group)
        for key, value in state.items():
            _check_value(name, key, value, of_sync)
        _check_per_matrix(name, X, group, state)
        for key in like_parameter(sync.state_keys):
            if isinstance(tensor := state.get(key), Tensor):
                _check_shard(name, X, key, tensor)
        _check_flat_shard(name, X, state.get(FLAT_SHARD_START))
        if isinstance(tensor := state.get(SPECTRUM), Tensor):
            _check_spectrum(name, X, group, tensor)


def check_complete(optimizer: Optimizer, saved: Mapping[str, Any], steps: int) -> None:
    """Raise ValueError if a run of some steps left no state: torch saves and loads none silently.

    torch.distributed.checkpoint makes an optimizer create its state only while no parameter has a
    gradient.
    """
    trained = any(X.requires_grad for group in optimizer.param_groups for X in group["params"])
    if steps and trained and not saved["state"]:
        raise ValueError(
            f"state_dict holds no state of any parameter, although it was saved after {steps} "
            f"steps. If it comes from torch.distributed.checkpoint, call optimizer.zero_grad() "
            f"before get_state_dict: a new optimizer has no state to load while there are "
            f"gradients."
        )


def restore_dtypes(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Give loaded state the dtypes it was saved with: torch casts it to the parameter's.

    Moments of AdamW stay cast: its kernels take them in the parameter's dtype, or float32 for
    float16.
    """
    for _, X, group, state in _states(optimizer, saved):
        loaded = optimizer.state[X]
        cast = group["algorithm"] == "adamw" and X.dtype != torch.float16
        for key, value in state.items():
            if cast and key in ("exp_avg", "exp_avg_sq"):
                continue
            if isinstance(value, Tensor) and value.dtype != loaded[key].dtype:
                loaded[key] = value.detach().clone().to(loaded[key].device)


def fit_to_checkpoint(
    state: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    storage_reader: StorageReader | None = None,
) -> None:
    """Prepare ``state`` to load a checkpoint that was saved under other arguments. In place.

    ``torch.distributed.checkpoint.load`` reads into tensors of the sizes that were saved, and
    demands every key. Another gate, sync kind, direction or rank asks for other ones: right factors
    get the saved number of columns here, and what was not saved of them, of anchors and of the keys
    of groups is left out.
    ``load_state_dict`` then converts what was read. A checkpoint of the same arguments needs
    nothing of this, and is left as it is::

        weights, held = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": held}
        fit_to_checkpoint(state, checkpoint_id=path)
        torch.distributed.checkpoint.load(state, checkpoint_id=path)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    Args:
        state: as it is given to ``load``, with what get_optimizer_state_dict returned in it.
        checkpoint_id: as it is given to ``load``.
        storage_reader: as it is given to ``load``.

    Raises:
        ValueError: if neither of the two is given.
    """
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if storage_reader is None:
        if checkpoint_id is None:
            raise ValueError("checkpoint_id=None and storage_reader=None: pass one of them.")
        storage_reader = FileSystemReader(checkpoint_id)
    saved = storage_reader.read_metadata().state_dict_metadata
    dispensable = _keys_of_syncs(Sync)
    _, paths = flatten_state_dict(state)
    for key, path in paths.items():
        parent = _at(state, path[:-1])
        # A flattened optimizer state has keys like "state.linear.weight.Q".
        name, target = str(path[-1]).rpartition(".")[2], parent[path[-1]]
        if key not in saved:
            if name in dispensable or is_right_factor(name) or "param_groups" in path:
                del parent[path[-1]]
            continue
        form = saved[key]
        if is_right_factor(name) and isinstance(form, TensorStorageMetadata):
            parent[path[-1]] = _with_columns(target, form.size[-1])


def _keys_of_syncs(kind: Any) -> set[str]:
    """The state keys of a sync kind and all kinds that build on it, a user's included."""
    own = {key.name for key in kind.state_keys}
    return own.union(*(_keys_of_syncs(one) for one in kind.__subclasses__()))


def _at(state: dict[str, Any], path: Sequence[Any]) -> Any:
    return functools.reduce(lambda held, step: held[step], path, cast(Any, state))


def _with_columns(Q: Tensor, columns: int) -> Tensor:
    """A tensor like Q, sharded as it is, with so many columns, which are never sharded."""
    if Q.shape[-1] == columns:
        return Q
    shard = local(Q)
    resized = shard.new_zeros(*shard.shape[:-1], columns)
    if not is_dtensor(Q):
        return resized
    shape = torch.Size((*Q.shape[:-1], columns))
    stride = torch.empty(shape, device="meta").stride()
    whole: Tensor = Q.from_local(
        resized, Q.device_mesh, Q.placements, run_check=False, shape=shape, stride=stride
    )
    return whole


def _states(
    optimizer: Optimizer, saved: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor, Mapping[str, Any], Mapping[str, Any]]]:
    """Name, parameter, group to be and saved state of every parameter that has one."""
    for g, (live, held) in enumerate(
        zip(optimizer.param_groups, saved["param_groups"], strict=True)
    ):
        group = {**live, **held}
        for i, name, X in zip(held["params"], names(live, g), live["params"], strict=True):
            if i in saved["state"]:
                yield name, X, group, saved["state"][i]


def _check_value(name: str, key: str, value: object, of_sync: Container[str]) -> None:
    """Raise unless a value of a known key is a tensor that steps can go on from.

    of_sync: the keys of the sync kind's tensors.
    """
    if isinstance(value, dict) and not value:  # torch's flattened form puts {} for nothing
        return
    if key == SPECTRUM_WEIGHT:
        checks.number(f"state_dict: {key} of {name}", value)
    if key_of(key) is None and key not in of_sync:
        return
    if not isinstance(value, Tensor):
        raise TypeError(f"state_dict holds {key}={value!r} for {name}: it must be a tensor")
    held = local(value)
    if key != FLAT_SHARD_START and not value.is_floating_point():
        problem = f"of dtype {value.dtype}"
    elif key == "step" and value.numel() != 1:
        problem = f"of shape {tuple(value.shape)} (it is one number)"
    elif key in ("step", "exp_avg_sq") and bool((held < 0).any()):
        problem = "with a negative element"
    elif not bool(held.isfinite().all()):
        problem = "with a NaN or an Inf"
    else:
        return
    raise ValueError(f"state_dict holds a {key!r} {problem} for {name}: load another checkpoint.")


def _check_shard(name: str, X: Tensor, key: str, tensor: Tensor) -> None:
    if tensor.shape != X.shape:
        raise ValueError(
            f"state_dict holds a {key!r} of shape {tuple(tensor.shape)} for {name}, which has "
            f"shape {tuple(X.shape)} here: build the optimizer over the parameters it was saved "
            f"with, in their order."
        )
    if _placements(tensor) != _placements(X):
        raise ValueError(
            f"state_dict holds a {key!r} with the placements {_placements(tensor)} for {name}, "
            f"which has {_placements(X)} here: a state moves between layouts through "
            f"torch.distributed.checkpoint.state_dict.set_optimizer_state_dict (a full one with "
            f"StateDictOptions(full_state_dict=True))."
        )


def _check_per_matrix(
    name: str, X: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]
) -> None:
    """Raise ValueError unless there is one norm and one scale a matrix."""
    if group["algorithm"] != "dion":
        return
    shape = tuple(zeros_per_matrix(X, group).shape)
    for key in (MOMENTUM_NORM, R_SCALE):
        if isinstance(held := state.get(key), Tensor) and tuple(held.shape) != shape:
            raise ValueError(
                f"state_dict holds a {key!r} of shape {tuple(held.shape)} for {name}, which "
                f"has {shape} here: build the optimizer with the stack_dims and row_blocks that it "
                f"was saved with."
            )


def _check_spectrum(name: str, X: Tensor, group: Mapping[str, Any], spectrum: Tensor) -> None:
    if group["algorithm"] != "dion" or squares_fit(X, group, spectrum):
        return
    raise ValueError(
        f"state_dict holds a {SPECTRUM!r} of shape {tuple(spectrum.shape)} with the placements "
        f"{_placements(spectrum)} for {name}, which does not fit here: load the state in the "
        f"layout in which it was saved, or through "
        f"torch.distributed.checkpoint.state_dict.set_optimizer_state_dict. Without its keys "
        f"{SPECTRUM!r} and {SPECTRUM_WEIGHT!r} it loads too, and they begin anew."
    )


def _check_flat_shard(name: str, X: Tensor, start: Tensor | None) -> None:
    declared = flat_shard(X)
    held = None if start is None else int(start)
    here = None if declared is None else declared.start
    if held != here:
        raise ValueError(
            f"state_dict holds the flat shard from element {held} of {name} of shape "
            f"{global_shape(X)}, but this rank has the one from element {here} (None: no flat "
            f"shard). Flat shards move to no other rank and no other layout, nor through "
            f"torch.distributed.checkpoint: let each rank torch.save and load its own "
            f"optimizer.state_dict()."
        )


def _placements(tensor: Tensor) -> tuple[object, ...] | None:
    """None for a tensor that is no DTensor."""
    return tuple(tensor.placements) if is_dtensor(tensor) else None
