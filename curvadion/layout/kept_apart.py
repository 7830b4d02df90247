"""Which parameters' gradients an integration keeps apart on the replicas, and who trains them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn


@dataclass(frozen=True)
class KeptApart:
    """What an integration says of some parameters.

    Attributes:
        ranks: one rank of each replica.
        optimizers: who trains the parameters, from the first step on.
    """

    ranks: tuple[int, ...]
    optimizers: WeakSet[Any] = field(default_factory=WeakSet)


# By module and name: torch refuses to move or cast a parameter to which there is a weak reference,
# and an attribute of it would be copied and pickled with it.
_DECLARED: WeakKeyDictionary[nn.Module, dict[str, KeptApart]] = WeakKeyDictionary()


def declare(module: nn.Module, parameters: Iterable[Tensor], kept: KeptApart) -> None:
    """Note that the replicas' gradients of a module's parameters are kept apart.

    Whoever is known to train them by an earlier declaration is known by this one.
    """
    wanted = {id(X) for X in parameters}
    by_name = _DECLARED.setdefault(module, {})
    for name, X in module.named_parameters():
        if id(X) in wanted:
            if name in by_name:
                kept.optimizers.update(by_name[name].optimizers)
            by_name[name] = kept


def declared() -> dict[int, KeptApart]:
    """What has been declared of the parameters of all modules that are alive, by ``id``."""
    found: dict[int, KeptApart] = {}
    for module, by_name in list(_DECLARED.items()):
        parameters = dict(module.named_parameters())
        found |= {
            id(parameters[name]): kept for name, kept in by_name.items() if name in parameters
        }
    return found


def note_optimizer(parameters: Iterable[Tensor], optimizer: object) -> None:
    """Let integrations know who trains the parameters."""
    known = declared()
    for X in parameters:
        if (kept := known.get(id(X))) is not None:
            kept.optimizers.add(optimizer)
