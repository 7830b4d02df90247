"""Gates decide at which steps replicas synchronise, with the same answer on every replica.

A gate turns what this replica knows into one number, its signal. The optimizer takes the maximum
over replicas in one collective of 24 bytes, and passes it to every replica's gate. A gate that
needs no signal is scheduled: every replica knows its answer in advance.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from curvadion import checks


class Gate(ABC):
    """Decides at each step whether replicas synchronise. Subclass it to write your own.

    Class attributes:
        reason: why the gate opened, for reports.
        reads_momentum: whether it has a :meth:`signal`. If not, no momentum norm is computed.
        always_open: whether it opens at every step.
        follows_schedule: whether :meth:`opens` ignores the signal. Replicas then exchange nothing
            while the gate is closed. Has no effect if the gate reads momenta.

    Each optimizer needs its own gate, because a gate keeps the state of one run.

    Attributes:
        share: the bytes that replicas may send, as a share of an all-reduce of all gradients in
            float32 at every step; None if the gate counts no bytes.
        open_cost: the bytes that an open step sends, as the same kind of share; set by the
            optimizer if known.
        openings_per_full_sync: number of openings that synchronise all weights; set by the
            optimizer.
    """

    reason: str = "gate"
    reads_momentum: bool = False
    always_open: bool = False
    follows_schedule: bool = False
    share: float | None = None
    open_cost: float | None = None
    openings_per_full_sync: int = 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "reads_momentum" not in vars(cls):
            cls.reads_momentum = cls.signal is not Gate.signal

    def signal(self, before: Tensor, after: Tensor) -> Tensor:
        """One number >= 0 per matrix; :meth:`opens` gets the largest over all replicas.

        Negative numbers count as 0. A NaN counts as a non-finite gradient: the step is skipped. A
        gate that reads something else gets it in its constructor, and returns for example
        ``torch.full_like(after, loss)``.

        Args:
            before: Frobenius norms of the momenta before this step's gradient, (k,).
            after: the same with this step's gradient, (k,). All stay on their device.
        """
        return torch.zeros_like(after)

    @abstractmethod
    def opens(self, signal: float, local_steps: int) -> bool:
        """Whether replicas synchronise at this step.

        Args:
            signal: the largest signal of any matrix on any replica (0 without signals).
            local_steps: steps taken since the replicas last synchronised, whatever the cause: this
                gate, a warm-up, the bound on local runs or ``synchronize()``.

        The result may depend only on these arguments and on earlier calls; otherwise replicas wait
        for each other forever. Called once at each step that is not skipped, also during warm-up.
        """

    def spend(self, openings: float) -> None:
        """Record that the bytes of ``openings`` open steps were sent."""

    def check_feasible(self, max_local_steps: int | None) -> None:
        """Raise ValueError if the gate cannot work with this bound on local steps."""

    def longest_run(self, bound: int | None) -> int | None:
        """The maximum number of local steps in a row now, if ``max_local_steps`` is ``bound``."""
        return bound

    def expected_period(self, open_cost: float) -> float:
        """Steps from one opening to the next if an open step sends this share; 1 if unknown."""
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: numbers and strings, the same on all replicas."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``."""


class RMMC(Gate):
    """Open when the relative maximum momentum change exceeds tau (CurvaDion, arXiv 2512.13728).

        RMMC = max over matrices and replicas of | ||M|| - ||M_prev|| | / ||M_prev||

    A first gradient on a zero momentum counts as an infinite change; a zero momentum that stays
    zero counts as no change.

    Raises:
        TypeError: if ``threshold``, tau, is not a number. ValueError: if it is negative or NaN.
    """

    reason = "threshold"

    def __init__(self, threshold: float) -> None:
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
            raise TypeError(f"threshold={threshold!r} must be a number >= 0")
        if math.isnan(threshold) or threshold < 0:
            raise ValueError(f"threshold={threshold!r} must be >= 0")
        self.threshold = float(threshold)

    def signal(self, before: Tensor, after: Tensor) -> Tensor:
        change = (after - before).abs()
        return torch.where(change == 0, 0.0, change / before)

    def opens(self, signal: float, local_steps: int) -> bool:
        return signal > self.threshold

    def __repr__(self) -> str:
        return f"RMMC(threshold={self.threshold})"


class FixedPeriod(Gate):
    """Open at every ``period``-th step: ``period`` - 1 local steps, then a synchronised one.

    Raises:
        TypeError: if ``period`` is not an integer. ValueError: if it is below 1.
    """

    reason = "period"
    follows_schedule = True

    def __init__(self, period: int) -> None:
        checks.integer("period", period, 1)
        self.period = period
        self.always_open = period == 1

    def opens(self, signal: float, local_steps: int) -> bool:
        return local_steps + 1 >= self.period

    def check_feasible(self, max_local_steps: int | None) -> None:
        if max_local_steps is not None and self.period - 1 > max_local_steps:
            raise ValueError(
                f"gate={self!r} opens after {self.period - 1} local steps, but "
                f"max_local_steps={max_local_steps} would open it earlier: pass "
                f"max_local_steps=None."
            )

    def expected_period(self, open_cost: float) -> float:
        return self.period

    def __repr__(self) -> str:
        return f"FixedPeriod(period={self.period})"


class AlwaysOpen(Gate):
    """Open at every step, as Dion does."""

    reason = "always"
    always_open = follows_schedule = True

    def opens(self, signal: float, local_steps: int) -> bool:
        return True

    def __repr__(self) -> str:
        return "AlwaysOpen()"


class ByteBudget(Gate):
    """Open as often as a byte budget allows.

    Every step adds its share of bytes to a balance, and an opening is due when the balance covers
    its cost. Up to half of each share is first reserved for a final ``synchronize()``, so that a
    run that ends with one stays within its budget, or pays back bytes sent beyond the budget (by an
    exact synchronisation, or during warm-up). So openings are at most twice as rare as the budget
    allows, and the first comes after two periods.

    Args:
        share: the budget, a share in (0, 1] of the bytes of an all-reduce of all gradients in
            float32 at every step.

    Raises:
        TypeError: if ``share`` is not a number. ValueError: if it is outside (0, 1].
        RuntimeError: when the gate is asked to open but the optimizer does not know the cost of an
            opening.
    """

    reason = "budget"
    follows_schedule = True
    share: float

    def __init__(self, share: float) -> None:
        if isinstance(share, bool) or not isinstance(share, (int, float)):
            raise TypeError(f"wire_budget={share!r} must be a number in (0, 1]")
        if not 0 < share <= 1:
            raise ValueError(f"wire_budget={share!r} must be > 0 and <= 1")
        self.share = float(share)
        # In openings: earned minus spent, and the part reserved for the next opening.
        self._balance = self._credit = 0.0
        self._counted_in: float | None = None  # the cost of such an opening; None if unknown

    @property
    def rate(self) -> float:
        """Openings per step that the budget allows."""
        return min(1.0, self._earned)

    @property
    def _earned(self) -> float:
        """Openings that a step earns; more than one with an ample budget."""
        if self.open_cost is None:
            raise RuntimeError(
                f"gate={self!r} needs a sync that knows how many bytes an open step sends: pass "
                f"sync=QuantizedAverage()."
            )
        return self.share / self.open_cost

    def longest_run(self, bound: int | None) -> int | None:
        """``bound``, or twice as long while the gate reserves or pays back bytes."""
        return bound if bound is None or self._credit >= 1 else 2 * bound + 1

    def expected_period(self, open_cost: float) -> float:
        return max(1.0, open_cost / self.share)

    def check_feasible(self, max_local_steps: int | None) -> None:
        if self.open_cost is None:
            return
        longest = math.ceil(1 / self.rate - 1e-9) - 1
        if max_local_steps is not None and longest > max_local_steps:
            raise ValueError(
                f"wire_budget={self.share!r} allows an opening every {longest + 1} steps, but "
                f"max_local_steps={max_local_steps} asks for more: raise max_local_steps or pass "
                f"None, raise wire_budget, or lower bits if it is above 1."
            )

    def opens(self, signal: float, local_steps: int) -> bool:
        self._recount()
        missing = self.openings_per_full_sync - (self._balance - self._credit)
        self._credit += min(1.0, self._earned - min(max(0.0, missing), self._earned / 2))
        self._balance += self._earned
        return self._credit >= 1 - 1e-9

    def _recount(self) -> None:
        """Convert to openings of the current cost, which depends on bits, fragments and shards."""
        if self.open_cost and self._counted_in:
            ratio = self._counted_in / self.open_cost
            self._balance, self._credit = self._balance * ratio, self._credit * ratio
        self._counted_in = self.open_cost

    def spend(self, openings: float) -> None:
        self._recount()
        self._balance -= openings
        self._credit -= min(openings, self._credit)

    def state_dict(self) -> dict[str, Any]:
        memory = {"balance": self._balance, "credit": self._credit}
        return {**memory, "open_cost": self._counted_in}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._balance, self._credit = state["balance"], state["credit"]
        self._counted_in = state["open_cost"]

    def __repr__(self) -> str:
        return f"ByteBudget(share={self.share})"
