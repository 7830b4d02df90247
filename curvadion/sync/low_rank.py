"""The papers' open step: replicas share the means of low-rank products and take one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from curvadion import checks
from curvadion.comm.collectives import group_size, mean_
from curvadion.sync.base import Step, Sync
from curvadion.sync.decision import Moving
from curvadion.sync.exact_average import average_weights_
from curvadion.update.elementwise import elementwise_steps, own_gradients
from curvadion.update.matrix_step import matrix_step
from curvadion.update.momentum import momentum_norms


def low_rank_open_step(step: Step) -> None:
    """One step of all replicas together (Dion, arXiv 2504.05295, algorithm 1). Collective.

        M_i <- M_i + G_i
        P = orth( mean_i(M_i Q) ),   R = mean_i( M_i^T P ),   Q = column_normalize(R)
        M_i <- M_i - (1 - mu) P R^T,   X <- (1 - lr wd) X - lr sqrt(m / n) P Q^T

    Matrices with direction="polar" have no factors to share. They take the polar factor of the
    momentum with the replicas' mean gradients, as parameters that are not matrices take AdamW or
    Lion with these: dense, as many numbers as the gradient has. A parameter without a gradient on
    any rank rests.
    """
    moving = step.moving if step.complete else step.moving.among(step.plan.all_ranks)
    moving = _with_mean_gradients(moving, step.replicas)
    matrix_step(*moving, step=step.number, inside_replica=False)
    gradients = own_gradients(moving.plan.elementwise)
    mean_(gradients, step.replicas)
    elementwise_steps(moving.plan, gradients)


def _with_mean_gradients(moving: Moving, replicas: dist.ProcessGroup | None) -> Moving:
    """Gradients of matrices that share no factors as their means over the replicas."""
    parameters, given = moving.gradients.parameters, moving.gradients.G
    dense = [i for i, p in enumerate(parameters) if p.direction == "polar"]
    if group_size(replicas) == 1 or not dense:
        return moving
    G = list(given)
    for i in dense:
        if parameters[i].G is None:  # zeros that other parameters share
            G[i] = torch.zeros_like(parameters[i].local)
    mean_([G[i] for i in dense], replicas)
    norms = moving.norms
    if norms is not None:
        norms = momentum_norms(moving.plan, replace(moving.gradients, G=G)).after
    return moving._replace(gradients=replace(moving.gradients, G=G), norms=norms)


class LowRank(Sync):
    """The open step of the papers, after an exact average of the weights if they have drifted.

    Args:
        average_weights: whether replicas that took local steps first average their weights and
            the moments of AdamW and Lion, exactly. If not, they stay apart until
            ``synchronize()``, as in the published experiments.

    Raises:
        TypeError: if ``average_weights`` is not a boolean.
    """

    shares_factors = True

    def __init__(self, average_weights: bool = True) -> None:
        checks.boolean("average_weights", average_weights)
        self.average_weights = self.brings_weights_together = average_weights
        # Names of the polar matrices whose momenta are the same on all replicas.
        self._agreed: set[str] = set()

    def open_step(self, step: Step) -> None:
        self._average_momenta(step)
        if step.local_steps or self.fragments_apart:
            if self.average_weights:
                average_weights_(step.plan, step.replicas)
            self.fragments_apart = 0 if self.average_weights else 1
        low_rank_open_step(step)

    def _average_momenta(self, step: Step) -> None:
        """Let the momenta of polar matrices agree, if something has let them differ.

        Low-rank products are means of what momenta hold; polar factors need the mean itself.
        """
        polar = [p for p in step.plan.dion if p.direction == "polar"]
        if step.number:  # before, all momenta are zero
            mean_([p.M for p in polar if p.name not in self._agreed], step.replicas)
        self._agreed = {p.name for p in polar}

    def note_own_step(self) -> None:
        self._agreed = set()

    def state_dict(self) -> dict[str, Any]:
        agreed = {"momenta_agreed": sorted(self._agreed)} if self._agreed else {}
        return {**super().state_dict(), **agreed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._agreed = set(state.get("momenta_agreed", ()))

    def __repr__(self) -> str:
        return f"LowRank(average_weights={self.average_weights})"
