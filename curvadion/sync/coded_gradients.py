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

from curvadion import checks
from curvadion.agreement.meeting import MEETING_BYTES
from curvadion.gates import shown
from curvadion.ops.code_format import BITS, FORMAT, Bits
from curvadion.plan.parameter import Parameter, States
from curvadion.plan.state import RESIDUAL, StateKey, StateOwner
from curvadion.sync.base import Costs, Step, Sync
from curvadion.sync.coded_mean import (
    ResidualDtype,
    bits_within,
    chosen_bits,
    coded_mean_,
    coded_together,
    empty_residual,
    encode_residuals,
    mean_message_bytes,
    message_bytes,
    name_of_dtype,
    open_residuals,
)
from curvadion.sync.exact_average import average_everything_
from curvadion.sync.opening import Opening, applying

UNBUDGETED_BITS = 3


class CodedGradients(Sync):
    """Replicas average their gradients at every step, in codes of a few bits.

    Replicas stay identical, and directions and algorithms work as with dense gradients. The
    gate must always be open, or be a byte budget that covers every step. Codes of 1, 2, 3, 4
    and 8 bits send 3.3, 6.4, 9.6, 12.7 and 25.2 % of dense gradients, and more if many shards
    have fewer than 256 elements. The first step after a checkpoint of another sync averages
    everything.

    Args:
        bits: bits per element: 1, 2, 3, 4 or 8, or a pair such as (1, 2): of what replicas
            send to the owners of blocks, and of the means that come back. None uses what a byte
            budget covers at every step, but at least 2, and 3 without a budget.
        residual_dtype: dtype of the residuals (the codes' errors): "bfloat16", "float32",
            "int8" or the torch.dtype. Those in int8 share a scale among 256 elements.

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

    def __init__(
        self,
        bits: int | Sequence[int] | None = None,
        residual_dtype: ResidualDtype = "bfloat16",
    ) -> None:
        self._bits = chosen_bits(bits)
        self.residual_dtype = name_of_dtype(residual_dtype)
        self.choose_defaults(None)
        # Whether all state but the residuals is identical on all replicas; False before the
        # first step, and after loading another sync's state.
        self._identical = False
        self._members = 0  # how many the last mean had; 0 if there was none

    def choose_defaults(self, budget: float | None) -> None:
        self._budget = budget
        default = UNBUDGETED_BITS if budget is None else bits_within(budget)
        self.bits = self._bits or Bits(default, default)

    def __repr__(self) -> str:
        return shown(self, bits=self.bits.written)

    def prepare(self, shards: Sequence[Sequence[int]]) -> None:
        if self._bits is not None or self._budget is None:
            return
        # The most bits within the budget, counting padded blocks and the meeting.
        sizes = list(chain.from_iterable(shards))
        meeting_bytes = MEETING_BYTES * max(map(len, shards), default=0)
        bytes_left = self._budget * 4 * sum(sizes) - meeting_bytes
        most = max(b for b in BITS if b <= 2 or message_bytes(sizes, b) <= bytes_left)
        self.bits = Bits(most, most)

    def costs(self, shards: Sequence[Sequence[int]]) -> Costs:
        sizes = chain.from_iterable(shards)
        return Costs(mean_message_bytes(sizes, self.bits), openings_per_full_sync=0)

    def begin(self, parameters: Sequence[Parameter]) -> None:
        for p in parameters:
            if RESIDUAL not in p.state:
                p.state[RESIDUAL] = empty_residual(p.X, self.residual_dtype)

    def open_step(self, step: Step) -> bool:
        """Step with the mean gradient of the members present, or not at all if one is lost.

        A replica that has just joined, or whose gradient is not finite, adds nothing to the
        mean.
        """
        members = step.members
        if members.fixed and not self._identical and step.step_index:
            self.sync_weights(step)
        self._identical = True
        self.fragments_drifted = 0
        members.meet()
        parameters = step.plan.parameters
        if members.fixed and members.size == 1:
            parameters = [p for p in parameters if not p.rests]
        opening = Opening(members, parameters)
        weight = 0.0 if members.fresh or step.rests else members.weight
        G: dict[int, Tensor] = {}
        codes: list[Tensor] = []
        with opening.exchanging():
            opening.weigh(weight, earlier=self._members)
            for p in parameters:
                G[id(p)] = self._summand(p.gradient_or_zeros, weight, opening)
            for run in coded_together(parameters, self.bits):
                gradients = [G[id(p)] for p in run]
                with open_residuals(run, step.step_index) as residuals:
                    mean_codes = coded_mean_(gradients, residuals, self.bits, members.group)
                if not members.fixed:  # nobody misses an opening of a fixed group
                    codes.append(mean_codes)
        opening.record["codes"] = [c.cpu() for c in codes]
        empty = not members.fixed and opening.total == 0.0  # nobody has a gradient
        if not opening.vote():
            return False
        if empty:
            opening.restore()
        else:
            self._members = opening.count
            with applying(members):
                replace(step, rests=False).take(gradients=G, directed=True)
        return True

    def _summand(self, gradient: Tensor, weight: float, opening: Opening) -> Tensor:
        """What this replica adds to the mean; with a fixed group the gradient itself.

        Args:
            gradient: of a parameter.
            weight: of this replica; 0 if it has nothing to add.
            opening: whose members are weighed.
        """
        if opening.members.fixed:
            return gradient
        # The gradient is kept for a second try.
        return opening.share * gradient if weight else torch.zeros_like(gradient)

    def after_join(self, parameters: Sequence[Parameter], steps: int) -> None:
        self._identical = True
        self.fragments_drifted = 0

    def after_average(self, parameters: Sequence[Parameter]) -> None:
        # Each replica now holds the mean residual, which is right for any number of them.
        self._members = 0

    def after_load(self, states: States) -> None:
        encode_residuals(states, self.residual_dtype)

    def sync_weights(self, step: Step) -> int:
        """Average everything after loading; otherwise it is already equal."""
        average_everything_(step.plan, step.replicas, self, step.state_keys())
        self._identical = True
        self.fragments_drifted = 0
        return 0

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "identical": self._identical,
            "members": self._members,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        checks.boolean("identical", state["identical"])
        checks.integer("members", state["members"], 0)
        self._identical = state["identical"]
        self._members = state["members"]
        self.fragments_drifted = 0 if self._identical else 1
