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
    """Inside, operations change weights and state only if this bool on the device is true."""
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
    """Copy a stack to tensors, unless the flag is false."""
    if _moves is not None:
        before = torch.stack([t.to(stacked.dtype) for t in tensors])  # their dtypes may differ
        stacked = torch.where(_moves, stacked, before)
    torch._foreach_copy_(list(tensors), list(stacked))


@contextmanager
def put_back(*lists: Sequence[Tensor]) -> Iterator[None]:
    """Restore tensors after the block if the flag is false; holds copies meanwhile."""
    if _moves is None:
        yield
        return
    before = [(x, x.clone()) for x in chain(*lists)]
    yield
    for x, old in before:
        x.copy_(if_moving(x, old))
