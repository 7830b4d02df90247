"""Which parameters take which update, in an order that all ranks share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvadion import ops
from curvadion.comm.collectives import checksum, group_size
from curvadion.comm.groups import Group, Unions
from curvadion.layout.dtensor import local
from curvadion.layout.exchange import sums
from curvadion.layout.matrix import Options
from curvadion.layout.matrix_shards import matrices_of
from curvadion.layout.placements import check_replicas, global_shape, groups_of
from curvadion.ops.tensors import Tensors
from curvadion.plan.parameter import (
    Matrix,
    Number,
    Parameter,
    States,
    check_parameter,
    check_trained,
    names,
    product_dtype,
)
from curvadion.plan.state import MOMENTUM_NORM

# Group keys that matrices of one stack have in common.
_STEP_OF_A_STACK = ["direction", "right_factor", "newton_schulz", "newton_schulz_steps"]
_STEP_OF_A_STACK += ["gather", "exchange_dtype"]
# The keys that determine the matrices and their states.
_STATE_KEYS = ["algorithm", "rank_fraction", "rank_multiple_of", "q_dtype"]
_STATE_KEYS += ["stack_dims", "row_blocks", "input_first", *_STEP_OF_A_STACK]
# The most elements of a batch on a rank. Small batches stay in a CPU's caches. An accelerator
# needs a fixed number of launches for each, and memory: for square float32 matrices about 8
# bytes an element in a polar step, and 17 at an opening with corrections.
MOST_ON_CPU, MOST_ON_ACCELERATORS = 2**22, 2**27
# Or this share of the plan's elements, if more.
BATCH_SHARE = 1 / 32


def plan_ingredients(param_groups: Iterable[Mapping[str, Any]]) -> list[object]:
    """The objects from which a plan is built; if one is replaced, so is the plan."""
    made_of: list[object] = []
    for group in param_groups:
        made_of += (group, *map(group.get, _STATE_KEYS))
        for X in group["params"]:
            made_of += (X, X.requires_grad, X.dtype)
    return made_of


class StepTensors(NamedTuple):
    """Matrix parameters and their shards of weights, momenta and gradients.

    A gradient that is None is zeros, because other replicas may have one.
    """

    parameters: Sequence[Parameter]
    X: Tensors
    M: Tensors
    G: Tensors
    complete: bool  # whether no gradient was None

    def each(self, number: Callable[[Parameter], Number]) -> list[Number]:
        """A number for every parameter, computed once a group."""
        one_of_group = {p.position: p for p in self.parameters}
        found = {position: number(p) for position, p in one_of_group.items()}
        return [found[p.position] for p in self.parameters]

    def among(self, parameters: Sequence[Parameter]) -> StepTensors:
        """The gradients of some of these parameters."""
        if len(parameters) == len(self.parameters):
            return self
        place = {p: i for i, p in enumerate(self.parameters)}
        X, M, G = ([own[place[p]] for p in parameters] for own in (self.X, self.M, self.G))
        return StepTensors(parameters, X, M, G, self.complete)


class MomentumNorms(NamedTuple):
    """Frobenius norms of the momenta, (k,), before and after a step's gradients."""

    before: Tensor
    after: Tensor  # a matrix without a gradient has decayed


@dataclass(eq=False)
class Plan:
    """Which parameters take which update."""

    dion: list[Parameter]
    elementwise: list[Parameter]
    inside: Group | None  # this replica's ranks
    all_ranks: Group | None  # all replicas' ranks
    device: torch.device  # of collectives
    unions: Unions  # the groups created so far

    def __post_init__(self) -> None:
        self.parameters = [*self.dion, *self.elementwise]
        self.matrices = [m for p in self.dion for m in p.matrices]

    @classmethod
    def of(
        cls,
        param_groups: Sequence[dict[str, Any]],
        states: States,
        replicas: Group | None,
        *,
        unions: Unions | None = None,
        wanted: Callable[[Tensor], bool] = attrgetter("requires_grad"),
    ) -> Plan:
        """The plan of the wanted parameters; collective if they are sharded."""
        dion: list[Parameter] = []
        elementwise: list[Parameter] = []
        unions = unions or Unions()
        for g, group in enumerate(param_groups):
            for X, name in zip(group["params"], names(group, g), strict=True):
                if not wanted(X):
                    continue
                check_trained(X, name)
                check_parameter(X, name, group)
                check_replicas(X, name, replicas)
                if group["algorithm"] == "dion":
                    try:
                        shards = matrices_of(X, group, replicas, unions)
                    except ValueError as error:
                        raise ValueError(f"{name}: {error}") from error
                    p = Parameter(X, group, states, name, len(dion), g)
                    p.matrices.extend(Matrix(p, shard, i) for i, shard in enumerate(shards))
                    dion.append(p)
                else:
                    elementwise.append(Parameter(X, group, states, name, position=g))
        inside = unions.of([g for p in [*dion, *elementwise] for g in groups_of(p.X)])
        # Frozen ones count: replicas need a device to agree on.
        devices = [local(X.detach()).device for group in param_groups for X in group["params"]]
        device = devices[0] if devices else torch.device("cpu")
        return cls(dion, elementwise, inside, unions.of([inside, replicas]), device, unions)

    def select(self, keep: Sequence[bool]) -> Plan:
        """The plan of the kept parameters, given in the order of ``parameters``."""
        if all(keep):
            return self
        kept = {p for p, k in zip(self.parameters, keep, strict=True) if k}
        dion = [p for p in self.dion if p in kept]
        elementwise = [p for p in self.elementwise if p in kept]
        selected = replace(self, dion=dion, elementwise=elementwise)
        selected.elements_in_a_batch = self.elements_in_a_batch
        return selected

    @cached_property
    def stacks(self) -> list[list[Matrix]]:
        """The stacks of matrices, the same on all ranks."""
        stacks: dict[Any, list[Matrix]] = {}
        for m in self.matrices:
            X, how = m.parameter.X, [m.group[key] for key in _STEP_OF_A_STACK]
            key = (m.shard.kind, m.shard.rank, product_dtype(X), X.device, *how)
            stacks.setdefault(key, []).append(m)
        return list(stacks.values())

    @cached_property
    def elements(self) -> int:
        """How many elements its parameters have on a rank: on average, equal on all ranks."""
        return sum(map(_elements_a_shard, self.parameters))

    @cached_property
    def elements_in_a_batch(self) -> int:
        """The most elements per rank of a batch of this plan and its parts."""
        return most_in_a_batch(self.elements, self.device)

    @cached_property
    def batches(self) -> list[Plan]:
        """Parts of the plan that bound a step's memory, equal on all ranks of a replica."""
        # Matrices of one shape are stacked, so they stay together.
        matrices = sorted(self.dion, key=lambda p: (*_kind_of_step(p), global_shape(p.X)))
        ordered = [*matrices, *self.elementwise]
        kinds = [*map(_kind_of_step, matrices), *[None] * len(self.elementwise)]
        each = zip(map(_elements_a_shard, ordered), kinds, map(_shards, ordered), strict=True)
        batches = batches_of_sizes(each, self.elements_in_a_batch)
        of = dict(zip(ordered, batches, strict=True))
        return [
            self.select([of[p] == batch for p in self.parameters]) for batch in sorted(set(batches))
        ]

    @cached_property
    def parameter_index(self) -> Tensor:
        """The index of each matrix's parameter, (k,) int64 on the device."""
        parameter_index = [i for i, p in enumerate(self.dion) for _ in p.matrices]
        return torch.tensor(parameter_index, dtype=torch.int64, device=self.device)

    def copies_inside(self, parameter: Parameter) -> int:
        """How many ranks of this replica hold the same shard."""
        return group_size(self.inside) // _shards(parameter)

    @cached_property
    def groups(self) -> dict[int, Options]:
        """The matrices' groups, by position in param_groups."""
        return {p.position: p.group for p in self.dion}

    @cached_property
    def checksum(self) -> int:
        """A checksum of the parameters in order."""
        return checksum([(p.name, p.X.dtype, global_shape(p.X)) for p in self.parameters])

    @cached_property
    def sharded(self) -> bool:
        """Whether parameters are DTensors."""
        return any(local(p.X) is not p.X for p in self.parameters)

    def step_tensors(self) -> StepTensors:
        """The step's gradients, with weights and momenta."""
        X, M = [p.local for p in self.dion], [p.M for p in self.dion]
        G = [p.gradient_or_zeros for p in self.dion]
        complete = all(p.X.grad is not None for p in self.dion)
        return StepTensors(self.dion, X, M, G, complete)

    @property
    def _norms(self) -> list[Tensor]:
        """The momenta's norms after the last step, by parameter."""
        return [local(p.state[MOMENTUM_NORM]).view(-1) for p in self.dion]

    def momentum_norms(self, tensors: StepTensors) -> MomentumNorms:
        """Norms before and after this step's gradients; collective."""
        before = torch.cat(self._norms or [torch.empty(0, device=self.device)])
        if not self.matrices:
            # A rank without experts takes part in the decision.
            return MomentumNorms(before, before)
        M, G = list[Tensor](), list[Tensor]()
        for p, momentum, gradient in zip(self.dion, tensors.M, tensors.G, strict=True):
            M.extend(m.elements(momentum) for m in p.matrices)
            G.extend(m.elements(gradient) for m in p.matrices)
        after = ops.momentum_norms(M, G, [m.parameter.momentum_decay for m in self.matrices])
        return MomentumNorms(before, self._norms_over_shards(after))

    def measure_momenta(self) -> None:
        """Measure and store the momenta's norms; collective."""
        if self.matrices:
            here = ops.norms([m.elements(m.parameter.M) for m in self.matrices])
            self.store_norms(self._norms_over_shards(here))

    def store_norms(self, norms: Tensor) -> None:
        """Store one norm a matrix, (k,), for the next gate."""
        stored = self._norms
        torch._foreach_copy_(stored, list(norms.split(list(map(len, stored)))))

    def _norms_over_shards(self, norms: Tensor) -> Tensor:
        """Norms of whole matrices from those of shards here, (k,) -> (k,)."""
        if self.inside is None:
            return norms
        # In float64, because squares of tiny and large values fit.
        held = norms.double().square().unbind()
        squares = sums(held, [m.layout.shards for m in self.matrices])
        return torch.stack(squares).sqrt().to(norms.dtype)

    def squared_norms(self, shards: Sequence[Tensors | Tensor]) -> list[Tensor]:
        """Squared norms of matrices sharded like the stacks'; collective."""
        norms: list[Tensor] = []
        for stack, each in zip(self.stacks, shards, strict=True):
            held = [m.held(x) for m, x in zip(stack, each, strict=True)]
            norms += torch._foreach_norm(held, dtype=product_dtype(held[0]))
        if not norms:
            return []
        squares = torch.stack(norms).square().split(list(map(len, self.stacks)))
        return sums(squares, [m.layout.shards for m, *_ in self.stacks])


def most_in_a_batch(elements: int, device: torch.device) -> int:
    """The most elements of a batch, the same on all ranks; elements: of the plan."""
    most = MOST_ON_CPU if device.type == "cpu" else MOST_ON_ACCELERATORS
    return max(most, int(BATCH_SHARE * elements))


def batches_of_sizes(parameters: Iterable[tuple[int, object, int]], most: float) -> list[int]:
    """The batch of each parameter, given as (elements, kind, number of shards).

    A batch has one kind; None goes with any. If equal parameters do not all fit, a batch has
    a number that their ranks can own evenly.
    """
    batches: list[int] = []
    left, batch, now = -1.0, -1, None
    for (size, kind, shards), run in groupby(parameters):
        if kind not in (None, now):
            left, now = -1.0, kind
        count = len(list(run))
        while count:
            fitting = min(count, int(left // max(1, size)))
            taken = fitting if fitting == count else fitting - fitting % shards
            if left == most:
                taken = taken or max(1, fitting)
            if taken <= 0:
                left, batch = most, batch + 1
                continue
            batches += [batch] * taken
            left -= taken * size
            count -= taken
    return batches


def _kind_of_step(p: Parameter) -> tuple[object, ...]:
    """What all matrices of a batch have in common."""
    return p.direction, p.stochastic_rounding, p.group["right_factor"]


def _elements_a_shard(p: Parameter) -> int:
    return math.prod(global_shape(p.X)) // _shards(p)


def _shards(p: Parameter) -> int:
    return math.prod(group_size(g) for g in groups_of(p.X))
