"""How drifted replicas come back together, and how far apart they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.collectives import group_size, mean_


def average_(
    tensors: Sequence[Tensor], counters: Sequence[Tensor], group: dist.ProcessGroup | None
) -> None:
    """Replace tensors and scalar counters by their means over the replicas: the same bits on each.

    Counters (one number each, often on the CPU) travel together as one tensor.
    """
    if group_size(group) == 1:
        return
    mean_(tensors, group)
    if tensors and counters:
        packed = torch.stack([c.detach() for c in counters]).to(tensors[0].device)
        mean_([packed], group)
        for counter, value in zip(counters, packed.to(counters[0].device).unbind(), strict=True):
            counter.copy_(value)


def drift(X: Iterable[Tensor], group: dist.ProcessGroup | None) -> float:
    """sqrt( mean over replicas of ||X_i - mean||^2 ) / ||mean||, over all parameters; collective.

    Dense: as many numbers cross the group as there are parameters. 0 for one replica.
    """
    if group_size(group) == 1:
        return 0.0
    apart, norm = 0.0, 0.0
    for x in X:
        mean = x.detach().to(torch.promote_types(x.dtype, torch.float32), copy=True)
        mean_([mean], group)
        squares = torch.stack([(x - mean).square().sum().double(), mean.square().sum().double()])
        mean_([squares], group)
        distance, length = squares.tolist()
        apart, norm = apart + distance, norm + length
    return math.sqrt(apart / norm) if norm > 0 else 0.0
