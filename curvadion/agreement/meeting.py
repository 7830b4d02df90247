"""The meeting: ranks agree on a step in one collective of 24 bytes.

It is an all-reduce MAX of three int64, ``(signal, w, -w)``, where ``w`` is a checksum of all
that must be equal. The largest ``-w`` is minus the smallest ``w``. So if the largest ``w`` is
not minus the largest ``-w``, some ranks differ, all know it, and every rank raises an error
that names the difference.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from curvadion import ops
from curvadion.agreement.verify import Listing, raise_different
from curvadion.comm.collectives import communicate, group_size
from curvadion.comm.exchange_thread import Exchange
from curvadion.comm.groups import Group
from curvadion.comm.members import Exchanges
from curvadion.gates import Gate
from curvadion.ops.tensors import from_host
from curvadion.ops.verdict import NAN_BITS
from curvadion.plan.plan import MomentumNorms, Plan, StepTensors

# Bytes of (signal, w, -w), and of (w, -w) alone.
MEETING_BYTES = 24
WORDS_BYTES = 16
# From this norm on gradients and momenta count as not finite; smaller squares fit float32.
LARGEST_NORM = 2.0**50
# Bits 0 to 30 of the first word, which :func:`curvadion.ops.verdict` lays out.
_PARAMETER_BITS = 0x7FFFFFFF


class Outcome(NamedTuple):
    """The result of a meeting.

    Args:
        signal: the largest gate signal of any matrix on any rank.
        parameter: the name of its parameter; None if this rank has no parameters.
        finite: whether all gradients are, and shorter than LARGEST_NORM.
        all_zero: whether all gradients are zero; known at a first step only, else False.
    """

    signal: float
    parameter: str | None
    finite: bool
    all_zero: bool


@dataclass
class Meeting:
    """A meeting that has been held; the host may read its result later.

    Args:
        words: the largest (signal, w, -w) of all ranks, (3,) int64; of one rank alone its
            signal, (1,). On the device until they are sent.
        moves: () bool on the device: whether to step.
        plan: of the step.
        listing: gives what w is a checksum of.
        group: the ranks that met; None for one.
        first: whether this is the run's first step.
        arrived: recorded after the copy of ``words`` to the host; None if there is none.
    """

    words: Tensor
    moves: Tensor
    plan: Plan
    listing: Callable[[], Listing]
    group: Group | None
    first: bool
    arrived: torch.cuda.Event | None = None

    def send(self) -> None:
        """Start copying the result to the host."""
        words = self.words
        if words.device.type != "cuda":
            return
        # Only to pinned memory can a GPU copy while the host goes on.
        self.words = torch.empty(words.shape, dtype=words.dtype, device="cpu").pin_memory()
        self.words.copy_(words, non_blocking=True)
        self.arrived = torch.cuda.Event()
        self.arrived.record(torch.cuda.current_stream(words.device))

    def read(self) -> Outcome:
        """Wait for the result; raise on all ranks if their words differ."""
        if self.arrived is not None:
            self.arrived.synchronize()
        words = self.words.tolist()
        if len(words) > 1:
            compare(words[1:], self.listing, self.group)
        word = words[0]
        signal_bits = word >> 32
        parameters = self.plan.parameters
        name = None
        if parameters:
            name = parameters[word & _PARAMETER_BITS].name
        return Outcome(
            # The float32 that has these bits.
            signal=struct.unpack("f", struct.pack("i", signal_bits))[0],
            parameter=name,
            finite=signal_bits != NAN_BITS,
            # At a first step bit 31 says whether a norm is positive.
            all_zero=self.first and word >> 31 == 0,
        )


@record_function("curvadion.meeting")
def meet(
    gate: Gate,
    plan: Plan,
    norms: Tensor,
    tensors: StepTensors,
    momenta: MomentumNorms | None,
    *,
    word: Callable[[], int],
    listing: Callable[[], Listing],
    group: Group | None,
    first: bool = False,
) -> Meeting:
    """Start the collective; :meth:`Meeting.read` waits for it.

    Args:
        gate: whose signals are compared.
        plan: of the step.
        norms: that must be finite, (l,) with l > 0.
        tensors: weights, momenta and gradients of the matrices.
        momenta: their norms; None if the gate reads none.
        word: gives w, an integer below 2^32.
        listing: gives what w is a checksum of.
        group: the ranks that meet; None for one.
        first: whether this is the run's first step.
    """
    signal: Tensor | None = None
    parameter: Tensor | None = None
    if momenta is not None:
        signals = _signals(gate, plan, tensors, momenta)
        # abs() removes the sign of a negative zero, whose bits would sort below everything.
        signal, matrix = signals.float().clamp_min(0).abs().max(dim=0)
        parameter = plan.parameter_index.take(matrix) if plan.matrices else matrix
    words, moves = ops.verdict(norms, signal, parameter, LARGEST_NORM, first)
    if group_size(group) > 1:
        w = word()
        words = torch.cat([words, from_host([w, -w], torch.int64, words.device)])
        communicate(dist.all_reduce, words, dist.ReduceOp.MAX, group)
        moves = ops.heeded(words)
    return Meeting(words, moves, plan, listing, group, first)


def begin_comparison(word: int, plan: Plan, thread: Exchanges) -> Exchange[Tensor]:
    """Start finding the largest ``(w, -w)``, at an opening with a delay."""
    words = from_host([word, -word], torch.int64, plan.device)

    def exchange() -> Tensor:
        dist.all_reduce(words, op=dist.ReduceOp.MAX, group=thread.group)
        return words

    return thread.begin("The comparison of the replicas' settings", exchange)


def compare(words: Sequence[int], listing: Callable[[], Listing], group: Group | None) -> None:
    """Raise RuntimeError on all ranks if w differed; words: the largest (w, -w)."""
    largest, largest_negated = words
    if group is not None and largest != -largest_negated:
        raise_different(listing(), group)


def _signals(gate: Gate, plan: Plan, tensors: StepTensors, momenta: MomentumNorms) -> Tensor:
    """The gate's signals, (k,), or (1,) of zero without matrices.

    Args:
        gate: which reads the norms.
        plan: with k matrices.
        tensors: weights, momenta and gradients of the matrices.
        momenta: norms before and after them.
    """
    after = momenta.after
    if not after.numel():
        return torch.zeros(1, dtype=torch.float32, device=plan.device)
    if not tensors.complete:
        # A matrix without a gradient rests: its momentum stays as it was.
        moving = torch.tensor(
            [m.parameter.G is not None for m in plan.matrices], device=after.device
        )
        after = torch.where(moving, after, momenta.before)
    signals = gate.signal(momenta.before, after)
    if not isinstance(signals, Tensor) or signals.shape != after.shape:
        raise ValueError(
            f"gate={gate!r}: signal() must return a tensor with one signal a matrix, of "
            f"shape {tuple(after.shape)}, got {signals!r}"
        )
    return signals
