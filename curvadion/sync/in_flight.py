"""Pseudo-gradients whose means arrive some steps after they were sent.

A replica keeps the D_i = X_i - anchor that it sent, and continues with local steps. When the
mean D of the D_i arrives,

    X_i <- X_i + D - D_i,   anchor <- anchor + D,

so that steps taken meanwhile are kept, and anchors have the same bits (the delay of Streaming
DiLoCo, arXiv 2501.18512). D_i is stored in the residual's dtype: its rounding error stays in
X_i, and is part of the next pseudo-gradient. Beside residuals in 8 bits it is bfloat16: it exists
during an exchange only, so codes would save little and cost two more passes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from curvadion import ops
from curvadion.comm.exchange_thread import Exchange
from curvadion.comm.members import Exchanges
from curvadion.layout.dtensor import local, made_like
from curvadion.ops.code_format import Bits
from curvadion.plan.parameter import Parameter
from curvadion.plan.state import ANCHOR, RESIDUAL
from curvadion.sync.coded_mean import (
    Message,
    coded_together,
    decode_add_,
    encode,
    moved_since,
    open_residuals,
)

# State of a pending exchange: D_i; D, once it is known; the step that adds D.
SENT = "sent"
MEAN = "mean"
DUE = "due"
Movements = dict[Parameter, Tensor]


@dataclass(frozen=True)
class Sent:
    """A message whose mean is pending."""

    parameters: Sequence[Parameter]
    message: Message
    exchange: Exchange[None]
    due: int  # the index of the step that adds the mean


class InFlight:
    """The pending pseudo-gradients of this replica."""

    def __init__(self) -> None:
        self.pending: list[Sent] = []
        self.waited_seconds = 0.0  # for arrivals

    def send(
        self,
        parameters: Sequence[Parameter],
        bits: Bits,
        to: Exchanges,
        due: int,
        share: float = 1.0,
    ) -> None:
        """Begin to send D_i = X_i - anchor of parameters.

        Args:
            parameters: with anchors and residuals.
            bits: of a code on each way.
            to: what runs the exchanges, and knows the other replicas.
            due: the index of the step that adds the mean, from 0 on.
            share: this replica's weight relative to an equal share.
        """
        for run in coded_together(parameters, bits):
            movements = []
            for p in run:
                # D_i = X_i - anchor
                empty = partial(torch.empty_like, dtype=_dtype_of_sent(p))
                p.state[SENT] = made_like(p.X, empty)
                movement = local(p.state[SENT])
                movement.copy_(moved_since(local(p.state[ANCHOR]), p.local))
                p.state[DUE] = due
                movements.append(movement)
            if share != 1.0:
                movements = [share * movement.float() for movement in movements]
            with open_residuals(run, due) as residuals:
                message = encode(movements, (), residuals, bits, to.group)
            what = f"The exchange of {run[0].name} and what goes with it, due at step {due + 1},"
            exchange = to.begin(what, partial(message.exchange_, to.group))
            self.pending.append(Sent(run, message, exchange, due))

    def land_(self, parameters: Iterable[Parameter]) -> tuple[Movements, Movements]:
        """Add pending means to weights and anchors, and wait for them if necessary.

        Returns:
            D and D - D_i of the parameters that had something pending; local shards.
        """
        arrivals = [p for p in parameters if DUE in p.state]
        without_mean = {p.X for p in arrivals if MEAN not in p.state}
        awaited = []
        for sent in self.pending:
            if any(p.X in without_mean for p in sent.parameters):
                awaited.append(sent)
        self.settle(awaited)
        D: Movements = {}
        differences: Movements = {}
        for p in arrivals:
            anchor = local(p.state[ANCHOR])
            mean = local(p.state.pop(MEAN))
            movement = local(p.state.pop(SENT))
            del p.state[DUE]
            # X_i - anchor - D_i, the steps since then
            since = moved_since(anchor, p.local) - movement
            # anchor <- anchor + D,  X_i <- X_i + D - D_i
            anchor.add_(mean)
            p.local.copy_(anchor + since)
            D[p] = mean
            differences[p] = mean - movement
        return D, differences

    def codes(self) -> list[Tensor]:
        """The codes of all received means, in order."""
        return [sent.message.means.cpu() for sent in self.pending]

    def take_back(self) -> None:
        """Wait for the thread, then drop what was sent: no weight has used it."""
        while self.pending:
            with suppress(RuntimeError):
                self.pending[-1].exchange.result()
            for p in self.pending.pop().parameters:
                del p.state[SENT], p.state[DUE]

    def missed_(self, parameters: Sequence[Parameter], bits: int, codes: Tensor) -> None:
        """Take means to which this replica did not contribute for pending ones.

        Args:
            parameters: a run of :func:`coded_together`.
            bits: of a code of a mean.
            codes: of the means, (blocks, block_bytes(bits)) uint8.
        """
        for p in parameters:
            X = p.X.detach()
            p.state[SENT] = torch.zeros_like(X, dtype=_dtype_of_sent(p))
            p.state[MEAN] = torch.zeros_like(X, dtype=torch.float32)
            p.state[DUE] = 0
        decode_add_([local(p.state[MEAN]) for p in parameters], (), codes, bits)

    def drop(self, parameters: Sequence[Parameter]) -> None:
        """Drop pending exchanges of parameters that got other, synchronised weights."""
        self.settle()
        for p in parameters:
            for key in (SENT, MEAN, DUE):
                p.state.pop(key, None)

    def settle(self, awaited: Sequence[Sent] | None = None) -> None:
        """Wait for pending exchanges, so that states hold their means; None: for all."""
        if awaited is None:
            awaited = list(self.pending)
        for sent in awaited:
            start = time.perf_counter()
            sent.exchange.result()
            self.waited_seconds += time.perf_counter() - start
            self.pending.remove(sent)
            for p in sent.parameters:
                empty = partial(torch.empty_like, dtype=torch.float32)
                p.state[MEAN] = made_like(p.X, empty)
            # ``send`` has rounded these residuals with the seed ``due``, and the same noise again
            # would round most elements in the same direction: hence ~due. It depends on no other
            # step, so a checkpoint, which calls this earlier, changes no bit. Blocks in which
            # nothing is replaced keep their codes.
            seed = ~sent.due
            with open_residuals(sent.parameters, seed) as residuals:
                sent.message.store_losses_(residuals)
            means = [local(p.state[MEAN]) for p in sent.parameters]
            decode_add_(means, (), sent.message.means, sent.message.bits.down)


def _dtype_of_sent(p: Parameter) -> torch.dtype:
    """The dtype of D_i."""
    residual: Tensor = p.state[RESIDUAL]
    return torch.bfloat16 if ops.is_coded(residual) else residual.dtype
