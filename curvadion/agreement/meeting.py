"""The meeting: ranks agree on a step in one collective of 24 bytes.

It is an all-reduce MAX of three int64, ``(signal, w, -w)``, where ``w`` is a checksum of all
that must be equal. If the largest ``w`` is not minus the largest ``-w``, every rank raises an
error that names the difference.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from curvadion import ops
from curvadion.agreement.verify import Listing, raise_different
from curvadion.comm.background import Background
from curvadion.comm.collectives import communicate, group_size
from curvadion.comm.exchange_thread import Exchange
from curvadion.comm.groups import Group
from curvadion.gates import Gate
from curvadion.ops.tensors import from_host
from curvadion.plan.plan import MomentumNorms, Plan, StepTensors

MEETING_BYTES, WORDS_BYTES = 24, 16
# From this norm on gradients and momenta count as not finite; smaller squares fit float32.
LARGEST_NORM = 2.0**50
_NAN_BITS, _PARAMETER = 0x7FC00000, 0x7FFFFFFF


class Outcome(NamedTuple):
    """The result of a meeting."""

    signal: float  # the largest gate signal of any matrix on any rank
    parameter: str | None  # the name of its parameter; None without matrices
    finite: bool  # whether all gradients are, and shorter than LARGEST_NORM
    all_zero: bool  # whether all gradients are zero; known at a first step only


@dataclass
class Meeting:
    """A meeting that has been held; the host may read its result later."""

    words: Tensor  # (3,) int64 on the device, or (1,) of one rank alone
    moves: Tensor  # () bool on the device: whether to step
    plan: Plan
    listing: Callable[[], Listing]
    group: Group | None
    first: bool
    arrived: torch.cuda.Event | None = None

    def send(self) -> None:
        """Start copying the result to the host."""
        words = self.words
        if words.device.type == "cuda":
            self.words = torch.empty(words.shape, dtype=words.dtype, device="cpu").pin_memory()
            self.words.copy_(words, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record(torch.cuda.current_stream(words.device))

    def read(self) -> Outcome:
        """Wait for the result; raise on all ranks if their words differ."""
        if self.arrived is not None:
            self.arrived.synchronize()
        number, *told = self.words.tolist()
        if told:
            compare(told, self.listing, self.group)
        bits, parameters = number >> 32, self.plan.parameters
        return Outcome(
            signal=struct.unpack("f", struct.pack("i", bits))[0],
            parameter=parameters[number & _PARAMETER].name if parameters else None,
            finite=bits != _NAN_BITS,
            all_zero=self.first and number >> 31 == 0,
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
        momenta: their norms, if the gate reads them.
        word: gives w.
        listing: of what w is a checksum of.
        group: the ranks that meet.
        first: whether this is the run's first step.
    """
    signal = owner = None
    if momenta is not None:
        signals = _signals(gate, plan, tensors, momenta)
        # abs() removes the sign of a negative zero, whose bits would sort below everything.
        signal, matrix = signals.float().clamp_min(0).abs().max(dim=0)
        owner = plan.parameter_index.take(matrix) if plan.matrices else matrix
    words, moves = ops.verdict(norms, signal, owner, LARGEST_NORM, first)
    if group_size(group) > 1:
        own = word()
        words = torch.cat([words, from_host([own, -own], torch.int64, words.device)])
        communicate(partial(dist.all_reduce, words, dist.ReduceOp.MAX, group))
        moves = ops.heeded(words)
    return Meeting(words, moves, plan, listing, group, first)


def begin_comparison(word: int, plan: Plan, background: Background) -> Exchange[Tensor]:
    """Start finding the largest ``(w, -w)``, at an opening with a delay."""
    words = from_host([word, -word], torch.int64, plan.device)

    def exchange() -> Tensor:
        dist.all_reduce(words, op=dist.ReduceOp.MAX, group=background.group)
        return words

    return background.begin("The comparison of the replicas' settings", exchange)


def compare(words: Sequence[int], listing: Callable[[], Listing], group: Group | None) -> None:
    """Raise RuntimeError on all ranks if w differed; words: the largest (w, -w)."""
    largest, negated = words
    if group is not None and largest != -negated:
        raise_different(listing(), group)


def _signals(gate: Gate, plan: Plan, tensors: StepTensors, momenta: MomentumNorms) -> Tensor:
    """The gate's signals, (k,); a matrix without a gradient keeps its momentum.

    Args:
        gate: which reads the norms.
        plan: with k matrices.
        tensors: weights, momenta and gradients of the matrices.
        momenta: norms before and after them.
    """
    if not momenta.after.numel():
        return torch.zeros(1, dtype=torch.float32, device=plan.device)
    before, after = momenta
    if not tensors.complete:
        held = [m.parameter.G is not None for m in plan.matrices]
        after = torch.where(torch.tensor(held, device=after.device), after, before)
    signals = gate.signal(before, after)
    if not isinstance(signals, Tensor) or signals.shape != after.shape:
        raise ValueError(
            f"gate={gate!r}: signal() must return a tensor with one signal a matrix, of "
            f"shape {tuple(after.shape)}, got {signals!r}"
        )
    return signals
