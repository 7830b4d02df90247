"""Which parameters take which update, in an order that all ranks share."""

from __future__ import annotations

import math
from collections import Counter
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
from curvadion.ops.tensors import Tensors, adjacent
from curvadion.plan.opened_states import open_momenta
from curvadion.plan.parameter import (
    Matrix,
    Parameter,
    States,
    check_parameter,
    check_trained,
    elements_of,
    names,
    product_dtype,
)
from curvadion.plan.state import MOMENTUM_NORM

# Group keys that matrices of one stack have in common.
_KEYS_OF_A_STACK = (
    "direction",
    "right_factor",
    "newton_schulz",
    "newton_schulz_steps",
    "gather",
    "exchange_dtype",
)
# The keys that determine the matrices, their states and their stacks.
_KEYS_OF_A_PLAN = (
    "algorithm",
    "rank_fraction",
    "rank_multiple_of",
    "state_dtype",
    "q_dtype",
    "stack_dims",
    "row_blocks",
    "column_blocks",
    "input_first",
    *_KEYS_OF_A_STACK,
)
# The most elements of a batch on a rank. Small batches stay in a CPU's caches. An accelerator
# needs a fixed number of launches for each, and memory: for square float32 matrices about 8
# bytes an element in a polar step, and 17 at an opening with corrections.
MOST_ON_CPU = 2**22
MOST_ON_ACCELERATORS = 2**27
# Or this share of the plan's elements, if more.
BATCH_SHARE = 1 / 32


def plan_ingredients(param_groups: Iterable[Mapping[str, Any]]) -> list[object]:
    """The objects from which a plan is built; if one is replaced, so is the plan."""
    ingredients: list[object] = []
    for group in param_groups:
        ingredients.append(group)
        ingredients += [group.get(key) for key in _KEYS_OF_A_PLAN]
        for X in group["params"]:
            ingredients += [X, X.requires_grad, X.dtype]
    return ingredients


class StepTensors(NamedTuple):
    """Matrix parameters and their shards of weights, momenta and gradients.

    Args:
        parameters: l parameters.
        X: l local tensors of weights.
        M: l local tensors of momenta, as they are stored.
        G: l local tensors of gradients. One that is None is zeros, because other replicas may
            have one.
        complete: whether no gradient was None.
    """

    parameters: Sequence[Parameter]
    X: Tensors
    M: Tensors
    G: Tensors
    complete: bool

    def among(self, parameters: Sequence[Parameter]) -> StepTensors:
        """The tensors of some of these parameters, which are in this order, too."""
        if len(parameters) == len(self.parameters):
            return self
        index_of = {p: i for i, p in enumerate(self.parameters)}
        indices = [index_of[p] for p in parameters]
        return StepTensors(
            parameters,
            X=[self.X[i] for i in indices],
            M=[self.M[i] for i in indices],
            G=[self.G[i] for i in indices],
            complete=self.complete,
        )


class MomentumNorms(NamedTuple):
    """Frobenius norms of the momenta, (k,), before and after a step's gradients."""

    before: Tensor
    after: Tensor  # a matrix without a gradient has decayed


@dataclass(eq=False)
class Plan:
    """Which parameters take which update.

    Args:
        dion: the parameters whose matrices take a direction.
        elementwise: those that take AdamW or Lion.
        inside: this replica's ranks; None for one.
        all_ranks: all replicas' ranks; None for one.
        device: of collectives.
        unions: the process groups created so far, which later plans reuse.

    Attributes:
        parameters: all of them, in an order that all ranks share.
        matrices: this rank's, in the order of ``dion``.
    """

    dion: list[Parameter]
    elementwise: list[Parameter]
    inside: Group | None
    all_ranks: Group | None
    device: torch.device
    unions: Unions

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
        feeds_back: Callable[[str], bool],
        unions: Unions | None = None,
        wanted: Callable[[Tensor], bool] = attrgetter("requires_grad"),
    ) -> Plan:
        """The plan of the wanted parameters; collective if they are sharded.

        Args:
            param_groups: the optimizer's.
            states: the states of parameters, which need not have one yet.
            replicas: the ranks with this rank's shards on all replicas; None for one replica.
            feeds_back: by a direction's name, whether error feedback follows its steps.
            unions: the groups of an earlier plan, to be reused; None: there are none.
            wanted: whether a parameter is a part of the plan; by default if it is trained.

        Raises:
            ValueError: if a parameter's dtype, shape or placements are not supported.
        """
        dion: list[Parameter] = []
        elementwise: list[Parameter] = []
        unions = unions or Unions()
        for position, group in enumerate(param_groups):
            for X, name in zip(group["params"], names(group, position), strict=True):
                if not wanted(X):
                    continue
                check_trained(X, name)
                check_parameter(X, name, group)
                check_replicas(X, name, replicas)
                index = len(dion) + len(elementwise)
                if group["algorithm"] != "dion":
                    elementwise.append(
                        Parameter(X, group, states, name, index=index, position=position)
                    )
                    continue
                try:
                    shards = matrices_of(X, group, replicas, unions)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from error
                p = Parameter(
                    X,
                    group,
                    states,
                    name,
                    index=index,
                    position=position,
                    feeds_back=feeds_back(group["direction"]),
                )
                p.matrices.extend(Matrix(p, shard, i) for i, shard in enumerate(shards))
                dion.append(p)
        inside = unions.of([group for p in [*dion, *elementwise] for group in groups_of(p.X)])
        all_ranks = unions.of([inside, replicas])
        # Frozen ones count: replicas need a device to agree on.
        devices = [local(X.detach()).device for group in param_groups for X in group["params"]]
        device = devices[0] if devices else torch.device("cpu")
        return cls(dion, elementwise, inside, all_ranks, device, unions)

    def select(self, keep: Sequence[bool]) -> Plan:
        """The plan of some parameters; keep: which, in the order of ``parameters``."""
        if all(keep):
            return self
        kept_parameters = {p for p, kept in zip(self.parameters, keep, strict=True) if kept}
        selected = replace(
            self,
            dion=[p for p in self.dion if p in kept_parameters],
            elementwise=[p for p in self.elementwise if p in kept_parameters],
        )
        # The bound depends on the whole plan, or a part's batches would be smaller.
        selected.elements_in_a_batch = self.elements_in_a_batch
        return selected

    @cached_property
    def stacks(self) -> list[list[Matrix]]:
        """The stacks of matrices, the same on all ranks."""
        stacks: dict[object, list[Matrix]] = {}
        for m in self.matrices:
            X = m.parameter.X
            options = tuple(m.group[key] for key in _KEYS_OF_A_STACK)
            key = (m.shard.kind, m.shard.rank, product_dtype(X), X.device, *options)
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
        # Matrices of one kind and shape are neighbours, because they are stacked.
        dion = sorted(self.dion, key=lambda p: (*_kind_of_step(p), global_shape(p.X)))
        parameters = [*dion, *self.elementwise]
        sizes: list[tuple[int, object, int]] = []
        for p in dion:
            sizes.append((_elements_a_shard(p), _kind_of_step(p), _shards(p)))
        for p in self.elementwise:
            sizes.append((_elements_a_shard(p), None, _shards(p)))
        numbers = batches_of_sizes(sizes, self.elements_in_a_batch)
        number_of = dict(zip(parameters, numbers, strict=True))
        batches = []
        for number in sorted(set(numbers)):
            batches.append(self.select([number_of[p] == number for p in self.parameters]))
        return batches

    @cached_property
    def directions(self) -> dict[str, int]:
        """How many parameters take each update, such as {"polar": 48, "adamw": 27}."""
        updates = [p.direction for p in self.dion]
        updates += [p.group["algorithm"] for p in self.elementwise]
        return dict(Counter(updates))

    @cached_property
    def parameter_index(self) -> Tensor:
        """The index of each matrix's parameter, (k,) int64 on the device."""
        indices = [i for i, p in enumerate(self.dion) for _ in p.matrices]
        return torch.tensor(indices, dtype=torch.int64, device=self.device)

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
        return StepTensors(
            self.dion,
            X=[p.local for p in self.dion],
            M=[p.M for p in self.dion],
            G=[p.gradient_or_zeros for p in self.dion],
            complete=all(p.X.grad is not None for p in self.dion),
        )

    @property
    def _stored_norms(self) -> list[Tensor]:
        """The momenta's norms after the last step, by parameter: a view, one a matrix."""
        return [local(p.state[MOMENTUM_NORM]).view(-1) for p in self.dion]

    def momentum_norms(self, tensors: StepTensors) -> MomentumNorms:
        """Norms before and after this step's gradients; collective."""
        stored = self._stored_norms
        before = torch.cat(stored) if stored else torch.empty(0, device=self.device)
        if not self.matrices:
            # A rank without experts takes part in the decision.
            return MomentumNorms(before, before)
        G_of = dict(zip(tensors.parameters, tensors.G, strict=True))
        norms = []
        for parameters in self._opened_at_once:
            G: list[Tensor] = []
            for p in parameters:
                G += elements_of(p.matrices, [G_of[p]] * len(p.matrices))
            mu = [p.momentum_decay for p in parameters for _ in p.matrices]
            # |mu M + G|
            norms.append(ops.momentum_norms(_elements_of_momenta(parameters), G, mu))
        return MomentumNorms(before, self._norms_over_shards(adjacent(norms)))

    def measure_momenta(self) -> None:
        """Measure and store the momenta's norms; collective."""
        if not self.matrices:
            return
        norms = []
        for parameters in self._opened_at_once:
            norms.append(ops.norms(_elements_of_momenta(parameters)))
        self.store_norms(self._norms_over_shards(adjacent(norms)))

    @property
    def _opened_at_once(self) -> list[list[Parameter]]:
        """Runs of the parameters with matrices here, whose momenta are opened together."""
        parameters = [p for p in self.dion if p.matrices]
        momenta = [p.M for p in parameters]
        runs = ops.runs_to_open(momenta, [p.local for p in parameters], self.elements_in_a_batch)
        return [[parameters[i] for i in run] for run in runs]

    def store_norms(self, norms: Tensor) -> None:
        """Store one norm a matrix, (k,), for the next gate."""
        stored = self._stored_norms
        counts = [len(of_parameter) for of_parameter in stored]
        torch._foreach_copy_(stored, list(norms.split(counts)))

    def _norms_over_shards(self, norms: Tensor) -> Tensor:
        """Norms of whole matrices from those of this rank's shards, (k,) -> (k,)."""
        if self.inside is None:
            return norms
        # In float64, because squares of tiny and large values fit.
        squares = norms.double().square().unbind()
        total = sums(squares, [m.layout.shards for m in self.matrices])
        return torch.stack(total).sqrt().to(norms.dtype)

    def squared_norms(self, shards: Sequence[Tensors | Tensor]) -> list[Tensor]:
        """Squared Frobenius norms of matrices sharded like the stacks'; collective.

        Args:
            shards: (k, m_i, n_j) by stack: lists of k matrices, or tensors.

        Returns:
            (k,) by stack.
        """
        norms: list[Tensor] = []
        for stack, shards_of_stack in zip(self.stacks, shards, strict=True):
            elements = [m.held(x) for m, x in zip(stack, shards_of_stack, strict=True)]
            norms += torch._foreach_norm(elements, dtype=product_dtype(elements[0]))
        if not norms:
            return []
        counts = [len(stack) for stack in self.stacks]
        squares = torch.stack(norms).square().split(counts)
        return sums(squares, [stack[0].layout.shards for stack in self.stacks])


def most_in_a_batch(elements: int, device: torch.device) -> int:
    """The most elements of a batch, the same on all ranks; elements: of the plan."""
    most = MOST_ON_CPU if device.type == "cpu" else MOST_ON_ACCELERATORS
    return max(most, int(BATCH_SHARE * elements))


def batches_of_sizes(parameters: Iterable[tuple[int, object, int]], most: float) -> list[int]:
    """The number of each parameter's batch, from 0 on, in the given order.

    Args:
        parameters: (elements of a shard, kind, number of shards) of each. A batch has
            parameters of one kind; those of kind None go with any.
        most: elements of a batch; a larger parameter is a batch by itself.
    """
    batches: list[int] = []
    number = -1  # of the batch that is being filled; there is none yet
    kind_of_batch: object = None
    left = 0.0  # elements that it still takes
    is_full = True  # whether the next parameters begin another batch
    for (size, kind, shards), equal_parameters in groupby(parameters):
        if kind is not None and kind != kind_of_batch:
            kind_of_batch = kind
            is_full = True
        remaining = len(list(equal_parameters))
        while remaining:
            if is_full:
                number += 1
                left = most
                is_full = False
            # A parameter larger than a batch leaves less than nothing.
            fitting = min(remaining, int(max(0.0, left) // max(1, size)))
            taken = fitting
            if fitting < remaining:
                # Of equal parameters that do not all fit, each rank of their shards owns
                # equally many.
                taken -= fitting % shards
            if left == most and taken == 0:
                # An empty batch takes what fits, and at least one.
                taken = max(1, fitting)
            if taken == 0:
                is_full = True
                continue
            batches += [number] * taken
            left -= taken * size
            remaining -= taken
    return batches


def _elements_of_momenta(parameters: Sequence[Parameter]) -> list[Tensor]:
    """The elements of the parameters' matrices in their momenta, to read."""
    elements: list[Tensor] = []
    for p, momentum in zip(parameters, open_momenta(parameters).tensors, strict=True):
        elements += elements_of(p.matrices, [momentum] * len(p.matrices))
    return elements


def _kind_of_step(p: Parameter) -> tuple[object, ...]:
    """What all matrices of a batch have in common."""
    return (p.direction, p.stochastic_rounding, p.group["right_factor"])


def _elements_a_shard(p: Parameter) -> int:
    return math.prod(global_shape(p.X)) // _shards(p)


def _shards(p: Parameter) -> int:
    """How many different shards of it this replica's ranks hold."""
    return math.prod(group_size(group) for group in groups_of(p.X))
