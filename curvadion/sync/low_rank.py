"""The papers' open step: replicas share the means of low-rank products and take one step."""

from __future__ import annotations

from curvadion import checks
from curvadion.sync.base import Step, Sync
from curvadion.sync.exact_average import average_weights_
from curvadion.update.dion_step import dion_step
from curvadion.update.elementwise import elementwise_steps


def low_rank_open_step(step: Step) -> None:
    """One step of all replicas together (Dion, arXiv 2504.05295, algorithm 1). Collective.

        M_i <- M_i + G_i
        P = orth( mean_i(M_i Q) ),   R = mean_i( M_i^T P ),   Q = column_normalize(R)
        M_i <- M_i - (1 - mu) P R^T,   X <- (1 - lr wd) X - lr sqrt(m / n) P Q^T

    Parameters that are not matrices take AdamW or Lion with the replicas' mean gradients. A
    parameter without a gradient on any rank rests.
    """
    moving = step.moving if step.complete else step.moving.among(step.plan.all_ranks)
    dion_step(*moving, step=step.number, inside_replica=False)
    elementwise_steps(moving.plan, step.replicas)


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

    def open_step(self, step: Step) -> None:
        if step.local_steps or self.fragments_apart:
            if self.average_weights:
                average_weights_(step.plan, step.replicas)
            self.fragments_apart = 0 if self.average_weights else 1
        low_rank_open_step(step)

    def __repr__(self) -> str:
        return f"LowRank(average_weights={self.average_weights})"
