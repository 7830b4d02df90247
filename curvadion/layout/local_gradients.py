"""Parameters whose gradients a framework no longer averages, so that an optimizer must."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from curvadion.comm.groups import Group, ranks_of


@dataclass(frozen=True)
class _Declaration:
    """What is known of a parameter.

    Attributes:
        name: in the model.
        ranks: over which nothing averages its gradient.
        model: a token of the model for which ``keep_gradients_local`` was called.
    """

    name: str
    ranks: frozenset[int]
    model: object


class LocalGradients:
    """The parameters of this process whose gradients nothing averages.

    Attributes:
        version: changes when parameters are declared.
    """

    def __init__(self) -> None:
        self.version = 0
        # By the module that has a parameter itself and the parameter's name in it, and not by the
        # parameter: model.to() drops all attributes of a DTensor, and torch refuses it while there
        # are weak references to one.
        self._declarations: WeakKeyDictionary[nn.Module, dict[str, _Declaration]] = (
            WeakKeyDictionary()
        )
        # A model may be gone before its modules.
        self._tokens: WeakKeyDictionary[nn.Module, object] = WeakKeyDictionary()

    def declare(self, model: nn.Module, groups: Mapping[str, Group]) -> None:
        """Note that nothing averages the gradients of some of a model's parameters.

        groups: by a parameter's name, the ranks over which nothing averages its gradient.
        """
        token = self._tokens.setdefault(model, object())
        for name, group in groups.items():
            prefix, _, local_name = name.rpartition(".")
            declarations = self._declarations.setdefault(model.get_submodule(prefix), {})
            declarations[local_name] = _Declaration(name, frozenset(ranks_of(group)), token)
        self.version += 1

    def ranks(self) -> dict[int, frozenset[int]]:
        """By the ``id()`` of a parameter, the ranks over which nothing averages its gradient."""
        return {id(X): declaration.ranks for X, declaration in self._present()}

    def left_to_nobody(self, own: Collection[Tensor], held: Collection[Tensor]) -> list[str]:
        """The names of parameters whose gradients nothing averages, in the models of an optimizer.

        Args:
            own: the optimizer's parameters.
            held: those of all optimizers that average gradients.
        """
        own_ids = {id(X) for X in own}
        held_ids = {id(X) for X in held}
        present = list(self._present())
        models = {declaration.model for X, declaration in present if id(X) in own_ids}
        # By id(): a shared parameter has several names.
        names = {
            id(X): declaration.name
            for X, declaration in present
            if declaration.model in models
            and len(declaration.ranks) > 1
            and id(X) not in held_ids
            # A parameter that was frozen after a backward pass still has a gradient.
            and X.requires_grad
            and X.grad is not None
        }
        return list(names.values())

    def _present(self) -> Iterator[tuple[Tensor, _Declaration]]:
        """The parameters that modules have now by the declared names."""
        for module, declarations in self._declarations.items():
            parameters = dict(module.named_parameters(recurse=False))
            for local_name, declaration in declarations.items():
                if local_name in parameters:
                    yield parameters[local_name], declaration


LOCAL_GRADIENTS = LocalGradients()
