"""Parameters whose gradients a framework no longer averages, so that an optimizer must."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from curvadion.comm.groups import Group, ranks_of

LOCAL_GRADIENTS = "curvadion_local_gradients"  # the attribute of a parameter that holds the ranks

_names = WeakIdKeyDictionary()  # of all such parameters that still exist


def declare_local_gradients(parameters: Iterable[tuple[str, Tensor]], group: Group) -> None:
    """Note that nothing averages the gradients of named parameters over a group's ranks."""
    ranks = frozenset(ranks_of(group))
    for name, X in parameters:
        setattr(X, LOCAL_GRADIENTS, ranks)
        _names[X] = name


def ranks_with_local_gradients(X: Tensor) -> frozenset[int]:
    """The ranks over which nothing averages a parameter's gradient; empty if none is known."""
    ranks: frozenset[int] = getattr(X, LOCAL_GRADIENTS, frozenset())
    return ranks


def left_to_nobody(held: Collection[Tensor]) -> list[str]:
    """The names of parameters with gradients that nothing averages.

    held: the parameters whose optimizers do so.
    """
    ids = {id(X) for X in held}
    return [
        name
        for X, name in _names.items()
        if len(ranks_with_local_gradients(X)) > 1
        and X.requires_grad
        and X.grad is not None
        and id(X) not in ids
    ]
