"""Parameters whose gradients a framework no longer averages, so that an optimizer must."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from curvadion.comm.groups import Group, ranks_of

LOCAL_GRADIENTS = "curvadion_local_gradients"  # the attribute of a parameter that holds the ranks


def declare_local_gradients(parameters: Iterable[Tensor], group: Group) -> None:
    """Note that nothing averages the gradients of these parameters over a group's ranks."""
    ranks = frozenset(ranks_of(group))
    for X in parameters:
        setattr(X, LOCAL_GRADIENTS, ranks)


def ranks_with_local_gradients(X: Tensor) -> frozenset[int]:
    """The ranks over which nothing averages a parameter's gradient; empty if none is known."""
    ranks: frozenset[int] = getattr(X, LOCAL_GRADIENTS, frozenset())
    return ranks
