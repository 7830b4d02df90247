"""When do replicas talk. The answer is the same on every replica.

A gate turns what this replica knows into one number, its signal. The optimizer takes the
maximum over replicas, together with everything else the replicas must agree on, in one collective
of 16 bytes, and hands it back to every replica's gate.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor


class Gate(ABC):
    """Decides at each step whether replicas synchronise. Subclass it to write another.

    Class attributes:
        reason: why the gate opened, for reports.
        reads_momentum: whether :meth:`signal` is wanted. If not, no momentum norm is taken.
    """

    reason: str = "gate"
    reads_momentum: bool = False

    def signal(self, before: Tensor, after: Tensor) -> Tensor:
        """What this replica brings to the decision, one number >= 0 per matrix parameter.

        Args:
            before: Frobenius norms of the momenta before this step's gradient, (k,).
            after: the same with this step's gradient, (k,).

        Must stay on the device; the largest entry over all replicas reaches :meth:`opens`.
        """
        return torch.zeros_like(after)

    @abstractmethod
    def opens(self, signal: float, local_steps: int) -> bool:
        """Whether replicas synchronise at this step.

        Args:
            signal: the largest signal of any matrix on any replica (0 without signals).
            local_steps: steps taken since the replicas last synchronised.

        May depend only on these and on what earlier calls left behind, which is the same on every
        replica; anything else lets replicas disagree and wait for each other forever.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold to continue this gate: numbers and strings."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``."""


class RMMC(Gate):
    """Open when the relative maximum momentum change exceeds tau (CurvaDion, arXiv 2512.13728).

        RMMC = max over matrices and replicas of | ||M|| - ||M_prev|| | / ||M_prev||

    A first gradient on a zero momentum is an infinite change; no change of a zero momentum is none.

    Args:
        threshold: tau >= 0.

    Raises:
        TypeError: if ``threshold`` is not a number. ValueError: if it is negative or NaN.
    """

    reason = "threshold"
    reads_momentum = True

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

    def __init__(self, period: int) -> None:
        if isinstance(period, bool) or not isinstance(period, int):
            raise TypeError(f"period={period!r} must be an integer >= 1")
        if period < 1:
            raise ValueError(f"period={period!r} must be >= 1")
        self.period = period

    def opens(self, signal: float, local_steps: int) -> bool:
        return local_steps + 1 >= self.period

    def __repr__(self) -> str:
        return f"FixedPeriod(period={self.period})"


class AlwaysOpen(Gate):
    """Synchronise at every step: Dion."""

    reason = "always"

    def opens(self, signal: float, local_steps: int) -> bool:
        return True

    def __repr__(self) -> str:
        return "AlwaysOpen()"
