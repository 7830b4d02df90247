"""Does a saved state fit the optimizer, and what torch changes when it loads one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from curvadion import consensus
from curvadion.plan import names
from curvadion.sharding import FLAT_SHARD_START, flat_shard, global_shape

# State tensors that have the parameter's shape.
_LIKE_THE_PARAMETER = ("momentum", "exp_avg", "exp_avg_sq", *consensus.STATE_KEYS)

# Keys of groups that older versions did not save.
_NEW_KEYS = ("input_first",)


def with_new_keys(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """A state_dict whose groups have the keys that came later, with the optimizer's own values."""
    groups = [
        {key: live[key] for key in _NEW_KEYS} | held
        for live, held in zip(optimizer.param_groups, saved["param_groups"], strict=False)
    ]
    return {**saved, "param_groups": groups + saved["param_groups"][len(groups) :]}


def check_fits(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the group or parameter, if a state_dict is another optimizer's.

    Numbers of groups and of their parameters are left to torch.
    """
    here, there = optimizer.param_groups, saved["param_groups"]
    if [len(group["params"]) for group in here] != [len(group["params"]) for group in there]:
        return
    for g, (live, held) in enumerate(zip(here, there, strict=True)):
        if missing := sorted(optimizer.defaults.keys() - held.keys()):
            raise ValueError(
                f"state_dict lacks {missing} in param group {g}: another version of this optimizer "
                f"saved it. Give its groups these keys to continue with it."
            )
        if live["algorithm"] != held["algorithm"]:
            raise ValueError(
                f"state_dict has algorithm={held['algorithm']!r} in param group {g}, which has "
                f"{live['algorithm']!r} here: give the groups in the order in which they were "
                f"saved."
            )
    for name, X, state in _states(optimizer, saved):
        for key in _LIKE_THE_PARAMETER:
            if isinstance(tensor := state.get(key), Tensor):
                _check_piece(name, X, key, tensor)
        _check_flat_shard(name, X, state.get(FLAT_SHARD_START))


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
    """Give loaded state the dtypes it was saved with: torch casts it to the parameter's."""
    for _, X, state in _states(optimizer, saved):
        loaded = optimizer.state[X]
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dtype != loaded[key].dtype:
                loaded[key] = value.detach().clone().to(loaded[key].device)


def _states(
    optimizer: Optimizer, saved: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor, Mapping[str, Any]]]:
    """Name, parameter and saved state of every parameter that has one."""
    order = [i for group in saved["param_groups"] for i in group["params"]]
    live = [
        named
        for g, group in enumerate(optimizer.param_groups)
        for named in zip(names(group, g), group["params"], strict=True)
    ]
    for i, (name, X) in zip(order, live, strict=True):
        if i in saved["state"]:
            yield name, X, saved["state"][i]


def _check_piece(name: str, X: Tensor, key: str, tensor: Tensor) -> None:
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
    return tuple(tensor.placements) if isinstance(tensor, DTensor) else None
