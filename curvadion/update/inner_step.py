"""The step of one replica, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from curvadion import ops
from curvadion.layout.dtensor import local
from curvadion.plan.parameter import Matrix, each_of_group
from curvadion.plan.plan import MomentumNorms, Plan, StepTensors
from curvadion.update.direction import Directions, StepMode
from curvadion.update.elementwise import (
    STATE_KEYS,
    Elementwise,
    counter_device,
    elementwise_step,
)
from curvadion.update.registry import DIRECTIONS


@dataclass
class Batch:
    """Parameters that have just moved, or rest."""

    part: Plan  # of the step's parts, the one that they belong to
    plan: Plan  # of these parameters
    directions: Directions | None  # their directions, if any


@dataclass(frozen=True)
class InnerStep:
    """A local step, which :meth:`batches` takes batch by batch."""

    plan: Plan
    tensors: StepTensors
    step_index: int  # the number of earlier steps; seeds stochastic rounding
    norms: Tensor | None = None  # of the momenta with these gradients, (k,), if needed
    lengths: Sequence[Tensor | None] = ()  # as Lengths.ahead, if they are known
    directed: bool = True  # whether a local step takes directions, not gradients
    rests: bool = False  # whether nothing moves, because a gradient is not finite
    moves: Tensor | None = None  # the same on the device, while the host does not know yet

    def batches(
        self,
        *parts: Plan,
        gradients: Mapping[int, Tensor] | None = None,
        directed: bool | None = None,
        over_replicas: bool = False,
        remember: bool = True,
    ) -> Iterator[Batch]:
        """Step each batch of the parts and yield it; exhaust it. Collective in the replica.

        Parameters without a gradient rest: neither weights nor state change.

        Args:
            parts: together the whole plan, whose batches are taken one part after another.
            gradients: replace ``.grad``, by the id of the :class:`Parameter`.
            directed: whether matrices take directions; by default as in a local step.
            over_replicas: average products over replicas, as the papers' open step does.
            remember: keep notes, equal on replicas that share products.
        """
        given = gradients or {}
        directed = self.directed if directed is None else directed
        moving = None if self.rests else self._moving(given)
        if moving is not None:
            self._step_without_directions(*moving, given, directed)
        mode = StepMode(self.step_index, not over_replicas, remember, self.moves)
        begin = partial(self._begin, moving if directed else None, mode)
        each = [(part, chosen) for part in parts or (self.plan,) for chosen in part.batches]
        # Lengths are of these gradients, and in the order of the plan's own batches.
        lengths = iter(() if parts or given else self.lengths)
        # A batch is begun before the last one is taken, so that its exchange of shards runs
        # during the last one's products. After the last batch comes None.
        batches = [*(chosen for _, chosen in each), None]
        take_next = begin(batches[0], next(lengths, None))
        for (part, chosen), following in zip(each, batches[1:], strict=True):
            take = take_next
            take_next = begin(following, next(lengths, None))
            batch = Batch(part, chosen, take())
            del take  # it holds the batch's copies of momenta
            yield batch
            batch.directions = None  # free them before the next batch's directions
        if moving is not None and self.norms is not None and self.plan.matrices:
            changed = any(id(p) in given or (directed and p.feedback) for p in self.plan.dion)
            if changed or moving[0] is not self.plan:
                moving[0].measure_momenta()
            else:
                self.plan.store_norms(self.norms)

    def _moving(self, given: Mapping[int, Tensor]) -> tuple[Plan, StepTensors]:
        """The plan of the parameters that move, and the gradients of its matrices."""
        tensors = self.tensors
        if given:
            each = zip(self.plan.dion, tensors.G, strict=True)
            G = [given.get(id(p), own) for p, own in each]
            tensors = tensors._replace(G=G)
        plan = self.plan.select([id(p) in given or not p.rests for p in self.plan.parameters])
        return plan, tensors.among(plan.dion)

    def _step_without_directions(
        self, plan: Plan, tensors: StepTensors, given: Mapping[int, Tensor], directed: bool
    ) -> None:
        """All elementwise updates, of all parameters at once.

        Args:
            plan: of the parameters that move.
            tensors: weights, momenta and gradients of its matrices.
            given: gradients that replace ``.grad``, by the id of the :class:`Parameter`.
            directed: whether matrices take directions, so that only momenta are updated here.
        """
        if directed:
            each = tensors.parameters
            waiting = [p for p in each if not DIRECTIONS[p.direction].adds_gradients]
            chosen = tensors.among(waiting)
            decays = chosen.each(attrgetter("momentum_decay"))
            ops.accumulate_(chosen.M, chosen.G, decays, moves=self.moves)
        else:
            _gradient_step(tensors, self.step_index, self.moves)
        parameters = []
        for p in plan.elementwise:
            # A checkpoint may have put it on another device.
            X = p.local
            state = p.state
            if state["step"].device != counter_device(X):
                state["step"] = state["step"].to(counter_device(X))
            keys = "step", *STATE_KEYS[p.group["algorithm"]]
            shards = {key: local(state[key]) for key in keys}
            G = given.get(id(p))
            if G is None:
                G = p.gradient_or_zeros
            parameters.append(Elementwise(X, G, shards, p.group))
        elementwise_step(parameters, self.moves)

    def _begin(
        self,
        moving: tuple[Plan, StepTensors] | None,
        mode: StepMode,
        batch: Plan | None,
        lengths: Tensor | None,
    ) -> Callable[[], Directions | None]:
        """Begin the step of a batch; the call takes it.

        Args:
            moving: the parameters that move and their gradients; None if none does.
            mode: of the step.
            batch: of parameters; None after the last one.
            lengths: of the batch's matrices, as ``StepMode.lengths``.
        """
        if moving is None or batch is None:
            return lambda: None
        plan, tensors = moving
        if plan is not self.plan:
            moves = set(plan.parameters)
            batch = batch.select([p in moves for p in batch.parameters])
            lengths = None  # which also count matrices that rest
        if not batch.dion:
            return lambda: None
        tensors = tensors.among(batch.dion)
        name = batch.dion[0].direction
        direction = DIRECTIONS[name]
        mode = mode._replace(lengths=lengths)
        begun = direction.begin(batch, tensors, mode)

        def take() -> Directions:
            with record_function(f"curvadion.{name}"):
                return direction.step(batch, tensors, begun, mode)

        return take


class Lengths(NamedTuple):
    """Frobenius norms on this rank before a step."""

    # By batch of the plan, as StepMode.lengths; empty if they are not known.
    ahead: Sequence[Tensor | None]
    every: Tensor  # those that must be finite, (l,) with l > 0


def measure(
    plan: Plan, tensors: StepTensors, momenta: MomentumNorms | None, *, directed: bool
) -> Lengths:
    """The norms of a step's gradients, in one pass over them.

    Args:
        plan: of the step.
        tensors: weights, momenta and gradients of its matrices.
        momenta: the norms of the momenta with these gradients, if they are known.
        directed: whether the step takes directions.
    """
    if momenta is not None:
        dense = [G for p in plan.elementwise if (G := p.G) is not None]
        norms = torch.cat([momenta.after, *([ops.norms(dense)] if dense else [])])
        return Lengths((), norms if len(norms) else _zero(plan))
    measured = _measured(plan) if directed and tensors.complete else []
    matrices = [m for batch in measured for m in batch]
    known = set(matrices)
    G_of = dict(zip(tensors.parameters, tensors.G, strict=True))
    given = [m.read(G_of[m.parameter]) for m in matrices]
    for p in plan.parameters:
        if (G := p.G) is None:
            continue
        # Blocks of one parameter may take different ways over the ranks.
        left = [m for m in p.matrices if m not in known]
        if len(left) == len(p.matrices):
            given.append(G)
        else:
            given += [m.elements(G) for m in left]
    if not given:
        return Lengths((), _zero(plan))
    alone = len(given) - len(matrices)
    M_of = dict(zip(tensors.parameters, tensors.M, strict=True))
    M: list[Tensor | None] = [m.read(M_of[m.parameter]) for m in matrices]
    mu = each_of_group(matrices, attrgetter("momentum_decay"))
    share = each_of_group(matrices, lambda p: 1 + p.group["look_ahead"])
    M += [None] * alone
    mu += [0.0] * alone
    share += [1.0] * alone
    ahead, every = ops.lengths(M, given, mu, share)
    by_batch = ahead[: len(matrices)].split(list(map(len, measured)))
    return Lengths([part if len(part) else None for part in by_batch], every)


def _zero(plan: Plan) -> Tensor:
    """The norm of nothing, (1,): a rank without gradients takes part in the decision."""
    return torch.zeros(1, dtype=torch.float32, device=plan.device)


def _measured(plan: Plan) -> list[list[Matrix]]:
    """The matrices of each batch that their direction measures."""
    found = []
    for batch in plan.batches:
        stacks = [s for s in batch.stacks if DIRECTIONS[s[0].parameter.direction].measures(s)]
        found.append([m for stack in stacks for m in stack])
    return found


def _gradient_step(tensors: StepTensors, step_index: int, moves: Tensor | None) -> None:
    """X <- (1 - lr wd) X - local_lr G; the momentum keeps the gradient for later.

    Args:
        tensors: weights, momenta and gradients.
        step_index: the number of earlier steps; seeds stochastic rounding.
        moves: () bool on the device, or None; false cancels the step.
    """
    parameters = tensors.parameters
    for random in sorted({p.stochastic_rounding for p in parameters}):
        chosen = tensors.among([p for p in parameters if p.stochastic_rounding == random])
        seeds = [p.rounding_seed(step_index) for p in chosen.parameters] if random else None
        names = "local_lr", "decay", "momentum_decay"
        step, decay, mu = (chosen.each(attrgetter(name)) for name in names)
        ops.local_step_(chosen.X, chosen.G, step, decay, chosen.M, mu, seeds, moves=moves)
