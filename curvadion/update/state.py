"""What the optimizer remembers, and whose it is: the one table that all others read.

Per parameter, ``optimizer.state[X]`` has keys of this table, those of its direction
(``Direction.state_keys``) and those of the sync kind (``Sync.state_keys``), such as ``anchor`` and
``residual``, which that kind looks after itself. Tensors under other keys are left alone.

Of the run, the same on every replica: the groups, ``Progress``, and what the gate and the sync
remember (their ``state_dict``). A checkpoint holds the last three as the groups' key ``progress``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

from torch import Tensor

from curvadion.layout.flat_shard import FLAT_SHARD_START

MOMENTUM, MOMENTUM_NORM, R_SCALE = "momentum", "momentum_norm", "R_scale"
# What replicas last agreed on. A sync kind that keeps it calls it so: ranks then compare it.
ANCHOR = "anchor"
# S = U^T M of matrices with polar directions, a weighted sum over openings, each replica's own; and
# the sum of the weights.
SPECTRUM, SPECTRUM_WEIGHT = "spectrum", "spectrum_weight"
# What codes have lost of the pseudo-gradients sent so far, each replica's own.
RESIDUAL = "residual"


class Owner(Enum):
    """Whose a state is, which decides what an exact synchronisation does with it."""

    REPLICA = auto()  # each replica has its own: the mean is taken
    MEASURED = auto()  # follows from other state: it is measured again
    RANK = auto()  # tells which shard a rank holds: it is left alone
    SYNC = auto()  # the sync kind's own: its hooks look after it


class StateKey(NamedTuple):
    """A key of a parameter's state."""

    name: str
    owner: Owner
    like_parameter: bool = False  # whether it has the parameter's shape and placements
    passing: bool = False  # whether a state has it at some steps only
    nonnegative: bool = False


_KEYS = (
    StateKey(MOMENTUM, Owner.REPLICA, like_parameter=True),
    StateKey("Q", Owner.REPLICA),  # and Q_<i>: right factors
    StateKey("Q_rows", Owner.REPLICA),
    StateKey(R_SCALE, Owner.REPLICA),  # one a matrix
    StateKey("exp_avg", Owner.REPLICA, like_parameter=True),
    StateKey("exp_avg_sq", Owner.REPLICA, like_parameter=True, nonnegative=True),
    StateKey("step", Owner.REPLICA, nonnegative=True),  # one
    StateKey(MOMENTUM_NORM, Owner.MEASURED),  # one a matrix
    StateKey(FLAT_SHARD_START, Owner.RANK),  # one
)
_BY_NAME = {key.name: key for key in _KEYS}


def is_right_factor(name: str) -> bool:
    """Whether a key holds right factors: "Q", "Q_rows", or "Q_<i>" of a flat shard's matrices."""
    return name == "Q" or name.startswith("Q_")


def key_of(name: str, more: Sequence[StateKey] = ()) -> StateKey | None:
    """What the table says of a key; None if nothing. more: keys of directions and the sync."""
    if is_right_factor(name):
        name = "Q"
    return _BY_NAME.get(name) or next((key for key in more if key.name == name), None)


def averaged(
    state: Mapping[str, Any], more: Sequence[StateKey] = (), *, counters: bool = False
) -> dict[str, Tensor]:
    """The tensors of a state whose mean is taken; counters: of ``step``, not of all others."""
    return {
        name: tensor
        for name, tensor in sorted(state.items())
        if isinstance(tensor, Tensor)
        and tensor.is_floating_point()
        and (key := key_of(name, more)) is not None
        and key.owner is Owner.REPLICA
        and (name == "step") == counters
    }


def like_parameter(more: Sequence[StateKey] = ()) -> list[str]:
    """The keys whose tensors have the parameter's shape and placements."""
    return [key.name for key in (*_KEYS, *more) if key.like_parameter]
