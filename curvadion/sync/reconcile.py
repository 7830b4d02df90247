"""How drifted replicas come back together, and how far apart they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.comm.collectives import DENSE_BUCKET_BYTES, chunks, group_size, mean_
from curvadion.ops.tensors import saturated
from curvadion.sync.coded_mean import quantized_mean


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


def quantized_average_(
    X: Sequence[Tensor],
    agreed: Sequence[Tensor],
    residuals: Sequence[Tensor],
    bits: int,
    group: dist.ProcessGroup | None,
) -> None:
    """Replace X by what replicas agree on: the same bits on each, sent in ``bits`` bits a number.

        agreed <- agreed + mean over replicas of (X - agreed),   X <- agreed

    Args:
        X: weights; afterwards ``agreed`` in their dtype.
        agreed: the same on every replica, float32 or wider, of X's shapes; updated.
        residuals: what the codes of these means have lost here, float32; updated.
        bits: of a code.
        group: the replicas.
    """
    first = 0
    for chunk in coded_together(X, bits):
        these = slice(first, first + len(chunk))
        first = these.stop
        # What X holds of the agreement: a narrow dtype's rounding is no movement.
        pairs = zip(X[these], agreed[these], strict=True)
        moved = ((x - saturated(a, x.dtype).to(x.dtype)).float() for x, a in pairs)
        means = quantized_mean(moved, residuals[these], bits, group)
        for x, a, mean in zip(X[these], agreed[these], means, strict=True):
            x.copy_(saturated(a.add_(mean), x.dtype))


def coded_together(X: Sequence[Tensor], bits: int) -> Iterator[list[Tensor]]:
    """Runs of tensors whose codes are one bucket, or of one tensor."""
    return chunks(X, DENSE_BUCKET_BYTES * 32 // bits)


def drift(
    X: Iterable[tuple[Tensor, int]],
    replicas: dist.ProcessGroup | None,
    inside: dist.ProcessGroup | None,
) -> float:
    """sqrt( mean over replicas of ||X_i - mean||^2 ) / ||mean||, over all parameters; collective.

    Args:
        X: the pieces held here, each with the number of ranks of the replica that hold it alike.
        replicas: the ranks that hold the same pieces.
        inside: the ranks of this replica, over which the squares are summed.

    Dense: as many numbers cross the group as there are parameters. 0 for one replica.
    """
    if group_size(replicas) == 1:
        return 0.0
    squares: Tensor | None = None
    for x, copies in X:
        mean = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
        mean_([mean], replicas)
        both = torch.stack([(x - mean).square().sum(), mean.square().sum()]).double() / copies
        squares = both if squares is None else squares + both
    if squares is None:
        return 0.0
    if inside is not None:
        dist.all_reduce(squares, group=inside)
    mean_([squares], replicas)
    apart, norm = squares.tolist()
    return math.sqrt(apart / norm) if norm > 0 else 0.0
