"""The directions, by their names in a group's ``direction``."""

from __future__ import annotations

import torch

from curvadion.layout.flat_shard import flat_shard_state
from curvadion.layout.states import zeros_per_matrix
from curvadion.update import scalar
from curvadion.update.dion2 import Dion2, NorDion2
from curvadion.update.direction import Direction
from curvadion.update.low_rank import PowerIteration
from curvadion.update.normuon import NorMuon
from curvadion.update.parameter import Parameter, dtype_of
from curvadion.update.polar import Polar
from curvadion.update.state import MOMENTUM, MOMENTUM_NORM, R_SCALE, StateKey, key_of

DIRECTIONS: dict[str, Direction] = {
    "low_rank": PowerIteration(),
    "polar": Polar(),
    "normuon": NorMuon(),
    "dion2": Dion2(),
    "nordion2": NorDion2(),
}


def state_keys() -> tuple[StateKey, ...]:
    """The state keys of directions."""
    return tuple(key for direction in DIRECTIONS.values() for key in direction.state_keys)


def create_state(p: Parameter) -> None:
    """Create the state that a parameter's algorithm and direction need before the first step."""
    X, group = p.X, p.group
    if group["algorithm"] != "dion":
        state = scalar.create_state(group["algorithm"], X)
    else:
        direction = DIRECTIONS[p.direction]
        own = direction.create_state(X, group)
        if unnamed := [key for key in own if key_of(key, direction.state_keys) is None]:
            raise ValueError(f"direction={p.direction!r}: name {unnamed} in its state_keys")
        state = {
            MOMENTUM: torch.zeros_like(X, dtype=dtype_of(group["momentum_dtype"], X)),
            MOMENTUM_NORM: zeros_per_matrix(X, group),
            R_SCALE: zeros_per_matrix(X, group),
            **own,
        }
    p.states[X] = state | flat_shard_state(X)
