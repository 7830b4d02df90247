"""What the ranks of all replicas have agreed on, from one step to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from curvadion.agreement.meeting import Meeting, begin_comparison, compare, meet
from curvadion.agreement.verify import (
    OTHER_GRADIENTS,
    Listing,
    Settings,
    lack_the_same_gradients,
    listing,
    verify_replicas,
)
from curvadion.comm.collectives import checksum
from curvadion.comm.exchange_thread import Exchange
from curvadion.comm.replicas import ReplicaGroup
from curvadion.gates import Gate
from curvadion.layout.matrix import Options
from curvadion.ops.page import Live, Page
from curvadion.plan.parameter import Parameter
from curvadion.plan.plan import MomentumNorms, Plan, StepTensors


class Terms(Protocol):
    """What must be equal on all replicas, besides the parameters: an optimizer's."""

    @property
    def gate(self) -> Gate:
        """The gate, which asks all ranks for a signal if it reads momenta."""

    @property
    def compared_groups(self) -> Sequence[Options]:
        """The groups with those keys that must be equal."""

    @property
    def choices(self) -> Mapping[str, object]:
        """All other settings, and the states of gate and sync, by name in errors."""

    @property
    def counters(self) -> tuple[int, ...]:
        """The progress of the run."""


class Agreement:
    """What ranks have agreed on, and what they still owe each other.

    Its methods take the :class:`Terms` of the optimizer, which may change between calls.

    Args:
        replicas: the ranks with replicas.

    Attributes:
        verified: whether replicas have been compared since something may have made them
            differ. While it is False, each step compares, until gradients are conclusive.
    """

    def __init__(self, replicas: ReplicaGroup) -> None:
        self._replicas = replicas
        self.verified = False
        self._settings = Settings()
        # (the step at which its result is read, a comparison of words)
        self._delayed: list[tuple[int, Exchange[Tensor]]] = []
        self._unread: Meeting | None = None  # the last step's, if the host has not read it

    def settings_changed(self, groups: Sequence[Options]) -> bool:
        """Whether a number or name in a group has changed since the last call."""
        return self._settings.changed(groups)

    def forget_settings(self) -> None:
        """Let the next call of :meth:`settings_changed` return True."""
        self._settings = Settings()

    # --- words

    def word(self, terms: Terms, plan: Plan, *, of_one_replica: bool = False) -> int:
        """A checksum, below 2^32, of everything that must be equal on the ranks that meet.

        Args:
            terms: of the optimizer.
            plan: of the step.
            of_one_replica: whether the ranks of this replica meet, and no others. They hold
                shards of the same parameters, so these must rest on all of them.
        """
        if not self.verified:  # so that w differs between verified ranks and others
            return checksum(("first", self._listing(terms, plan)))
        resting: list[str] = []
        if of_one_replica or self._replicas.size == 1:
            resting = [p.name for p in plan.parameters if p.rests]
        known = self._settings.checksum, plan.checksum, terms.counters, resting
        return checksum((*known, *terms.choices.items()))

    def _listing(self, terms: Terms, plan: Plan) -> Listing:
        """Everything that the word is a checksum of, for an error that names differences."""
        more = {**terms.choices, "progress": terms.counters}
        return listing(terms.compared_groups, plan, more)

    def meet(
        self,
        terms: Terms,
        plan: Plan,
        norms: Tensor,
        tensors: StepTensors,
        momenta: MomentumNorms | None,
        *,
        everyone: bool,
        first: bool,
        page: Page | None = None,
    ) -> Meeting:
        """Start the meeting of a step.

        Args:
            terms: of the optimizer.
            plan: of the step.
            norms: that must be finite, (l,) with l > 0.
            tensors: weights, momenta and gradients of the matrices.
            momenta: their norms; None if the gate reads none.
            everyone: whether all replicas meet, or the ranks of this one.
            first: whether this is the run's first step.
            page: of the step that is recorded, if any: the word differs at every replay.
        """
        word: Callable[[], int] = partial(self.word, terms, plan, of_one_replica=not everyone)
        if page is not None:
            word = partial(Live, page, word)  # type: ignore[assignment]
        return meet(
            terms.gate,
            plan,
            norms,
            tensors,
            momenta,
            word=word,
            listing=partial(self._listing, terms, plan),
            group=plan.all_ranks if everyone else plan.inside,
            first=first,
        )

    # --- openings with a delay, which do not wait for other replicas

    def compare_later(self, terms: Terms, plan: Plan, step: int) -> None:
        """Start to compare this step's words; collective.

        Args:
            terms: of the optimizer.
            plan: of the step.
            step: the one at which :meth:`compare_delayed` may wait for the result.
        """
        thread = self._replicas.members.during_training(plan.device)
        comparison = begin_comparison(self.word(terms, plan), plan, thread)
        self._delayed.append((step, comparison))

    def compare_delayed(self, terms: Terms, plan: Plan, step: int) -> None:
        """Raise RuntimeError on all ranks if replicas differed at an opening that is due.

        Args:
            terms: of the optimizer.
            plan: of the step.
            step: the index of this step.
        """
        while self._delayed and self._delayed[0][0] <= step:
            _, comparison = self._delayed.pop(0)
            words = comparison.result().tolist()
            compare(words, partial(self._listing, terms, plan), plan.all_ranks)

    # --- comparing weights and gradients

    def verify(self, plan: Plan, comparable: Sequence[Parameter], *, delay: int) -> None:
        """Compare weights and gradients of the replicas, before any moves; collective.

        Args:
            plan: of the step.
            comparable: the parameters whose weights, or anchors, must be equal.
            delay: the sync's.

        Raises:
            RuntimeError: on all ranks, if weights differ, or if gradients are equal.
        """
        replicas = self._replicas
        if replicas.fixed and replicas.size > 1:
            self.verified = verify_replicas(plan, comparable, replicas.process_group)
            if delay:  # create its group while all ranks are here
                replicas.members.during_training(plan.device)
            return
        # One replica, or members that come and go, which compare themselves when they meet.
        if not lack_the_same_gradients(plan):
            raise RuntimeError(OTHER_GRADIENTS)
        replicas.members.changed()
        self.verified = True

    # --- steps that are skipped

    def read_later(self, meeting: Meeting) -> None:
        """Let the host read this step's result at the next step."""
        meeting.send()
        self._unread = meeting

    def last_step_was_finite(self) -> bool | None:
        """Whether the last step's gradients were finite; None if the host knows that already."""
        meeting = self._unread
        self._unread = None
        return None if meeting is None else meeting.read().finite
