"""The step of one replica, batch by batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from curvadion import ops
from curvadion.layout.dtensor import local
from curvadion.plan.parameter import (
    Matrix,
    Parameter,
    each_of_group,
    elements_of,
    gradients_without_gaps,
    shards_without_gaps,
)
from curvadion.plan.plan import MomentumNorms, Plan, StepTensors
from curvadion.update.direction import Directions, StepMode
from curvadion.update.elementwise import (
    STATE_KEYS,
    Elementwise,
    counter_device,
    elementwise_step,
)
from curvadion.update.registry import DIRECTIONS
from curvadion.update.update_hooks import UpdateHook


@dataclass
class Batch:
    """Parameters that have just moved, or rest.

    Args:
        part: of the step's parts, the one that they belong to.
        plan: of these parameters.
        directions: their directions; None if they took gradients or rest.
    """

    part: Plan
    plan: Plan
    directions: Directions | None


class _Moving(NamedTuple):
    """What moves in a step: not the parameters without a gradient, which rest."""

    plan: Plan
    tensors: StepTensors  # of its matrices


@dataclass(frozen=True)
class InnerStep:
    """A local step, which :meth:`batches` takes batch by batch.

    Args:
        plan: of the parameters.
        tensors: weights, momenta and gradients of the plan's matrices.
        step_index: the number of earlier steps; seeds stochastic rounding.
        norms: of the momenta with these gradients, (k,); None if no gate reads them.
        lengths: as ``Lengths.ahead``; empty if they are not known.
        directed: whether a local step takes directions, not gradients.
        rests: whether nothing moves, because a gradient is not finite.
        moves: () bool on the device, which says the same while the host does not know yet;
            None if it does.
        hooks: are called with each batch before its matrices move along directions.
    """

    plan: Plan
    tensors: StepTensors
    step_index: int
    norms: Tensor | None = None
    lengths: Sequence[Tensor | None] = ()
    directed: bool = True
    rests: bool = False
    moves: Tensor | None = None
    hooks: Sequence[UpdateHook] = ()

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
            parts: together the whole plan, whose batches are taken one part after another;
                none for the plan itself.
            gradients: replace ``.grad``, by the id of the :class:`Parameter`; None replaces
                none.
            directed: whether matrices take directions; None: as in a local step.
            over_replicas: average products over replicas, as the papers' open step does.
            remember: whether to store each matrix's scale (:attr:`Matrix.R_scale`). Ranks that
                share products must read the same scales, so a local step between such steps
                stores none.
        """
        replaced = gradients or {}
        if directed is None:
            directed = self.directed
        moving: _Moving | None = None
        if not self.rests:
            moving = self._moving(replaced)
            self._step_without_directions(moving, replaced, directed)
        part_and_batch = [(part, batch) for part in parts or [self.plan] for batch in part.batches]
        batches = [batch for _, batch in part_and_batch]
        lengths: Sequence[Tensor | None] = [None] * len(batches)
        # self.lengths are of ``.grad``, and of the batches of the whole plan in order.
        if self.lengths and not parts and not replaced:
            lengths = self.lengths
        mode = StepMode(self.step_index, not over_replicas, remember, self.moves, hooks=self.hooks)
        directions = self._directions(moving if directed else None, batches, lengths, mode)
        for part, batch in part_and_batch:
            stepped = Batch(part, batch, next(directions))
            yield stepped
            # Free them before the next batch's directions.
            stepped.directions = None
        if moving is not None:
            self._store_norms(moving, replaced, directed)

    def _directions(
        self,
        moving: _Moving | None,
        batches: Sequence[Plan],
        lengths: Sequence[Tensor | None],
        mode: StepMode,
    ) -> Iterator[Directions | None]:
        """Step one batch after another, and yield its directions.

        Each batch is begun before the step of the one before it is taken, so that its exchange
        of shards runs during the other's products.

        Args:
            moving: what takes directions; None if nothing does.
            batches: of the step.
            lengths: by batch, as ``StepMode.lengths``.
            mode: of the step.
        """
        # A begun step holds copies of momenta, so nothing else may refer to it: popleft()
        # frees it when it is taken.
        begun: deque[Callable[[], Directions | None]] = deque()
        for batch, lengths_of_batch in zip(batches, lengths, strict=True):
            begun.append(self._begin(moving, batch, mode._replace(lengths=lengths_of_batch)))
            if len(begun) > 1:
                yield begun.popleft()()
        while begun:
            yield begun.popleft()()

    def _begin(
        self, moving: _Moving | None, batch: Plan, mode: StepMode
    ) -> Callable[[], Directions | None]:
        """Begin the step of a batch; the call takes it.

        Args:
            moving: what takes directions; None if nothing does.
            batch: of the step.
            mode: of the step, with the batch's lengths.
        """
        if moving is None:
            return lambda: None
        if moving.plan is not self.plan:
            parameters = set(moving.plan.parameters)
            batch = batch.select([p in parameters for p in batch.parameters])
            # They are of all the batch's matrices, also those that rest.
            mode = mode._replace(lengths=None)
        if not batch.dion:
            return lambda: None
        tensors = moving.tensors.among(batch.dion)
        # A batch has one direction.
        name = batch.dion[0].direction
        direction = DIRECTIONS[name]
        begun = direction.begin(batch, tensors, mode)

        def take() -> Directions:
            with record_function(f"curvadion.{name}"):
                return direction.step(batch, tensors, begun, mode)

        return take

    def _moving(self, replaced: Mapping[int, Tensor]) -> _Moving:
        """What moves; replaced: gradients that replace ``.grad``, by parameter id."""
        tensors = self.tensors
        if replaced:
            G = []
            for p, gradient in zip(self.plan.dion, tensors.G, strict=True):
                G.append(replaced.get(id(p), gradient))
            tensors = tensors._replace(G=G)
        plan = self.plan.select([id(p) in replaced or not p.rests for p in self.plan.parameters])
        return _Moving(plan, tensors.among(plan.dion))

    def _step_without_directions(
        self, moving: _Moving, replaced: Mapping[int, Tensor], directed: bool
    ) -> None:
        """What a step does besides directions, for all parameters at once.

        Momenta take their gradients, or matrices step along them, and AdamW and Lion step.

        Args:
            moving: what moves.
            replaced: gradients that replace ``.grad``, by the id of the :class:`Parameter`.
            directed: whether matrices take directions, so that only momenta are updated here.
        """
        tensors = moving.tensors
        if directed:
            accumulating = [
                p for p in tensors.parameters if not DIRECTIONS[p.direction].adds_gradients
            ]
            tensors = tensors.among(accumulating)
            mu = each_of_group(tensors.parameters, attrgetter("momentum_decay"))
            # M <- mu M + G, or M + G with error feedback, whose mu comes after the step
            ops.accumulate_(tensors.M, tensors.G, mu, moves=self.moves)
        else:
            _gradient_step(tensors, self.step_index, self.moves)
        self._elementwise_step(moving.plan.elementwise, replaced)

    def _elementwise_step(
        self, parameters: Sequence[Parameter], replaced: Mapping[int, Tensor]
    ) -> None:
        """The updates of AdamW and Lion.

        Args:
            parameters: that move.
            replaced: gradients that replace ``.grad``, by the id of the :class:`Parameter`.
        """
        entries = []
        for p in parameters:
            G = replaced.get(id(p))
            if G is None:
                G = p.gradient_or_zeros
            states = {"step": _counter(p)}
            seeds = {}
            for key in STATE_KEYS[p.group["algorithm"]]:
                states[key] = local(p.state[key])
                if p.keeps_codes:
                    seeds[key] = p.state_seed(self.step_index, key)
            entries.append(Elementwise(p.local, G, states, seeds, p.group))
        elementwise_step(entries, self.moves)

    def _store_norms(self, moving: _Moving, replaced: Mapping[int, Tensor], directed: bool) -> None:
        """Store the norms of the new momenta, if a gate reads them; collective.

        Args:
            moving: what has moved.
            replaced: gradients that replaced ``.grad``, by the id of the :class:`Parameter`.
            directed: whether matrices took directions.
        """
        if self.norms is None or not self.plan.matrices:
            return
        # self.norms are of mu M + G with ``.grad``. Momenta are something else if they took
        # another gradient, if error feedback took a part of them, or if they rested.
        known = moving.plan is self.plan
        for p in self.plan.dion:
            if id(p) in replaced or (directed and p.feedback):
                known = False
        if known:
            self.plan.store_norms(self.norms)
        else:
            moving.plan.measure_momenta()


def _counter(p: Parameter) -> Tensor:
    """The parameter's number of steps, () float32."""
    state = p.state
    device = counter_device(p.local)
    # A checkpoint may have put it on another device.
    if state["step"].device != device:
        state["step"] = state["step"].to(device)
    counter: Tensor = local(state["step"])
    return counter


class Lengths(NamedTuple):
    """Frobenius norms on this rank before a step."""

    by_batch: Sequence[Tensor | None]  # as StepMode.lengths; empty if they are not known
    norms: Tensor  # those that must be finite, (l,) with l > 0


def measure(
    plan: Plan, tensors: StepTensors, momenta: MomentumNorms | None, *, directed: bool
) -> Lengths:
    """The norms of a step's gradients, in one pass over them.

    Args:
        plan: of the step.
        tensors: weights, momenta and gradients of its matrices.
        momenta: the norms of the momenta with these gradients; None if they are not known.
        directed: whether the step takes directions.
    """
    if momenta is not None:
        return Lengths((), _norms_beside(plan, momenta))
    # The lengths of mu M + (1 + look_ahead) G of the matrices whose directions ask for them,
    # and the norms of all gradients, by one operation.
    batches: list[list[Matrix]] = []
    if directed and tensors.complete:
        batches = _measured(plan)
    matrices = [m for batch in batches for m in batch]
    G_of = dict(zip(tensors.parameters, tensors.G, strict=True))
    M_of = dict(zip(tensors.parameters, tensors.M, strict=True))
    G = gradients_without_gaps(matrices, [G_of[m.parameter] for m in matrices])
    stay_coded = [m.stays_coded for m in matrices]
    momenta_of_matrices = [M_of[m.parameter] for m in matrices]
    M: list[Tensor | None] = [*shards_without_gaps(matrices, momenta_of_matrices, stay_coded)]
    owners = [m.parameter for m in matrices]
    mu = each_of_group(owners, attrgetter("momentum_decay"))
    share = each_of_group(owners, lambda p: 1 + p.group["look_ahead"])
    others = _other_gradients(plan, set(matrices))
    if others and not matrices:
        return Lengths((), ops.norms(others))
    G += others
    M += [None] * len(others)
    mu += [0.0] * len(others)
    share += [1.0] * len(others)
    if not G:
        return Lengths((), _zero(plan))
    ahead, norms = ops.lengths(M, G, mu, share)
    by_batch = ahead[: len(matrices)].split([len(batch) for batch in batches])
    return Lengths([lengths if len(lengths) else None for lengths in by_batch], norms)


def _norms_beside(plan: Plan, momenta: MomentumNorms) -> Tensor:
    """The norms that must be finite where those of momenta are known."""
    # A momentum is as finite as the gradient that it takes.
    norms = momenta.after
    gradients = []
    for p in plan.elementwise:
        G = p.G
        if G is not None:
            gradients.append(G)
    if gradients:
        norms = torch.cat([norms, ops.norms(gradients)])
    return norms if len(norms) else _zero(plan)


def _other_gradients(plan: Plan, measured: set[Matrix]) -> list[Tensor]:
    """The gradients of all parameters, without the elements of the measured matrices."""
    gradients: list[Tensor] = []
    for p in plan.parameters:
        G = p.G
        if G is None:
            continue
        if not p.matrices:
            gradients.append(G)
            continue
        # Blocks of one parameter may take different ways over the ranks, so only some of
        # them may be measured.
        others = [m for m in p.matrices if m not in measured]
        if len(others) == len(p.matrices):
            gradients.append(G)
        else:
            gradients += elements_of(others, [G] * len(others))
    return gradients


def _zero(plan: Plan) -> Tensor:
    """The norm of nothing, (1,): a rank without gradients takes part in the decision."""
    return torch.zeros(1, dtype=torch.float32, device=plan.device)


def _measured(plan: Plan) -> list[list[Matrix]]:
    """By batch, the matrices whose lengths their direction asks for.

    Not of a batch with momenta in 8 bits that have to be opened: its direction opens them once, and
    measures them then.
    """
    measured = []
    for batch in plan.batches:
        matrices: list[Matrix] = []
        if any(p.keeps_codes and p.code_places is None for p in batch.dion):
            measured.append(matrices)
            continue
        for stack in batch.stacks:
            direction = DIRECTIONS[stack[0].parameter.direction]
            if direction.measures(stack):
                matrices += stack
        measured.append(matrices)
    return measured


def _gradient_step(tensors: StepTensors, step_index: int, moves: Tensor | None) -> None:
    """X <- (1 - lr wd) X - local_lr G; the momentum keeps the gradient for later.

    Args:
        tensors: weights, momenta and gradients.
        step_index: the number of earlier steps; seeds stochastic rounding.
        moves: () bool on the device, or None; false cancels the step.
    """
    # All tensors of one operation have seeds, or none has.
    for stochastic in (False, True):
        parameters = [p for p in tensors.parameters if p.stochastic_rounding == stochastic]
        if not parameters:
            continue
        chosen = tensors.among(parameters)
        seeds = [p.rounding_seed(step_index) for p in parameters] if stochastic else None
        step = each_of_group(parameters, attrgetter("local_lr"))
        decay = each_of_group(parameters, attrgetter("decay"))
        mu = each_of_group(parameters, attrgetter("momentum_decay"))
        # X <- decay X - step G,   M <- mu M + G
        ops.local_step_(chosen.X, chosen.G, step, decay, chosen.M, mu, seeds, moves=moves)
