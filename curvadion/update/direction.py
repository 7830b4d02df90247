"""The interface of a direction: how the update of a matrix is computed.

Another direction is one more file, and a line in :mod:`curvadion.update.directions`. What moves
along changed polar factors overrides :meth:`curvadion.update.polar.Polar.rescaled` only, as
:mod:`curvadion.update.normuon` does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from curvadion.update.gradients import Gradients
from curvadion.update.plan import Plan
from curvadion.update.state import StateKey


class How(NamedTuple):
    """How a step is taken."""

    number: int  # of steps before, which seeds a stochastic rounding
    inside_replica: bool  # whether the other replicas are left out of all means
    remember: bool  # as of InnerStep.batches


class Taken(ABC):
    """The directions U_i that the matrices of a batch took in its last step."""

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

        If U_i + share C is another direction, the part of M_i in the space of U_i takes it. Only
        once: directions are given up, and C, (k, m_i, n_j) by stack, is overwritten. A direction
        that keeps S_i takes a mean over calls, in which earlier ones weigh ``decay`` times as much.
        """


class Direction(ABC):
    """How the update of a matrix is computed."""

    # Whether it can take means over replicas inside its products, for the papers' open step. Other
    # directions get the replicas' mean gradient there.
    shares_factors: ClassVar[bool] = False
    # What it remembers of a parameter, beside the table of curvadion.update.state.
    state_keys: ClassVar[tuple[StateKey, ...]] = ()
    # Whether momentum alignment keeps S over openings for it.
    keeps_spectrum: ClassVar[bool] = False

    def create_state(self, X: Tensor, options: Mapping[str, Any]) -> dict[str, Tensor]:
        """What it remembers of a parameter, before the first step; options: the group."""
        return {}

    def state_shapes(self, X: Tensor, options: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """The shapes of what :meth:`create_state` makes, global ones of DTensors.

        Override it where that is large: it is asked for whenever states are checked.
        """
        return {key: tuple(held.shape) for key, held in self.create_state(X, options).items()}

    def begin(self, batch: Plan, gradients: Gradients) -> Any:
        """Begin exchanges inside the replica, beside the step of the batch before; collective.

        The momenta hold the gradients already. What is returned is given to :meth:`step`.
        """

    @abstractmethod
    def step(self, batch: Plan, gradients: Gradients, begun: Any, how: How) -> Taken:
        """Update X, and M beyond the gradient that it holds already; collective over the shards.

        Write weights and states by curvadion.ops, or under ``ops.put_back``: a flag on the device
        may call the step off.
        """
