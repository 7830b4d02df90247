"""How well replicas agree at openings, measured while somebody asks for it.

Replica i has moved by D_i since its anchor when the mean D arrives, and e is its residual, what
its codes have lost. Norms are over all parameters of the opening:

    disagreement = |D_i - D| / |D|
    residual     = |e| / |D|
    progress     = |D / L|,                   L the learning rates of the steps from D' to D
    cosine       = <D, D'> / (|D| |D'|),      D' the last mean of the same parameters

The last two are known from a parameter's second mean on. Of ``Replicated``, whose rates are the
inner optimizer's, L is the number of steps. Nothing is sent between replicas. The
ranks of a sharded replica add up their shards, in one all-reduce of 56 bytes. Reading the
numbers waits for the device.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.comm.collectives import communicate
from curvadion.comm.groups import Group
from curvadion.plan.opened_states import open_states
from curvadion.plan.parameter import Parameter
from curvadion.plan.plan import Plan
from curvadion.plan.state import RESIDUAL


class _Last(NamedTuple):
    """The last mean of a parameter."""

    D: Tensor  # in two bytes an element, which the cosine does not notice
    rates: float  # the sum of its learning rates until then


class Diagnostics:
    """Sums over the means that arrive in a step."""

    def __init__(self) -> None:
        self._in_step = False  # between steps, as in synchronize(), nothing is measured
        self._rates: defaultdict[int, float] = defaultdict(float)  # sums, by parameter group
        self._last: dict[Tensor, _Last] = {}
        # |D|^2, |D - D_i|^2, |e|^2; of those with a D': |D / L|^2, <D, D'>, |D|^2, |D'|^2.
        self._sums: Tensor | None = None
        self._group: Group | None = None  # the ranks of this replica

    def begin(self, plan: Plan) -> None:
        """Begin a step."""
        self._in_step = True
        groups = {p.position: p.group for p in plan.parameters}
        for position, group in groups.items():
            self._rates[position] += float(group.get("lr", 1.0))

    def add(self, plan: Plan, p: Parameter, D: Tensor, difference: Tensor) -> None:
        """Add a parameter's mean, or this rank's shard of it.

        Args:
            plan: with the parameter.
            p: the parameter, with its new residual.
            D: the mean movement, float32 or wider.
            difference: D - D_i.
        """
        if not self._in_step:
            return
        square = _dot(D, D)
        (residual,) = open_states([(p, RESIDUAL)]).tensors
        terms = [square, _dot(difference, difference), _dot(residual, residual)]
        rates = self._rates[p.position]
        last = self._last.get(p.X)
        if last is None:
            terms += [torch.zeros_like(square)] * 4
        else:
            L = rates - last.rates
            relative = square / L**2 if L > 0 else torch.zeros_like(square)
            terms += [relative, _dot(D, last.D), square, _dot(last.D, last.D)]
        # Of several copies of a shard each counts in part.
        sums = torch.stack(terms).to(plan.device) / plan.copies_inside(p)
        self._sums = sums if self._sums is None else self._sums + sums
        self._group = plan.inside
        self._last[p.X] = _Last(D.to(torch.bfloat16), rates)

    def take(self) -> dict[str, float] | None:
        """End the step; return its diagnostics, if means have arrived. Collective in the replica.

        A number whose denominator is zero is left out.
        """
        self._in_step = False
        sums = self._sums
        if sums is None:
            return None
        self._sums = None
        if self._group is not None:
            communicate(dist.all_reduce, sums, dist.ReduceOp.SUM, self._group)
            self._group = None
        D, difference, residual, progress, product, of_both, last = sums.tolist()
        found = {}
        if D > 0:
            found["disagreement"] = math.sqrt(difference / D)
            found["residual"] = math.sqrt(residual / D)
        if of_both > 0 and last > 0:
            found["progress"] = math.sqrt(progress)
            found["cosine"] = product / math.sqrt(of_both * last)
        return found


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """The inner product of two tensors, a float64 scalar."""
    return torch.dot(a.flatten().float(), b.flatten().float()).double()
