"""The gradients of a step, in lists as the fused operations take them.

A gradient that is None is zeros here: where replicas step together, others may have one. In a
replica's own step such a parameter rests (:class:`curvadion.update.inner_step.InnerStep`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import TypeVar

from torch import Tensor

from curvadion.update.parameter import Parameter

Number = TypeVar("Number")


@dataclass(frozen=True, eq=False)
class Gradients:
    """The gradients of a plan's matrices with their weights and momenta, shard by shard.

    Attributes:
        parameters: those that take a matrix update, in the plan's order.
        X, M, G: their weights, momenta and gradients, zeros where a gradient is missing here.
        complete: whether no gradient is missing here.
    """

    parameters: Sequence[Parameter]
    X: Sequence[Tensor]
    M: Sequence[Tensor]
    G: Sequence[Tensor]
    complete: bool

    def each(self, number: Callable[[Parameter], Number]) -> list[Number]:
        """A number that follows from a parameter's group, for every parameter."""
        one_of_group = {id(p.group): p for p in self.parameters}
        found = {group: number(p) for group, p in one_of_group.items()}
        return [found[id(p.group)] for p in self.parameters]

    def among(self, parameters: Sequence[Parameter]) -> Gradients:
        """Those of these parameters, which are some of this one's."""
        if len(parameters) == len(self.parameters):
            return self
        each = zip(self.parameters, self.X, self.M, self.G, strict=True)
        known = {id(p): (x, m, g) for p, x, m, g in each}
        X, M, G = ([known[id(p)][i] for p in parameters] for i in range(3))
        return Gradients(parameters, X, M, G, self.complete)

    def replaced_by(self, G: Sequence[Tensor]) -> Gradients:
        """The same parameters with other gradients, of which none is missing."""
        return replace(self, G=G, complete=True)


def same(these: Sequence[object], those: Sequence[object]) -> bool:
    """Whether two lists hold the same objects."""
    return len(these) == len(those) and all(map(is_, these, those))
