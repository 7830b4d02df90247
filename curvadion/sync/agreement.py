"""What the ranks of a run have told each other so far, and what they still have to compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.comm.background import Background, Exchange
from curvadion.comm.replicas import ReplicaGroup
from curvadion.gates import Gate
from curvadion.sync.decision import Decision, Notice, Settings, decide, notice_of, refuse, word_of
from curvadion.sync.verify import (
    Checksum,
    GradientWatch,
    Listing,
    raise_different,
    verify_replicas,
)
from curvadion.update.gradients import Gradients
from curvadion.update.momentum import MomentumNorms
from curvadion.update.parameter import Parameter
from curvadion.update.plan import Plan

_STUCK = (
    "Some replica had a NaN or an Inf in a gradient at each of its last steps, too many in a row, "
    "and has left these out: reports and warnings of its ranks tell. Lower the learning rate or "
    "look for the cause in the model, then load the last checkpoint."
)


_INVALID = (
    "Another rank has an impossible value in its param_groups and raises the error that names it: "
    "see that rank's output."
)


class Told(NamedTuple):
    """What replicas told each other at an opening, heard later: 16 bytes.

    step: the opening. due: the step at which it is heard.
    """

    step: int
    due: int
    exchange: Exchange[Tensor]

    @classmethod
    def begin(
        cls, word: int, step: int, due: int, background: Background, device: torch.device
    ) -> Told:
        """Tell the other replicas a word."""
        bounds = torch.tensor([word, -word], device=device)

        def exchange() -> Tensor:
            dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=background.group)
            return bounds

        what = f"What replicas tell each other at step {step + 1}"
        return cls(step, due, background.begin(what, exchange))

    def bounds(self, inside: dist.ProcessGroup | None) -> tuple[int, int]:
        """The largest and the smallest word of any rank; waits for it. Collective inside."""
        bounds = self.exchange.result()
        if inside is not None:
            dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=inside)
        largest, smallest = bounds.tolist()
        return largest, -smallest


class Agreement:
    """Asks and answers for one optimizer, on each of its ranks.

    Attributes:
        verified: whether replicas have been compared since the last change of the parameters.
    """

    def __init__(self, replicas: ReplicaGroup) -> None:
        self._replicas = replicas
        self.verified = False
        self._alike = True  # whether no settings but this rank's have been seen and not told
        self._checksum = Checksum()
        self._watch: GradientWatch | None = None
        self._unread: Tensor | None = None  # the watch's last look, on the device
        self._told: list[Told] = []
        self._unheard: list[object] = []  # keeps what is sent until others hear it

    def follow(self, plan: Plan) -> None:
        """Begin anew with the gradients of another plan."""
        self._watch = self._unread = None

    def decide(
        self,
        gate: Gate,
        plan: Plan,
        gradients: Gradients,
        momenta: MomentumNorms | None,
        *,
        changed: bool,
        still: bool,
        uneven: bool,
        stuck: bool,
        opens: bool,
        heard: bool,
        delay: int,
        background: Callable[[], Background],
        steps: int,
        param_groups: Sequence[Mapping[str, Any]],
        listing: Callable[[], Listing],
    ) -> Decision:
        """What ranks know of this step before it is taken; a user's error is raised on all.

        All ranks of all replicas agree, or those of this replica, if the others need not be heard.
        A rank that cannot go on alone tells so at once: the others hear it when they next agree.

        Args:
            gate: whose signal travels along.
            plan: of the last step.
            gradients: of its matrices.
            momenta: their norms if the gate reads them.
            changed: whether the parameters are no longer those of the plan here.
            still: whether states have just been created here, and all learning rates are zero.
            uneven: whether replicas may have taken other steps since they last agreed.
            stuck: whether this replica has left out too many steps in a row.
            opens: whether replicas are known to come together at this step.
            heard: whether the other replicas must be heard before.
            delay: how many steps later they are heard where they need not be heard before.
            background: sends what is heard later.
            steps: how many steps were taken before.
            param_groups: whose settings must be the same on all ranks.
            listing: all that must be the same, for errors that say what differs.

        Raises:
            RuntimeError: if ranks differ, or another rank has an impossible setting.
        """
        self._hear(plan, listing, until=steps)
        notice = self._notice(
            stuck=stuck and opens,
            listening=heard or opens,
            changed=changed,
            still=still,
            uneven=uneven and heard,
        )
        ask = partial(decide, gate, plan, gradients, momenta)
        settings = Settings(steps, self._checksum.of(param_groups))
        inside = None
        if not heard:
            inside = ask(notice=notice, settings=settings, group=plan.inside)
            self._alike &= inside.alike  # told when the others listen
            quiet = inside.notice in (Notice.NOTHING, Notice.MISSING_GRADIENT)
            if delay and (opens or not quiet):
                word = word_of(Notice.NOTHING if quiet else inside.notice, settings)
                self._told.append(Told.begin(word, steps, steps + delay, background(), plan.device))
            if quiet or (opens and inside.notice == Notice.STUCK):
                return inside
            # All ranks must be here; those that are not say so when they hear of it.
            self._hear(plan, listing, until=steps + delay)
            notice = inside.notice
        unread, self._unread = self._unread, None
        decision = ask(notice=notice, settings=settings, group=plan.all_ranks, unread=unread)
        self._conclude(decision, plan, listing)
        return decision if inside is None else _of_one_replica(decision, inside, first=steps == 0)

    def _notice(
        self, *, stuck: bool, listening: bool, changed: bool, still: bool, uneven: bool
    ) -> Notice:
        """The most urgent of what this rank has to tell; listening: whether others will hear it."""
        if stuck:
            return Notice.STUCK
        if not self._alike and listening:
            return Notice.DIFFERENT
        if changed:
            return Notice.CHANGED
        if still:
            return Notice.NEW
        if not self.verified and self._replicas.size > 1:
            return Notice.UNVERIFIED
        return Notice.MISSING_GRADIENT if uneven else Notice.NOTHING

    def _conclude(self, decision: Decision, plan: Plan, listing: Callable[[], Listing]) -> None:
        """Take in what all ranks have told; raise on all what concerns all."""
        self._alike = decision.alike
        if decision.notice == Notice.STUCK:
            raise RuntimeError(_STUCK)
        if decision.notice == Notice.INVALID:
            raise RuntimeError(_INVALID)
        if decision.notice == Notice.DIFFERENT:
            raise_different(listing(), plan.all_ranks)
        if self._watch is not None and decision.read:
            self._watch.conclude(decision.read)

    def refuse(
        self,
        gate: Gate,
        plan: Plan,
        *,
        heard: bool,
        delay: int,
        background: Callable[[], Background],
        steps: int,
    ) -> None:
        """Tell the other ranks that a setting here is impossible, where they listen next."""
        if heard:
            refuse(gate, plan, plan.all_ranks)
            return
        # The others listen at their next opening. This rank raises its error without waiting.
        refuse(gate, plan, plan.inside)
        word = word_of(Notice.INVALID, Settings(steps, 0))
        if delay:
            Told.begin(word, steps, steps, background(), plan.device)
        else:
            words = torch.tensor([0, word], device=plan.device)
            work = dist.all_reduce(words, op=dist.ReduceOp.MAX, group=plan.all_ranks, async_op=True)
            self._unheard.append((work, words))

    def _hear(self, plan: Plan, listing: Callable[[], Listing], *, until: int) -> None:
        """Take in what replicas told at openings, as far as it is due at a step; alike on all."""
        while self._told and self._told[0].due <= until:
            told = self._told.pop(0)
            largest, smallest = told.bounds(plan.inside)
            if notice_of(largest) == Notice.STUCK:
                raise RuntimeError(_STUCK)
            if notice_of(largest) == Notice.INVALID:
                raise RuntimeError(_INVALID)
            if notice_of(largest) == Notice.DIFFERENT:
                raise RuntimeError(
                    f"The ranks of some replica had different settings at step {told.step + 1}: "
                    f"give all ranks the same values in param_groups."
                )
            if notice_of(largest) != notice_of(smallest):
                raise RuntimeError(
                    f"Parameters were added, frozen or regrouped, or a checkpoint was loaded, on "
                    f"some ranks only: at step {told.step + 1} this one and others told different "
                    f"things. Do it on all ranks before the same step."
                )
            if largest != smallest:
                raise_different(listing(), plan.all_ranks)

    def verify(
        self, plan: Plan, listing: Listing, comparable: Sequence[Parameter], *, uneven: bool
    ) -> bool:
        """Compare the replicas; return whether all of them have all gradients, and none is uneven.

        comparable: the parameters of which replicas should hold the same weights now. uneven: as
        :meth:`decide` takes it.
        """
        self.verified, complete = verify_replicas(
            plan, listing, comparable, replicas=self._replicas.process_group, uneven=uneven
        )
        return complete

    def look_at_gradients(self, plan: Plan, number: int) -> int:
        """Look now and then whether something else averages gradients; return the bytes sent.

        The next step reads what this look tells. number: as :meth:`GradientWatch.look` takes it.
        """
        if self._replicas.size == 1:
            return 0
        if self._watch is None:
            self._watch = GradientWatch(plan)
        self._unread = self._watch.look(number)
        return 0 if self._unread is None else GradientWatch.BYTES


def _of_one_replica(everywhere: Decision, inside: Decision, *, first: bool) -> Decision:
    """What a replica makes of a step of its own on which all ranks have agreed.

    Others' gradients do not concern it: the step is that of a run in which nobody had anything to
    tell. Replicas are compared once all gradients are finite. The first step is not taken before,
    because weights can be compared only where no replica has moved.
    """
    if first or everywhere.finite:
        return everywhere._replace(group=inside.group)
    notice = everywhere.notice
    if notice in (Notice.NEW, Notice.UNVERIFIED):
        notice = Notice.MISSING_GRADIENT
    return everywhere._replace(finite=inside.finite, notice=notice, group=inside.group)
