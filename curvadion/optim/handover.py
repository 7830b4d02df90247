"""Handing anchors, states and counters over to a replica that joins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from curvadion.layout.dtensor import is_dtensor, local
from curvadion.optim.outer import ReplicaOptimizer
from curvadion.optim.record import load_memory, parse_record
from curvadion.sync.under_way import DUE, MEAN, SENT
from curvadion.sync.verify import settings_of
from curvadion.update.parameter import Parameter
from curvadion.update.state import ANCHOR, RESIDUAL

OWN = (RESIDUAL, SENT, MEAN, DUE)  # states that are not handed over


SHARED = ("sync", "the format of the sync's messages", "local_step")


def shared_settings(optimizer: ReplicaOptimizer) -> dict[str, object]:
    """What must be equal on all members, beside their parameters."""
    choices = optimizer._choices
    chosen = {key: choices[key] for key in SHARED if key in choices}
    return {"number of parameter groups": len(optimizer.param_groups), **chosen}


def _described(optimizer: ReplicaOptimizer) -> dict[str, object]:
    shapes = [(p.name, tuple(p.local.shape)) for p in optimizer._present_plan().parameters]
    return {"parameters": shapes, **shared_settings(optimizer)}


@torch.no_grad()
def hand_over(optimizer: ReplicaOptimizer) -> dict[str, Any]:
    """The input of :func:`take_over`: this rank's shards, on the CPU; CPU tensors are shared."""
    states = [
        {
            # The device type tells a newcomer without this state where to put it.
            key: (local(value).cpu(), value.device.type) if isinstance(value, Tensor) else value
            for key, value in p.state.items()
            if key not in OWN
        }
        for p in optimizer._present_plan().parameters
    ]
    groups = [settings_of(group) for group in optimizer.param_groups]
    parameters = optimizer._present_plan().parameters
    return {
        "settings": _described(optimizer),
        # Anchors are among the states.
        "weights": [None if ANCHOR in p.state else p.local.cpu() for p in parameters],
        "states": states,
        "groups": groups,
        "record": optimizer._record(),
    }


def shared_weights(p: Parameter) -> Tensor:
    """This rank's shard of the last synchronised weights: the anchor, else the weights."""
    return local(p.state[ANCHOR]) if ANCHOR in p.state else p.local


@torch.no_grad()
def take_over(optimizer: ReplicaOptimizer, given: Mapping[str, Any]) -> None:
    """Continue from another replica's state: its anchors become weights, residuals are zero."""
    parameters = optimizer._present_plan().parameters
    for key, own in _described(optimizer).items():
        if own != (theirs := given["settings"][key]):
            raise ValueError(
                f"This replica differs from the others: its {key} is {own!r}, theirs is "
                f"{theirs!r}. Build the same model and optimizer on every replica."
            )
    given_each = zip(parameters, given["states"], given["weights"], strict=True)
    for p, state, weights in given_each:
        for key, value in state.items():
            _put(optimizer, p, key, value)
        p.local.copy_(shared_weights(p) if weights is None else weights)
        local(p.state[RESIDUAL]).zero_()
    for group, settings in zip(optimizer.param_groups, given["groups"], strict=True):
        for key, value in settings.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
    held = parse_record(given["record"])
    load_memory("gate", optimizer.gate, held.gate)
    load_memory("sync", optimizer.sync, held.sync)
    optimizer.progress = held.progress
    optimizer.progress.local_steps = 0
    optimizer.sync.after_join(parameters, held.progress.steps)


def _put(optimizer: ReplicaOptimizer, p: Parameter, key: str, value: Any) -> None:
    held = p.state.get(key)
    if not isinstance(value, tuple):
        optimizer._put_state(p, key, value)
        return
    value, device = value
    if isinstance(held, Tensor) and local(held).shape == value.shape:
        local(held).copy_(value)
    elif is_dtensor(p.X) and value.shape == p.local.shape:
        made = torch.zeros_like(p.X, dtype=value.dtype)
        local(made).copy_(value)
        optimizer._put_state(p, key, made)
    else:
        same = p.local.device if p.local.device.type == device else device
        optimizer._put_state(p, key, value.clone().to(same))
