"""Handing anchors, states and counters over to a replica that joins."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from curvadion.agreement.verify import settings_of
from curvadion.layout.dtensor import is_dtensor, local
from curvadion.optim.checkpoint import parse_record
from curvadion.optim.replica_optimizer import ReplicaOptimizer
from curvadion.optim.tail_average import AVERAGES, TailAverage
from curvadion.plan.parameter import Parameter
from curvadion.plan.state import ANCHOR, RESIDUAL
from curvadion.sync.in_flight import DUE, MEAN, SENT

# States that are not handed over: they belong to what this replica has sent or waits for.
OWN_STATES = (RESIDUAL, SENT, MEAN, DUE)
# Choices of an optimizer that must be equal on all members. Settings of the groups are handed
# over, but the states of one class of optimizers mean nothing to another.
SHARED_CHOICES = ("optimizer", "sync", "the format of the sync's messages", "local_step")


def shared_settings(optimizer: ReplicaOptimizer) -> dict[str, object]:
    """What must be equal on all members, besides their parameters."""
    choices = optimizer.choices
    shared_choices = {key: choices[key] for key in SHARED_CHOICES if key in choices}
    return {"number of parameter groups": len(optimizer.param_groups), **shared_choices}


def check_stateful(stateful: Mapping[str, Any]) -> None:
    """Raise TypeError for an argument of ``start()`` that nobody could copy to a newcomer."""
    for name, item in stateful.items():
        methods = (getattr(item, key, None) for key in ("state_dict", "load_state_dict"))
        if not all(map(callable, methods)):
            raise TypeError(
                f"start({name}={item!r}) takes a module, a scheduler or another object with "
                f"state_dict() and load_state_dict()."
            )


def checksum_of_anchors(optimizer: ReplicaOptimizer) -> int:
    """A checksum of this rank's anchors, or of its weights if they never drift."""
    chain = 0
    for p in optimizer._collective_plan().parameters:
        weights = _shared_weights(p).float().cpu()
        chain = zlib.crc32(weights.numpy().tobytes(), chain)
    return chain


@torch.no_grad()
def hand_over(optimizer: ReplicaOptimizer, /, **stateful: Any) -> dict[str, Any]:
    """Return the input of :func:`take_over`: this rank's shards, on the CPU.

    Args:
        optimizer: whose state is copied.
        stateful: what else is: modules, whose buffers are, and objects with ``state_dict``.

    Returns:
        What must be equal on both replicas under "settings"; by parameter "weights" (None if
        anchors are among the states) and "states", as :func:`_states_of` returns them; the
        settings of the "groups"; a checkpoint's "record"; by name "averages", of which each
        rank has its shards, and all other "stateful".
    """
    averages, others = _divided(stateful)
    parameters = optimizer._collective_plan().parameters
    return {
        "settings": _settings(optimizer, stateful),
        "weights": [None if ANCHOR in p.state else p.local.cpu() for p in parameters],
        "states": [_states_of(p) for p in parameters],
        "groups": [_settings_of(group) for group in optimizer.param_groups],
        "record": optimizer._record(),
        "averages": {name: _average_of(tail) for name, tail in averages.items()},
        "stateful": {name: _state_of(item) for name, item in others.items()},
    }


def bytes_of_states(handed_over: Mapping[str, Any]) -> int:
    """The size of the states' tensors in what :func:`hand_over` returned."""
    size = 0
    for states in handed_over["states"]:
        for value in states.values():
            if isinstance(value, tuple):
                tensor, _ = value
                size += tensor.nbytes
    return size


@torch.no_grad()
def take_over(
    optimizer: ReplicaOptimizer, handed_over: Mapping[str, Any], /, **stateful: Any
) -> list[str]:
    """Continue from another's state: its anchors become weights, residuals zero.

    Args:
        optimizer: that continues.
        handed_over: what :func:`hand_over` returned on the same rank of the other replica.
        stateful: the counterparts of what was passed there.

    Returns:
        Which settings of the groups have changed.
    """
    for key, setting in _settings(optimizer, stateful).items():
        their_setting = handed_over["settings"][key]
        if setting != their_setting:
            raise ValueError(
                f"This replica differs from the others: {key} is {setting!r}, not "
                f"{their_setting!r}. Build the same on every replica."
            )
    for name, state in handed_over["stateful"].items():
        item = stateful[name]
        if isinstance(item, nn.Module):
            for key, buffer in item.named_buffers():
                buffer.copy_(state[key])
        else:
            item.load_state_dict(state)
    for name, average in handed_over["averages"].items():
        _put_average(stateful[name], average)
    parameters = optimizer._collective_plan().parameters
    for p, states, weights in zip(
        parameters, handed_over["states"], handed_over["weights"], strict=True
    ):
        for key, value in states.items():
            _put(optimizer, p, key, value)
        p.local.copy_(_shared_weights(p) if weights is None else weights)
        local(p.state[RESIDUAL]).zero_()
    changes = []
    groups = zip(optimizer.param_groups, handed_over["groups"], strict=True)
    for position, (group, settings) in enumerate(groups):
        mine = _settings_of(group)
        for key, value in settings.items():
            if value != mine.get(key):
                name = f"param_groups[{position}][{key!r}]"
                changes.append(f"{name} is {value!r} instead of {mine.get(key)!r}")
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
    record = parse_record(handed_over["record"])
    optimizer.gate.load_state_dict(record.gate)
    optimizer.sync.load_state_dict(record.sync)
    optimizer.progress = record.progress
    optimizer.progress.local_steps = 0
    optimizer.sync.after_join(parameters, record.progress.steps)
    return changes


def _settings_of(group: Mapping[str, Any]) -> dict[str, object]:
    """The hyperparameters of a group, also those that are one-element tensors on a GPU."""
    values: dict[str, Any] = {}
    for key, value in group.items():
        is_number = isinstance(value, Tensor) and value.numel() == 1
        values[key] = value.item() if is_number else value
    return settings_of(values)


def _settings(optimizer: ReplicaOptimizer, stateful: Mapping[str, Any]) -> dict[str, object]:
    """What must be equal on who hands over and who takes over, by its name in errors."""
    shapes = [(p.name, tuple(p.local.shape)) for p in optimizer._collective_plan().parameters]
    averages, _ = _divided(stateful)
    return {
        "parameters": shapes,
        "list of arguments of start()": sorted(stateful),
        # Their blend is each replica's own choice: it is no part of the average.
        "start and decay of averages": {n: (t.start, t.decay) for n, t in averages.items()},
        **shared_settings(optimizer),
    }


def _shared_weights(p: Parameter) -> Tensor:
    """This rank's shard of the last synchronised weights."""
    return local(p.state[ANCHOR]) if ANCHOR in p.state else p.local


def _state_of(item: Any) -> Any:
    """The buffers of a module, or the ``state_dict()`` of anything else."""
    if isinstance(item, nn.Module):
        return {key: buffer.cpu() for key, buffer in item.named_buffers()}
    return item.state_dict()


def _divided(stateful: Mapping[str, Any]) -> tuple[dict[str, TailAverage], dict[str, Any]]:
    """Averages of weights, and everything else, by name."""
    averages = {name: item for name, item in stateful.items() if isinstance(item, TailAverage)}
    others = {name: item for name, item in stateful.items() if name not in averages}
    return averages, others


def _average_of(tail: TailAverage) -> dict[str, Any]:
    """The ``state_dict()`` of an average, with this rank's shards on the CPU."""
    state = tail.state_dict()
    return {**state, AVERAGES: {name: local(E).cpu() for name, E in state[AVERAGES].items()}}


def _put_average(tail: TailAverage, state: Mapping[str, Any]) -> None:
    """Let an average be what :func:`_average_of` has returned on the same rank of another."""
    averages = {}
    for name, shard in state[AVERAGES].items():
        averages[name] = torch.zeros_like(tail.parameters[name], dtype=shard.dtype)
        local(averages[name]).copy_(shard)
    tail.load_state_dict({**state, AVERAGES: averages})


def _states_of(p: Parameter) -> dict[str, Any]:
    """A parameter's states, by key: tensors as (this rank's shard on the CPU, device type).

    The device type tells a newcomer without this state where to put it.
    """
    states = {key: value for key, value in p.state.items() if key not in OWN_STATES}
    for key, value in states.items():
        if isinstance(value, Tensor):
            states[key] = local(value).cpu(), value.device.type
    return states


def _put(optimizer: ReplicaOptimizer, p: Parameter, key: str, value: Any) -> None:
    """Set a state of a parameter.

    Args:
        optimizer: of the parameter.
        p: the parameter.
        key: of the state.
        value: as :func:`_states_of` returns it.
    """
    if not isinstance(value, tuple):
        optimizer.inner.put_state(p, key, value)
        return
    shard, device_type = value
    present = p.state.get(key)
    if isinstance(present, Tensor) and local(present).shape == shard.shape:
        local(present).copy_(shard)
        return
    if is_dtensor(p.X) and shard.shape == p.local.shape:
        state = torch.zeros_like(p.X, dtype=shard.dtype)
        local(state).copy_(shard)
    else:
        on_device = p.local.device.type == device_type
        state = shard.clone().to(p.local.device if on_device else device_type)
    optimizer.inner.put_state(p, key, state)
