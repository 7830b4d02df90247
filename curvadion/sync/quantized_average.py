"""Replicas step by themselves, then take the mean of what their weights moved, in a few bits.

Replicas share an anchor, the weights they last agreed on. When the gate opens, each sends its
pseudo-gradient, what its weights have moved since, in codes, and all move to the mean:

    anchor <- anchor + mean over replicas of (X_i - anchor),   X_i <- anchor

What the codes lose is each replica's residual: it is sent with the next pseudo-gradient (error
feedback). Parameters may come together in fragments, one at each opening.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion import checks
from curvadion.comm.collectives import checksum, divide, group_size
from curvadion.sync.anchored import (
    anchored,
    average_in_codes_,
    begin_anew,
    coded_together,
    cut_alike,
)
from curvadion.sync.base import Costs, Step, Sync
from curvadion.sync.codec import FORMAT, bits_of_weights, check_bits, coded_share
from curvadion.sync.coded_mean import (
    RESIDUAL_DTYPES,
    ResidualDtype,
    check_residual_dtype,
    message_bytes,
)
from curvadion.sync.corrections import (
    LR_SINCE_ANCHOR,
    agree_on_lengths_,
    align_momenta_,
    anchors_moved_,
    anchors_of,
    correct_polar_,
    drop_spectra,
    forget_spectra,
    lengths_since_anchor,
    moved_since_,
    place_spectra,
    weights_of,
)
from curvadion.sync.under_way import (
    DUE,
    LENGTH_BYTES,
    LR_SENT,
    MEAN,
    SENT,
    Lengths,
    UnderWay,
    forget_lengths,
)
from curvadion.update.direction import Taken
from curvadion.update.momentum import measure_momenta
from curvadion.update.parameter import Parameter, stacked
from curvadion.update.plan import Plan
from curvadion.update.state import ANCHOR, RESIDUAL, SPECTRUM, SPECTRUM_WEIGHT, Owner, StateKey

LONGEST_LOOK_AHEAD = 4.1  # that of a budget of 1 %


class QuantizedAverage(Sync):
    """Local steps, then the mean of the replicas' pseudo-gradients in codes of a few bits.

    P and R never cross the replicas: their rank costs no bytes. An opening is a local step, then
    the exchange of codes for one fragment.

    Args:
        bits: of a code: 1, 2, 3, 4 or 8. None takes what a byte budget pays for at every step (3
            for 0.1), 2 at least, but 1 below 0.3 %.
        fragments: parameters are divided into so many fragments of about equal size. At each
            opening one comes together, in rotation; under a byte budget the gate opens as many
            times more often. At 1 % of the bytes and less 3 ended a little lower with the smaller
            of two models, and no lower with the larger (docs/convergence-lab.md).
        align_momentum: whether momenta follow the mean direction that the agreement on weights
            tells, for no bytes (curvadion.sync.corrections). For local_step="dion"; holds a copy
            of a wave's weights meanwhile (docs/guide.md#memory).
        spectrum_decay: weight of earlier openings' S (curvadion.sync.corrections) in momentum
            alignment, for polar directions. Takes min(m, n)^2 numbers a matrix, shared by ranks.
        polar_correction: whether replicas restore, for no bytes, the length that the mean of their
            directions has lost to noise (curvadion.sync.corrections). For local_step="dion";
            holds a copy of a wave's anchors meanwhile.
        residual_dtype: "bfloat16" or "float32", or the torch.dtype, of what the codes have lost.
            Codes of 2 bits lose a third of a pseudo-gradient, those of 1 bit 0.6 of it. bfloat16
            loses a 500th of that.
        delay: how many steps later the means are added, and momenta and weights corrected; 0 waits
            for each exchange. Codes travel meanwhile, over a process group and in a thread of their
            own. A step waits for late means. An opening first adds those of its own parameters.

    Raises:
        TypeError, ValueError: naming the argument and its value.
    """

    group_defaults = {"direction": "polar", "rank_fraction": 1.0, "right_factor": "qr"}  # noqa: RUF012
    state_keys = (
        StateKey(ANCHOR, Owner.SYNC, like_parameter=True),
        StateKey(RESIDUAL, Owner.SYNC, like_parameter=True),
        StateKey(LR_SINCE_ANCHOR, Owner.SYNC),
        StateKey(SPECTRUM, Owner.SYNC),
        StateKey(SPECTRUM_WEIGHT, Owner.SYNC),
        StateKey(SENT, Owner.SYNC, like_parameter=True, passing=True),
        StateKey(MEAN, Owner.SYNC, like_parameter=True, passing=True),
        StateKey(DUE, Owner.SYNC, passing=True),
        StateKey(LR_SENT, Owner.SYNC, passing=True),
    )
    sends_codes = True
    message_format = FORMAT

    def __init__(
        self,
        bits: int | None = None,
        fragments: int = 1,
        align_momentum: bool = True,
        polar_correction: bool = True,
        residual_dtype: ResidualDtype = "bfloat16",
        delay: int = 0,
        spectrum_decay: float = 0.8,
    ) -> None:
        check_bits(bits)
        checks.integer("fragments", fragments, 1)
        checks.boolean("align_momentum", align_momentum)
        checks.boolean("polar_correction", polar_correction)
        checks.integer("delay", delay, 0)
        checks.number("spectrum_decay", spectrum_decay, below=1.0)
        self._bits = bits
        self.bits = bits or bits_of_weights(0.0, fragments)
        self.fragments = fragments
        self.align_momentum = align_momentum
        self.polar_correction = polar_correction
        self.residual_dtype = check_residual_dtype(residual_dtype)
        self.delay = delay
        self.spectrum_decay = float(spectrum_decay)
        self._keeps_spectra = align_momentum and spectrum_decay > 0
        self.next_fragment = 0
        self._fragment_of: list[int] = []  # of each parameter of the plan
        self._dealt = 0  # a checksum of it, which tells of the run that was saved
        self._under_way = UnderWay()
        self._expecting = True  # a loaded state may hold means that are to be added

    @property
    def count(self) -> int:
        """How many fragments there are: fewer than asked for if parameters are few."""
        return max(self._fragment_of, default=-1) + 1

    # ---------------------------------------------------------------- what it costs

    def choose_defaults(self, budget: float | None) -> None:
        self.bits = self._bits or bits_of_weights(budget or 0.0, self.fragments)

    def prepare(self, sizes: Sequence[int]) -> Costs:
        self._fragment_of = divide(sizes, self.fragments)
        before, self._dealt = self._dealt, checksum(self._fragment_of)
        if self.fragments_apart and before != self._dealt:
            self.fragments_apart = self.count  # which of the old ones is not known
        count = max(1, self.count)
        codes = message_bytes(sizes, self.bits)
        # With a delay, what replicas count as a matrix's length travels with the codes.
        lengths = LENGTH_BYTES * len(sizes) if self.delay else 0
        return Costs((codes + lengths) / count, count)

    def added_by_shards(self, shards: Sequence[Sequence[int]]) -> float:
        # Each has blocks of its own, and its rank sends the lengths too.
        whole, each = map(sum, shards), chain.from_iterable(shards)
        codes = message_bytes(each, self.bits) - message_bytes(whole, self.bits)
        lengths = sum(len(s) - 1 for s in shards) if self.delay else 0
        return (codes + LENGTH_BYTES * lengths) / max(1, self.count)

    @property
    def typical_cost(self) -> float:
        return coded_share(self.bits) / self.fragments

    def look_ahead(self, period: float) -> float:
        """1.6 sqrt(period), 4.1 at most (docs/convergence-lab.md)."""
        return round(min(1.6 * math.sqrt(period), LONGEST_LOOK_AHEAD), 1)

    # ---------------------------------------------------------------- around steps

    def begin(self, parameters: Sequence[Parameter]) -> None:
        """Anchor the weights as they are."""
        for p in parameters:
            if ANCHOR not in p.state:
                X = p.X.detach()
                wide = torch.promote_types(X.dtype, torch.float32)
                p.state[ANCHOR] = X.to(wide, copy=True)
                p.state[RESIDUAL] = torch.zeros_like(X, dtype=RESIDUAL_DTYPES[self.residual_dtype])
            if p.matrices:  # flattened old checkpoints lack it
                p.state.setdefault(LR_SINCE_ANCHOR, 0.0)
        # Where there are none, those of a run that was loaded go.
        (place_spectra if self._keeps_spectra else drop_spectra)(parameters)

    def note_own_step(self) -> None:
        self.fragments_apart = self.count

    def before_local_update(self, step: Step) -> None:
        """Count the learning rate of the matrices that move, as far as it is known, anywhere."""
        if self._keeps_spectra:
            place_spectra(step.plan.dion)  # where the direction has changed
        plan = step.plan if step.complete else step.moving.plan_among(step.agreed)
        rates: dict[int, float] = {}  # each read once: it may be a tensor on an accelerator
        for p in plan.dion:
            if LR_SINCE_ANCHOR in p.state:
                if id(p.group) not in rates:
                    rates[id(p.group)] = float(p.group["lr"])
                p.state[LR_SINCE_ANCHOR] += rates[id(p.group)]

    def closed_step(self, step: Step) -> None:
        self._step(step, ())

    def open_step(self, step: Step) -> None:
        self._step(step, self._next(step.plan, 1).parameters)
        self._turn(1)

    def _step(self, step: Step, sending: Sequence[Parameter]) -> None:
        """A local step; then means arrive that are due, and these parameters are sent."""
        plan, sent = step.plan, set(map(id, sending))
        due = self._due(step, sent) if self._expecting else set[int]()
        if not (sent or due):
            step.local_update(None)
            return
        step.local_update(plan.select([id(p) not in sent | due for p in plan.parameters]))
        lengths = None
        if sent and self.delay and group_size(step.replicas) > 1:
            lengths = Lengths.begin(sending, step.background())
        elif sent and not step.complete:
            agree_on_lengths_(plan, step.replicas)
        for arrives, goes in ((True, False), (True, True), (False, True)):
            chosen = [(id(p) in due, id(p) in sent) == (arrives, goes) for p in plan.parameters]
            for wave in plan.select(chosen).waves() if any(chosen) else ():
                self._take_wave(step, wave, lengths, arrives=arrives, goes=goes)
        if step.moving.norms is not None:
            measure_momenta(plan)

    def _due(self, step: Step, sending: set[int]) -> set[int]:
        """The parameters whose means are added at this step, by id; those sent again among them."""
        expected = [(id(p), p.state[DUE]) for p in step.plan.parameters if DUE in p.state]
        self._expecting = bool(expected)
        return {p for p, due in expected if due <= step.number or p in sending}

    def _take_wave(
        self, step: Step, wave: Plan, lengths: Lengths | None, *, arrives: bool, goes: bool
    ) -> None:
        """The local step of a wave, then its arrival, then its sending.

        lengths: of what is sent now and arrives at a later step; None if replicas wait for it.
        """
        # No name holds the directions where they can go before weights are corrected.
        if not arrives and lengths is None:
            self._agree(wave, step.replicas, step.local_update(wave), corrected=step.directed)
            return
        taken = step.local_update(wave)
        if arrives:
            self._arrive(wave, taken, corrected=step.directed)
        del taken
        if goes and lengths is not None:
            self._send(wave, step, lengths)
        elif goes:
            self._agree(wave, step.replicas, None, corrected=step.directed)

    def come_together(self, plan: Plan, replicas: dist.ProcessGroup | None) -> int:
        self._arrive_all(plan.parameters)
        openings = self.fragments_apart
        for wave in self._next(plan, openings).waves():
            self._agree(wave, replicas, None, corrected=False)
        self._turn(openings, apart=False)
        return openings

    def settle(self) -> None:
        self._under_way.settle()

    @property
    def waited_seconds(self) -> float:
        return self._under_way.waiting.seconds

    def _next(self, plan: Plan, fragments: int) -> Plan:
        """The parameters of the next fragments."""
        now = {(self.next_fragment + i) % max(1, self.count) for i in range(fragments)}
        return plan.select([fragment in now for fragment in self._fragment_of])

    def _turn(self, fragments: int, *, apart: bool | None = None) -> None:
        """Note that the next fragments have come together; apart: whether weights still differ."""
        self.next_fragment = (self.next_fragment + fragments) % max(1, self.count)
        if not (self.delay if apart is None else apart):
            self.fragments_apart = max(0, self.fragments_apart - fragments)

    # ---------------------------------------------------------------- means that arrive later

    def _send(self, wave: Plan, step: Step, lengths: Lengths) -> None:
        self._expecting = True
        for alike in cut_alike(wave.parameters):
            first = 0
            for chunk in coded_together([p.local for p in alike], self.bits):
                these = alike[first : first + len(chunk)]
                first += len(chunk)
                due = step.number + self.delay
                self._under_way.send(these, self.bits, step.background(), lengths, due=due)

    def _arrive(self, wave: Plan, taken: Taken | None, *, corrected: bool) -> None:
        """Take in the means of a wave, then correct momenta and weights."""
        arrived = {
            id(p): a
            for p, a in zip(wave.parameters, self._under_way.land_(wave.parameters), strict=True)
        }
        if taken is not None and self.align_momentum:
            missing = [
                stacked([m.read(arrived[id(m.parameter)].missing) for m in stack], stack[0])
                for stack in taken.stacks
            ]
            align_momenta_(taken, missing, self.spectrum_decay, LR_SENT)
            del missing
        del taken
        if corrected and self.polar_correction:
            D = [
                stacked([m.read(arrived[id(m.parameter)].mean) for m in stack], stack[0])
                for stack in wave.stacks()
            ]
            correct_polar_(wave, D, lengths_since_anchor(wave, LR_SENT), together=False)
        forget_lengths(wave.parameters)

    def _arrive_all(self, parameters: Sequence[Parameter]) -> None:
        """Take in all that is under way, without corrections."""
        due = [p for p in parameters if DUE in p.state]
        self._under_way.land_(due)
        forget_lengths(due)

    def _agree(
        self,
        wave: Plan,
        replicas: dist.ProcessGroup | None,
        taken: Taken | None,
        *,
        corrected: bool,
    ) -> None:
        """Agree on the weights of a wave, then correct momenta and weights.

        taken: what its matrices have just moved by. corrected: whether to correct the weights.
        """
        if group_size(replicas) == 1:
            self.after_average(wave.parameters)
            return
        aligned = taken if self.align_momentum else None
        own: Sequence[Tensor] = [] if aligned is None else weights_of(aligned)
        corrected = corrected and self.polar_correction
        before: Sequence[Tensor] = anchors_of(wave) if corrected else []
        for alike in cut_alike(wave.parameters):
            average_in_codes_(list(anchored(alike)), self.bits, replicas)
        if aligned is not None:
            align_momenta_(aligned, moved_since_(aligned, own), self.spectrum_decay)
        del taken, aligned, own
        if corrected:
            correct_polar_(wave, anchors_moved_(wave, before), lengths_since_anchor(wave))
        begin_anew(wave.parameters)

    # ---------------------------------------------------------------- exact averages

    def before_average(self, parameters: Sequence[Parameter]) -> None:
        self._arrive_all(parameters)
        for held in anchored(parameters):
            held.X.add_(held.residual)
            held.residual.zero_()

    def after_average(self, parameters: Sequence[Parameter]) -> None:
        self._under_way.drop(parameters)
        for held in anchored(parameters):
            held.anchor.copy_(held.X)
        forget_spectra(parameters)
        begin_anew(parameters)

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        own = {"next_fragment": self.next_fragment, "dealt": self._dealt}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        number, dealt = state.get("next_fragment", 0), state.get("dealt", 0)
        checks.integer("next_fragment", number, 0)
        checks.integer("dealt", dealt, 0)
        super().load_state_dict(state)
        # Where parameters are divided otherwise here, prepare() counts all fragments as apart.
        self.next_fragment, self._dealt = number, dealt

    def after_load(self) -> None:
        self._under_way, self._expecting = UnderWay(), True

    def __repr__(self) -> str:
        return (
            f"QuantizedAverage(bits={self.bits}, fragments={self.fragments}, "
            f"align_momentum={self.align_momentum}, polar_correction={self.polar_correction}, "
            f"residual_dtype={self.residual_dtype!r}, delay={self.delay}, "
            f"spectrum_decay={self.spectrum_decay})"
        )
