"""The gradients of a step, in lists as the fused operations take them.

A gradient that is None is zeros here: where replicas step together, others may have one. In a
replica's own step such a parameter rests (:class:`curvadion.update.inner_step.InnerStep`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress, groupby, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvadion.layout.dtensor import local
from curvadion.ops.tensors import FixedTensors, Parameters, Tensors
from curvadion.update.parameter import Parameter
from curvadion.update.state import MOMENTUM

Number = TypeVar("Number")


@dataclass(frozen=True, eq=False)
class Gradients:
    """The gradients of a plan's matrices with their weights and momenta, shard by shard.

    Attributes:
        parameters: those that take a matrix update, in the plan's order.
        X, M, G: their weights, momenta and gradients, zeros where a gradient is missing here.
        complete: whether no gradient is missing here.
        runs: parameters of one group in a row, by the first of them and their number.
    """

    parameters: Sequence[Parameter]
    X: Sequence[Tensor]
    M: Sequence[Tensor]
    G: Sequence[Tensor]
    complete: bool
    runs: Sequence[tuple[Parameter, int]]

    def each(self, number: Callable[[Parameter], Number]) -> list[Number]:
        """A number that follows from a parameter's group, for every parameter."""
        return list(chain.from_iterable(repeat(number(first), k) for first, k in self.runs))

    def among(self, parameters: Sequence[Parameter]) -> Gradients:
        """Those of these parameters, which are some of this one's."""
        if len(parameters) == len(self.parameters):
            return self
        each = zip(self.parameters, self.X, self.M, self.G, strict=True)
        known = {id(p): (x, m, g) for p, x, m, g in each}
        X, M, G = ([known[id(p)][i] for p in parameters] for i in range(3))
        return Gradients(parameters, X, M, G, self.complete, runs_of(parameters))

    def replaced_by(self, G: Sequence[Tensor]) -> Gradients:
        """The same parameters with other gradients, of which none is missing."""
        return self if same(G, self.G) else replace(self, G=G, complete=True)

    def by_rounding(self, step: int) -> Iterator[tuple[Gradients, list[int] | None]]:
        """Those that are rounded stochastically with their seeds, and the others without."""
        kinds = {first.stochastic_rounding for first, _ in self.runs}
        for random in sorted(kinds):
            chosen = self._chosen(random) if len(kinds) == 2 else self
            seeds = [p.rounding_seed(step) for p in chosen.parameters] if random else None
            yield chosen, seeds

    def _chosen(self, random: bool) -> Gradients:
        keep = [p.stochastic_rounding == random for p in self.parameters]
        parameters = list(compress(self.parameters, keep))
        X, M, G = (list(compress(tensors, keep)) for tensors in (self.X, self.M, self.G))
        return Gradients(parameters, X, M, G, self.complete, runs_of(parameters))


class GradientLists:
    """Collects a plan's :class:`Gradients` at each step.

    Lists of hundreds of tensors stay the same objects as long as they hold the same tensors: most
    of what fused operations must know of them is then known already.
    """

    def __init__(self, parameters: Sequence[Parameter], *, sharded: bool) -> None:
        self._parameters, self._sharded = parameters, sharded
        self._runs = runs_of(parameters)
        self._given = [p.X for p in parameters]
        self._X, self._M = Parameters(), Tensors()

    def collect(self, states: Sequence[dict[str, Any]]) -> Gradients:
        """The gradients as they are now; states: of the parameters, in their order."""
        X: Sequence[Tensor] = self._given
        M = list(map(itemgetter(MOMENTUM), states))
        if self._sharded:
            X, M = list(map(local, X)), list(map(local, M))
        self._X = self._X if same(self._X, X) else Parameters(X)
        self._M = self._M if same(self._M, M) else Tensors(M)
        G = list(map(_gradient, self._given))
        complete = not any(map(is_, G, repeat(None)))
        if self._sharded or not complete or any(map(_is_sparse, G)):
            G = [p.G for p in self._parameters]
        weights = FixedTensors.of(self._X)
        given = FixedTensors.gradients(G if complete else _filled(G, X), weights)
        return Gradients(
            self._parameters, weights, FixedTensors.of(self._M), given, complete, self._runs
        )


_gradient, _is_sparse = attrgetter("grad"), attrgetter("is_sparse")


def _filled(G: Sequence[Tensor | None], X: Sequence[Tensor]) -> list[Tensor]:
    """The gradients, with zeros in place of the missing ones: views of one buffer per dtype."""
    missing = [x for g, x in zip(G, X, strict=True) if g is None]
    buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}
    for x in missing:
        key = x.device, x.dtype
        last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        size = last + 1 if x.numel() else 0
        if key not in buffers or buffers[key].numel() < size:
            buffers[key] = torch.zeros(size, dtype=x.dtype, device=x.device)
    return [
        buffers[x.device, x.dtype].as_strided(x.shape, x.stride()) if g is None else g
        for g, x in zip(G, X, strict=True)
    ]


def same(these: Sequence[object], those: Sequence[object]) -> bool:
    """Whether two lists hold the same objects."""
    return len(these) == len(those) and all(map(is_, these, those))


def runs_of(parameters: Sequence[Parameter]) -> list[tuple[Parameter, int]]:
    """Parameters of one group in a row, by the first of them and their number."""
    runs = [list(run) for _, run in groupby(parameters, key=lambda p: id(p.group))]
    return [(run[0], len(run)) for run in runs]
