"""The gradients of a step, in lists as the fused operations take them.

A gradient that is None is zeros here: where replicas step together, others may have one. In a
replica's own step such a parameter rests (:class:`curvadion.update.inner_step.InnerStep`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import TypeVar

import torch
from torch import Tensor

from curvadion.update.parameter import Parameter

Number = TypeVar("Number")


@dataclass(frozen=True, eq=False)
class Gradients:
    """Parameters that take a matrix update, with the shards of weights, momenta and gradients."""

    parameters: Sequence[Parameter]
    X: Sequence[Tensor]
    M: Sequence[Tensor]
    G: Sequence[Tensor]
    complete: bool  # whether no gradient is missing here

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


def filled(G: Sequence[Tensor | None], X: Sequence[Tensor]) -> list[Tensor]:
    """The gradients, with zeros like X in place of the missing ones: views of one buffer."""
    most: dict[tuple[torch.device, torch.dtype], int] = {}
    for g, x in zip(G, X, strict=True):
        if g is None:
            most[x.device, x.dtype] = max(x.numel(), most.get((x.device, x.dtype), 0))
    zeros = {key: torch.zeros(n, device=key[0], dtype=key[1]) for key, n in most.items()}
    return [
        zeros[x.device, x.dtype][: x.numel()].view(x.shape) if g is None else g
        for g, x in zip(G, X, strict=True)
    ]
