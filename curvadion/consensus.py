"""What replicas agree on between quantised averages: weights, and momenta where these take part."""

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

WEIGHT = "weight"
# Not AdamW's first moment: its mean over replicas is smaller than its summands, where gradients are
# noise, but would be divided by the root of a second moment that is as large as theirs.
MOMENTA = {"dion": "momentum", "lion": "exp_avg"}
AGREED, RESIDUAL = "_agreed", "_residual"
# Keys of the state that hold them, each a tensor of the parameter's shape.
STATE_KEYS = tuple(
    name + kind for name in (WEIGHT, *sorted({*MOMENTA.values()})) for kind in (AGREED, RESIDUAL)
)


class Consensus(NamedTuple):
    """A tensor, what replicas last agreed it is, and what codes have lost here; pieces held here.

    All have the same shape; ``agreed`` and ``residual`` are float32 or wider.
    """

    tensor: Tensor
    agreed: Tensor
    residual: Tensor


def begin(parameters: Sequence[Parameter], *, momenta: bool) -> None:
    """Remember tensors as they are, the same on all replicas, where nothing is remembered yet."""
    for p in parameters:
        for name in _names(p, momenta=momenta):
            if name + AGREED not in p.state:
                tensor = p.X.detach() if name == WEIGHT else p.state[name]
                wide = torch.promote_types(tensor.dtype, torch.float32)
                p.state[name + AGREED] = tensor.to(wide, copy=True)
                p.state[name + RESIDUAL] = torch.zeros_like(tensor, dtype=torch.float32)


def sizes(parameters: Sequence[Parameter], *, momenta: bool) -> list[int]:
    """Numbers in each tensor that takes part, of all its shards together."""
    return [math.prod(global_shape(p.X)) for p in parameters for _ in _names(p, momenta=momenta)]


def _names(p: Parameter, *, momenta: bool) -> tuple[str, ...]:
    algorithm = p.group["algorithm"]
    return (WEIGHT, MOMENTA[algorithm]) if momenta and algorithm in MOMENTA else (WEIGHT,)


def consensuses(parameters: Sequence[Parameter]) -> Iterator[Consensus]:
    """All of them in an order that ranks share: those on weights, then those on momenta."""
    for on_weights in (True, False):
        for p in parameters:
            name = WEIGHT if on_weights else MOMENTA.get(p.group["algorithm"])
            if name is not None and name + AGREED in p.state:
                tensor = p.local if on_weights else local(p.state[name])
                agreed, residual = (local(p.state[name + key]) for key in (AGREED, RESIDUAL))
                yield Consensus(tensor, agreed, residual)


def agree_(parameters: Sequence[Parameter], bits: int, group: dist.ProcessGroup | None) -> None:
    """Bring the replicas to a new consensus; afterwards they hold the same bits. Collective."""
    tensors, agreed, residuals = zip(*consensuses(parameters), strict=True)
    quantized_average_(tensors, agreed, residuals, bits, group)


def give_back_losses_(parameters: Sequence[Parameter]) -> None:
    """Add what codes have lost to the tensors, before an exact average of these."""
    for tensor, _, residual in consensuses(parameters):
        tensor.add_(residual)
        residual.zero_()


def renew_(parameters: Sequence[Parameter]) -> None:
    """Agree on what the tensors are: they have just been averaged."""
    for tensor, agreed, _ in consensuses(parameters):
        agreed.copy_(tensor)


def fingerprint(parameters: Sequence[Parameter]) -> float:
    """A number that is the same where replicas agree on the same."""
    return sum(float(agreed.double().sum()) for _, agreed, _ in consensuses(parameters))
