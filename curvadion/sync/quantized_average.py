"""Replicas take local steps, then average the changes of their weights, in a few bits.

Replicas share an anchor, the last synchronised weights. When the gate opens, each sends its
pseudo-gradient, the change of its weights since then, in codes, and all move to the mean:

    anchor <- anchor + mean over replicas of (X_i - anchor),   X_i <- anchor

The codes' error, the residual, is sent with the next pseudo-gradient (error feedback).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from typing import Any

from torch import Tensor

from curvadion import checks
from curvadion.comm.collectives import group_size
from curvadion.comm.groups import Group
from curvadion.gates import shown
from curvadion.layout.dtensor import local, made_like
from curvadion.ops.code_format import FORMAT
from curvadion.plan.parameter import Parameter, States, product_dtype
from curvadion.plan.plan import Plan
from curvadion.plan.state import (
    ANCHOR,
    RESIDUAL,
    SPECTRUM,
    SPECTRUM_WEIGHT,
    StateKey,
    StateOwner,
)
from curvadion.sync import corrections
from curvadion.sync.base import Costs, Step, Sync
from curvadion.sync.coded_mean import (
    ResidualDtype,
    bits_of_weights,
    chosen_bits,
    coded_together,
    decode_add_,
    empty_residual,
    encode_residuals,
    exchanged,
    mean_message_bytes,
    moved_since,
    name_of_dtype,
    open_residuals,
)
from curvadion.sync.corrections import Rate, anchor_of, copies_of
from curvadion.sync.diagnostics import Diagnostics
from curvadion.sync.fragments import Fragments, Movement
from curvadion.sync.in_flight import DUE, MEAN, SENT, InFlight
from curvadion.sync.opening import Opening, applying
from curvadion.update.inner_step import Batch


@dataclass
class _Pending:
    """An opening that has begun and not ended.

    Attributes:
        opening: the transaction.
        fragment: what it synchronises.
        due: the step that adds its means.
        movement: what the fragment had done, to be put back if the opening fails; None before
            members are weighed.
    """

    opening: Opening
    fragment: int
    due: int
    movement: Movement | None = None


class QuantizedAverage(Sync):
    """Replicas take local steps, then average their pseudo-gradients in codes of a few bits.

    An opening is a local step, then the exchange of one fragment's codes. Low-rank factors
    are not sent, so their rank costs no bytes.

    Args:
        bits: bits per element: 1, 2, 3, 4 or 8. A pair such as (1, 2) has those of what
            replicas send to the owners of blocks, and those of the means that come back: the
            errors of n replicas average out, those of a mean do not. None: the most that a
            byte budget covers at every step; else 2, or (1, 2) below a budget of 0.02, and 1
            below 0.003.
        fragments: number of parts of about equal size. Each opening synchronises one, in
            rotation; a byte budget then opens that many times more often.
        align_momentum: whether momenta follow the mean direction
            (curvadion.sync.corrections), for local_step="dion"; copies a batch's weights.
        polar_correction: whether to restore the length that averaged directions lose to
            noise. For local_step="dion"; copies a batch's anchors.
        residual_dtype: dtype of the residuals (the codes' errors): "bfloat16", "float32",
            "int8" or the torch.dtype. Those in int8 share a scale among 256 elements.
        delay: number of steps, less than the gate's period, until means are added; a thread
            exchanges them meanwhile, and a step waits for late ones. 0 waits for each
            exchange.
        spectrum_decay: weight of earlier openings' S (curvadion.sync.corrections) in momentum
            alignment. Stores min(m, n)^2 elements per polar matrix, sharded over ranks.

    Raises:
        TypeError, ValueError: naming the argument and its value.
    """

    group_defaults = {  # noqa: RUF012
        "direction": "polar",
        "rank_fraction": 1.0,
        "right_factor": "qr",
    }
    state_keys = (
        StateKey(ANCHOR, StateOwner.SYNC, like_parameter=True),
        StateKey(RESIDUAL, StateOwner.SYNC, like_parameter=True),
        StateKey(SPECTRUM, StateOwner.SYNC),
        StateKey(SPECTRUM_WEIGHT, StateOwner.SYNC),
        StateKey(SENT, StateOwner.SYNC, like_parameter=True, transient=True),
        StateKey(MEAN, StateOwner.SYNC, like_parameter=True, transient=True),
        StateKey(DUE, StateOwner.SYNC, transient=True),
    )
    sends_codes = True
    elastic = True
    replays = True
    runs_ahead = True
    message_format = FORMAT

    def __init__(
        self,
        bits: int | Sequence[int] | None = None,
        fragments: int = 1,
        align_momentum: bool = True,
        polar_correction: bool = True,
        residual_dtype: ResidualDtype = "bfloat16",
        delay: int = 0,
        spectrum_decay: float = 0.8,
    ) -> None:
        self._bits = chosen_bits(bits)
        self.residual_dtype = name_of_dtype(residual_dtype)
        checks.integer("fragments", fragments, 1)
        checks.boolean("align_momentum", align_momentum)
        checks.boolean("polar_correction", polar_correction)
        checks.integer("delay", delay, 0)
        checks.number("spectrum_decay", spectrum_decay, below=1.0)
        self.fragments = fragments
        self.choose_defaults(None)
        self.align_momentum = align_momentum
        self.polar_correction = polar_correction
        self.delay = delay
        self.spectrum_decay = float(spectrum_decay)
        self._division = Fragments()
        self._in_flight = InFlight()
        # Whether means arrive some steps after their opening, at least those of a checkpoint.
        self._means_are_late = delay > 0
        self._pending: _Pending | None = None
        self._diagnostics: Diagnostics | None = None  # while somebody asks for them
        self._joined_at = 0  # the step at which this replica took over another's state

    def choose_defaults(self, budget: float | None) -> None:
        self.bits = self._bits or bits_of_weights(budget or 0.0, self.fragments)

    def prepare(self, shards: Sequence[Sequence[int]]) -> None:
        sizes = [sum(shard_sizes) for shard_sizes in shards]
        divided_anew = self._division.divide(sizes, self.fragments)
        if divided_anew and self.fragments_drifted:
            # It is unknown which new fragments have drifted, so all count.
            self.fragments_drifted = self._division.count

    def costs(self, shards: Sequence[Sequence[int]]) -> Costs:
        count = max(1, min(self.fragments, len(shards)))
        opening_bytes = mean_message_bytes(chain.from_iterable(shards), self.bits) / count
        return Costs(opening_bytes, count)

    def __repr__(self) -> str:
        return shown(self, bits=self.bits.written)

    def look_ahead(self, period: float) -> float:
        """1.6 sqrt(period), at most 4.1 (benchmarks/results/convergence)."""
        return round(min(1.6 * math.sqrt(period), 4.1), 1)

    def begin(self, parameters: Sequence[Parameter]) -> None:
        """Make the current weights the anchors."""
        for p in parameters:
            if ANCHOR not in p.state:
                wide = partial(Tensor.to, dtype=product_dtype(p.X), copy=True)
                p.state[ANCHOR] = made_like(p.X, wide)
                p.state[RESIDUAL] = empty_residual(p.X, self.residual_dtype)
        self._means_are_late = self.delay > 0 or any(DUE in p.state for p in parameters)
        # If this run keeps no spectra, drop those of a loaded one.
        kept = self.align_momentum and self.spectrum_decay > 0
        corrections.place_spectra(parameters, kept=kept)

    # --- a step

    def closed_step(self, step: Step) -> None:
        self._count(step)
        for _ in self._stepped(step, None):
            pass

    def open_step(self, step: Step) -> bool:
        """Step, then apply an opening of a fragment if all members can.

        ===========  =====  ======================  =========================  ===============
        members      delay  the local step          means are added            vote
        ===========  =====  ======================  =========================  ===============
        fixed        0      in the exchange, batch  to each batch, before the  none
                            by batch                next one is stepped
        fixed        k      the same                k steps later              none
        come and go  0      before members meet     after the vote             at the end
        come and go  k      the same; means that    k steps later              when means are
                            are pending land first                             due
        ===========  =====  ======================  =========================  ===============

        So a fixed group has one batch at a time in memory. Members that come and go keep all
        of a fragment until they have voted, because the opening may fail.
        """
        applied = self._open_fixed(step) if step.members.fixed else self._open_elastic(step)
        if not applied or self.delay:
            return applied
        if step.norms is not None:
            # Corrections have changed momenta.
            step.plan.measure_momenta()
        self.fragments_drifted = max(0, self.fragments_drifted - 1)
        return True

    def _open_fixed(self, step: Step) -> bool:
        """Open with a fixed group; return True, as a lost rank ends all of them."""
        self._count(step)
        step.members.meet()
        pending = self._begin_opening(step, self._division.next)
        # Nothing is stepped yet: iterating over these batches does that.
        batches = self._stepped(step, pending.fragment)
        self._exchange(step, pending, batches)
        return self._end(pending)

    def _open_elastic(self, step: Step) -> bool:
        """Open with members that come and go; return whether all could."""
        members = step.members
        if not step.rests:
            self._count(step)
        fragment = self._division.next
        batches: list[Batch] = []
        if self.delay:
            # Add all pending means before members meet, with the polar correction, which the
            # others apply to their anchors, too.
            for _ in self._stepped(step, None):
                pass
            self._end_pending()
            with applying(members):
                self._land(step.plan, directed=step.directed)
        else:
            # ``batches`` drops a batch's directions when it goes on, so copies keep them.
            batches = [replace(batch) for batch in self._stepped(step, fragment)]
        members.meet()
        if self.delay or members.fresh or self._division.next != fragment:
            # This step's directions do not fit: the means arrive at a later step, or the weights
            # are another replica's, or openings that this one had missed were just applied.
            fragment = self._division.next
            part = self._division.select(step.plan, fragment)
            batches = [Batch(part, plan, None) for plan in part.batches]
        pending = self._pending = self._begin_opening(step, fragment)
        means = self._exchange(step, pending, batches)
        # With a delay the vote is held when the means are due, unless it has failed before.
        if not (pending.opening.agrees_later or self._end_pending()):
            return False
        with applying(members):
            for batch, codes in means:  # none with a delay
                self._take_in(batch, codes, self._sent_rate(step))
        return True

    def _count(self, step: Step) -> None:
        """Count a step of all fragments.

        A step that rests adds its learning rates, too, so that replicas keep equal sums, but no
        weight.
        """
        self.fragments_drifted = self._division.count
        self._division.count_step(step.plan, 0.0 if step.rests else step.members.weight)

    def _stepped(self, step: Step, fragment: int | None) -> Iterator[Batch]:
        """Take a local step, in which means that are due arrive.

        Args:
            step: to take.
            fragment: of an opening, whose batches are yielded; None for a closed step.
        """
        plan = step.plan
        if self._diagnostics is not None:
            self._diagnostics.begin(plan)
        now = step.step_index
        if self._pending is not None and (fragment is not None or self._pending.due <= now):
            self._end_pending()
        if fragment is None and not self._means_are_late:
            step.take()
            return
        is_sent = [its_fragment == fragment for its_fragment in self._division.of_parameter]
        # The fragment's last means may still be pending when it opens again: add them now,
        # without corrections.
        self._in_flight.land_(
            [p for p, opens in zip(plan.parameters, is_sent, strict=True) if opens]
        )
        is_due = [DUE in p.state and p.state[DUE] <= now for p in plan.parameters]
        if fragment is None and not any(is_due):
            step.take()
            return
        others = plan.select([not (s or d) for s, d in zip(is_sent, is_due, strict=True)])
        due = plan.select(is_due)
        sent = plan.select(is_sent)
        # Corrections change momenta, whose norms are therefore measured at the end.
        for batch in replace(step, norms=None).batches(others, due, sent):
            if batch.part is due:
                with applying(step.members):
                    self._arrive(batch, self._sent_rate(step))
            elif batch.part is sent:
                yield batch
        if step.norms is not None and (fragment is None or self.delay):
            plan.measure_momenta()

    def _sent_rate(self, step: Step) -> Rate | None:
        """The sum of learning rates of each parameter's last opening.

        After :meth:`_weigh` that is this opening. None if the step takes no directions: there
        is nothing to correct then.
        """
        return self._division.sent_rate(step.plan) if step.directed else None

    # --- an opening

    def _begin_opening(self, step: Step, fragment: int) -> _Pending:
        members = step.members
        part = self._division.select(step.plan, fragment)
        opening = Opening(members, part.parameters)
        opening.record |= {"fragment": fragment, "directed": step.directed}
        now = self._joined_at if members.fresh else step.step_index
        return _Pending(opening, fragment, now + self.delay)

    def _exchange(
        self, step: Step, pending: _Pending, batches: Iterable[Batch]
    ) -> list[tuple[Batch, list[Tensor]]]:
        """Exchange a fragment's movements, or begin to.

        Args:
            step: already taken, or taken by iterating over ``batches``.
            pending: the opening.
            batches: of its fragment.

        Returns:
            Batches of members that come and go, with the codes of their means, which are
            applied after the vote; none with a delay.
        """
        members = step.members
        opening = pending.opening
        waiting: list[tuple[Batch, list[Tensor]]] = []
        try:
            with opening.exchanging():
                share = self._weigh(pending, step.plan)
                for batch in batches:
                    parameters = batch.plan.parameters
                    if members.fixed and members.size == 1:
                        self._make_anchors(parameters)
                    elif self.delay:
                        thread = members.during_training(step.plan.device)
                        self._in_flight.send(parameters, self.bits, thread, pending.due, share)
                    else:
                        assert members.group is not None
                        codes = self._means(step, batch.plan, members.group, share)
                        if members.fixed:
                            self._take_in(batch, codes, self._sent_rate(step))
                        else:
                            waiting.append((batch, codes))
                if self.delay and not members.fixed:
                    thread = members.during_training(step.plan.device)
                    exchanges = [sent.exchange for sent in self._in_flight.pending]
                    opening.end_later(thread, exchanges)
        except BaseException:
            if members.fixed:  # with members that come and go, `_end` undoes it
                self._forget_movement_sent(pending)
            raise
        opening.record["codes"] = [c.cpu() for _, codes in waiting for c in codes]
        return waiting

    def _weigh(self, pending: _Pending, plan: Plan) -> float:
        """Weigh the members by their steps; return this replica's share."""
        fragment = pending.fragment
        opening = pending.opening
        movement = self._division.movement(fragment, plan)
        if opening.members.fresh:
            movement = movement._replace(weight=0.0)
        earlier = self._division.members[fragment]
        rates = opening.weigh(movement.weight, movement.rates, earlier=earlier)
        largest = [max(of_group) for of_group in zip(*rates, strict=True)]
        # Begin anew only now: while members are weighed, one that joins may still copy these
        # sums.
        pending.movement = movement
        self._division.begin_again(fragment, sent_rates=largest)
        opening.record["rates"] = largest
        return opening.share

    def _forget_movement_sent(self, pending: _Pending) -> None:
        """Let a fragment's movement be what it was before its opening."""
        if pending.movement is not None:
            self._division.put_back(pending.fragment, pending.movement)
            pending.movement = None

    def _end_pending(self) -> bool:
        """End the opening whose means are in flight, if there is one."""
        if self._pending is None:
            return True
        pending = self._pending
        try:
            applied = self._end(pending)
        except Exception:
            self._pending = None
            raise
        # Cleared only now: after a KeyboardInterrupt the opening is still pending, and the next
        # call ends it.
        self._pending = None
        return applied

    def _end(self, pending: _Pending) -> bool:
        """Apply an opening, or undo it; return whether it is applied."""
        opening = pending.opening
        try:
            start = time.perf_counter()
            opening.wait()
            if opening.agrees_later:
                self._in_flight.waited_seconds += time.perf_counter() - start
                opening.record["codes"] = self._in_flight.codes()
            applied = opening.vote()
        except Exception:
            opening.restore()
            self._undo(pending)
            raise
        if applied:
            self._division.members[pending.fragment] = opening.count
            self._division.go_on_after(pending.fragment)
            return True
        self._undo(pending)
        return False

    def _undo(self, pending: _Pending) -> None:
        """Drop what an opening has sent."""
        self._in_flight.take_back()
        self._forget_movement_sent(pending)

    def finish(self, plan: Plan, step: Step) -> None:
        pending = self._pending
        applied = self._end_pending()
        self._land(plan, directed=step.directed)
        if pending is None or not applied:
            return
        for p in self._division.select(plan, pending.fragment).parameters:
            # X - anchor is now the rounding error of the stored D_i: let the residual hold it, and
            # X equal the anchor.
            with open_residuals([p], step.step_index) as (residual,):
                residual.add_(moved_since(anchor_of(p), p.local))
            p.local.copy_(anchor_of(p))
        self.fragments_drifted = max(0, self.fragments_drifted - 1)

    # --- codes and means

    def _means(self, step: Step, plan: Plan, group: Group, share: float) -> list[Tensor]:
        """Send movements since the anchors; return the codes of their means.

        Args:
            step: of the opening.
            plan: of a batch.
            group: the members.
            share: this replica's weight relative to an equal share.
        """
        codes = []
        for run in coded_together(plan.parameters, self.bits):
            X = [p.local for p in run]
            anchors = [local(p.state[ANCHOR]) for p in run]
            if share != 1.0:
                # Residuals are errors of earlier messages, which ``share`` had scaled, so they are
                # added as they are.
                X = [share * moved_since(a, x) for a, x in zip(anchors, X, strict=True)]
                anchors = []
            with open_residuals(run, step.step_index) as residuals:
                codes.append(exchanged(X, anchors, residuals, self.bits, group))
        return codes

    def _take_in(self, batch: Batch, codes: Sequence[Tensor], rate: Rate | None) -> None:
        """Move anchors by the coded means and set weights to them, then correct.

        Args:
            batch: that has just been stepped.
            codes: of the means, by run of parameters that are coded together.
            rate: a parameter's sum of learning rates since its anchor; None: do not correct.
        """
        plan = batch.plan
        weights: Callable[[Parameter], Tensor] = attrgetter("local")
        directions = batch.directions if self.align_momentum else None
        batch.directions = None  # directions are used once and take memory
        moved = [] if directions is None else copies_of(directions.stacks, weights)
        corrected = rate is not None and self.polar_correction
        means = copies_of(plan.stacks, anchor_of) if corrected else []
        runs = coded_together(plan.parameters, self.bits)
        for run, code in zip(runs, codes, strict=True):
            before = [] if self._diagnostics is None else _places(run)
            decode_add_([p.local for p in run], list(map(anchor_of, run)), code, self.bits.down)
            for p, (anchor, movement) in zip(run, before, strict=False):
                assert self._diagnostics is not None
                D = anchor_of(p) - anchor
                self._diagnostics.add(plan, p, D, D - movement)
        if rate is not None and directions is not None:
            # The copies become D - D_i, by which the mean differs from this replica.
            corrections.subtract_from_(directions.stacks, weights, moved)
            corrections.align_momenta_(directions, moved, self.spectrum_decay, rate)
        del directions, moved
        if rate is not None and corrected:
            # The copies become D, the movements of the anchors.
            corrections.subtract_from_(plan.stacks, anchor_of, means)
            corrections.correct_polar_(plan, means, rate)

    def _arrive(self, batch: Batch, rate: Rate | None) -> None:
        """Add the means of a batch that were in flight, then correct.

        Args:
            batch: that has just been stepped.
            rate: a parameter's sum of learning rates when it was sent; None: do not correct.
        """
        plan = batch.plan
        directions = batch.directions
        D, differences = self._in_flight.land_(plan.parameters)
        if self._diagnostics is not None:
            for p, mean in D.items():
                self._diagnostics.add(plan, p, mean, differences[p])
        if rate is not None and directions is not None and self.align_momentum:
            copies = copies_of(directions.stacks, differences.__getitem__)
            corrections.align_momenta_(directions, copies, self.spectrum_decay, rate)
            del copies
        batch.directions = directions = None
        if rate is not None and self.polar_correction:
            means = copies_of(plan.stacks, D.__getitem__)
            corrections.correct_polar_(plan, means, rate, together=False)

    def _land(self, plan: Plan, *, directed: bool) -> None:
        """Add pending means, with the correction that keeps anchors identical."""
        rate = self._division.sent_rate(plan) if directed else None
        for part in plan.select([DUE in p.state for p in plan.parameters]).batches:
            self._arrive(Batch(part, part, None), rate)

    # --- between steps

    def sync_weights(self, step: Step) -> int:
        plan = step.plan
        replicas = step.replicas
        self._in_flight.land_(plan.parameters)
        openings = self.fragments_drifted
        count = self._division.count
        drifted = {(self._division.next + i) % count for i in range(openings)}
        # A parameter that was frozen when its state was loaded has no anchor until its first step,
        # and has not moved.
        moved = [
            its_fragment in drifted and ANCHOR in p.state
            for its_fragment, p in zip(self._division.of_parameter, plan.parameters, strict=True)
        ]
        for chosen in plan.select(moved).batches:
            if group_size(replicas) == 1:
                self._make_anchors(chosen.parameters)
            else:
                assert replicas is not None
                codes = self._means(step, chosen, replicas, 1.0)
                self._take_in(Batch(plan, chosen, None), codes, None)
        self._division.forget_rates()
        self._division.next = (self._division.next + openings) % count
        self.fragments_drifted = 0
        return openings

    def diagnose(self, on: bool = True) -> None:
        """Begin or end to measure :mod:`curvadion.sync.diagnostics`, at openings.

        Meanwhile the last means are kept, in two bytes an element.
        """
        if not on:
            self._diagnostics = None
        elif self._diagnostics is None:
            self._diagnostics = Diagnostics()

    def take_diagnostics(self) -> dict[str, float] | None:
        return None if self._diagnostics is None else self._diagnostics.take()

    def settle(self) -> None:
        self._end_pending()
        self._in_flight.settle()

    @property
    def waited_seconds(self) -> float:
        return self._in_flight.waited_seconds

    def before_average(self, parameters: Sequence[Parameter]) -> None:
        self._in_flight.land_(parameters)
        for p in parameters:
            if ANCHOR in p.state:
                with open_residuals([p], None) as (residual,):
                    p.local.add_(residual)
                    residual.zero_()

    def after_average(self, parameters: Sequence[Parameter]) -> None:
        self._in_flight.drop(parameters)
        self._make_anchors(parameters)
        corrections.forget_spectra(parameters)
        self._division.forget_rates()
        self._division.forget_members()

    def _make_anchors(self, parameters: Sequence[Parameter]) -> None:
        for p in parameters:
            if ANCHOR in p.state:
                anchor_of(p).copy_(p.local)

    def after_join(self, parameters: Sequence[Parameter], steps: int) -> None:
        division = self._division
        division.weights = [0.0] * len(division.weights)
        self.fragments_drifted = 0
        self._joined_at = steps
        self._in_flight.drop(parameters)  # of a checkpoint, perhaps

    def after_load(self, states: States) -> None:
        encode_residuals(states, self.residual_dtype)

    def catch_up(self, plan: Plan, record: Mapping[str, Any]) -> None:
        """X <- X + D, anchor <- anchor + D; this replica keeps its own movement."""
        fragment = record["fragment"]
        directed = record["directed"]
        codes = iter(record["codes"])
        self._division.sent_rates[fragment] = record["rates"]
        rate = self._division.sent_rate(plan) if directed else None
        for part in self._division.select(plan, fragment).batches:
            runs = list(coded_together(part.parameters, self.bits))
            means = [c.to(plan.device) for c in islice(codes, len(runs))]
            if self.delay:
                for run, mean in zip(runs, means, strict=True):
                    self._in_flight.missed_(run, self.bits.down, mean)
                continue
            movements = [(p, p.local - anchor_of(p)) for p in part.parameters]
            self._take_in(Batch(part, part, None), means, rate)
            for p, movement in movements:
                p.local.add_(movement)
        self._land(plan, directed=directed)
        self._division.go_on_after(fragment)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | self._division.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._division.load_state_dict(state)


def _places(parameters: Sequence[Parameter]) -> list[tuple[Tensor, Tensor]]:
    """A copy of each anchor, and how far the weights have moved since then."""
    places = []
    for p in parameters:
        anchor = anchor_of(p)
        places.append((anchor.clone(), moved_since(anchor, p.local)))
    return places
