"""The interface of a sync: how replicas synchronise when the gate opens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

from curvadion import checks
from curvadion.comm.groups import Group
from curvadion.comm.members import Members
from curvadion.comm.replicas import FixedMembers
from curvadion.gates import shown
from curvadion.plan.parameter import Parameter, States
from curvadion.plan.plan import Plan
from curvadion.plan.state import StateKey
from curvadion.update.inner_step import Batch, InnerStep


@dataclass(frozen=True)
class Step(InnerStep):
    """A step that ranks have agreed to take."""

    members: Members = field(default_factory=FixedMembers)  # the replicas
    local_steps: int = 0  # since replicas last synchronised
    # Keys of states that are not in the table of curvadion.plan.state.
    state_keys: Callable[[], Sequence[StateKey]] = tuple
    ahead: RunsAhead | None = None  # if the host does not wait for the ranks' decision

    @property
    def replicas(self) -> Group | None:
        """The group of a fixed number of replicas; None for one, or if they come and go."""
        return self.members.group if self.members.fixed else None

    def take(self, **how: Any) -> None:
        """Take the local step; how: as in :meth:`batches`."""
        if self.ahead is not None and self.ahead.replay(how):
            return
        for _ in self.batches(**how):
            pass

    def batches(self, *parts: Plan, **how: Any) -> Iterator[Batch]:
        """As :meth:`InnerStep.batches`."""
        if self.ahead is None:
            return super().batches(*parts, **how)
        return self.ahead.decided(self).batches(*parts, **how)


class RunsAhead(Protocol):
    """How a step is taken whose host does not wait to learn if gradients are finite."""

    def decided(self, step: Step) -> Step:
        """The step with its gradients, and with what the ranks decide on the device."""

    def replay(self, how: Mapping[str, Any]) -> bool:
        """Take the whole step, decision included, if it has been recorded."""


class Costs(NamedTuple):
    """What a byte budget must know."""

    opening_bytes: float  # on average; each of n replicas sends 2 (n - 1) / n times this
    openings_per_full_sync: int = 1  # openings that synchronise all weights


class Sync(ABC):
    """How replicas synchronise when the gate opens. Subclass it for your own.

    Each optimizer works on a copy, which keeps the state of its run.

    Class attributes:
        group_defaults: values that replace None in group keys, where they differ from Sync's.
            Without "look_ahead", :meth:`look_ahead` gives it. "direction" is for full rank:
            groups with another rank_fraction use "low_rank".
        state_keys: its state of each parameter, beside the table of curvadion.plan.state.
            "anchor" must hold the last synchronised weights, in float32 or wider.
        sends_codes: whether :meth:`sync_weights` sends less than an exact average, and leaves
            residuals that differ.
        every_step: whether gates may not close.
        message_format: a number that must be equal on all replicas.
        elastic: whether it works with replicas that come and go.
        replays: whether :meth:`catch_up` can apply openings that a replica has missed.
        runs_ahead: whether its local step is only :meth:`Step.take` or :meth:`Step.batches`,
            so that the host need not know yet whether gradients are finite, and a step can be
            captured in a CUDA graph.

    Attributes:
        fragments_drifted: number of fragments that have moved since they were last
            synchronised.
        delay: number of steps from an opening until its result arrives. Above 0, openings do
            not wait for other replicas, and a replica with a non-finite gradient takes part.
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
    elastic: ClassVar[bool] = False
    replays: ClassVar[bool] = False
    runs_ahead: ClassVar[bool] = False
    fragments_drifted: int = 0
    delay: int = 0
    ends_drift: bool = True

    def __repr__(self) -> str:
        return shown(self)

    @abstractmethod
    def open_step(self, step: Step) -> bool:
        """Take a step with the gate open; collective. Return whether replicas synchronised.

        Only members that come and go can fail to.
        """

    def closed_step(self, step: Step) -> None:
        """Take a step with the gate closed; collective inside the replica."""
        step.take()

    def settle(self) -> None:
        """Wait for pending exchanges, so that states contain their results."""

    @property
    def waited_seconds(self) -> float:
        """Seconds that steps have waited for late exchanges."""
        return 0.0

    def diagnose(self, on: bool = True) -> None:
        """Begin or end to measure how well replicas agree, for ``report.diagnostics``.

        Call it on all ranks of a replica; other replicas need not.

        Raises:
            ValueError: if this sync cannot.
        """
        if on:
            raise ValueError(f"{self!r} has no diagnostics: QuantizedAverage has some.")

    def take_diagnostics(self) -> dict[str, float] | None:
        """End a step; return what it has measured. Collective in the replica."""
        return None

    def choose_defaults(self, budget: float | None) -> None:
        """Replace None in arguments; budget: the gate's share of dense gradients."""

    def prepare(self, shards: Sequence[Sequence[int]]) -> None:
        """Note the parameters of a plan; shards: elements of each shard of every parameter."""

    def costs(self, shards: Sequence[Sequence[int]]) -> Costs | None:
        """What an opening sends for parameters like those of :meth:`prepare`, if it is known."""
        return None

    def look_ahead(self, period: float) -> float:
        """The default of look_ahead; period: steps from a weight's opening to the next."""
        return 0.0

    def begin(self, parameters: Sequence[Parameter]) -> None:
        """Create missing state, while replicas hold the same weights or after loading."""

    def after_load(self, states: States) -> None:
        """Bring loaded states, by parameter, into the form in which this sync keeps them."""

    def after_join(self, parameters: Sequence[Parameter], steps: int) -> None:
        """Note that a peer's weights and states replaced these; steps: the peer's."""

    def finish(self, plan: Plan, step: Step) -> None:
        """With members: wait for a pending opening and apply its means."""

    def catch_up(self, plan: Plan, record: Mapping[str, Any]) -> None:
        """Apply an opening that this replica missed, from another replica's record."""
        raise NotImplementedError

    def sync_weights(self, step: Step) -> int:
        """Synchronise weights if ``sends_codes``; return the cost in openings. Collective.

        Args:
            step: the next one, which is not taken here.
        """
        raise NotImplementedError

    def before_average(self, parameters: Sequence[Parameter]) -> None:
        """Prepare weights for an exact average, perhaps by adding residuals."""

    def after_average(self, parameters: Sequence[Parameter]) -> None:
        """Note that replicas now hold the same weights; parameters may have no state yet."""

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: numbers, strings, lists; the same on all ranks."""
        return {"fragments_drifted": self.fragments_drifted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict()`` of this class; raise an error if it is none.

        A KeyError, TypeError or ValueError undoes the optimizer's ``load_state_dict``.
        """
        checks.integer("fragments_drifted", state["fragments_drifted"], 0, checks.LARGEST_COUNTER)
        self.fragments_drifted = state["fragments_drifted"]
