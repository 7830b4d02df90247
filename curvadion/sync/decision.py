"""What all ranks agree on before a step, and the gate's one collective that tells them.

Everything that ranks must decide together crosses in 16 bytes: the gate's signal, a gradient that
is not finite, and a notice of what has changed on a rank. At a closed step of a schedule only ranks
of one replica decide together.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion import ops
from curvadion.comm.collectives import group_size
from curvadion.gates import Gate
from curvadion.update.gradients import Gradients
from curvadion.update.momentum import MomentumNorms
from curvadion.update.plan import Plan

GATE_BYTES = 16
_NAN_BITS = 0x7FC00000
_PARAMETER = 0x7FFFFFFF
# The second word of the collective: a notice, the number of steps, and a checksum.
_STEP_BITS, _CHECKSUM_BITS = 28, 32


class Notice(IntEnum):
    """What a rank has to tell the others before a step; of all ranks' the highest counts."""

    NEW = 0  # no parameter has a state, and all learning rates are zero: nothing will move
    NOTHING = 1
    MISSING_GRADIENT = 2
    UNVERIFIED = 3  # replicas have not been compared since the last change of what they are
    CHANGED = 4  # parameters were added, frozen or regrouped here since the last step
    DIFFERENT = 5  # at the last step some rank had other settings than this one
    INVALID = 6  # a setting here is impossible
    STUCK = 7  # this replica has left out too many steps in a row


class Settings(NamedTuple):
    """What must be the same on all ranks at every step.

    steps: how many were taken. checksum: of the hyperparameters, below 2**32.
    """

    steps: int
    checksum: int

    @property
    def word(self) -> int:
        return (self.steps % (1 << _STEP_BITS)) << _CHECKSUM_BITS | self.checksum


class Signal(NamedTuple):
    """The largest gate signal of a step on any replica, and the name of the parameter that had it.

    parameter: None if no parameter is a matrix.
    """

    largest: float
    parameter: str | None


class Decision(NamedTuple):
    """What the ranks that were asked know alike after the gate's collective, but for ``alike``.

    signal: the largest gate signal of any matrix on any replica. parameter: the index, in the
    plan's order, of the parameter that had it. finite: no gradient on any replica holds a NaN or
    an Inf. all_zero: every gradient of every replica is zero (told only where no signal is
    positive). notice: the highest of any rank. alike: whether this rank has the settings of the
    rank whose word was the largest. If settings differ at all, they do so for some rank. read: the
    numbers of ``unread``. group: the ranks.
    """

    signal: float
    parameter: int
    finite: bool
    all_zero: bool
    notice: Notice
    alike: bool
    read: list[int]
    group: dist.ProcessGroup | None

    @property
    def complete(self) -> bool:
        """Whether no replica misses a gradient; False where that is not known."""
        return self.notice <= Notice.NOTHING

    @property
    def signal_word(self) -> int:
        """A word that sorts like the signal and holds its parameter; 0 if one was not finite."""
        if not self.finite:
            return 0
        return int(struct.unpack("i", struct.pack("f", self.signal))[0]) << 32 | self.parameter


def agree(
    signals: Tensor,
    owners: Tensor,
    norms: Tensor,
    *,
    notice: Notice,
    settings: Settings,
    group: dist.ProcessGroup | None,
    unread: Tensor | None = None,
) -> Decision:
    """One collective of ``GATE_BYTES`` and one device-to-host read.

    Args:
        signals: this replica's gate signals, one per matrix, (k,), k may be 0.
        owners: the index of each matrix's parameter, (k,) int64, on the same device.
        norms: what must be finite, and zero for all_zero to hold, (l,) with l >= 1.
        notice: what this rank has to tell.
        settings: what should be the same on all ranks.
        group: the ranks that agree; None for this process alone.
        unread: int64 numbers that the host is to read with the rest, (l,).

    The maximum over replicas of a word whose highest bits are the float32 bits of the signal is
    the word of the largest signal, since non-negative floats sort like their bits; NaN sorts above
    infinity and stands for a non-finite gradient. Below these bits, one says that a norm
    is positive and 31 hold the parameter's index. The other word holds the notice above the
    settings: a rank whose settings are not those of the maximum tells so at the next step.
    """
    if signals.numel() == 0:
        signals, owners = norms.new_zeros(1), torch.zeros_like(norms[:1], dtype=torch.int64)
    # abs() takes the sign off a negative zero, whose bits would sort below everything.
    signal, matrix = signals.float().clamp_min(0).abs().max(dim=0)
    finite = torch.isfinite(norms).all() & ~torch.isnan(signal)
    bits = torch.where(finite, signal.view(torch.int32).long(), _NAN_BITS)
    word = (bits << 32) | ((norms > 0).any().long() << 31) | owners.take(matrix)
    told = word_of(notice, settings)
    words = torch.stack([word, torch.full_like(word, told)])
    if group_size(group) > 1:
        dist.all_reduce(words, op=dist.ReduceOp.MAX, group=group)
    if unread is not None:
        words = torch.cat([words, unread])
    largest, told, *read = words.tolist()
    return Decision(
        signal=_number(largest),
        parameter=largest & _PARAMETER,
        finite=(largest >> 32) != _NAN_BITS,
        all_zero=(largest >> 31) == 0,
        notice=notice_of(told),
        alike=settings_of(told) == settings.word,
        read=read,
        group=group,
    )


def word_of(notice: Notice, settings: Settings) -> int:
    """What a rank tells: a word of 63 bits, the notice above the settings."""
    return notice << (_STEP_BITS + _CHECKSUM_BITS) | settings.word


def notice_of(word: int) -> Notice:
    """The notice of a :func:`word_of`."""
    return Notice(word >> (_STEP_BITS + _CHECKSUM_BITS))


def settings_of(word: int) -> int:
    """The settings of a :func:`word_of`, as :attr:`Settings.word` has them."""
    return word & ((1 << (_STEP_BITS + _CHECKSUM_BITS)) - 1)


def signal_of(word: int, plan: Plan) -> Signal:
    """What a :attr:`Decision.signal_word` says of the parameters of a plan."""
    return Signal(_number(word), plan.parameters[word & _PARAMETER].name if plan.dion else None)


def _number(word: int) -> float:
    """The float32 whose bits are the highest of a word."""
    number: float = struct.unpack("f", struct.pack("i", word >> 32))[0]
    return number


def held_anywhere(
    held: list[bool], device: torch.device, group: dist.ProcessGroup | None
) -> list[bool]:
    """Per parameter, whether some replica has a gradient: one byte each over the group."""
    if group_size(group) == 1:
        return held
    flags = torch.tensor(held, dtype=torch.uint8, device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in flags.tolist()]


def decide(
    gate: Gate,
    plan: Plan,
    gradients: Gradients,
    momenta: MomentumNorms | None,
    *,
    notice: Notice,
    settings: Settings,
    group: dist.ProcessGroup | None,
    unread: Tensor | None = None,
) -> Decision:
    """The gate's one collective; ``momenta`` if the gate reads them.

    notice, settings, group, unread: as :func:`agree` takes them; a missing gradient is noticed
    here.

    Raises:
        ValueError: if the gate's signals are not one per matrix.
    """
    covered = plan.parameters if momenta is None else plan.elementwise
    held = [G for p in covered if (G := p.G) is not None]
    norms = [ops.norms(held)] if held else []
    signals = torch.empty(0, dtype=torch.float32, device=plan.device)
    if momenta is not None:
        signals = _signals(gate, plan, gradients, momenta)
        norms.append(momenta.after)
    if not sum(n.numel() for n in norms):
        norms.append(torch.zeros(1, dtype=torch.float32, device=plan.device))
    unsure = plan.elementwise if gradients.complete else plan.parameters
    # FSDP1 gives no gradient to a parameter of which it holds nothing here.
    if any(p.G is None and p.local.numel() for p in unsure):
        notice = max(notice, Notice.MISSING_GRADIENT)
    return agree(
        signals,
        plan.owners,
        torch.cat(norms),
        notice=notice,
        settings=settings,
        unread=unread,
        group=group,
    )


def refuse(gate: Gate, plan: Plan, group: dist.ProcessGroup | None) -> None:
    """Take part in a step's agreement only to tell the ranks that a setting here is impossible.

    The collectives are those of :func:`momentum_norms` and :func:`decide`.
    """
    zero = torch.zeros(1, dtype=torch.float32, device=plan.device)
    if gate.reads_momentum and plan.dion:
        plan.norms_over_shards(zero.expand(len(plan.matrices)))
    agree(
        zero[:0],
        plan.owners,
        zero,
        notice=Notice.INVALID,
        settings=Settings(0, 0),
        group=group,
    )


def _signals(gate: Gate, plan: Plan, gradients: Gradients, momenta: MomentumNorms) -> Tensor:
    """The gate's signals; the momentum of a matrix without a gradient is as it was."""
    before, after = momenta
    if not gradients.complete:
        held = [m.parameter.G is not None for m in plan.matrices]
        after = torch.where(torch.tensor(held, device=after.device), after, before)
    signals = gate.signal(before, after)
    if signals.shape != after.shape:
        raise ValueError(
            f"gate={gate!r}: signal() returned the shape {tuple(signals.shape)}, but "
            f"there is one signal per matrix: {tuple(after.shape)}"
        )
    return signals


class Moving(NamedTuple):
    """The parameters that a step moves, their gradients, and the norms of their momenta.

    norms: Frobenius norms with these gradients, one per matrix, (k,); None if no gate reads them.
    """

    plan: Plan
    gradients: Gradients
    norms: Tensor | None

    def among(self, group: dist.ProcessGroup | None) -> Moving:
        """Those of them that have a gradient on some rank of the group; one byte each is sent.

        The others rest: neither their weights nor their state change.
        """
        keep = self._held(group)
        norms = self.norms
        if norms is not None:
            by_parameter = norms.split([len(p.matrices) for p in self.plan.dion])
            kept = [these for these, k in zip(by_parameter, keep, strict=False) if k]
            norms = torch.cat(kept) if kept else norms[:0]
        plan = self.plan.select(keep)
        return self if plan is self.plan else Moving(plan, plan.gradients(), norms)

    def plan_among(self, group: dist.ProcessGroup | None) -> Plan:
        """The plan of :meth:`among` alone."""
        return self.plan.select(self._held(group))

    def _held(self, group: dist.ProcessGroup | None) -> list[bool]:
        return held_anywhere(
            [p.G is not None for p in self.plan.parameters], self.plan.device, group
        )
