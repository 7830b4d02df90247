"""How rivals synchronise: outer steps with mean weights, and low-rank gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common.sent_elements import (
    POWERSGD_DENSE_STEPS,
    period_within,
    powersgd_elements,
)
from benchmarks.losses.simulation.inner import Replicas
from benchmarks.losses.simulation.outer import Codes, Outer, Synchronous
from benchmarks.losses.simulation.world import Weights, World
from curvadion.layout.matrix import Extent
from curvadion.update.orthonormalize import orthonormal_columns


@dataclass(frozen=True)
class OuterStep:
    """Settings of :class:`OuterMomentum`.

    period: local steps per outer step. lr, momentum: of the outer step. bits: of codes with error
    feedback; None: float32.
    """

    period: int
    lr: float = 0.7
    momentum: float = 0.9
    bits: int | None = None


class OuterMomentum(Outer):
    """An outer Nesterov step with the mean pseudo-gradient.

    This is DiLoCo (arXiv 2311.08105) around AdamW, MuLoCo (arXiv 2505.23725) around Muon; with a
    rate of 1 and no momentum it averages weights.
    """

    def __init__(self, settings: OuterStep, world: World):
        super().__init__(world)
        self.settings, self.codes = settings, Codes(settings.bits)
        self._velocity = {name: torch.zeros_like(x) for name, x in self.anchor.items()}

    @classmethod
    def within(cls, budget: float, steps: int, settings: OuterStep, world: World) -> OuterMomentum:
        """Return one with the shortest period that keeps to a share of the bytes.

        Args:
            budget: share of the bytes of gradients in float32 at every step.
            steps: of the run.
            settings: of the outer step, but for its period.
            world: the model and its data.

        Raises:
            ValueError: not even one outer step fits.
        """
        period = period_within(budget, steps, cls(settings, world).cost, 1)
        if period is None:
            raise ValueError(f"{budget:%} of {steps} steps do not reach for one outer step")
        return cls(replace(settings, period=period), world)

    def means(self, moved: Weights) -> Weights:
        """Return the mean pseudo-gradients as replicas receive them."""
        return self.codes.means(moved)

    @property
    def cost(self) -> float:
        """Bytes of an outer step, as a share of float32 gradients."""
        return self.codes.share(list(self.sizes.values()))

    def after(self, step: int, own: Replicas, lr: float, *, last: bool) -> None:
        if (step + 1) % self.settings.period and not last:
            return
        self.sent += self.cost
        momentum = self.settings.momentum
        moved = {name: X - self.anchor[name] for name, X in own.X.items()}
        for name, mean in self.means(moved).items():
            X = own.X[name]
            v = self._velocity[name].mul_(momentum).add_(mean)
            self.anchor[name] += self.settings.lr * (mean + momentum * v)
            X.copy_(self.anchor[name].expand_as(X))


@dataclass(frozen=True)
class Sparse(OuterStep):
    """Settings of :class:`SparseAverage`; momentum is 0.

    kept: elements kept of each chunk. chunk: most elements of a chunk. decay: of the residual.
    """

    kept: int = 64
    chunk: int = 4096
    decay: float = 0.95

    def chunks(self, size: int) -> tuple[int, int]:
        """Return the number of a tensor's chunks and their common length."""
        count = -(-size // self.chunk)
        return count, -(-size // count)


class SparseAverage(OuterMomentum):
    """The largest elements of each chunk in 2 bits with error feedback (SparseLoCo, 2508.15706).

    Every replica sends its positions and codes to all others.
    """

    settings: Sparse

    def __init__(self, settings: Sparse, world: World):
        super().__init__(replace(settings, momentum=0.0), world)
        self._lost: Weights = {}
        self.replicas = world.replicas

    def means(self, moved: Weights) -> Weights:
        return {name: self._mean(name, x) for name, x in moved.items()}

    def _mean(self, name: str, moved: Tensor) -> Tensor:
        wanted = moved + self.settings.decay * self._lost[name] if name in self._lost else moved
        flat = wanted.flatten(1)
        count, length = self.settings.chunks(flat.shape[1])
        chunks = F.pad(flat, (0, count * length - flat.shape[1])).view(len(moved), count, length)
        where = chunks.abs().topk(min(self.settings.kept, length), dim=-1).indices
        sent = torch.zeros_like(chunks).scatter(-1, where, _in_two_bits(chunks.gather(-1, where)))
        sent = sent.flatten(1)[:, : flat.shape[1]].view_as(moved)
        self._lost[name] = wanted - sent
        return sent.mean(0, keepdim=True)

    @property
    def cost(self) -> float:
        bits = sum(map(self._bits, self.sizes.values()))
        # Every rank sends its message to n - 1 others, where an all-reduce sends 2 (n - 1) / n
        return float(self.replicas / 2 * bits / 8 / (4 * sum(self.sizes.values())))

    def _bits(self, size: int) -> float:
        count, length = self.settings.chunks(size)
        kept = min(self.settings.kept, length)
        # Positions: the bits that number all possible choices of so many elements of a chunk.
        choices = math.lgamma(length + 1) - math.lgamma(kept + 1) - math.lgamma(length - kept + 1)
        return count * (kept * 2 + choices / math.log(2) + 16)


def _in_two_bits(x: Tensor) -> Tensor:
    """Quantise (..., k) to signs and two sizes: the means of the smaller and the larger half."""
    size = x.abs()
    large = size > size.median(dim=-1, keepdim=True).values
    high = (size * large).sum(-1, keepdim=True) / large.sum(-1, keepdim=True).clamp_min(1)
    low = (size * ~large).sum(-1, keepdim=True) / (~large).sum(-1, keepdim=True).clamp_min(1)
    return x.sign() * torch.where(large, high, low)


class PowerSGD(Synchronous):
    """Low-rank mean gradients at every step, with error feedback (arXiv 1905.13727).

    Follows PyTorch's DDP hook: the first steps are exact, and so are tensors that low rank would
    not halve.
    """

    def __init__(self, rank: int, world: World):
        super().__init__(world)
        elements = {name: powersgd_elements(x.shape, rank) for name, x in world.initial.items()}
        self.cost = sum(elements.values()) / world.parameters
        low = {name: x for name, x in world.initial.items() if elements[name] < x.numel()}
        self._Q = {
            name: torch.randn(x.shape[1], min(rank, *x.shape)).to(x.device)
            for name, x in low.items()
        }
        self._lost: Weights = {}

    def gradients(self, step: int, own: Weights) -> Weights:
        exact = step < POWERSGD_DENSE_STEPS
        self.sent += 1.0 if exact else self.cost
        low = () if exact else self._Q
        means = {n: self._mean(n, G) if n in low else G.mean(0) for n, G in own.items()}
        return {name: mean[None] for name, mean in means.items()}

    def _mean(self, name: str, G: Tensor) -> Tensor:
        """Take a power iteration of the mean, from the last step's Q."""
        wanted = G + self._lost.get(name, torch.zeros_like(G))
        mean = wanted.mean(0)
        [found] = orthonormal_columns([(mean @ self._Q[name])[None]], [Extent(range(len(mean)))])
        P = found.columns
        self._Q[name] = mean.mT @ P[0]
        sent = P[0] @ self._Q[name].mT
        self._lost[name] = wanted - sent
        return sent
