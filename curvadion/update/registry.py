"""The directions of matrices by name, and the states that parameters begin with."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from curvadion.layout.dtensor import made_like
from curvadion.layout.flat_shard import flat_shard_state
from curvadion.layout.sharded_states import zeros_per_matrix
from curvadion.plan.coded_states import CODED, coded_zeros
from curvadion.plan.parameter import Parameter, dtype_of
from curvadion.plan.state import MOMENTUM, MOMENTUM_NORM, R_SCALE, StateKey, key_of
from curvadion.update.dion2 import Dion2, NorDion2
from curvadion.update.direction import Direction
from curvadion.update.elementwise import STATE_KEYS, counter_device
from curvadion.update.normuon import NorMuon
from curvadion.update.polar import Polar
from curvadion.update.power_iteration import PowerIteration

DIRECTIONS: dict[str, Direction] = {}


def register(name: str, direction: Direction) -> None:
    """Let groups name a direction; it replaces one of the same name."""
    DIRECTIONS[name] = direction


register("low_rank", PowerIteration())
register("polar", Polar())
register("normuon", NorMuon())
register("dion2", Dion2())
register("nordion2", NorDion2())


def feeds_back(name: str) -> bool:
    """Whether error feedback follows the steps of a direction, given by its name."""
    return DIRECTIONS[name].feeds_back


def state_keys() -> tuple[StateKey, ...]:
    """The state keys of directions."""
    return tuple(key for direction in DIRECTIONS.values() for key in direction.state_keys)


def create_state(p: Parameter) -> None:
    """Create the state that a parameter needs before the first step.

    Raises:
        ValueError: if a direction creates a state that its ``state_keys`` do not name.
    """
    X = p.X
    group = p.group
    state: dict[str, Tensor] = {}
    if group["algorithm"] == "dion":
        direction = DIRECTIONS[p.direction]
        state |= direction.create_state(X, group)
        unnamed = [key for key in state if key_of(key, direction.state_keys) is None]
        if unnamed:
            raise ValueError(f"direction={p.direction!r}: name {unnamed} in its state_keys")
        if group["state_dtype"] == CODED:
            state[MOMENTUM] = coded_zeros(MOMENTUM, X, group)
        else:
            dtype = dtype_of(group["state_dtype"], X)
            state[MOMENTUM] = made_like(X, partial(torch.zeros_like, dtype=dtype))
        state[MOMENTUM_NORM] = zeros_per_matrix(X, group)
        state[R_SCALE] = zeros_per_matrix(X, group)
    else:
        for key in STATE_KEYS[group["algorithm"]]:
            if group["state_dtype"] == CODED:
                state[key] = coded_zeros(key, X, group)
            else:
                state[key] = made_like(X, torch.zeros_like)
        state["step"] = torch.zeros((), dtype=torch.float32, device=counter_device(X))
    p.states[X] = state | flat_shard_state(X)
