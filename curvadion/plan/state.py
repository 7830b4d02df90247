"""The optimizer's state and its owners: the one table that everything else reads.

``optimizer.state[X]`` has keys of this table and the ``state_keys`` of the direction and the
sync. Tensors under other keys are left alone. The groups hold the state of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvadion.layout.flat_shard import FLAT_SHARD_START

MOMENTUM = "momentum"
MOMENTUM_NORM = "momentum_norm"
SECOND_MOMENT = "exp_avg_sq"  # of AdamW
R_SCALE = "R_scale"
# The last synchronised weights, under this key in every sync: ranks compare them.
ANCHOR = "anchor"
# S = U^T M of polar directions, summed over openings with weights, and the weights' sum.
SPECTRUM = "spectrum"
SPECTRUM_WEIGHT = "spectrum_weight"
RESIDUAL = "residual"  # the accumulated errors of codes
PROGRESS = "progress"  # the key of a group under which the optimizer keeps the run's record


class StateOwner(Enum):
    """The owner of a state, which decides what an exact synchronisation does with it."""

    REPLICA = auto()  # each replica has its own: averaged
    MEASURED = auto()  # follows from other state: measured again
    RANK = auto()  # identifies the shard of a rank: left alone
    SYNC = auto()  # belongs to the sync, whose hooks manage it


class StateKey(NamedTuple):
    """A key of a parameter's state.

    Args:
        name: of the key.
        owner: what an exact synchronisation does with the value.
        like_parameter: whether the value has the parameter's shape and placements.
        transient: whether it exists at some steps only.
    """

    name: str
    owner: StateOwner
    like_parameter: bool = False
    transient: bool = False


_KEYS = (
    StateKey(MOMENTUM, StateOwner.REPLICA, like_parameter=True),
    StateKey("Q", StateOwner.REPLICA),  # and Q_rows, Q_<i>: right factors
    StateKey(R_SCALE, StateOwner.REPLICA),  # one a matrix
    StateKey("exp_avg", StateOwner.REPLICA, like_parameter=True),
    StateKey(SECOND_MOMENT, StateOwner.REPLICA, like_parameter=True),
    StateKey("step", StateOwner.REPLICA),  # one
    StateKey(MOMENTUM_NORM, StateOwner.MEASURED),  # one a matrix
    StateKey(FLAT_SHARD_START, StateOwner.RANK),  # one
)


def is_right_factor(name: str) -> bool:
    """Whether a key holds right factors: "Q", "Q_rows", or "Q_<i>" of a flat shard."""
    return name == "Q" or name.startswith("Q_")


def key_of(name: str, more: Sequence[StateKey] = ()) -> StateKey | None:
    """The table's entry for a key, or None; more: the keys of directions and the sync."""
    if is_right_factor(name):
        name = "Q"  # one entry stands for all of them
    for key in (*_KEYS, *more):
        if key.name == name:
            return key
    return None


def averaged(
    state: Mapping[str, Any], more: Sequence[StateKey] = (), *, counters: bool = False
) -> dict[str, Tensor]:
    """The tensors of a state that an exact synchronisation averages, sorted by key.

    Those in 8 bits are codes, which curvadion.plan.coded_states opens.

    Args:
        state: of a parameter.
        more: the keys of directions and the sync.
        counters: whether to return only ``step``, else all others.
    """
    tensors = {}
    for name, value in sorted(state.items()):
        key = key_of(name, more)
        if key is None or key.owner is not StateOwner.REPLICA:
            continue
        if counters != (name == "step"):
            continue
        if isinstance(value, Tensor) and (value.is_floating_point() or value.dtype == torch.int8):
            tensors[name] = value
    return tensors


def like_parameter(more: Sequence[StateKey] = ()) -> list[str]:
    """The keys whose tensors have the parameter's shape and placements."""
    return [key.name for key in (*_KEYS, *more) if key.like_parameter]
