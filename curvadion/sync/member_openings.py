"""Averages of weights in coded means, and openings of members that come and go.

All present members apply an opening, or none does. If one is lost before all have the means,
residuals are restored and weights stay.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from operator import attrgetter
from typing import Any

from torch import Tensor

from curvadion.comm.exchange_thread import Exchange
from curvadion.comm.groups import Group
from curvadion.comm.members import LOST, Members
from curvadion.layout.dtensor import local
from curvadion.plan.parameter import Parameter
from curvadion.plan.plan import Plan
from curvadion.plan.state import ANCHOR, RESIDUAL
from curvadion.sync import corrections
from curvadion.sync.base import Step, Sync
from curvadion.sync.coded_mean import coded_together, decode_add_, exchanged, moved_since
from curvadion.sync.corrections import Rate, anchor_of, copies_of
from curvadion.sync.in_flight import DUE, UnderWay
from curvadion.update.inner_step import Batch


@dataclass
class _Pending:
    """An opening that is not applied yet, with what to restore if it fails.

    due: the step that adds its means. kept: residuals and their former values. among: the
    number of members, 0 until they have met.
    """

    members: Members
    fragment: int
    due: int
    kept: Sequence[tuple[Tensor, Tensor]]
    rates: Sequence[float]
    record: dict[str, Any]  # what a late member needs
    moved: float = 0.0
    among: int = 0
    agreement: Exchange[Any] | None = None  # with a delay: all have received the means
    # Why it fails; None once the exchanges have ended, or are under way.
    error: str | None = "it was interrupted"


class MemberOpenings(Sync):
    """An average of weights in fragments, also with members that come and go."""

    bits: int
    align_momentum: bool
    polar_correction: bool
    spectrum_decay: float

    def __init__(self) -> None:
        self.next_fragment = 0
        self._fragment_of: list[int] = []  # of each parameter of the plan
        # Sums of learning rates by fragment and group: since the anchor, and as sent.
        self._rates: list[list[float]] = []
        self._sent_rates: list[list[float]] = []
        self._under_way = UnderWay()
        # By fragment: weight of the steps since the anchor, members of the last mean.
        self._moved: list[float] = []
        self._among: list[int] = []
        self._pending: _Pending | None = None
        self._joined_at = 0  # the step at which this replica took over another's state

    @abstractmethod
    def _step(self, step: Step, sending: int | None) -> None:
        """Take a local step, add the means that are due, and send a fragment."""

    @property
    def count(self) -> int:
        """The number of fragments, at most one for each parameter."""
        return max(self._fragment_of, default=0) + 1

    def _rotate_from(self, fragment: int) -> None:
        self.next_fragment = (fragment + 1) % self.count

    def _count(self, step: Step) -> None:
        """Add a step and its learning rates to each fragment's sums."""
        self.fragments_drifted = self.count
        if step.members is not None and not step.rests:
            self._moved = [moved + step.members.weight for moved in self._moved]
        rates = {g: float(group["lr"]) for g, group in step.plan.groups.items()}
        for sums in self._rates:
            sums.extend([0.0] * (max(rates, default=-1) + 1 - len(sums)))
            for g, rate in rates.items():
                sums[g] += rate

    def open_with(self, members: Members, step: Step) -> bool:
        """Step, then apply an opening if all members can; else restore residuals."""
        plan, fragment = step.plan, self.next_fragment
        if not step.rests:
            self._count(step)
        if not self.delay:  # an error may have ended the last opening early
            self._commit()
        batches = self._batches_of(step, fragment)
        members.meet()
        if members.fresh or self.next_fragment != fragment:  # took over, or caught up
            fragment, batches = self.next_fragment, []
        go = self._of_fragment(plan, fragment)
        batches = batches or [Batch(go, chosen, None) for chosen in go.batches]
        residuals = [local(p.state[RESIDUAL]) for p in go.parameters]
        kept = [(residual, residual.clone()) for residual in residuals]
        due = (self._joined_at if members.fresh else step.step_index) + self.delay
        record: dict[str, Any] = {"fragment": fragment, "directed": step.directed}
        pending = _Pending(members, fragment, due, kept, self._rates[fragment], record)
        self._pending, codes = pending, list[list[Tensor]]()
        try:
            share = self._weigh(pending, max(plan.groups, default=-1) + 1)
            if self.delay:
                for batch in batches:
                    self._under_way.send(batch.plan.parameters, self.bits, members, due, share)
                exchanges = [sent.exchange for sent in self._under_way.pending]

                def end() -> None:
                    for exchange in exchanges:  # already done: the thread works in order
                        exchange.result()
                    members.agree()

                pending.agreement = members.begin("The end of an opening", end)
            else:
                codes = [self._means(batch.plan, members.group, share) for batch in batches]
                members.agree()
                record["codes"] = [c.cpu() for means in codes for c in means]
            pending.error = None
        except LOST as error:  # whose traceback would keep the tensors
            pending.error = str(error)
        if pending.agreement is not None:
            return True
        if not self._commit():
            return False
        rate = self._rate(plan, self._sent_rates) if step.directed else None
        for batch, means in zip(batches, codes, strict=True):
            self._take_in(batch, means, rate)
        self.fragments_drifted = max(0, self.fragments_drifted - 1)
        return True

    def _batches_of(self, step: Step, fragment: int) -> list[Batch]:
        """Take a step; without a delay return the fragment's batches."""
        if self.delay:
            self._step(step, None)
            self._commit()
            self._land(step.plan, directed=step.directed)
            return []
        stay = step.plan.select([of != fragment for of in self._fragment_of])
        go = self._of_fragment(step.plan, fragment)
        batches = [replace(b) for b in step.batches(stay, go)]  # a batch loses its directions
        return [batch for batch in batches if batch.part is go]

    def _of_fragment(self, plan: Plan, fragment: int) -> Plan:
        return plan.select([of == fragment for of in self._fragment_of])

    def _weigh(self, pending: _Pending, groups: int) -> float:
        """This replica's weight relative to an equal share."""
        fragment, members = pending.fragment, pending.members
        own = (self._rates[fragment] + [0.0] * groups)[:groups]
        pending.moved = 0.0 if members.fresh else self._moved[fragment]
        moved, *rates = zip(*members.gather([pending.moved, *own]), strict=True)
        pending.among, total = len(moved), sum(moved)
        pending.record["rates"] = self._sent_rates[fragment] = [max(each) for each in rates]
        self._rates[fragment], self._moved[fragment] = [], 0.0
        if self._among[fragment] not in (0, pending.among):
            # Residuals are parts of a mean, and scale with its number of replicas.
            for residual, _ in pending.kept:
                residual.mul_(pending.among / self._among[fragment])
        return pending.moved * pending.among / total if total else 1.0

    def _commit(self) -> bool:
        """End the pending opening: apply it, or restore everything."""
        if (pending := self._pending) is None:
            return True
        fragment = pending.fragment
        try:
            if pending.agreement is not None:  # the thread must be idle before the vote
                pending.agreement.result()
                pending.record["codes"] = self._under_way.codes()
        except LOST as error:
            pending.error = str(error)
        written = pending.members.commit(error=pending.error, record=pending.record)
        self._pending = None  # not before: an interrupt may have ended the wait
        if written:
            self._among[fragment] = pending.among
            self._rotate_from(fragment)
            return True
        self._under_way.take_back()
        for residual, before in pending.kept:
            residual.copy_(before)
        if pending.among:
            both = zip_longest(pending.rates, self._rates[fragment], fillvalue=0.0)
            self._rates[fragment] = [sum(each) for each in both]
            self._moved[fragment] += pending.moved
        return False

    def finish(self, plan: Plan, step: Step) -> None:
        pending = self._pending
        written = self._commit()
        self._land(plan, directed=step.directed)
        if pending is None or not written:
            return
        for p in self._of_fragment(plan, pending.fragment).parameters:
            # The rounding error of D_i.
            local(p.state[RESIDUAL]).add_(moved_since(anchor_of(p), p.local))
            p.local.copy_(anchor_of(p))
        self.fragments_drifted = max(0, self.fragments_drifted - 1)

    def _land(self, plan: Plan, *, directed: bool) -> None:
        """Add pending means, with the correction that keeps anchors identical."""
        rate = self._rate(plan, self._sent_rates) if directed else None
        for chosen in plan.select([DUE in p.state for p in plan.parameters]).batches:
            self._arrive(Batch(chosen, chosen, None), rate)

    def _rate(self, plan: Plan, rates: Sequence[Sequence[float]]) -> Rate:
        """A parameter's sum of learning rates, from the fragments' sums by group."""
        fragments = dict(zip(plan.parameters, self._fragment_of, strict=True))

        def rate(p: Parameter) -> float:
            sums = rates[fragments[p]]
            return sums[p.position] if p.position < len(sums) else 0.0

        return rate

    def _means(self, plan: Plan, group: Group, share: float = 1.0) -> list[Tensor]:
        """Send the movements since the anchors; return the codes of their means."""
        codes = []
        for run in coded_together(plan.parameters, self.bits):
            anchors, residuals = ([local(p.state[k]) for p in run] for k in (ANCHOR, RESIDUAL))
            X = [p.local for p in run]
            if share != 1.0:
                # Residuals are errors of the message, so ``share`` does not scale them.
                X = [share * moved_since(a, x) for a, x in zip(anchors, X, strict=True)]
                anchors = []
            codes.append(exchanged(X, anchors, residuals, self.bits, group))
        return codes

    def _arrive(self, batch: Batch, rate: Rate | None) -> None:
        """Add the means of a batch, then correct."""
        plan, directions = batch.plan, batch.directions
        D, missing = self._under_way.land_(plan.parameters)
        if rate is not None and directions is not None and self.align_momentum:
            own = copies_of(directions.stacks, missing.__getitem__)
            corrections.align_momenta_(directions, own, self.spectrum_decay, rate)
            del own
        batch.directions = directions = None
        if rate is not None and self.polar_correction:
            means = copies_of(plan.stacks, D.__getitem__)
            corrections.correct_polar_(plan, means, rate, together=False)

    def _take_in(self, batch: Batch, codes: Sequence[Tensor], rate: Rate | None) -> None:
        """Move anchors by the coded means and set weights to them, then correct."""
        plan = batch.plan
        directions, weights = (
            batch.directions if self.align_momentum else None,
            attrgetter("local"),
        )
        batch.directions = None  # directions are used once and take memory
        own = [] if directions is None else copies_of(directions.stacks, weights)
        corrected = rate is not None and self.polar_correction
        before = copies_of(plan.stacks, anchor_of) if corrected else []
        for run, means in zip(coded_together(plan.parameters, self.bits), codes, strict=True):
            decode_add_([p.local for p in run], list(map(anchor_of, run)), means, self.bits)
        if rate is not None and directions is not None:
            corrections.subtract_from_(directions.stacks, weights, own)
            corrections.align_momenta_(directions, own, self.spectrum_decay, rate)
        del directions, own
        if rate is not None and corrected:
            corrections.subtract_from_(plan.stacks, anchor_of, before)
            corrections.correct_polar_(plan, before, rate)

    def after_join(self, parameters: Sequence[Parameter], steps: int) -> None:
        self._moved, self.fragments_drifted = [0.0] * len(self._moved), 0
        self._joined_at = steps
        self._under_way.drop(parameters)  # of a checkpoint, perhaps

    def catch_up(self, plan: Plan, record: Mapping[str, Any]) -> None:
        """X <- X + D, anchor <- anchor + D; this replica keeps its own movement."""
        fragment, directed = record["fragment"], record["directed"]
        codes = iter(record["codes"])
        self._sent_rates[fragment] = record["rates"]
        rate = self._rate(plan, self._sent_rates) if directed else None
        for chosen in self._of_fragment(plan, fragment).batches:
            runs = list(coded_together(chosen.parameters, self.bits))
            means = [c.to(plan.device) for c in islice(codes, len(runs))]
            if self.delay:
                for run, mean in zip(runs, means, strict=True):
                    self._under_way.missed_(run, self.bits, mean)
                continue
            before = [(p, p.local - anchor_of(p)) for p in chosen.parameters]
            self._take_in(Batch(chosen, chosen, None), means, rate)
            for p, own in before:
                p.local.add_(own)
        self._land(plan, directed=directed)
        self._rotate_from(fragment)
