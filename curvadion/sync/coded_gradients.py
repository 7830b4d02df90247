"""Replicas share the mean of their gradients, in a few bits, and take one step with it.

    G <- mean over replicas of C(G_i + residual_i),   residual_i <- what the code C lost there

and the mean goes back in codes too, whose losses its owner keeps (error feedback in both
directions: DoubleSqueeze, arXiv 1905.05957). All replicas step with the same bits, so their
weights, momenta and moments stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.layout.dtensor import local
from curvadion.ops.tensors import saturated
from curvadion.sync.anchored import coded_together, cut_alike
from curvadion.sync.base import Costs, Step, Sync
from curvadion.sync.codec import BITS, FORMAT, bits_within, check_bits, coded_share
from curvadion.sync.coded_mean import (
    RESIDUAL_DTYPES,
    ResidualDtype,
    added_by_shards,
    check_residual_dtype,
    coded_mean,
    message_bytes,
)
from curvadion.sync.decision import GATE_BYTES, Moving
from curvadion.sync.exact_average import average_everything_
from curvadion.update.elementwise import elementwise_steps, own_gradients
from curvadion.update.matrix_step import matrix_step
from curvadion.update.momentum import momentum_norms
from curvadion.update.parameter import Parameter
from curvadion.update.state import RESIDUAL, Owner, StateKey


class CodedGradients(Sync):
    """One step of all replicas with the mean of their gradients, in codes of a few bits.

    Replicas never differ: there is nothing to align, to correct or to bring together, and every
    direction and every algorithm works as with dense gradients. They come together at every step.
    So the gate must always be open, or count bytes and pay for that: 3 bits take 9.6 % of dense
    gradients and 4 take 12.7 %, as 2 or 1 take 6.5 and 3.3 %.

    Args:
        bits: of a code: 1, 2, 3, 4 or 8. None takes what a byte budget pays for at every step, 2 at
            least, and 3 without a budget.
        residual_dtype: "bfloat16" or "float32", or the torch.dtype, of what the codes have lost.

    Raises:
        TypeError, ValueError: naming the argument and its value.
    """

    group_defaults = {  # noqa: RUF012
        "direction": "polar",
        "rank_fraction": 1.0,
        "right_factor": "qr",
        "nesterov": 2.0,
    }
    # The next mean is the same if replicas hold the mean of what they lost.
    state_keys = (StateKey(RESIDUAL, Owner.REPLICA, like_parameter=True),)
    sends_codes = True
    every_step = True
    message_format = FORMAT
    UNBUDGETED_BITS = 3

    def __init__(
        self,
        bits: int | None = None,
        residual_dtype: ResidualDtype = "bfloat16",
    ) -> None:
        check_bits(bits)
        self._bits = bits
        self._budget: float | None = None
        self.bits = bits or self.UNBUDGETED_BITS
        self.residual_dtype = check_residual_dtype(residual_dtype)
        # Whether all state but the residuals is the same on all replicas.
        self._alike = False

    # ---------------------------------------------------------------- what it costs

    def choose_defaults(self, budget: float | None) -> None:
        self._budget = budget
        chosen = self.UNBUDGETED_BITS if budget is None else bits_within(budget)
        self.bits = self._bits or chosen

    def prepare(self, sizes: Sequence[int]) -> Costs:
        if self._bits is None and self._budget is not None:
            # Blocks that are filled up and the gate's bytes can take more than the budget has left.
            left = self._budget * 4 * sum(sizes) - GATE_BYTES
            self.bits = max(b for b in BITS if b <= 2 or message_bytes(sizes, b) <= left)
        return Costs(message_bytes(sizes, self.bits), openings_per_agreement=0)

    def added_by_shards(self, shards: Sequence[Sequence[int]]) -> float:
        return added_by_shards(shards, self.bits)

    @property
    def typical_cost(self) -> float:
        return coded_share(self.bits)

    # ---------------------------------------------------------------- around steps

    def begin(self, parameters: Sequence[Parameter]) -> None:
        for p in parameters:
            if RESIDUAL not in p.state:
                dtype = RESIDUAL_DTYPES[self.residual_dtype]
                p.state[RESIDUAL] = torch.zeros_like(p.X.detach(), dtype=dtype)

    def open_step(self, step: Step) -> None:
        if step.number and not self._alike:  # what was loaded may be each replica's own
            average_everything_(step.plan, step.replicas, self)
        self._alike = True
        moving = step.moving if step.complete else step.moving.among(step.plan.all_ranks)
        parameters = moving.plan.parameters
        G = dict(zip(map(id, parameters), own_gradients(parameters), strict=True))
        self._replace_by_means_(parameters, G, step.replicas)
        matrix_step(*_moving_by(moving, G), step=step.number, inside_replica=True)
        elementwise_steps(moving.plan, [G[id(p)] for p in moving.plan.elementwise])

    def _replace_by_means_(
        self,
        parameters: Sequence[Parameter],
        G: Mapping[int, Tensor],
        replicas: dist.ProcessGroup | None,
    ) -> None:
        """Gradients, by the parameter's id, become their means over the replicas."""
        for alike in cut_alike(parameters):
            first = 0
            for chunk in coded_together([G[id(p)] for p in alike], self.bits):
                residuals = [local(p.state[RESIDUAL]) for p in alike[first : first + len(chunk)]]
                first += len(chunk)
                means = coded_mean(chunk, residuals, self.bits, replicas)
                for gradient, mean in zip(chunk, means, strict=True):
                    wide = mean.to(torch.promote_types(mean.dtype, gradient.dtype))
                    gradient.copy_(saturated(wide, gradient.dtype))

    def come_together(self, plan: Any, replicas: dist.ProcessGroup | None) -> int:
        return 0

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "alike": self._alike}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._alike = bool(state.get("alike", False))

    def __repr__(self) -> str:
        return f"CodedGradients(bits={self.bits}, residual_dtype={self.residual_dtype!r})"


def _moving_by(moving: Moving, G: Mapping[int, Tensor]) -> Moving:
    """The same step with these gradients of its matrices, by the parameter's id."""
    given = moving.gradients
    gradients = replace(given, G=[G[id(p)] for p in given.parameters], complete=True)
    norms = moving.norms
    if norms is not None:
        norms = momentum_norms(moving.plan, gradients).after
    return moving._replace(gradients=gradients, norms=norms)
