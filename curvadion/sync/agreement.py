"""What the ranks of a run have told each other so far, and what they still have to compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.comm.background import Stopwatch
from curvadion.comm.collectives import group_size
from curvadion.comm.replicas import ReplicaGroup
from curvadion.gates import Gate
from curvadion.sync.decision import (
    Decision,
    Notice,
    Settings,
    Signal,
    decide,
    notice_of,
    refuse,
    settings_of,
    signal_of,
    word_of,
)
from curvadion.sync.told import ANNOUNCED, MEETING, NO_SIGNAL, QUIET, Foreseen, Told
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
    "Another rank has an impossible value in its param_groups, gradients that its replica "
    "cannot average or a loss scale that cannot become smaller, and raises the error that names "
    "it: see that rank's output."
)


class Agreement:
    """Asks and answers for one optimizer, on each of its ranks.

    Args:
        replicas: whose ranks agree.
        before: the agreement that this one replaces. What was told to it is still heard, because
            another rank may tell of a change that this one does not know.

    Attributes:
        verified: whether replicas have been compared since the last change of the parameters.
        met: whether all ranks have agreed on a step, so that none has another gate or sync.
        waiting: measures how long was waited for what replicas told each other.
    """

    def __init__(self, replicas: ReplicaGroup, before: Agreement | None = None) -> None:
        self._replicas = replicas
        self.verified = False
        self.met: bool = before is not None and before.met
        self._alike = True  # whether no settings but this rank's have been seen and not told
        self._checksum = Checksum()
        self._watch: GradientWatch | None = None
        self._unread: Tensor | None = None  # the watch's last look, on the device
        self.waiting = Stopwatch()
        told: Sequence[Told] = () if before is None else before._told
        self._told: list[Told] = [each._replace(stale=True) for each in told]
        self._announced = False
        self._signal: Signal | None = None  # of the last step that all ranks heard of
        self._unheard: list[object] = []  # keeps what is sent until others hear it

    def forget_signal(self) -> None:
        """Let no step be decided by the last signal."""
        self._signal = None

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
        foreseen: Foreseen,
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
            foreseen: what is known of this step, after :meth:`hear`.
            steps: how many steps were taken before.
            param_groups: whose settings must be the same on all ranks.
            listing: all that must be the same, for errors that say what differs.

        Raises:
            RuntimeError: if ranks differ, or another rank has an impossible setting.
        """
        notice = self._notice(
            foreseen, stuck=stuck, changed=changed, still=still, uneven=uneven and foreseen.heard
        )
        ask = partial(decide, gate, plan, gradients, momenta)
        settings = Settings(steps, self._checksum.of(param_groups))
        inside = None
        if not foreseen.heard:
            inside = ask(notice=notice, settings=settings, group=plan.inside)
            self._alike &= inside.alike  # told when the others listen
            self._tell(inside, settings, plan, foreseen)
            if inside.notice in (*QUIET, Notice.STUCK, Notice.DIFFERENT):
                return inside
            # All ranks must be here. Under a late gate this tells whether they are; under a
            # schedule those that are not come when they next agree.
            self.hear(plan, listing, until=steps + foreseen.delay)
            notice = inside.notice
        else:
            self._announce(Notice.UNVERIFIED, settings, plan, foreseen)
        unread, self._unread = self._unread, None
        decision = ask(notice=notice, settings=settings, group=plan.all_ranks, unread=unread)
        self._conclude(decision, plan, listing)
        self.met = True
        if (foreseen.heard or foreseen.late) and decision.finite:
            # That of an opening which was skipped would be 0: the one before counts once more.
            tells = foreseen.late and not (decision.notice == Notice.NEW and decision.all_zero)
            self._signal = signal_of(decision.signal_word, plan) if tells else None
        return decision if inside is None else _of_one_replica(decision, inside, first=steps == 0)

    def _tell(self, inside: Decision, settings: Settings, plan: Plan, foreseen: Foreseen) -> None:
        """Tell the other replicas what this one has to say, if they hear it later."""
        quiet = inside.notice in QUIET
        if not self.met:  # another rank may have another gate, and tell nothing; all meet now
            return
        if foreseen.late:
            # Of all notices the highest is heard, so one that wants an answer must be above none.
            notice = inside.notice if quiet else max(inside.notice, Notice.UNVERIFIED)
            # The largest is heard: it is below 0 if no replica told a signal.
            signal = inside.signal_word if quiet else NO_SIGNAL
        elif foreseen.delay and (foreseen.opens or not quiet):
            notice, signal = Notice.NOTHING if quiet else inside.notice, None
        else:
            return
        steps = settings.steps
        told = word_of(notice, settings), signal, steps, steps + foreseen.delay
        self._told.append(Told.begin(*told, plan, foreseen.background()))
        self._told.sort(key=lambda each: each.due)  # the gate may have changed in between

    def _announce(self, notice: Notice, settings: Settings, plan: Plan, foreseen: Foreseen) -> None:
        """Tell the others that this rank meets them, if it may be the only one that knows.

        They need not be there: a state may have been loaded here that opens the gate.
        """
        others = self._replicas.size > 1 and self.met
        self._announced = foreseen.late and not self.verified and others
        if self._announced:
            word, steps = word_of(notice, settings), settings.steps
            Told.begin(word, ANNOUNCED, steps, steps, plan, foreseen.background())

    def _notice(
        self, foreseen: Foreseen, *, stuck: bool, changed: bool, still: bool, uneven: bool
    ) -> Notice:
        """The most urgent of what this rank has to tell."""
        if stuck and (foreseen.opens or foreseen.late):
            return Notice.STUCK
        listening = foreseen.heard or foreseen.opens or foreseen.late
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

    def refuse(self, gate: Gate, plan: Plan, foreseen: Foreseen, *, steps: int) -> None:
        """Tell the other ranks that a setting here is impossible, where they listen next."""
        if foreseen.heard:
            self._announce(Notice.INVALID, Settings(steps, 0), plan, foreseen)
            refuse(gate, plan, plan.all_ranks)
            return
        refuse(gate, plan, plan.inside)
        if not self.met:
            refuse(gate, plan, plan.all_ranks)
            return
        # The others listen later. This rank raises its error without waiting.
        word = word_of(Notice.INVALID, Settings(steps, 0))
        if foreseen.delay:
            signal = 0 if foreseen.late else None
            Told.begin(word, signal, steps, steps, plan, foreseen.background())
        else:
            words = torch.tensor([0, word], device=plan.device)
            work = dist.all_reduce(words, op=dist.ReduceOp.MAX, group=plan.all_ranks, async_op=True)
            self._unheard.append((work, words))

    @property
    def signal(self) -> Signal | None:
        """The largest at the last step that tells it, None if none does; waits for it."""
        for told in reversed(self._told):
            if told.signal is not None and not told.stale:
                with self.waiting:
                    largest, signal = told.heard(None)
                _check_alone(told, largest, signal)
                return signal_of(signal, told.plan)
        return self._signal

    def hear(self, plan: Plan, listing: Callable[[], Listing], *, until: int) -> bool:
        """Take in what replicas told, as far as it is due at a step; alike on all.

        Returns whether others wait for this rank, because of something that it did not tell.

        Raises:
            RuntimeError: if ranks differ, or another rank has an impossible setting.
        """
        awaited = False
        while self._told and self._told[0].due <= until:
            told = self._told.pop(0)
            with self.waiting:
                largest, other = told.heard(plan.inside)
            notice = notice_of(largest)
            if notice == Notice.STUCK:
                raise RuntimeError(_STUCK)
            if notice == Notice.INVALID:
                raise RuntimeError(_INVALID)
            if told.signal is None:
                _compare_words(told, largest, -other, plan, listing)
                continue
            if notice == Notice.DIFFERENT:
                raise_different(listing(), plan.all_ranks)
            if other == ANNOUNCED:
                awaited = True
                self._alike = False
                continue
            _check_alone(told, largest, other)
            if told.stale or told.needs_answer:
                continue
            self._signal = signal_of(other, told.plan)
            self._alike &= settings_of(largest) == settings_of(told.word)
        return awaited

    def verify(
        self, plan: Plan, listing: Listing, comparable: Sequence[Parameter], *, uneven: bool
    ) -> bool:
        """Compare the replicas; return whether all of them have all gradients, and none is uneven.

        comparable: the parameters of which replicas should hold the same weights now. uneven: as
        :meth:`decide` takes it.
        """
        # Ranks that have announced nothing would wait for what the others have.
        listing = [*listing, ("whether a state has just been loaded", repr(self._announced))]
        self.verified, complete = verify_replicas(
            plan, listing, comparable, replicas=self._replicas.process_group, uneven=uneven,
            own_norms=self._replicas.own_norms,
        )  # fmt: skip
        return complete

    def look_at_gradients(self, plan: Plan, number: int) -> int:
        """Look now and then whether something else averages gradients; return the bytes sent.

        They are those of all ranks of a replica, as if they were sent over the replicas alone. The
        next step reads what this look tells. number: as :meth:`GradientWatch.look` takes it.
        """
        if self._replicas.size == 1:
            return 0
        if self._watch is None:
            self._watch = GradientWatch(plan)
        self._unread = self._watch.look(number)
        if self._unread is None:
            return 0
        # n ranks, n / N of a replica: n / N * 2 (n - 1) / n of the bytes, of 2 (N - 1) / N.
        n, N = group_size(plan.all_ranks), self._replicas.size
        return GradientWatch.BYTES * (n - 1) // (N - 1)


def _compare_words(
    told: Told, largest: int, smallest: int, plan: Plan, listing: Callable[[], Listing]
) -> None:
    """Raise RuntimeError if replicas told different words at an opening; alike on all ranks."""
    if notice_of(largest) == Notice.DIFFERENT:
        raise RuntimeError(
            f"The ranks of some replica had different settings at step {told.step + 1}: "
            f"give all ranks the same values in param_groups."
        )
    if notice_of(largest) != notice_of(smallest):
        raise RuntimeError(_alone(told))
    if largest != smallest:
        raise_different(listing(), plan.all_ranks)


def _check_alone(told: Told, largest: int, signal: int) -> None:
    """Raise RuntimeError if some replicas told something for which all must meet, and some not."""
    wanted = notice_of(largest) in MEETING
    if signal != ANNOUNCED and wanted and not (told.needs_answer and signal == NO_SIGNAL):
        raise RuntimeError(_alone(told))


def _alone(told: Told) -> str:
    return (
        f"Parameters were added, frozen or regrouped, or a checkpoint was loaded, on some ranks "
        f"only: at step {told.step + 1} this one and others told different things. Do it on all "
        f"ranks before the same step."
    )


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
