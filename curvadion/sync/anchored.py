"""Weights beside their anchors, and the mean of what they have moved, in codes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from curvadion.comm.collectives import DENSE_BUCKET_BYTES, chunks
from curvadion.layout.dtensor import local
from curvadion.layout.parameters import groups_of
from curvadion.sync.coded_mean import add_coded_mean_
from curvadion.update.parameter import Parameter
from curvadion.update.state import ANCHOR, RESIDUAL


class Anchored(NamedTuple):
    """Weights, their anchor, and what codes have lost here; shards held here.

    All have the same shape. anchor: float32 or wider. residual: bfloat16 or float32.
    """

    X: Tensor
    anchor: Tensor
    residual: Tensor


def anchored(parameters: Sequence[Parameter]) -> Iterator[Anchored]:
    """Those of the parameters that have an anchor, in their order."""
    for p in parameters:
        if ANCHOR in p.state:
            yield Anchored(p.local, local(p.state[ANCHOR]), local(p.state[RESIDUAL]))


def average_in_codes_(
    weights: Sequence[Anchored], bits: int, replicas: dist.ProcessGroup | None
) -> None:
    """Move anchors and weights by the mean pseudo-gradient; afterwards all hold the same bits.

        anchor <- anchor + mean over replicas of (X - anchor),   X <- anchor

    Args:
        weights: the same parameters on every replica; updated.
        bits: of a code.
        replicas: the process group.
    """
    first = 0
    for chunk in coded_together([held.X for held in weights], bits):
        these = weights[first : first + len(chunk)]
        first += len(chunk)
        residuals = [held.residual for held in these]
        add_coded_mean_(chunk, [held.anchor for held in these], residuals, bits, replicas)


def coded_together(X: Sequence[Tensor], bits: int) -> Iterator[list[Tensor]]:
    """Runs of tensors whose codes are one bucket, or of one tensor."""
    return chunks(X, DENSE_BUCKET_BYTES * 32 // bits)


def group_by_sharding(parameters: Sequence[Parameter]) -> Iterator[list[Parameter]]:
    """Parameters that are sharded over the same ranks, in an order that ranks share.

    Which replica averages a block depends on the blocks before it. Ranks of one replica that hold
    the same shard of a parameter must get the same, whatever shards they hold of others.
    """
    by_cut: dict[tuple[int, ...], list[Parameter]] = {}
    for p in parameters:
        if RESIDUAL in p.state:
            by_cut.setdefault(tuple(map(id, groups_of(p.X))), []).append(p)
    yield from by_cut.values()
