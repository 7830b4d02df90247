"""Replicas take local steps, then average the changes of their weights, in a few bits.

Replicas share an anchor, the last synchronised weights. When the gate opens, each sends its
pseudo-gradient, the change of its weights since then, in codes, and all move to the mean:

    anchor <- anchor + mean over replicas of (X_i - anchor),   X_i <- anchor

The codes' error, the residual, is sent with the next pseudo-gradient (error feedback).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, compress, zip_longest
from typing import Any

import torch

from curvadion import checks
from curvadion.comm.collectives import checksum, group_size
from curvadion.comm.groups import Group
from curvadion.division import divide
from curvadion.layout.dtensor import local
from curvadion.ops.code_format import FORMAT
from curvadion.plan.parameter import Parameter, product_dtype
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
from curvadion.sync.base import Costs, Step
from curvadion.sync.coded_mean import (
    RESIDUAL_DTYPES,
    ResidualDtype,
    bits_of_weights,
    check_codes,
    message_bytes,
)
from curvadion.sync.corrections import Rate, anchor_of
from curvadion.sync.in_flight import DUE, MEAN, SENT
from curvadion.sync.member_openings import MemberOpenings
from curvadion.update.inner_step import Batch


class QuantizedAverage(MemberOpenings):
    """Replicas take local steps, then average their pseudo-gradients in codes of a few bits.

    An opening is a local step, then the exchange of one fragment's codes. Low-rank factors
    are not sent, so their rank costs no bytes.

    Args:
        bits: bits per element: 1, 2, 3, 4 or 8. None: the most that a byte budget covers at
            every step; else 2, or 1 below a budget of 0.003.
        fragments: number of parts of about equal size. Each opening synchronises one, in
            rotation; a byte budget then opens that many times more often.
        align_momentum: whether momenta follow the mean direction
            (curvadion.sync.corrections), for local_step="dion"; copies a batch's weights.
        polar_correction: whether to restore the length that averaged directions lose to
            noise. For local_step="dion"; copies a batch's anchors.
        residual_dtype: dtype of the residuals (the codes' errors): "bfloat16", "float32" or
            the torch.dtype.
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
        StateKey(SENT, StateOwner.SYNC, like_parameter=True, passing=True),
        StateKey(MEAN, StateOwner.SYNC, like_parameter=True, passing=True),
        StateKey(DUE, StateOwner.SYNC, passing=True),
    )
    sends_codes = True
    elastic = True
    replays = True
    runs_ahead = True
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
        super().__init__()
        self.residual_dtype = check_codes(bits, residual_dtype)
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
        self.delay = delay
        self.spectrum_decay = float(spectrum_decay)
        self._dealt = 0  # checksum of the division into fragments, in the saved run

    def choose_defaults(self, budget: float | None) -> None:
        self.bits = self._bits or bits_of_weights(budget or 0.0, self.fragments)

    def prepare(self, shards: Sequence[Sequence[int]]) -> Costs:
        self._fragment_of = divide([sum(each) for each in shards], self.fragments)
        before, self._dealt = self._dealt, checksum(self._fragment_of)
        count = self.count
        self.next_fragment %= count
        if before != self._dealt:
            if self.fragments_drifted:
                self.fragments_drifted = count  # which of the new ones drifted is unknown
            self._rates = [_largest(self._rates) for _ in range(count)]
            self._sent_rates = [_largest(self._sent_rates) for _ in range(count)]
            self._moved = [max(self._moved, default=0.0)] * count
            self._among = [max(self._among, default=0)] * count
        return Costs(message_bytes(chain.from_iterable(shards), self.bits) / count, count)

    def look_ahead(self, period: float) -> float:
        """1.6 sqrt(period), at most 4.1 (benchmarks/results/convergence)."""
        return round(min(1.6 * math.sqrt(period), 4.1), 1)

    def begin(self, parameters: Sequence[Parameter]) -> None:
        """Make the current weights the anchors."""
        for p in parameters:
            if ANCHOR not in p.state:
                X = p.X.detach()
                p.state[ANCHOR] = X.to(product_dtype(X), copy=True)
                p.state[RESIDUAL] = torch.zeros_like(X, dtype=RESIDUAL_DTYPES[self.residual_dtype])
        # If this run keeps no spectra, drop those of a loaded one.
        kept = self.align_momentum and self.spectrum_decay > 0
        corrections.place_spectra(parameters, kept=kept)

    def closed_step(self, step: Step) -> None:
        self._count(step)
        self._step(step, None)

    def open_step(self, step: Step) -> bool | None:
        if step.members is not None:
            return self.open_with(step.members, step)
        fragment = self.next_fragment
        self._count(step)
        self._step(step, fragment)
        self._rotate_from(fragment)
        if not self.delay:
            self.fragments_drifted -= 1
        return None

    def _step(self, step: Step, sending: int | None) -> None:
        plan, now = step.plan, step.step_index
        if self._pending is not None and self._pending.due <= now:
            self._commit()
        going = [fragment == sending for fragment in self._fragment_of]
        # A budget may open before the last means arrive.
        self._under_way.land_(compress(plan.parameters, going))
        arriving = [p.state.get(DUE, now + 1) <= now for p in plan.parameters]
        if sending is None and not any(arriving):
            step.take()
            return
        # Corrections change momenta, whose norms are measured at the end.
        unmeasured = replace(step, norms=None)
        staying = [not (a or g) for a, g in zip(arriving, going, strict=True)]
        stay, arrive, go = map(plan.select, (staying, arriving, going))
        rate = self._rate(plan, self._rates) if step.directed else None
        sent_rate = self._rate(plan, self._sent_rates) if step.directed else None
        for batch in unmeasured.batches(stay, arrive, go):
            if batch.part is arrive:
                self._arrive(batch, sent_rate)
            elif batch.part is go and self.delay and group_size(step.replicas) > 1:
                moved = batch.plan.parameters
                self._under_way.send(moved, self.bits, step.background(), now + self.delay)
            elif batch.part is go:
                self._agree(batch, step.replicas, rate)
        if sending is not None:
            self._sent_rates[sending], self._rates[sending] = self._rates[sending], []
        if step.norms is not None:
            plan.measure_momenta()

    def sync_weights(self, plan: Plan, replicas: Group | None, keys: Sequence[StateKey]) -> int:
        self._under_way.land_(plan.parameters)
        openings, count = self.fragments_drifted, self.count
        drifted = {(self.next_fragment + i) % count for i in range(openings)}
        for chosen in plan.select([f in drifted for f in self._fragment_of]).batches:
            self._agree(Batch(plan, chosen, None), replicas, None)
        self._rates = [[] for _ in self._rates]
        self.next_fragment = (self.next_fragment + openings) % count
        self.fragments_drifted = 0
        return openings

    def settle(self) -> None:
        self._commit()
        self._under_way.settle()

    @property
    def waited_seconds(self) -> float:
        return self._under_way.waited_seconds

    def _agree(self, batch: Batch, replicas: Group | None, rate: Rate | None) -> None:
        """Synchronise a batch, then correct momenta and weights if there is a rate."""
        if replicas is None or group_size(replicas) == 1:
            self._anchor(batch.plan.parameters)
        else:
            self._take_in(batch, self._means(batch.plan, replicas), rate)

    def before_average(self, parameters: Sequence[Parameter]) -> None:
        self._under_way.land_(parameters)
        for p in parameters:
            if ANCHOR in p.state:
                residual = local(p.state[RESIDUAL])
                p.local.add_(residual)
                residual.zero_()

    def after_average(self, parameters: Sequence[Parameter]) -> None:
        self._under_way.drop(parameters)
        self._anchor(parameters)
        corrections.forget_spectra(parameters)
        self._rates = [[] for _ in self._rates]

    def _anchor(self, parameters: Sequence[Parameter]) -> None:
        for p in parameters:
            if ANCHOR in p.state:
                anchor_of(p).copy_(p.local)

    def state_dict(self) -> dict[str, Any]:
        division = {"next_fragment": self.next_fragment, "dealt": self._dealt}
        rates = {"rates": self._rates, "sent_rates": self._sent_rates}
        of_members = {"moved": self._moved, "among": self._among}
        return super().state_dict() | division | rates | of_members

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._moved, self._among = state["moved"], state["among"]
        # If parameters are divided differently here, prepare() counts all fragments as
        # drifted.
        self.next_fragment, self._dealt = state["next_fragment"], state["dealt"]
        self._rates, self._sent_rates = state["rates"], state["sent_rates"]


def _largest(sums: Sequence[Sequence[float]]) -> list[float]:
    """The largest of the fragments' sums, by group."""
    return [max(of_group) for of_group in zip_longest(*sums, fillvalue=0.0)]
