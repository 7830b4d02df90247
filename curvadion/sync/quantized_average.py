"""Replicas step by themselves, then take the mean of what their weights moved, in a few bits.

Replicas share an anchor, the weights they last agreed on. When the gate opens, each sends its
pseudo-gradient, what its weights have moved since, in codes, and all move to the mean:

    anchor <- anchor + mean over replicas of (X_i - anchor),   X_i <- anchor

What the codes lose is each replica's residual: it is sent with the next pseudo-gradient (error
feedback). Parameters may come together in fragments, one at each opening.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion import checks
from curvadion.comm.collectives import DENSE_BUCKET_BYTES, chunks, divide, group_size
from curvadion.layout.dtensor import local
from curvadion.layout.parameters import groups_of
from curvadion.sync.base import Costs, Step, Sync
from curvadion.sync.codec import BITS, FORMAT, bits_within, coded_share
from curvadion.sync.coded_mean import add_coded_mean_, message_bytes
from curvadion.sync.corrections import (
    LR_SINCE_ANCHOR,
    agree_on_lengths_,
    align_momenta_,
    anchors_of,
    correct_polar_,
    weights_of,
)
from curvadion.update.direction import Taken
from curvadion.update.momentum import measure_momenta
from curvadion.update.parameter import Parameter
from curvadion.update.plan import Plan
from curvadion.update.state import ANCHOR, RESIDUAL, Owner, StateKey

RESIDUAL_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class QuantizedAverage(Sync):
    """Local steps, then the mean of the replicas' pseudo-gradients in codes of a few bits.

    P and R never cross the replicas: their rank costs no bytes. An opening is a local step, then
    the exchange of codes for one fragment.

    Args:
        bits: of a code: 1, 2, 3, 4 or 8. None takes what a byte budget pays for at every second
            step, 2 at least: 4 for 0.1.
        fragments: parameters are divided into so many fragments of about equal size. At each
            opening one comes together, in rotation; under a byte budget the gate opens as many
            times more often. 3 gain in short runs where each weight is agreed on at every third to
            sixteenth step (docs/convergence.md).
        align_momentum: whether momenta follow the mean direction that the agreement on weights
            tells, for no bytes (curvadion.sync.corrections). For local_step="dion"; holds a copy
            of a wave's weights meanwhile (docs/guide.md#memory).
        polar_correction: whether replicas restore, for no bytes, the length that the mean of their
            directions has lost to noise (curvadion.sync.corrections). For local_step="dion";
            holds a copy of a wave's anchors meanwhile.
        residual_dtype: "bfloat16" or "float32", or the torch.dtype, of what the codes have lost.
            Codes of few bits lose a third of a pseudo-gradient; that bfloat16 loses a 500th of this
            third is no loss.

    Raises:
        TypeError, ValueError: naming the argument and its value.
    """

    group_defaults = {"direction": "polar", "rank_fraction": 1.0, "right_factor": "qr"}  # noqa: RUF012
    state_keys = (
        StateKey(ANCHOR, Owner.SYNC, like_parameter=True),
        StateKey(RESIDUAL, Owner.SYNC, like_parameter=True),
        StateKey(LR_SINCE_ANCHOR, Owner.SYNC),
    )
    sends_codes = True
    message_format = FORMAT

    def __init__(
        self,
        bits: int | None = None,
        fragments: int = 1,
        align_momentum: bool = True,
        polar_correction: bool = True,
        residual_dtype: Literal["bfloat16", "float32"] | torch.dtype = "bfloat16",
    ) -> None:
        if bits is not None:
            checks.integer("bits", bits, 1)
            checks.one_of("bits", bits, BITS)
        checks.integer("fragments", fragments, 1)
        checks.boolean("align_momentum", align_momentum)
        checks.boolean("polar_correction", polar_correction)
        if isinstance(residual_dtype, torch.dtype):
            name = str(residual_dtype).removeprefix("torch.")
        else:
            name = residual_dtype
        checks.one_of("residual_dtype", name, tuple(RESIDUAL_DTYPES))
        self._bits = bits
        self.bits = bits_within(0.0) if bits is None else bits
        self.fragments = fragments
        self.align_momentum = align_momentum
        self.polar_correction = polar_correction
        self.residual_dtype: str = name
        self.next_fragment = 0
        self._fragment_of: list[int] = []  # of each parameter of the plan

    @property
    def count(self) -> int:
        """How many fragments there are: fewer than asked for if parameters are few."""
        return max(self._fragment_of, default=-1) + 1

    # ---------------------------------------------------------------- what it costs

    def choose_defaults(self, budget: float | None) -> None:
        self.bits = bits_within(budget or 0.0) if self._bits is None else self._bits

    def prepare(self, sizes: Sequence[int]) -> Costs:
        before, self._fragment_of = self._fragment_of, divide(sizes, self.fragments)
        if self.fragments_apart and before != self._fragment_of:
            self.fragments_apart = self.count  # which of the old ones is not known
        count = max(1, self.count)
        return Costs(message_bytes(sizes, self.bits) / count, count)

    @property
    def typical_cost(self) -> float:
        return coded_share(self.bits) / self.fragments

    def look_ahead(self, period: float) -> float:
        """1.6 sqrt(period), which did best (docs/convergence.md)."""
        return round(1.6 * math.sqrt(period), 1)

    # ---------------------------------------------------------------- around steps

    def begin(self, parameters: Sequence[Parameter]) -> None:
        """Anchor the weights as they are."""
        for p in parameters:
            if ANCHOR not in p.state:
                X = p.X.detach()
                wide = torch.promote_types(X.dtype, torch.float32)
                p.state[ANCHOR] = X.to(wide, copy=True)
                p.state[RESIDUAL] = torch.zeros_like(X, dtype=RESIDUAL_DTYPES[self.residual_dtype])
            if p.matrices:
                p.state.setdefault(LR_SINCE_ANCHOR, 0.0)  # flattened old checkpoints lack it

    def note_own_step(self) -> None:
        self.fragments_apart = self.count

    def before_local_update(self, step: Step) -> None:
        """Count the learning rate of the matrices that move, as far as it is known, anywhere."""
        plan = step.plan if step.complete else step.moving.plan_among(step.agreed)
        rates: dict[int, float] = {}  # each read once: it may be a tensor on an accelerator
        for p in plan.dion:
            if LR_SINCE_ANCHOR in p.state:
                if id(p.group) not in rates:
                    rates[id(p.group)] = float(p.group["lr"])
                p.state[LR_SINCE_ANCHOR] += rates[id(p.group)]

    def open_step(self, step: Step) -> None:
        now = self._next(step.plan, 1)
        kept = set(map(id, now.parameters))
        step.local_update(step.plan.select([id(p) not in kept for p in step.plan.parameters]))
        if not step.complete:
            agree_on_lengths_(step.plan, step.replicas)
        for wave in now.waves():
            # No name holds the directions here, so that they can go before weights are corrected.
            self._agree(wave, step.replicas, step.local_update(wave), corrected=step.directed)
        self._turn(1)
        if step.moving.norms is not None:
            measure_momenta(step.plan)

    def come_together(self, plan: Plan, replicas: dist.ProcessGroup | None) -> int:
        openings = self.fragments_apart
        for wave in self._next(plan, openings).waves():
            self._agree(wave, replicas, None, corrected=False)
        self._turn(openings)
        return openings

    def _next(self, plan: Plan, fragments: int) -> Plan:
        """The parameters of the next fragments."""
        now = {(self.next_fragment + i) % max(1, self.count) for i in range(fragments)}
        return plan.select([fragment in now for fragment in self._fragment_of])

    def _turn(self, fragments: int) -> None:
        """Note that the next fragments have come together."""
        self.next_fragment = (self.next_fragment + fragments) % max(1, self.count)
        self.fragments_apart = max(0, self.fragments_apart - fragments)

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
        own = [] if aligned is None else weights_of(aligned)
        corrected = corrected and self.polar_correction
        before = anchors_of(wave) if corrected else []
        for alike in _cut_alike(wave.parameters):
            average_in_codes_(list(anchored(alike)), self.bits, replicas)
        if aligned is not None:
            align_momenta_(aligned, own)
        del taken, aligned, own
        if corrected:
            correct_polar_(wave, before)
        _begin_anew(wave.parameters)

    # ---------------------------------------------------------------- exact averages

    def before_average(self, parameters: Sequence[Parameter]) -> None:
        for held in anchored(parameters):
            held.X.add_(held.residual)
            held.residual.zero_()

    def after_average(self, parameters: Sequence[Parameter]) -> None:
        for held in anchored(parameters):
            held.anchor.copy_(held.X)
        _begin_anew(parameters)

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "next_fragment": self.next_fragment}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        number = state.get("next_fragment", 0)
        checks.integer("next_fragment", number, 0)
        super().load_state_dict(state)
        self.next_fragment = number
        # Parameters may have been divided otherwise: prepare() then counts all fragments as apart.
        self._fragment_of = []

    def __repr__(self) -> str:
        return (
            f"QuantizedAverage(bits={self.bits}, fragments={self.fragments}, "
            f"align_momentum={self.align_momentum}, polar_correction={self.polar_correction}, "
            f"residual_dtype={self.residual_dtype!r})"
        )


# -------------------------------------------------------------------- the mean in codes


class Anchored(NamedTuple):
    """Weights, their anchor, and what codes have lost here; shards held here.

    All have the same shape. anchor: float32 or wider. residual: bfloat16 or float32.
    """

    X: Tensor
    anchor: Tensor
    residual: Tensor


def anchored(parameters: Sequence[Parameter]) -> Iterator[Anchored]:
    """Those of the parameters that have an anchor, in their order."""
    for p in parameters:
        if ANCHOR in p.state:
            yield Anchored(p.local, local(p.state[ANCHOR]), local(p.state[RESIDUAL]))


def average_in_codes_(
    weights: Sequence[Anchored], bits: int, replicas: dist.ProcessGroup | None
) -> None:
    """Move anchors and weights by the mean pseudo-gradient; afterwards all hold the same bits.

        anchor <- anchor + mean over replicas of (X - anchor),   X <- anchor

    Args:
        weights: the same parameters on every replica; updated.
        bits: of a code.
        replicas: the process group.
    """
    first = 0
    for chunk in coded_together([held.X for held in weights], bits):
        these = weights[first : first + len(chunk)]
        first += len(chunk)
        residuals = [held.residual for held in these]
        add_coded_mean_(chunk, [held.anchor for held in these], residuals, bits, replicas)


def coded_together(X: Sequence[Tensor], bits: int) -> Iterator[list[Tensor]]:
    """Runs of tensors whose codes are one bucket, or of one tensor."""
    return chunks(X, DENSE_BUCKET_BYTES * 32 // bits)


def _cut_alike(parameters: Sequence[Parameter]) -> Iterator[list[Parameter]]:
    """Parameters that are cut over the same ranks, in an order that ranks share.

    Which replica averages a block depends on the blocks before it. Ranks of one replica that hold
    a parameter alike must come to the same, whatever shards they hold of others.
    """
    by_cut: dict[tuple[int, ...], list[Parameter]] = {}
    for p in parameters:
        if ANCHOR in p.state:
            by_cut.setdefault(tuple(map(id, groups_of(p.X))), []).append(p)
    yield from by_cut.values()


def _begin_anew(parameters: Sequence[Parameter]) -> None:
    """Count learning rates from here: replicas agree on these parameters."""
    for p in parameters:
        if LR_SINCE_ANCHOR in p.state:
            p.state[LR_SINCE_ANCHOR] = 0.0
