"""The gradients of a step, in lists as the fused operations take them.

A gradient that is None is zeros here, because other replicas may have one. In a local step such a
parameter rests (:class:`curvadion.update.inner_step.InnerStep`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from curvadion.update.parameter import Parameter

Number = TypeVar("Number")


@dataclass(frozen=True, eq=False)
class Gradients:
    """Parameters with matrix updates, with their shards of weights, momenta and gradients."""

    parameters: Sequence[Parameter]
    X: Sequence[Tensor]
    M: Sequence[Tensor]
    G: Sequence[Tensor]
    complete: bool  # whether no gradient is missing here

    def each(self, number: Callable[[Parameter], Number]) -> list[Number]:
        """A number for every parameter, computed from its group."""
        one_of_group = {id(p.group): p for p in self.parameters}
        found = {group: number(p) for group, p in one_of_group.items()}
        return [found[id(p.group)] for p in self.parameters]

    def among(self, parameters: Sequence[Parameter]) -> Gradients:
        """The gradients of some of these parameters."""
        if len(parameters) == len(self.parameters):
            return self
        place = {p: i for i, p in enumerate(self.parameters)}
        X, M, G = ([own[place[p]] for p in parameters] for own in (self.X, self.M, self.G))
        return Gradients(parameters, X, M, G, self.complete)


def filled(G: Sequence[Tensor | None], X: Sequence[Tensor]) -> list[Tensor]:
    """The gradients, with zeros like X in place of the missing ones: views of one buffer."""
    zeros: dict[tuple[torch.device, torch.dtype], Tensor] = {}
    missing = [x for g, x in zip(G, X, strict=True) if g is None]
    for x in sorted(missing, key=Tensor.numel):
        zeros[x.device, x.dtype] = x  # the largest
    zeros = {key: x.new_zeros(x.numel()) for key, x in zeros.items()}
    return [
        zeros[x.device, x.dtype][: x.numel()].view(x.shape) if g is None else g
        for g, x in zip(G, X, strict=True)
    ]
