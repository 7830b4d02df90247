"""Pseudo-gradients whose means arrive some steps after they were sent.

A replica keeps the D_i = X_i - anchor that it sent, and continues with local steps. When the mean
D of the D_i arrives,

    X_i <- X_i + D - D_i,   anchor <- anchor + D,

so that steps taken meanwhile are kept, and anchors have the same bits (the delay of Streaming
DiLoCo, arXiv 2501.18512). D_i is stored in the residual's dtype: its rounding error stays in X_i,
and is part of the next pseudo-gradient.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from curvadion import ops
from curvadion.comm.background import Background
from curvadion.comm.members import Members
from curvadion.comm.worker import Exchange
from curvadion.layout.dtensor import local
from curvadion.sync.coded_mean import Message, encode, moved_since
from curvadion.update.parameter import Parameter
from curvadion.update.state import ANCHOR, RESIDUAL

# State of a pending exchange: D_i; D once it is known; the step that adds it.
SENT, MEAN, DUE = "sent", "mean", "due"


@dataclass(frozen=True)
class Sent:
    """A message whose mean is pending."""

    parameters: Sequence[Parameter]
    message: Message | None  # None if this rank holds no element of the parameters
    exchange: Exchange[None]


class UnderWay:
    """The pending pseudo-gradients of this replica."""

    def __init__(self) -> None:
        self.pending: list[Sent] = []
        self.waited_seconds = 0.0  # for arrivals

    def send(
        self,
        parameters: Sequence[Parameter],
        bits: int,
        to: Background | Members,
        due: int,
        share: float = 1.0,
    ) -> None:
        """Send the movement of parameters on the same ranks; due: the step that adds the mean.

        share: this replica's weight relative to an equal share.
        """
        for p in parameters:
            p.state[SENT] = torch.empty_like(p.X.detach(), dtype=p.state[RESIDUAL].dtype)
            local(p.state[SENT]).copy_(moved_since(local(p.state[ANCHOR]), p.local))
            p.state[DUE] = due
        group = to.group
        sent, residuals = ([local(p.state[k]) for p in parameters] for k in (SENT, RESIDUAL))
        if share != 1.0:
            sent = [share * x.float() for x in sent]
        numbers = any(x.numel() for x in residuals)
        message = encode(sent, (), residuals, bits, group) if numbers else None

        def exchange() -> None:
            if message is not None:
                message.exchange_(group)

        what = f"The exchange of {parameters[0].name} and what goes with it, due at step {due + 1},"
        self.pending.append(Sent(parameters, message, to.begin(what, exchange)))

    def land_(self, parameters: Sequence[Parameter]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Add the pending means to weights and anchors; return D and D - D_i by parameter id."""
        wanted = {id(p.X) for p in parameters if MEAN not in p.state}
        self.settle([s for s in self.pending if any(id(p.X) in wanted for p in s.parameters)])
        D, missing = dict[int, Tensor](), dict[int, Tensor]()
        for p in parameters:
            anchor, mean, sent = (local(p.state[key]) for key in (ANCHOR, MEAN, SENT))
            del p.state[MEAN], p.state[SENT], p.state[DUE]
            since = moved_since(anchor, p.local) - sent
            anchor.add_(mean)
            p.local.copy_(anchor + since)
            D[id(p)], missing[id(p)] = mean, mean - sent
        return D, missing

    def codes(self) -> list[Tensor | None]:
        """The codes of all received means, in order."""
        return [None if s.message is None else s.message.codes.cpu() for s in self.pending]

    def take_back(self) -> None:
        """Wait for the thread, then drop what was sent: no weight has used it."""
        for sent in self.pending:
            with suppress(RuntimeError):
                sent.exchange.result()
        for p in (p for sent in self.pending for p in sent.parameters):
            del p.state[SENT], p.state[DUE]
        self.pending.clear()

    def missed_(self, parameters: Sequence[Parameter], bits: int, codes: Tensor | None) -> None:
        """Take means to which this replica did not contribute for pending ones."""
        for p in parameters:
            X = p.X.detach()
            p.state[SENT] = torch.zeros_like(X, dtype=p.state[RESIDUAL].dtype)
            p.state[MEAN], p.state[DUE] = torch.zeros_like(X, dtype=torch.float32), 0
        if codes is not None:
            ops.decode_add_([local(p.state[MEAN]) for p in parameters], (), codes, bits)

    def drop(self, parameters: Sequence[Parameter]) -> None:
        """Drop pending exchanges of parameters that got other, synchronised weights."""
        if any(DUE in p.state for p in parameters):
            self.settle()
        for p in parameters:
            for key in (SENT, MEAN, DUE):
                p.state.pop(key, None)

    def settle(self, some: Sequence[Sent] | None = None) -> None:
        """Wait for pending exchanges, by default all, so that states hold their means."""
        for sent in list(self.pending if some is None else some):
            since = time.perf_counter()
            sent.exchange.result()
            self.waited_seconds += time.perf_counter() - since
            self.pending.remove(sent)
            for p in sent.parameters:
                p.state[MEAN] = torch.empty_like(p.X.detach(), dtype=torch.float32)
            if (message := sent.message) is not None:
                message.store_losses_([local(p.state[RESIDUAL]) for p in sent.parameters])
                means = [local(p.state[MEAN]) for p in sent.parameters]
                ops.decode_add_(means, (), message.codes, message.bits)
