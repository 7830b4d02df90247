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
from curvadion.optim.outer import ReplicaOptimizer
from curvadion.plan.parameter import Parameter
from curvadion.plan.state import ANCHOR, RESIDUAL
from curvadion.sync.in_flight import DUE, MEAN, SENT

OWN = (RESIDUAL, SENT, MEAN, DUE)  # states that are not handed over
SHARED = ("sync", "the format of the sync's messages", "local_step")


def shared_settings(optimizer: ReplicaOptimizer) -> dict[str, object]:
    """What must be equal on all members, beside their parameters."""
    choices = optimizer._choices
    chosen = {key: choices[key] for key in SHARED if key in choices}
    return {"number of parameter groups": len(optimizer.param_groups), **chosen}


def checksum_of_anchors(optimizer: ReplicaOptimizer) -> int:
    """A checksum of the anchors, or of the weights if they never drift."""
    chain = 0
    for p in optimizer._present_plan().parameters:
        weights = _shared_weights(p).float().cpu()
        chain = zlib.crc32(weights.numpy().tobytes(), chain)
    return chain


@torch.no_grad()
def hand_over(optimizer: ReplicaOptimizer, /, **stateful: Any) -> dict[str, Any]:
    """The input of :func:`take_over`: this rank's shards, on the CPU."""
    parameters = optimizer._present_plan().parameters
    return {
        "settings": _described(optimizer, stateful),
        # Anchors are among the states.
        "weights": [None if ANCHOR in p.state else p.local.cpu() for p in parameters],
        "states": [_states_of(p) for p in parameters],
        "groups": [settings_of(group) for group in optimizer.param_groups],
        "record": optimizer._record(),
        "stateful": {name: _state_of(one) for name, one in stateful.items()},
    }


@torch.no_grad()
def take_over(optimizer: ReplicaOptimizer, given: Mapping[str, Any], /, **stateful: Any) -> None:
    """Continue from another's state: its anchors become weights, residuals zero."""
    for key, own in _described(optimizer, stateful).items():
        if own != (theirs := given["settings"][key]):
            raise ValueError(
                f"This replica differs from the others: {key} is {own!r}, not {theirs!r}. "
                f"Build the same model and optimizer on every replica."
            )
    for name, state in given["stateful"].items():
        one = stateful[name]
        if isinstance(one, nn.Module):
            for key, buffer in one.named_buffers():
                buffer.copy_(state[key])
        else:
            one.load_state_dict(state)
    parameters = optimizer._present_plan().parameters
    for p, states, weights in zip(parameters, given["states"], given["weights"], strict=True):
        for key, value in states.items():
            _put(optimizer, p, key, value)
        p.local.copy_(_shared_weights(p) if weights is None else weights)
        local(p.state[RESIDUAL]).zero_()
    for group, settings in zip(optimizer.param_groups, given["groups"], strict=True):
        for key, value in settings.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
    held = parse_record(given["record"])
    optimizer.gate.load_state_dict(held.gate)
    optimizer.sync.load_state_dict(held.sync)
    optimizer.progress = held.progress
    optimizer.progress.local_steps = 0
    optimizer.sync.after_join(parameters, held.progress.steps)


def _described(optimizer: ReplicaOptimizer, stateful: Mapping[str, Any]) -> dict[str, object]:
    shapes = [(p.name, tuple(p.local.shape)) for p in optimizer._present_plan().parameters]
    own = {"parameters": shapes, "list of arguments of start()": sorted(stateful)}
    return {**own, **shared_settings(optimizer)}


def _shared_weights(p: Parameter) -> Tensor:
    """This rank's shard of the last synchronised weights."""
    return local(p.state[ANCHOR]) if ANCHOR in p.state else p.local


def _state_of(one: Any) -> Any:
    if isinstance(one, nn.Module):
        return {key: buffer.cpu() for key, buffer in one.named_buffers()}
    return one.state_dict()


def _states_of(p: Parameter) -> dict[str, Any]:
    states = {key: value for key, value in p.state.items() if key not in OWN}
    for key, value in states.items():
        if isinstance(value, Tensor):
            # The device type tells a newcomer without this state where to put it.
            states[key] = local(value).cpu(), value.device.type
    return states


def _put(optimizer: ReplicaOptimizer, p: Parameter, key: str, value: Any) -> None:
    if isinstance(value, tuple):
        value, device = value
        held = p.state.get(key)
        if isinstance(held, Tensor) and local(held).shape == value.shape:
            local(held).copy_(value)
            return
        if is_dtensor(p.X) and value.shape == p.local.shape:
            made = torch.zeros_like(p.X, dtype=value.dtype)
            local(made).copy_(value)
            value = made
        else:
            same = p.local.device if p.local.device.type == device else device
            value = value.clone().to(same)
    optimizer._put_state(p, key, value)
