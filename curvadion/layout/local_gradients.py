"""Parameters whose gradients a framework no longer averages, so that an optimizer must."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from weakref import WeakSet

from torch import Tensor, nn

from curvadion.comm.groups import Group, ranks_of

LOCAL_GRADIENTS = "curvadion_local_gradients"  # the attribute of a parameter that holds the ranks

# Models that have such parameters. Not the parameters: torch cannot replace a DTensor, as
# model.to() does, while a weak reference to it exists.
_models: WeakSet[nn.Module] = WeakSet()


def declare_local_gradients(model: nn.Module, parameters: Iterable[Tensor], group: Group) -> None:
    """Note that nothing averages the gradients of parameters of a model over a group's ranks."""
    ranks = frozenset(ranks_of(group))
    for X in parameters:
        setattr(X, LOCAL_GRADIENTS, ranks)
    _models.add(model)


def ranks_with_local_gradients(X: Tensor) -> frozenset[int]:
    """The ranks over which nothing averages a parameter's gradient; empty if none is known."""
    ranks: frozenset[int] = getattr(X, LOCAL_GRADIENTS, frozenset())
    return ranks


def left_to_nobody(own: Collection[Tensor], held: Collection[Tensor]) -> list[str]:
    """The names of parameters whose gradients nothing averages, in the models of an optimizer.

    Args:
        own: the optimizer's parameters.
        held: those of all optimizers that average gradients.
    """
    own_ids = {id(X) for X in own}
    held_ids = {id(X) for X in held}
    names = []
    for model in _models:
        named = list(model.named_parameters())
        if own_ids.isdisjoint(id(X) for _, X in named):
            continue
        for name, X in named:
            is_local = len(ranks_with_local_gradients(X)) > 1
            if is_local and X.grad is not None and id(X) not in held_ids:
                names.append(name)
    return names
