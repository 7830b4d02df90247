"""States in 8 bits: their form beside tensors, and how operations read and write them.

With ``state_dtype="int8"``, and residuals with ``residual_dtype="int8"``, a state is a vector of
codes, :mod:`curvadion.ops.state_codes`, of this rank's shard alone. Its blocks follow from the
shard, so a ``state_dict()`` has the elements for which codes stand, in a tensor like the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from curvadion import ops
from curvadion.layout.dtensor import local
from curvadion.ops.tensors import Tensors
from curvadion.plan.state import MOMENTUM, SECOND_MOMENT

CODED = "int8"  # the value of the group key "state_dtype", and of a sync's residual_dtype
# The keys of states that may be in 8 bits, beside the sync's residual.
KEYS = (MOMENTUM, "exp_avg", SECOND_MOMENT)
# Of these, those whose codes are of roots: their elements are not negative and differ widely.
ROOTS = (SECOND_MOMENT,)


def coded_zeros(X: Tensor) -> Tensor:
    """The codes of zeros like this rank's shard of X."""
    shard = local(X.detach())
    return torch.zeros(ops.code_bytes(shard.numel()), dtype=torch.int8, device=shard.device)


def encoded(key: str, X: Tensor, state: Tensor) -> Tensor:
    """The codes of a state like X, rounded to nearest.

    Args:
        key: of the state.
        X: the parameter.
        state: of X's shape and placements, in any floating dtype and on any device.
    """
    codes = coded_zeros(X)
    values = torch.empty_like(local(X.detach()), dtype=torch.float32).copy_(local(state))
    ops.encode_states_([codes], [values], None, roots=key in ROOTS)
    return codes


def decoded(key: str, X: Tensor, codes: Tensor) -> Tensor:
    """A tensor like X with the elements for which codes stand.

    Args:
        key: of the state.
        X: the parameter.
        codes: of this rank's shard.

    Returns:
        Of X's shape and placements, float32.
    """
    (values,) = ops.decode_states([codes], [local(X.detach())], roots=key in ROOTS)
    like_X = torch.empty_like(X.detach(), dtype=torch.float32)
    local(like_X).copy_(values)
    return like_X


def open_states(keys: Sequence[str], states: Tensors, X: Tensors) -> ops.Opened:
    """This rank's shards of states, as tensors to read and write.

    Args:
        keys: of k states.
        states: k shards, or vectors of their codes.
        X: the k parameters.
    """
    return ops.Opened(states, [local(x.detach()) for x in X], [key in ROOTS for key in keys])


@contextmanager
def opened(
    keys: Sequence[str],
    states: Sequence[MutableMapping[str, Any]],
    X: Tensors,
    seeds: Sequence[int] | None = None,
) -> Iterator[list[Tensor]]:
    """This rank's shards of states, to write; those in 8 bits are encoded after the block.

    Args:
        keys: k keys.
        states: k states of parameters, each of which has its key.
        X: the k parameters.
        seeds: k integers below 2^32, for random rounding; None rounds to nearest.
    """
    shards = [local(state[key]) for key, state in zip(keys, states, strict=True)]
    of_block = open_states(keys, shards, X)
    yield of_block.tensors
    of_block.close(seeds)
