"""The step of one replica, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor
from torch.profiler import record_function

from curvadion import ops
from curvadion.update.direction import Taken
from curvadion.update.directions import DIRECTIONS
from curvadion.update.elementwise import elementwise_steps
from curvadion.update.gradients import Gradients
from curvadion.update.momentum import accumulate_momenta, measure_momenta
from curvadion.update.plan import Plan


@dataclass
class Batch:
    """Parameters that have just moved.

    Attributes:
        part: the part of the plan that they belong to, as it was asked for.
        plan: the parameters, those that rest on this replica among them.
        taken: the directions that its matrices took; None if none took any.
    """

    part: Plan
    plan: Plan
    taken: Taken | None


@dataclass(frozen=True)
class InnerStep:
    """The step of a replica's own, of which :meth:`batches` takes one batch after the other.

    Attributes:
        plan: the parameters.
        gradients: of its matrices.
        number: how many steps were taken before, which seeds a stochastic rounding.
        norms: Frobenius norms of the momenta with these gradients, one per matrix, (k,); None if
            no gate reads them.
        directed: whether matrices take their directions in a local step; else plain gradient steps.
        rests: whether nothing moves, because a gradient is not finite.
    """

    plan: Plan
    gradients: Gradients
    number: int
    norms: Tensor | None = None
    directed: bool = True
    rests: bool = False

    def batches(
        self,
        *parts: Plan,
        gradients: Mapping[int, Tensor] | None = None,
        directed: bool | None = None,
        over_replicas: bool = False,
        remember: bool = True,
    ) -> Iterator[Batch]:
        """Step each batch of the parts and yield it; exhaust it. Collective inside the replica.

        A parameter without a gradient rests: neither its weights nor its state change.

        Args:
            parts: of the plan, all of it together; the plan itself by default.
            gradients: what takes the place of ``.grad``, by the id of the :class:`Parameter`.
            directed: whether matrices take their directions; None for what a local step does.
            over_replicas: take means over replicas inside the products, the papers' open step.
            remember: keep notes for later steps. Steps that share products with other replicas
                may depend on such notes only if all replicas have made the same ones.
        """
        parts, directed = parts or (self.plan,), self.directed if directed is None else directed
        moving = None if self.rests else self._moving(gradients)
        drops: dict[int, Tensor] = {}  # by matrix
        if moving is not None:
            self._step_without_directions(*moving, gradients, directed)
        for part in parts:
            for chosen in part.batches():
                taken = None
                if moving is not None and directed and chosen.dion:
                    taken = self._direct(chosen, *moving, over_replicas, remember)
                    if taken is not None and self.norms is not None:
                        drops |= _drops(taken)
                batch = Batch(part, chosen, taken)
                del taken
                yield batch
                batch.taken = None  # before the next batch's directions take memory
        if moving is not None and self.norms is not None and self.plan.matrices:
            own = not any(id(p) in (gradients or {}) for p in self.plan.dion)
            whole = own and moving[0] is self.plan
            self._store_norms(moving[0], self.norms if whole else None, drops, directed)

    def _moving(self, given: Mapping[int, Tensor] | None) -> tuple[Plan, Gradients]:
        """The plan of the parameters that move, and the gradients of its matrices."""
        gradients, given = self.gradients, given or {}
        if given:
            G = [given.get(id(p), own) for p, own in zip(self.plan.dion, gradients.G, strict=True)]
            gradients = gradients.replaced_by(G)
        plan = self.plan.select([id(p) in given or not p.rests for p in self.plan.parameters])
        return plan, gradients.among(plan.dion)

    def _step_without_directions(
        self,
        plan: Plan,
        gradients: Gradients,
        given: Mapping[int, Tensor] | None,
        directed: bool,
    ) -> None:
        """What concerns each element alone, of all parameters at once."""
        if directed:
            accumulate_momenta(gradients)
        else:
            gradient_step(gradients, self.number)
        own = given or {}
        G = [own.get(id(p), p.gradient_or_zeros) for p in plan.elementwise]
        elementwise_steps(plan, G)

    def _direct(
        self, batch: Plan, moving: Plan, gradients: Gradients, over_replicas: bool, remember: bool
    ) -> Taken | None:
        """The direction of a batch's momenta, which hold the gradients already."""
        if moving is not self.plan:
            moves = set(map(id, moving.parameters))
            batch = batch.select([id(p) in moves for p in batch.parameters])
            if not batch.dion:
                return None
        with record_function(f"curvadion.{batch.direction}"):
            return DIRECTIONS[batch.direction].step(
                batch,
                gradients.among(batch.dion),
                step=self.number,
                inside_replica=not over_replicas,
                remember=remember,
            )

    def _store_norms(
        self, plan: Plan, norms: Tensor | None, drops: Mapping[int, Tensor], directed: bool
    ) -> None:
        """Norms of what moved after the error feedback, without a second pass if these tell."""
        fed_back = directed and any(p.error_feedback for p in plan.dion)
        if norms is None or (directed and any(p.look_ahead and p.feedback for p in plan.dion)):
            measure_momenta(plan)
            return
        if fed_back:
            none = torch.zeros((), dtype=torch.float64, device=norms.device)
            dropped = torch.stack([drops.get(id(m), none) for m in plan.matrices])
            square = norms.double().square() - plan.sum_over_shards(dropped)
            norms = square.clamp_min(0).sqrt()
        plan.store_norms(norms)


def gradient_step(gradients: Gradients, number: int) -> None:
    """X <- (1 - lr wd) X - local_lr G; the momentum keeps the gradient for later (CurvaDion)."""
    for chosen, seeds in gradients.by_rounding(number):
        ops.local_step_(
            chosen.X,
            chosen.G,
            chosen.each(attrgetter("local_lr")),
            chosen.each(attrgetter("decay")),
            chosen.M,
            chosen.each(attrgetter("momentum_decay")),
            seeds,
        )


def _drops(taken: Taken) -> dict[int, Tensor]:
    """What the step took from each ||M||^2, by the matrix."""
    dropped = taken.drops()
    if not dropped:
        return {}
    matrices = [m for stack in taken.stacks for m in stack]
    return dict(zip(map(id, matrices), torch.cat(dropped).unbind(), strict=True))
