"""The interface of an inner optimizer: the optimizer of one replica and its shards."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from curvadion.comm.groups import Group
from curvadion.layout.matrix import Options
from curvadion.optim.checkpoint import Record
from curvadion.plan.parameter import Parameter, States
from curvadion.plan.plan import Plan, StepTensors
from curvadion.plan.state import StateKey
from curvadion.sync.base import Step, Sync
from curvadion.update.update_hooks import UpdateHook


class Inner(Protocol):
    """The optimizer of one replica, around which :class:`ReplicaOptimizer` synchronises.

    It knows groups, states and the steps of its own weights, and never hears of other
    replicas: the sync may replace its gradients and average its weights. Only a step that the
    sync takes with ``over_replicas=True`` has means over replicas inside its products.

    Attributes:
        param_groups: as in torch.
        defaults: as in torch.
        state: as in torch, for checkpoint tools; it may be a copy, where ``states`` is live.
        runs_ahead: whether a flag on the device can cancel its step, so that the host need not
            know first whether gradients are finite.
        update_hooks: what is called before matrices move, by the numbers of handles.
    """

    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]
    state: Any
    runs_ahead: bool
    update_hooks: OrderedDict[int, UpdateHook]

    @property
    def directed(self) -> bool:
        """Whether a local step moves matrices along directions, which syncs can correct."""

    @property
    def names(self) -> Sequence[str]:
        """What to call it in a ``repr``; empty if its owner's class says it."""

    # --- groups and states

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; change nothing and raise if it is invalid."""

    @property
    def states(self) -> States:
        """The live states of parameters, with those of the sync."""

    @property
    def state_count(self) -> int:
        """A number of states that changes if some are added or removed."""

    @property
    def planned_groups(self) -> Sequence[dict[str, Any]]:
        """The groups from which plans are built, each with an ``algorithm``."""

    @property
    def compared_groups(self) -> Sequence[Options]:
        """The groups with only those keys that must be equal on all replicas."""

    @property
    def choices(self) -> Mapping[str, object]:
        """What else must be equal on all replicas, by name in errors."""

    def state_keys(self, sync: Sync) -> tuple[StateKey, ...]:
        """The state keys that are not in the table of curvadion.plan.state."""

    def check_groups(self) -> None:
        """Raise ValueError for an invalid value of a group."""

    def check_plan(self, plan: Plan, replicas: Group | None, *, begun: bool) -> None:
        """Raise ValueError if it cannot step these parameters.

        Args:
            plan: new, of its groups.
            replicas: the group of a fixed number of replicas, over which a parameter's mesh may
                extend; None without one.
            begun: whether the run has taken a step.
        """

    def create_state(self, p: Parameter) -> None:
        """Create the state that a parameter needs before its first step."""

    def put_state(self, p: Parameter, key: str, value: Any) -> None:
        """Set or add an entry of a parameter's state."""

    # --- a step

    def step_of(self, plan: Plan, tensors: StepTensors, step_index: int, **fields: Any) -> Step:
        """A step of its parameters, which is not taken yet.

        Args:
            plan: of the parameters.
            tensors: weights, momenta and gradients of the plan's matrices.
            step_index: the number of earlier steps.
            fields: further fields of :class:`Step`.
        """

    def register_update_hook(self, hook: UpdateHook) -> RemovableHandle:
        """Let a hook see and change updates of matrices; TypeError if it cannot."""

    def take_no_step(self) -> None:
        """Create states as a step without gradients and learning rate would."""

    @property
    def evaluates_states(self) -> bool:
        """Whether :meth:`eval` computes weights from states, which replicas must then share."""

    def eval(self) -> None:
        """Prepare the weights for an evaluation; replicas are synchronised."""

    def train(self) -> None:
        """Undo :meth:`eval`."""

    # --- checkpoints

    def undo_of_load(self) -> Callable[[], None]:
        """A function that makes groups and states what they are now, after :meth:`load`."""

    def load(self, saved: Mapping[str, Any], record: Record, sync: Sync) -> None:
        """Load groups and states; ValueError if they do not fit.

        A parameter that is frozen and has no saved state keeps its own: tools save none.

        Args:
            saved: a ``state_dict()`` of :class:`ReplicaOptimizer`.
            record: the one in it.
            sync: of this optimizer.
        """


def without_addresses(text: str) -> str:
    """A repr without the addresses of objects, which differ between ranks."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def undo_of_loads(optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """A function that makes groups and states of torch's optimizers what they are now."""
    # load_state_dict() replaces both, and changes no tensor.
    present = [(optimizer, optimizer.state, optimizer.param_groups) for optimizer in optimizers]

    def undo() -> None:
        for optimizer, state, param_groups in present:
            optimizer.state = state
            optimizer.param_groups = param_groups

    return undo


def load_unless_frozen(
    optimizer: Optimizer, state_dict: dict[str, Any], left_out: Sequence[StateKey] = ()
) -> None:
    """``optimizer.load_state_dict``, but frozen parameters without a saved state keep theirs.

    Args:
        optimizer: of torch's kind.
        state_dict: in torch's packed form.
        left_out: keys that they do not keep.
    """
    earlier: MutableMapping[Tensor, Any] = optimizer.state
    optimizer.load_state_dict(state_dict)
    dropped = {key.name for key in left_out}
    for group in optimizer.param_groups:
        for X in group["params"]:
            if not X.requires_grad and X in earlier and not optimizer.state.get(X):
                kept = {key: value for key, value in earlier[X].items() if key not in dropped}
                optimizer.state[X] = kept


def trained(param_groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """The trained parameters in the order of a plan, Dion's first; all if none is yet."""
    groups = sorted(param_groups, key=lambda group: group.get("algorithm", "dion") != "dion")
    X = [x for group in groups for x in group["params"]]
    return [x for x in X if x.requires_grad] or X
