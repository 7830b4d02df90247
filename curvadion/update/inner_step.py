"""The step of one replica, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter

from torch import Tensor
from torch.profiler import record_function

from curvadion import ops
from curvadion.layout.dtensor import local
from curvadion.update.direction import How, Taken
from curvadion.update.directions import (
    DIRECTIONS,
    STATE_KEYS,
    counter_device,
    elementwise_step,
)
from curvadion.update.plan import Gradients, Plan


@dataclass
class Batch:
    """Parameters that have just moved, or rest."""

    part: Plan  # of the step's parts, the one that they belong to
    plan: Plan  # of these parameters
    taken: Taken | None  # their directions, if any


@dataclass(frozen=True)
class InnerStep:
    """A local step, which :meth:`batches` takes batch by batch."""

    plan: Plan
    gradients: Gradients
    number: int  # of earlier steps; seeds stochastic rounding
    norms: Tensor | None = None  # of the momenta with these gradients, (k,), if needed
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

        Parameters without a gradient rest: neither weights nor state change. parts: together
        the whole plan. gradients: replace ``.grad``, by the id of the :class:`Parameter`.
        directed: by default as in a local step. over_replicas: average products, the papers'
        open step. remember: keep notes, equal on replicas that share products.
        """
        given, directed = gradients or {}, self.directed if directed is None else directed
        moving = None if self.rests else self._moving(given)
        if moving is not None:
            self._step_without_directions(*moving, given, directed)
        how = How(self.number, not over_replicas, remember, self.moves)
        begin = partial(self._begin, moving if directed else None, how)
        each = [(part, chosen) for part in parts or (self.plan,) for chosen in part.batches]
        coming = [*(chosen for _, chosen in each), None]
        following = begin(coming[0])
        for (part, chosen), later in zip(each, coming[1:], strict=True):
            # The next exchange runs during this batch's products.
            take, following = following, begin(later)
            batch = Batch(part, chosen, take())
            del take
            yield batch
            batch.taken = None  # free them before the next batch's directions
        if moving is not None and self.norms is not None and self.plan.matrices:
            changed = any(id(p) in given or (directed and p.feedback) for p in self.plan.dion)
            if changed or moving[0] is not self.plan:
                moving[0].measure_momenta()
            else:
                self.plan.store_norms(self.norms)

    def _moving(self, given: Mapping[int, Tensor]) -> tuple[Plan, Gradients]:
        """The plan of the parameters that move, and the gradients of its matrices."""
        gradients = self.gradients
        if given:
            each = zip(self.plan.dion, gradients.G, strict=True)
            G = [given.get(id(p), own) for p, own in each]
            gradients = gradients._replace(G=G)
        plan = self.plan.select([id(p) in given or not p.rests for p in self.plan.parameters])
        return plan, gradients.among(plan.dion)

    def _step_without_directions(
        self, plan: Plan, gradients: Gradients, given: Mapping[int, Tensor], directed: bool
    ) -> None:
        """All elementwise updates, of all parameters at once."""
        if directed:
            decays = gradients.each(attrgetter("momentum_decay"))
            ops.accumulate_(gradients.M, gradients.G, decays, self.moves)
        else:
            _gradient_step(gradients, self.number, self.moves)
        for _, run in groupby(plan.elementwise, attrgetter("position")):
            parameters = list(run)
            group, states = parameters[0].group, []
            keys = "step", *STATE_KEYS[group["algorithm"]]
            for p in parameters:
                # A checkpoint may have put it on another device.
                p.state["step"] = p.state["step"].to(counter_device(p.local))
                states.append({key: local(p.state[key]) for key in keys})
            X = [p.local for p in parameters]
            G = [given.get(id(p), p.gradient_or_zeros) for p in parameters]
            elementwise_step(X, G, states, group, self.moves)

    def _begin(
        self, moving: tuple[Plan, Gradients] | None, how: How, batch: Plan | None
    ) -> Callable[[], Taken | None]:
        """Begin the step of a batch along momenta that hold the gradients."""
        if moving is None or batch is None:
            return lambda: None
        plan, gradients = moving
        if plan is not self.plan:
            moves = set(plan.parameters)
            batch = batch.select([p in moves for p in batch.parameters])
        if not batch.dion:
            return lambda: None
        gradients, name = gradients.among(batch.dion), batch.dion[0].direction
        direction = DIRECTIONS[name]
        begun = direction.begin(batch, gradients)

        def take() -> Taken:
            with record_function(f"curvadion.{name}"):
                return direction.step(batch, gradients, begun, how)

        return take


def _gradient_step(gradients: Gradients, number: int, moves: Tensor | None) -> None:
    """X <- (1 - lr wd) X - local_lr G; the momentum keeps the gradient for later."""
    parameters = gradients.parameters
    for random in sorted({p.stochastic_rounding for p in parameters}):
        chosen = gradients.among([p for p in parameters if p.stochastic_rounding == random])
        seeds = [p.rounding_seed(number) for p in chosen.parameters] if random else None
        names = "local_lr", "decay", "momentum_decay"
        step, decay, mu = (chosen.each(attrgetter(name)) for name in names)
        ops.local_step_(chosen.X, chosen.G, step, decay, chosen.M, mu, seeds, moves)
