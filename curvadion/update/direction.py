"""The interface of a direction: how the update of a matrix is computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from curvadion.plan.parameter import Matrix
from curvadion.plan.plan import Plan, StepTensors
from curvadion.plan.state import StateKey
from curvadion.update.update_hooks import UpdateHook


class StepMode(NamedTuple):
    """How a step is taken.

    Args:
        step_index: the number of earlier steps; seeds rounding.
        inside_replica: whether means exclude other replicas.
        remember: whether the matrices' scales are stored, as in :meth:`InnerStep.batches`.
        moves: () bool on the device: where it is false, nothing is written. None writes.
        lengths: (l,) Frobenius norms of mu M + (1 + look_ahead) G on this rank, of the batch's
            matrices for which the direction measures them, in the order of its stacks; None if
            they are not known yet.
        hooks: are called before matrices move, in this order.
    """

    step_index: int
    inside_replica: bool
    remember: bool
    moves: Tensor | None = None
    lengths: Tensor | None = None
    hooks: Sequence[UpdateHook] = ()


class Directions(ABC):
    """The directions U_i of a batch's last step, which corrections at an opening use.

    Args:
        plan: of the batch.
        ranks: of U_i, by stack.
    """

    def __init__(self, plan: Plan, ranks: list[int]) -> None:
        self.plan = plan
        self.stacks = plan.stacks
        self.ranks = ranks

    @abstractmethod
    def turn_momenta_(
        self, changes: Sequence[Tensor], shares: Sequence[Tensor], decay: float
    ) -> None:
        """M_i <- M_i + share C S_i with S_i = U_i^T M_i; collective inside the replica.

        This turns the part of M_i in the space of U_i to the direction U_i + share C. Call it
        once, because it frees the directions.

        Args:
            changes: C, (k, m_i, n_j) by stack; overwritten.
            shares: (k,) by stack.
            decay: the weight of S_i of earlier calls relative to later ones, for a direction
                that averages it over calls.
        """


class Direction(ABC):
    """How the update of a matrix is computed."""

    # Whether it averages its products over replicas in the papers' open step; others get the
    # mean gradient there.
    shares_factors: ClassVar[bool] = False
    # Whether error feedback subtracts from M what a step has used; others use all of M.
    feeds_back: ClassVar[bool] = False
    # Its state, beside the table of curvadion.plan.state.
    state_keys: ClassVar[tuple[StateKey, ...]] = ()
    # Whether ``begin`` adds the gradients to momenta; otherwise momenta hold them by then.
    adds_gradients: ClassVar[bool] = False
    # Whether it reads and writes momenta by open_shards alone, so that they may be in 8 bits. A
    # direction that feeds back needs more bits: it takes small parts from large momenta.
    opens_momenta: ClassVar[bool] = False
    # Whether a step can be recorded in a CUDA graph: its work follows from tensors and from
    # numbers that reach kernels by tables or ``from_host``, and the host reads no result. A
    # subclass declares it anew, because a graph would keep what it has added as it was.
    capturable: ClassVar[bool] = False
    # Whether momentum alignment keeps S over openings for it.
    keeps_spectrum: ClassVar[bool] = False

    def create_state(self, X: Tensor, options: Mapping[str, Any]) -> dict[str, Tensor]:
        """Create its state of a parameter, by key; options: the group."""
        return {}

    def state_shapes(self, X: Tensor, options: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """The global shapes of :meth:`create_state`; override it if its tensors are large."""
        state = self.create_state(X, options)
        return {key: tuple(tensor.shape) for key, tensor in state.items()}

    def measures(self, matrices: Sequence[Matrix]) -> bool:
        """Whether :meth:`begin` takes ``mode.lengths`` of these matrices of a stack."""
        return False

    def obstacle(self, m: Matrix) -> str | None:
        """Why a step of this matrix cannot be recorded, if ``capturable``; None if it can."""
        return None

    def begin(self, plan: Plan, tensors: StepTensors, mode: StepMode) -> Any:
        """Begin the step of a batch, such as its exchanges in the replica.

        They run during the products of the batch before it. With ``adds_gradients``, this or
        :meth:`step` adds the gradients to M.

        Args:
            plan: of the batch.
            tensors: weights, momenta and gradients of the batch's parameters.
            mode: what else a step depends on.

        Returns:
            What :meth:`step` gets as ``begun``.
        """

    @abstractmethod
    def step(self, plan: Plan, tensors: StepTensors, begun: Any, mode: StepMode) -> Directions:
        """Update X and M; collective over the shards.

        M holds the gradients already, unless ``adds_gradients``. Change X by
        :func:`curvadion.update.moving.move` alone, which calls update hooks, and after M, so
        that these see the new momentum. Pass ``mode.moves`` to the
        operations of curvadion.ops that write, or write under ``ops.put_back(mode.moves,
        ...)``: a flag on the device may cancel the step.

        Args:
            plan: of the batch.
            tensors: weights, momenta and gradients of the batch's parameters.
            begun: what :meth:`begin` returned.
            mode: what else a step depends on.

        Returns:
            The directions, for corrections at an opening.
        """
