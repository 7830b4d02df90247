"""The interface of a sync kind: how replicas synchronise when the gate opens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch.distributed as dist

from curvadion.comm.background import Background, no_background
from curvadion.comm.members import Members
from curvadion.update.inner_step import InnerStep
from curvadion.update.parameter import Parameter
from curvadion.update.plan import Plan
from curvadion.update.state import StateKey


@dataclass(frozen=True)
class Step(InnerStep):
    """A step that ranks have agreed to take; :meth:`batches` takes this replica's own."""

    replicas: dist.ProcessGroup | None = None  # None for one replica
    local_steps: int = 0  # that replicas took by themselves since they last synchronised
    background: Callable[[], Background] = no_background  # does exchanges beside the training
    members: Members | None = None  # the replicas, where they come and go
    # Those of states beside the table of curvadion.update.state.
    state_keys: Callable[[], Sequence[StateKey]] = tuple

    def take(self, **how: Any) -> None:
        """Take all batches, where nothing is to be done with each; how: as of :meth:`batches`."""
        for _ in self.batches(**how):
            pass


class Costs(NamedTuple):
    """What openings send, and how many of them synchronise all weights."""

    # Of one opening, on average: the bytes of a tensor whose ring all-reduce sends as much, which
    # is 2 (n - 1) / n times these for each of n replicas.
    opening_bytes: float
    openings_per_full_sync: int = 1


class Sync(ABC):
    """How replicas synchronise when the gate opens: the outer step. Subclass it for your own.

    Each optimizer works on a copy, which keeps the state of its run.

    Class attributes:
        group_defaults: what None stands for in group keys, if that differs from Sync's. Without
            "look_ahead" :meth:`look_ahead` gives that default. "direction" is for full rank: groups
            with another rank_fraction use "low_rank".
        state_keys: what it stores for each parameter, in addition to the table of
            curvadion.update.state. A state "anchor" holds the weights that replicas last agreed on;
            ranks compare it.
        sends_codes: whether :meth:`sync_weights` sends less than an exact average. Codes are lossy,
            so one replica's state cannot represent all, even if weights are identical.
        every_step: whether replicas must synchronise at every step: gates may not close.
        message_format: a number that must be the same on all replicas for them to read each other's
            messages.

    Attributes:
        fragments_drifted: how many fragments of the weights have moved since replicas agreed on
            them. Only a kind that divides weights into fragments needs it.
        delay: how many steps after an opening its result arrives. Above 0 openings do not wait for
            other replicas, and a replica whose gradient is not finite takes part.
        ends_drift: whether openings end the replicas' drift.
        elastic: whether it works with replicas that come and go.
        replays: whether a replica that is late can apply what it has missed (:meth:`catch_up`).
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
    elastic: ClassVar[bool] = False
    replays: ClassVar[bool] = False
    fragments_drifted: int = 0
    delay: int = 0
    ends_drift: bool = True

    @abstractmethod
    def open_step(self, step: Step) -> bool | None:
        """Take a step at which the gate is open, the same on every replica. Collective.

        Returns False if replicas that come and go did not synchronise: the next step tries again.
        """

    def closed_step(self, step: Step) -> None:
        """Take a step at which the gate is closed; collective inside the replica."""
        step.take()

    def after_load(self) -> None:
        """Note that states and this kind's memory have been loaded."""

    def settle(self) -> None:
        """Wait for exchanges under way, so that states contain them, for copies and checkpoints."""

    @property
    def waited_seconds(self) -> float:
        """How long steps have waited so far for what was under way."""
        return 0.0

    def choose_defaults(self, budget: float | None) -> None:
        """Replace None in the constructor's arguments by defaults.

        budget: the gate's, as a share of dense gradients; None if it counts no bytes.
        """

    def prepare(self, shards: Sequence[Sequence[int]]) -> Costs | None:
        """Learn how many elements each shard of every parameter has, in the order of a plan.

        Returns what openings send, or None if that is unknown.
        """
        return None

    def look_ahead(self, period: float) -> float:
        """The default of look_ahead; period: steps from one agreement on a weight to the next."""
        return 0.0

    def begin(self, parameters: Sequence[Parameter]) -> None:
        """Create the missing state of parameters, whose weights are identical on all replicas.

        Called before a first step, and again whenever there are new parameters or loaded states.
        """

    def after_join(self, parameters: Sequence[Parameter], steps: int) -> None:
        """Note that weights, states and memory are another replica's, after so many steps."""

    def finish(self, plan: Plan, step: Step) -> None:
        """Wait for an opening under way, where replicas come and go, and apply its means."""

    def catch_up(self, plan: Plan, record: Mapping[str, Any]) -> None:
        """Apply an opening that this replica has missed, from another replica's record of it."""
        raise NotImplementedError

    def sync_weights(
        self, plan: Plan, replicas: dist.ProcessGroup | None, keys: Sequence[StateKey]
    ) -> int:
        """Synchronise weights, for ``sends_codes``; collective. Returns the cost, in openings.

        keys: of states in addition to the table of curvadion.update.state.
        """
        raise NotImplementedError

    def before_average(self, parameters: Sequence[Parameter]) -> None:
        """Make weights ready for an exact average, such as by adding what codes lost."""

    def after_average(self, parameters: Sequence[Parameter]) -> None:
        """Note that replicas now hold the same weights; parameters may have no state yet."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold: numbers, strings, lists; the same on all ranks."""
        return {"fragments_drifted": self.fragments_drifted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict()`` of this class."""
        self.fragments_drifted = state["fragments_drifted"]
