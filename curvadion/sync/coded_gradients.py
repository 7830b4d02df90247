"""Replicas average their gradients, in a few bits, and all take the same step.

    G <- mean over replicas of C(G_i + residual_i),   residual_i <- the error of C

The mean is sent back in codes too, and its owner keeps their residual (error feedback in both
directions: DoubleSqueeze, arXiv 1905.05957). All replicas step with the same bits, so their
weights, momenta and moments stay identical.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from curvadion.agreement.meeting import MEETING_BYTES
from curvadion.comm.collectives import group_size
from curvadion.comm.groups import Group
from curvadion.comm.members import LOST, Members
from curvadion.layout.dtensor import local
from curvadion.ops.code_format import BITS, FORMAT
from curvadion.plan.parameter import Parameter
from curvadion.plan.plan import Plan
from curvadion.plan.state import RESIDUAL, StateKey, StateOwner
from curvadion.sync.base import Costs, Step, Sync
from curvadion.sync.coded_mean import (
    RESIDUAL_DTYPES,
    ResidualDtype,
    bits_within,
    check_codes,
    coded_mean_,
    coded_together,
    message_bytes,
)
from curvadion.sync.exact_average import average_everything_

UNBUDGETED_BITS = 3


class CodedGradients(Sync):
    """Replicas average their gradients at every step, in codes of a few bits.

    Replicas stay identical, and directions and algorithms work as with dense gradients. The
    gate must always be open, or be a byte budget that covers every step. Codes of 1, 2, 3, 4
    and 8 bits send 3.3, 6.5, 9.6, 12.7 and 25.2 % of dense gradients, and more if many shards
    have fewer than 256 elements. The first step after a checkpoint of another sync averages
    everything.

    Args:
        bits: bits per element: 1, 2, 3, 4 or 8. None uses what a byte budget covers at every
            step, but at least 2, and 3 without a budget.
        residual_dtype: dtype of the residuals (the codes' errors): "bfloat16", "float32" or
            the torch.dtype.

    Raises:
        TypeError, ValueError: naming the argument and its value.
    """

    group_defaults = {  # noqa: RUF012
        "direction": "polar",
        "rank_fraction": 1.0,
        "right_factor": "qr",
        "look_ahead": 2.0,
    }
    # Replacing each residual by their mean does not change the next mean.
    state_keys = (StateKey(RESIDUAL, StateOwner.REPLICA, like_parameter=True),)
    sends_codes = True
    every_step = True
    elastic = True
    message_format = FORMAT

    def __init__(self, bits: int | None = None, residual_dtype: ResidualDtype = "bfloat16") -> None:
        self.residual_dtype = check_codes(bits, residual_dtype)
        self._bits = bits
        self._budget: float | None = None
        self.bits = bits or UNBUDGETED_BITS
        # Whether all state but the residuals is identical on all replicas; False before the
        # first step, and after loading another sync's state.
        self._agree = False
        self._among = 0  # number of members of the last mean, if they come and go

    def choose_defaults(self, budget: float | None) -> None:
        self._budget = budget
        chosen = UNBUDGETED_BITS if budget is None else bits_within(budget)
        self.bits = self._bits or chosen

    def prepare(self, shards: Sequence[Sequence[int]]) -> Costs:
        each = list(chain.from_iterable(shards))
        if self._bits is None and self._budget is not None:
            # The most bits within the budget, counting padded blocks and the meeting.
            left = self._budget * 4 * sum(each) - MEETING_BYTES * max(map(len, shards), default=0)
            self.bits = max(b for b in BITS if b <= 2 or message_bytes(each, b) <= left)
        return Costs(message_bytes(each, self.bits), openings_per_full_sync=0)

    def begin(self, parameters: Sequence[Parameter]) -> None:
        for p in parameters:
            if RESIDUAL not in p.state:
                dtype = RESIDUAL_DTYPES[self.residual_dtype]
                p.state[RESIDUAL] = torch.zeros_like(p.X.detach(), dtype=dtype)

    def open_step(self, step: Step) -> bool | None:
        if step.members is None and not self._agree and step.step_index:
            self.sync_weights(step.plan, step.replicas, step.state_keys())
        self._agree, self.fragments_drifted = True, 0
        if step.members is not None:
            return self._open_with(step.members, step)
        parameters = step.plan.parameters
        if group_size(step.replicas) == 1:
            parameters = [p for p in parameters if not p.rests]
        G = {id(p): p.gradient_or_zeros for p in parameters}
        for run in coded_together(parameters, self.bits):
            residuals = [local(p.state[RESIDUAL]) for p in run]
            coded_mean_([G[id(p)] for p in run], residuals, self.bits, step.replicas)
        step.take(gradients=G, directed=True)
        return None

    def _open_with(self, members: Members, step: Step) -> bool:
        """Step with the mean gradient of the members present, or not at all if one is lost.

        A replica that has just joined, or whose gradient is not finite, adds nothing to the
        mean.
        """
        plan = step.plan
        members.meet()
        residuals = [local(p.state[RESIDUAL]) for p in plan.parameters]
        kept, G = [residual.clone() for residual in residuals], dict[int, Tensor]()
        weight = 0.0 if members.fresh or step.rests else members.weight
        weights, codes, lost = [weight], list[Tensor](), None
        try:
            weights = [own for [own] in members.gather([weight])]
            share = weight * len(weights) / sum(weights) if any(weights) else 0.0
            if self._among not in (0, len(weights)):  # rescale to the number of members
                torch._foreach_mul_(residuals, len(weights) / self._among)
            for p in plan.parameters:
                g = p.gradient_or_zeros
                G[id(p)] = share * g if share else torch.zeros_like(g)
            for run in coded_together(plan.parameters, self.bits):
                sent = [G[id(p)] for p in run], [local(p.state[RESIDUAL]) for p in run]
                codes.append(coded_mean_(*sent, self.bits, members.group))
            members.agree()
        except LOST as error:
            lost = str(error)  # the traceback would keep the tensors
        except BaseException:
            torch._foreach_copy_(residuals, kept)
            raise
        record = {"codes": [c.cpu() for c in codes]}
        written = members.commit(error=lost, record=record)
        if not written or not any(weights):  # the codes are not applied
            torch._foreach_copy_(residuals, kept)
        if not written:
            return False
        self._among = len(weights)
        if any(weights):
            replace(step, rests=False).take(gradients=G, directed=True)
        return True

    def after_join(self, parameters: Sequence[Parameter], steps: int) -> None:
        self._agree, self.fragments_drifted = True, 0

    def sync_weights(self, plan: Plan, replicas: Group | None, keys: Sequence[StateKey]) -> int:
        """Average everything after loading; otherwise it is already equal."""
        average_everything_(plan, replicas, self, keys)
        self._agree, self.fragments_drifted = True, 0
        return 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "agree": self._agree, "among": self._among}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._agree, self._among = state["agree"], state["among"]
        self.fragments_drifted = 0 if self._agree else 1
