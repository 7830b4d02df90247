"""The papers' open step: replicas average low-rank products and take the same step."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import filterfalse
from typing import Any

from torch import Tensor

from curvadion import checks
from curvadion.comm.collectives import group_size, mean_
from curvadion.plan.opened_states import opened
from curvadion.plan.parameter import Parameter
from curvadion.plan.state import MOMENTUM
from curvadion.sync.base import Step, Sync
from curvadion.sync.exact_average import average_weights_
from curvadion.update.registry import DIRECTIONS


class LowRank(Sync):
    """The papers' open step: Dion, after an exact average of weights that have drifted.

        M_i <- M_i + G_i
        P = orth( mean_i(M_i Q) ),   R = mean_i( M_i^T P ),   Q = column_normalize(R)
        M_i <- M_i - (1 - mu) P R^T,   X <- (1 - lr wd) X - lr sqrt(m / n) P Q^T

    (Dion, arXiv 2504.05295, algorithm 1.) Polar directions, AdamW and Lion use the mean
    gradient, sent dense; ``.grad`` then holds it. A gradient that is None on some replica
    counts as zero.

    Args:
        average_weights: whether replicas that took local steps first average their weights
            and the moments of AdamW and Lion. If False, they stay different until
            ``synchronize()``: a variant of the CurvaDion paper, for those who compare with it.

    Raises:
        TypeError: if ``average_weights`` is not a boolean.
    """

    runs_ahead = True

    def __init__(self, average_weights: bool = True) -> None:
        checks.boolean("average_weights", average_weights)
        self.average_weights = self.ends_drift = average_weights
        # Whether the momenta of polar matrices are identical on all replicas.
        self._momenta_identical = False

    def open_step(self, step: Step) -> bool:
        if group_size(step.replicas) == 1:
            self._momenta_identical = True
            self.fragments_drifted = 0
            step.take(directed=True)
            return True
        self._average_momenta(step)
        if step.local_steps or self.fragments_drifted:
            if self.average_weights:
                average_weights_(step.plan, step.replicas)
            self.fragments_drifted = 0 if self.average_weights else 1
        G = _mean_gradients(step)
        step.take(gradients=G, directed=True, over_replicas=True)
        return True

    def closed_step(self, step: Step) -> None:
        self._momenta_identical = False
        # Open steps must read the same scales on all replicas, so local steps store none.
        step.take(remember=False)

    def _average_momenta(self, step: Step) -> None:
        """Average momenta of polar matrices, as a polar factor needs the mean itself."""
        if step.step_index and not self._momenta_identical:  # before, all momenta are zero
            owners = []
            for p in filterfalse(_shares_factors, step.plan.dion):
                owners.append((p, MOMENTUM))
                owners += [(p, key.name) for key in DIRECTIONS[p.direction].state_keys]
            with opened(owners) as momenta:
                mean_(momenta, step.replicas)
        self._momenta_identical = True

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "momenta_identical": self._momenta_identical}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        checks.boolean("momenta_identical", state["momenta_identical"])
        self._momenta_identical = state["momenta_identical"]


def _shares_factors(p: Parameter) -> bool:
    return DIRECTIONS[p.direction].shares_factors


def _mean_gradients(step: Step) -> dict[int, Tensor]:
    """Gradients by parameter id: means where factors are not shared, zeros where missing."""
    plan = step.plan
    matrices = list(filterfalse(_shares_factors, plan.dion))
    resting = [p for p in plan.dion if p.rests]
    G = {id(p): p.gradient_or_zeros for p in [*matrices, *resting, *plan.elementwise]}
    for dense in (matrices, plan.elementwise):
        mean_([G[id(p)] for p in dense], step.replicas)
    return G
