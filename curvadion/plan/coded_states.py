"""States in 8 bits: their form beside tensors, and how operations read and write them.

With ``state_dtype="int8"``, and residuals with ``residual_dtype="int8"``, a state is a vector of
codes, :mod:`curvadion.ops.state_codes`, of this rank's shard alone. Its blocks follow from the
shard and its matrices, so a ``state_dict()`` has the elements for which codes stand, in a tensor
like the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from curvadion import ops
from curvadion.layout.dtensor import local
from curvadion.layout.matrix import Options, division_of
from curvadion.layout.matrix_shards import sizes_in_memory
from curvadion.layout.placements import global_shape
from curvadion.ops.tensors import Tensors
from curvadion.plan.state import MOMENTUM, SECOND_MOMENT

CODED = "int8"  # the value of the group key "state_dtype", and of a sync's residual_dtype
# The keys of states that may be in 8 bits, beside the sync's residual.
KEYS = (MOMENTUM, "exp_avg", SECOND_MOMENT)
# Of these, those whose codes are of roots: their elements are not negative and differ widely.
ROOTS = (SECOND_MOMENT,)
_CODED_PARTS = "curvadion_coded_parts"  # the attribute of a momentum's codes


class CodedParts(NamedTuple):
    """How the elements of a momentum were divided when its codes were created.

    A group may divide its parameters anew, which changes no codes that exist.

    Attributes:
        parts: the elements of each part, as :func:`parts_of` returned them.
        division: what :func:`curvadion.layout.matrix.division_of` returned, equal on all ranks.
    """

    parts: list[int]
    division: tuple[object, ...]


def parts_of(key: str, X: Tensor, group: Options | None = None) -> list[int]:
    """The elements of each part of this rank's shard of a state that has codes of its own.

    Those of a momentum are its matrices, so that operations take the codes of each matrix as they
    are, if each lies in memory without gaps. Other states have one part.

    Args:
        key: of the state.
        X: its parameter.
        group: the parameter's group; read for a momentum only.
    """
    if key == MOMENTUM:
        assert group is not None
        sizes = sizes_in_memory(X, group)
        if sizes:  # a rank may have no matrix of a stack
            return sizes
    return [local(X.detach()).numel()]


def coded_zeros(key: str, X: Tensor, group: Options | None = None) -> Tensor:
    """The codes of zeros like this rank's shard of X.

    Args:
        key: of the state.
        X: its parameter.
        group: the parameter's group; read for a momentum only.
    """
    parts = parts_of(key, X, group)
    size = ops.code_places(parts)[-1].stop
    codes = torch.zeros(size, dtype=torch.int8, device=local(X.detach()).device)
    if key == MOMENTUM:
        assert group is not None
        division = division_of(global_shape(X), group)
        setattr(codes, _CODED_PARTS, CodedParts(parts, division))
    return codes


def coded_parts(codes: Tensor) -> CodedParts | None:
    """How the elements behind codes were divided; None if it is not known.

    Copies by :mod:`copy` and :mod:`pickle` keep it, those on another device do not.
    """
    coded: CodedParts | None = getattr(codes, _CODED_PARTS, None)
    return coded


def encoded(key: str, X: Tensor, state: Tensor, group: Options | None = None) -> Tensor:
    """The codes of a state like X, rounded to nearest.

    Args:
        key: of the state.
        X: the parameter.
        state: of X's shape and placements, in any floating dtype and on any device.
        group: the parameter's group; read for a momentum only.
    """
    codes = coded_zeros(key, X, group)
    of_state = open_codes([codes], [key], [X], [group])
    of_state.tensors[0].copy_(local(state))
    of_state.close()
    return codes


def decoded(key: str, X: Tensor, codes: Tensor, group: Options | None = None) -> Tensor:
    """A tensor like X with the elements for which codes stand.

    Args:
        key: of the state.
        X: the parameter.
        codes: of this rank's shard.
        group: the parameter's group; read for a momentum only.

    Returns:
        Of X's shape and placements, float32.
    """
    [values] = open_codes([codes], [key], [X], [group]).tensors
    like_X = torch.empty_like(X.detach(), dtype=torch.float32)
    local(like_X).copy_(values)
    return like_X


def open_codes(
    states: Tensors, keys: Sequence[str], X: Tensors, groups: Sequence[Options | None]
) -> ops.Opened:
    """States as tensors to read and write.

    Args:
        states: k shards, or vectors of their codes.
        keys: of the k states.
        X: their k parameters.
        groups: of these parameters.
    """
    parts: list[list[int]] = []
    for state, key, x, group in zip(states, keys, X, groups, strict=True):
        if not ops.is_coded(state):
            parts.append([])
            continue
        # Computed only if it must be: steps with a gate that reads momenta open all of them.
        coded = coded_parts(state)
        if coded is not None and sum(coded.parts) == local(x.detach()).numel():
            parts.append(coded.parts)
        else:
            parts.append(parts_of(key, x, group))
    roots = [key in ROOTS for key in keys]
    return ops.Opened(states, [local(x.detach()) for x in X], roots, parts)
