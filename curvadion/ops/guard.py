"""Writes that a flag on the device can cancel, so that the host need not wait for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor

_moves: Tensor | None = None


@contextmanager
def only_if(moves: Tensor | None) -> Iterator[None]:
    """Inside the block, operations change weights and state only if ``moves`` is true.

    moves: a scalar bool tensor on the device of the weights and state; None for always.
    """
    global _moves
    before, _moves = _moves, moves
    try:
        yield
    finally:
        _moves = before


def moves() -> Tensor | None:
    """The flag of the innermost :func:`only_if`."""
    return _moves


def if_moving(new: Tensor, old: Tensor) -> Tensor:
    """``new``, or ``old`` if the flag is false."""
    return new if _moves is None else torch.where(_moves, new, old)


def copy_(tensors: Sequence[Tensor], stacked: Tensor) -> None:
    """Copy a stack to tensors of the same shape, unless the flag is false."""
    if _moves is not None:
        before = torch.stack([t.to(stacked.dtype) for t in tensors])  # their dtypes may differ
        stacked = torch.where(_moves, stacked, before)
    torch._foreach_copy_(list(tensors), list(stacked))


@contextmanager
def put_back(*lists: Sequence[Tensor]) -> Iterator[None]:
    """Restore tensors after the block if the flag is false; holds copies meanwhile."""
    tensors = list(chain(*lists)) if _moves is not None else []
    before = [x.clone() for x in tensors]
    yield
    for x, old in zip(tensors, before, strict=True):
        x.copy_(if_moving(x, old))
