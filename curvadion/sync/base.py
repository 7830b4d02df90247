"""The interface of a sync kind: how replicas synchronise when the gate opens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch.distributed as dist
from torch import Tensor

from curvadion.comm.background import Background, no_background
from curvadion.update.inner_step import Batch, InnerStep
from curvadion.update.parameter import Parameter
from curvadion.update.plan import Plan
from curvadion.update.state import StateKey


@dataclass(frozen=True)
class Step:
    """A step that ranks have agreed to take.

    Attributes:
        inner: the step of this replica's own, which :meth:`batches` takes.
        replicas: the process group of the replicas; None for one replica.
        local_steps: how many steps replicas took by themselves since they last synchronised.
        background: does exchanges beside the training.
    """

    inner: InnerStep
    replicas: dist.ProcessGroup | None
    local_steps: int = 0
    background: Callable[[], Background] = no_background

    @property
    def plan(self) -> Plan:
        """The parameters."""
        return self.inner.plan

    @property
    def number(self) -> int:
        """How many steps were taken before."""
        return self.inner.number

    def batches(
        self, *parts: Plan, gradients: Mapping[int, Tensor] | None = None, **how: Any
    ) -> Iterator[Batch]:
        """See :meth:`InnerStep.batches`."""
        return self.inner.batches(*parts, gradients=gradients, **how)

    def take(self, **how: Any) -> None:
        """Take all batches, where nothing is to be done with each; how: as of :meth:`batches`."""
        for _ in self.batches(**how):
            pass


class Costs(NamedTuple):
    """What openings send, and how many of them synchronise all weights.

    opening_bytes: of one, on average: bytes of an all-reduce of float32 elements that sends as
    much. So a mean in codes counts its codes once.
    """

    opening_bytes: float
    openings_per_full_sync: int = 1


class Sync(ABC):
    """How replicas synchronise when the gate opens: the outer step. Subclass it for another.

    Each optimizer works with a copy, which remembers how far its run has come.

    Class attributes:
        group_defaults: what None stands for in group keys under this kind. Without the key
            "look_ahead" :meth:`look_ahead` tells that one. "direction" is for full rank: groups of
            another rank_fraction take "low_rank".
        state_keys: what it keeps of each parameter, beside the table of curvadion.update.state.
        sends_codes: whether weights can be synchronised for fewer bytes than an exact average, by
            :meth:`sync_weights`. Codes lose something, so one replica's state cannot stand for
            all, even if weights agree.
        every_step: whether replicas must synchronise at every step. Gates that would close are
            refused.
        message_format: a number that replicas must have in common to read each other's messages.

    Attributes:
        fragments_drifted: how many fragments of the weights have moved since replicas agreed on
            them; the weights are one fragment unless the kind divides them. A kind that sends
            codes sets it in its steps.
        delay: how many steps after an opening its result arrives. If there is one, openings do not
            wait for other replicas, and a replica whose gradient is not finite takes part.
        ends_drift: whether openings end the replicas' drift.
    """

    group_defaults: ClassVar[Mapping[str, Any]] = {
        "direction": "low_rank",
        "rank_fraction": 0.25,
        "right_factor": "column_normalized",
        "look_ahead": 0.0,
    }
    state_keys: ClassVar[tuple[StateKey, ...]] = ()
    sends_codes: ClassVar[bool] = False
    every_step: ClassVar[bool] = False
    message_format: ClassVar[int] = 0
    fragments_drifted: int = 0
    delay: int = 0
    ends_drift: bool = True

    @abstractmethod
    def open_step(self, step: Step) -> None:
        """Take a step at which the gate is open, the same on every replica. Collective."""

    def closed_step(self, step: Step) -> None:
        """Take a step at which the gate is closed; collective inside the replica."""
        step.take()

    def after_load(self) -> None:
        """Note that states and this kind's memory have been loaded."""

    def settle(self) -> None:
        """Wait for what is under way, so that states hold it: for copies and checkpoints."""

    @property
    def waited_seconds(self) -> float:
        """How long steps have waited so far for what was under way."""
        return 0.0

    # ---------------------------------------------------------------- what it costs

    def choose_defaults(self, budget: float | None) -> None:
        """Set what None stands for in the constructor's arguments.

        budget: what the gate allows replicas to send, as a share of dense gradients; None if it
        counts no bytes.
        """

    def prepare(self, shards: Sequence[Sequence[int]]) -> Costs | None:
        """Learn which parameters there are; return what openings send, None if that is unknown.

        shards: elements of each shard of every parameter, in the order of a plan.
        """
        return None

    def look_ahead(self, period: float) -> float:
        """The default of look_ahead; period: steps from one agreement on a weight to the next."""
        return 0.0

    # ---------------------------------------------------------------- around steps

    def begin(self, parameters: Sequence[Parameter]) -> None:
        """Create what this kind keeps of parameters, where it is missing.

        All replicas hold the same weights when this is called for a parameter the first time.
        """

    def sync_weights(self, plan: Plan, replicas: dist.ProcessGroup | None) -> int:
        """Synchronise the weights without a step; return how many openings that was worth.

        Only for kinds that have ``sends_codes``. Collective.
        """
        raise NotImplementedError

    def before_average(self, parameters: Sequence[Parameter]) -> None:
        """Make weights ready for an exact average, such as by adding what codes lost."""

    def after_average(self, parameters: Sequence[Parameter]) -> None:
        """Note that replicas now hold the same weights."""

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold to continue: numbers, strings, lists of these."""
        return {"fragments_drifted": self.fragments_drifted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict()`` of this class."""
        self.fragments_drifted = state["fragments_drifted"]
