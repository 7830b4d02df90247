"""Gates decide at which steps replicas synchronise, with the same answer on every replica.

A gate turns what this replica knows into one number, its signal. The optimizer takes the
maximum over replicas in one collective of 24 bytes, and passes it to every replica's gate.
"""

from __future__ import annotations

import copy
import math
import warnings
from abc import ABC, abstractmethod
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from curvadion import checks

FORESEEN = 10_000  # steps of a schedule, in which an opening is looked for


@cache
def _arguments(kind: type) -> list[str]:
    """The names of a constructor's arguments."""
    return list(signature(kind).parameters)


def shown(choice: object, **written: object) -> str:
    """The repr of a gate or sync: the constructor's arguments that are attributes of it.

    written: what users write for an attribute that prints in another way.
    """
    kind: Any = type(choice)
    attributes = vars(choice) | written
    arguments = [f"{name}={attributes[name]!r}" for name in _arguments(kind) if name in attributes]
    return f"{kind.__name__}({', '.join(arguments)})"


class Gate(ABC):
    """Decides at each step whether replicas synchronise. Each optimizer has a copy.

    Replicas compare its repr: the constructor's arguments that it keeps as attributes.

    Attributes:
        reason: why the gate opened, for reports.
        threshold: with which it compares the signal, for reports; None if it has none.
        always_open: whether it opens at every step.
        follows_schedule: whether :meth:`opens` ignores the signal. Replicas then exchange
            nothing while the gate is closed. Has no effect if the gate reads momenta. With
            ``always_open`` it is never closed, so it does not count as a scheduled gate.
        share: the bytes that replicas may send, as a share of an all-reduce of all gradients
            in float32 at every step; None if the gate counts no bytes.
        open_cost: the bytes of an open step, as such a share. The optimizer sets this and
            ``openings_per_full_sync``; 0 if it does not know.
    """

    reason: str = "gate"
    threshold: float | None = None
    always_open: bool = False
    follows_schedule: bool = False
    share: float | None = None
    open_cost: float = 0.0
    openings_per_full_sync: int = 1

    def __repr__(self) -> str:
        return shown(self)

    @property
    def reads_momentum(self) -> bool:
        """Whether the gate has a :meth:`signal`; if not, no momentum norm is computed."""
        return type(self).signal is not Gate.signal

    def signal(self, before: Tensor, after: Tensor) -> Tensor:
        """One number >= 0 per matrix; :meth:`opens` gets the largest over all replicas.

        A NaN counts as a non-finite gradient: the step is skipped.

        Args:
            before: Frobenius norms of the momenta before this step's gradient, (k,), float32
                or wider, on the device of the parameters.
            after: the same with this step's gradient.

        Returns:
            (k,), on the same device: reading a number on the host would wait for it.
        """
        return torch.zeros_like(after)

    @abstractmethod
    def opens(self, signal: float, local_steps: int) -> bool:
        """Whether replicas synchronise at this step.

        The result must follow from these arguments and earlier calls, or replicas wait for
        each other forever. Called once at each step, also during warm-up, unless all
        replicas skip it.

        Args:
            signal: the largest signal of any matrix on any replica; 0 without signals.
            local_steps: steps taken since the replicas last synchronised, whatever the cause;
                0 at the step after it.
        """

    def spend(self, openings: float) -> None:
        """Record that bytes were sent: as many as this number of open steps sends."""

    def check_feasible(self, max_local_steps: int | None) -> None:
        """Raise ValueError if the gate opens less often than this bound on local steps.

        Args:
            max_local_steps: the most local steps in a row; None for no bound.
        """
        # A period that is whole but for rounding errors is not rounded up.
        period = math.ceil(self.expected_period() - 1e-9)
        if max_local_steps is not None and period > max_local_steps + 1:
            raise ValueError(
                f"gate={self!r} opens every {period} steps, but "
                f"max_local_steps={max_local_steps} asks for more: raise it or pass None, or "
                f"raise the budget."
            )

    def longest_run(self, bound: int | None) -> int | None:
        """The most local steps in a row that the gate may now take.

        Args:
            bound: the optimizer's ``max_local_steps``; None for no bound.
        """
        return bound

    def expected_period(self) -> float:
        """Steps from one opening to the next, at most max_local_steps + 1; 1 if unknown."""
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: numbers and strings, the same on all replicas."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``; raise an error if it is none.

        A KeyError, TypeError or ValueError undoes the optimizer's ``load_state_dict``.
        """


def steps_to_opening(gate: Gate, local_steps: int, max_local_steps: int | None) -> int | None:
    """In how many steps a gate will open, if it follows a schedule.

    Args:
        gate: which is not changed.
        local_steps: steps taken since the replicas last synchronised.
        max_local_steps: the most local steps in a row; None for no bound.

    Returns:
        1 if it opens at the next step; None if that depends on signals, or if it stays closed
        for ``FORESEEN`` steps.
    """
    if gate.reads_momentum or not gate.follows_schedule:
        return None
    ahead = copy.deepcopy(gate)
    for steps in range(1, FORESEEN + 1):
        opens = ahead.opens(0.0, local_steps)
        longest = ahead.longest_run(max_local_steps)
        if opens or (longest is not None and local_steps >= longest):
            return steps
        local_steps += 1
    return None


class RMMC(Gate):
    """Open if the relative maximum momentum change exceeds tau (CurvaDion, arXiv 2512.13728).

        RMMC = max over matrices and replicas of | ||M|| - ||M_prev|| | / ||M_prev||

    A first gradient on a zero momentum counts as an infinite change; a zero momentum that
    stays zero counts as no change.

    Args:
        threshold: tau, a number >= 0 or infinity.
    """

    reason = "threshold"
    threshold: float

    def __init__(self, threshold: float) -> None:
        if threshold != math.inf:
            checks.number("threshold", threshold)
        self.threshold = float(threshold)

    def signal(self, before: Tensor, after: Tensor) -> Tensor:
        # | ||M|| - ||M_prev|| | / ||M_prev||, where 0 / 0 counts as 0
        change = (after - before).abs()
        return torch.where(change == 0, 0.0, change / before)

    def opens(self, signal: float, local_steps: int) -> bool:
        return signal > self.threshold


class FixedPeriod(Gate):
    """Open at every ``period``-th step, after ``period`` - 1 local ones.

    Args:
        period: steps from one opening to the next, an integer >= 1.
    """

    reason = "period"
    follows_schedule = True

    def __init__(self, period: int) -> None:
        checks.integer("period", period, 1)
        self.period = period
        self.always_open = period == 1

    def opens(self, signal: float, local_steps: int) -> bool:
        return local_steps + 1 >= self.period

    def expected_period(self) -> float:
        return self.period


class AlwaysOpen(Gate):
    """Open at every step, as Dion does."""

    reason = "always"
    always_open = True
    follows_schedule = True

    def opens(self, signal: float, local_steps: int) -> bool:
        return True


class ByteBudget(Gate):
    """Open as often as a byte budget allows.

    Every step adds its share of bytes to a balance. Up to half of the share is reserved for a
    final ``synchronize()``, or pays back bytes sent beyond the budget (by an exact
    synchronisation, or during warm-up). The rest is credit, and the gate opens when the credit
    covers an opening. So openings are at most twice as rare as the budget allows, and the first
    comes after two periods.

        reserved = balance - credit
        missing  = openings_per_full_sync open_cost - reserved
        earned   = share - min(max(0, missing), share / 2)
        credit  <- credit + min(open_cost, earned)
        balance <- balance + share
        open where credit >= open_cost

    Args:
        share: in (0, 1], of the bytes of an all-reduce of all float32 gradients at every step.

    Warns:
        UserWarning: if ``share`` is the integer 1, which may be meant as 1 %.
    """

    reason = "budget"
    follows_schedule = True
    share: float

    def __init__(self, share: float) -> None:
        checks.number("wire_budget", share, least=1e-9, most=1.0)
        if type(share) is int:
            warnings.warn(
                f"wire_budget={share!r} is {share:.0%} of DDP's bytes: for 1 % pass 0.01, and for "
                f"100 % 1.0.",
                stacklevel=checks.user_stacklevel(),
            )
        self.share = float(share)
        # Both as shares. The balance is what was earned minus what was spent, and the credit is
        # the part of it that openings may spend.
        self._balance = 0.0
        self._credit = 0.0

    @property
    def debt(self) -> float:
        """Bytes sent beyond the budget, in all-reduces of all gradients; 0 within it.

        Later steps pay them back, and openings are rarer until then.
        """
        return max(0.0, -self._balance)

    def longest_run(self, bound: int | None) -> int | None:
        """For openings half as often as ``bound`` asks: the gate may reserve or pay back bytes."""
        # From one opening to the next bound + 1 steps become 2 (bound + 1).
        return None if bound is None else 2 * (bound + 1) - 1

    def expected_period(self) -> float:
        return max(1.0, self.open_cost / self.share)

    def opens(self, signal: float, local_steps: int) -> bool:
        reserved = self._balance - self._credit
        missing = self.openings_per_full_sync * self.open_cost - reserved
        earned = self.share - min(max(0.0, missing), self.share / 2)
        self._credit += min(self.open_cost, earned)
        self._balance += self.share
        # A credit that covers the cost but for rounding errors opens.
        return self._credit >= self.open_cost * (1 - 1e-9)

    def spend(self, openings: float) -> None:
        cost = openings * self.open_cost
        self._balance -= cost
        self._credit -= min(cost, self._credit)

    def state_dict(self) -> dict[str, Any]:
        return {"balance": self._balance, "credit": self._credit}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key in ("balance", "credit"):
            checks.number(key, state[key], least=-math.inf)
        self._balance = state["balance"]
        self._credit = state["credit"]
