"""The interface of a direction: what the step of a matrix is made of.

Another direction is one more file, and a line in :mod:`curvadion.update.directions`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from curvadion.update.gradients import Gradients
from curvadion.update.plan import Plan


class Taken(ABC):
    """What the last step of a batch was made of: U_i, the direction that each of its matrices took.

    plan: the batch. stacks: its matrices.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.stacks = plan, plan.stacks

    @abstractmethod
    def ranks(self) -> list[int]:
        """The rank of U_i by stack: its squared Frobenius norm, about."""

    @abstractmethod
    def turn_momenta_(
        self, changes: Sequence[Tensor], shares: Sequence[Tensor], decay: float = 0.0
    ) -> None:
        """M_i <- M_i + share C S_i with S_i = U_i^T M_i; collective inside the replica.

        If U_i + share C is another direction, the part of M_i in the space of U_i takes it. It can
        be called once: the directions are given up, and C, (k, m_i, n_j) by stack, is overwritten.

        decay: a direction that keeps S_i (polar) takes a mean over calls: U_i^T M_i of a call
        weighs decay times as much as that of the next one.
        """


class Direction(ABC):
    """What the step of a matrix is made of.

    Class attributes:
        shares_factors: whether it can take means over replicas inside its products, for the papers'
            open step. Other directions get the replicas' mean gradient there.
        keeps_spectrum: whether momentum alignment keeps S over openings for it.
    """

    shares_factors: ClassVar[bool] = False
    keeps_spectrum: ClassVar[bool] = False

    def create_state(self, X: Tensor, options: Mapping[str, Any]) -> dict[str, Tensor]:
        """What the direction remembers of a parameter, before the first step.

        Each key must be in the table of curvadion.update.state, which says what an exact
        synchronisation does with it. options: the parameter's group.
        """
        return {}

    def state_shapes(self, X: Tensor, options: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """The shapes of what :meth:`create_state` makes, global ones of DTensors."""
        return {key: tuple(held.shape) for key, held in self.create_state(X, options).items()}

    def begin(self, batch: Plan, gradients: Gradients) -> Any:
        """Begin exchanges inside the replica, beside the step of the batch before; collective.

        The momenta hold the gradients already. What is returned is given to :meth:`step`.
        """

    @abstractmethod
    def step(
        self,
        batch: Plan,
        gradients: Gradients,
        begun: Any,
        *,
        step: int,
        inside_replica: bool,
        remember: bool,
    ) -> Taken:
        """Update X, and M beyond the gradient that it holds already; collective over the shards.

        begun: what :meth:`begin` has returned. step: how many steps were taken before, which seeds
        a stochastic rounding. inside_replica: leave the other replicas out of all means. remember:
        as of :meth:`InnerStep.batches`.
        """
