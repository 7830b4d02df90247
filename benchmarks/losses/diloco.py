"""DiLoCo (arXiv 2311.08105): local steps, then an outer optimizer that steps by the drift."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from curvadion.comm.collectives import mean_


class DiLoCo:
    """Inner steps of each replica and, every ``period`` steps, one outer step for all replicas.

    With theta the weights after the last outer step and X_i those of replica i:

        g = theta - mean_i(X_i)                         the outer gradient: one dense all-reduce
        v <- outer_momentum v + g
        theta <- theta - outer_lr (g + outer_momentum v)
        X_i <- theta

    The inner optimizer's state stays with its replica.

    Args:
        parameters: the weights, equal on all replicas; updated in place.
        inner: an optimizer of these weights that does not communicate.
        replicas: the ranks that hold replicas.
        period: inner steps per outer step.
        outer_lr: learning rate of the outer step.
        outer_momentum: Nesterov momentum of the outer step.

    Raises:
        ValueError: if ``period`` is below 1.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        inner: Optimizer,
        replicas: dist.ProcessGroup,
        *,
        period: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
    ):
        if period < 1:
            raise ValueError(f"period={period} must be >= 1")
        self.parameters = [p.detach() for p in parameters]  # the same memory
        self.inner, self.replicas, self.period = inner, replicas, period
        self.local_steps = 0
        self.reference = [p.clone() for p in self.parameters]
        self.outer = torch.optim.SGD(
            self.reference, lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0
        )

    def step(self) -> bool:
        """Take an inner step, and an outer one if it is due; return whether it was."""
        self.inner.step()
        self.local_steps += 1
        due = self.local_steps >= self.period
        if due:
            self.synchronize()
        return due

    @torch.no_grad()
    def synchronize(self) -> None:
        """Take an outer step, after which all replicas are equal; collective."""
        drift = [theta - X for theta, X in zip(self.reference, self.parameters, strict=True)]
        mean_(drift, self.replicas)
        for theta, gradient in zip(self.reference, drift, strict=True):
            theta.grad = gradient
        self.outer.step()
        for theta, X in zip(self.reference, self.parameters, strict=True):
            X.copy_(theta)
        self.local_steps = 0
