"""What replicas agree on between quantised averages: weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.plan import Parameter
from curvadion.reconcile import quantized_average_
from curvadion.sharding import global_shape, local

AGREED, RESIDUAL = "weight_agreed", "weight_residual"
# Keys of the state that hold them, each a tensor of the parameter's shape.
STATE_KEYS = (AGREED, RESIDUAL)


class Consensus(NamedTuple):
    """Weights, what replicas last agreed they are, and what codes have lost here; pieces held here.

    All have the same shape; ``agreed`` and ``residual`` are float32 or wider.
    """

    X: Tensor
    agreed: Tensor
    residual: Tensor


def begin(parameters: Sequence[Parameter]) -> None:
    """Remember weights as they are, the same on all replicas, where nothing is remembered yet."""
    for p in parameters:
        if AGREED not in p.state:
            X = p.X.detach()
            wide = torch.promote_types(X.dtype, torch.float32)
            p.state[AGREED] = X.to(wide, copy=True)
            p.state[RESIDUAL] = torch.zeros_like(X, dtype=torch.float32)


def sizes(parameters: Sequence[Parameter]) -> list[int]:
    """Numbers in each parameter, all its shards together."""
    return [math.prod(global_shape(p.X)) for p in parameters]


def consensuses(parameters: Sequence[Parameter]) -> Iterator[Consensus]:
    """All of them in an order that ranks share."""
    for p in parameters:
        if AGREED in p.state:
            yield Consensus(p.local, *(local(p.state[key]) for key in STATE_KEYS))


def agree_(parameters: Sequence[Parameter], bits: int, group: dist.ProcessGroup | None) -> None:
    """Bring the replicas to a new consensus; afterwards they hold the same bits. Collective."""
    X, agreed, residuals = zip(*consensuses(parameters), strict=True)
    quantized_average_(X, agreed, residuals, bits, group)


def give_back_losses_(parameters: Sequence[Parameter]) -> None:
    """Add what codes have lost to the weights, before an exact average of these."""
    for X, _, residual in consensuses(parameters):
        X.add_(residual)
        residual.zero_()


def renew_(parameters: Sequence[Parameter]) -> None:
    """Agree on what the weights are: they have just been averaged."""
    for X, agreed, _ in consensuses(parameters):
        agreed.copy_(X)


def fingerprint(parameters: Sequence[Parameter]) -> float:
    """A number that is the same where replicas agree on the same."""
    return sum(float(agreed.double().sum()) for _, agreed, _ in consensuses(parameters))
