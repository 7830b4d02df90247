"""DTensors with prescribed pieces: cut by hand, so that the library's own cutting is not used.

A layout is one word per mesh axis: "0", "1", "2" cut that dimension, "r" replicates, and "0s" cuts
dimension 0 after an axis to its right has cut it, as FSDP over tensor parallelism does.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def piece(full, axes, mesh):
    """The local piece: plain cuts first, from left to right, then the strided ones."""
    order = [a for a, kind in enumerate(axes) if kind in ("0", "1", "2")]
    order += [a for a, kind in enumerate(axes) if kind.endswith("s")]
    for axis in order:
        dim, pieces, place = int(axes[axis][0]), mesh.size(axis), mesh.get_local_rank(axis)
        size = -(-full.shape[dim] // pieces)
        start = min(place * size, full.shape[dim])
        full = full.narrow(dim, start, min(size, full.shape[dim] - start))
    return full


def shard(full, axes, mesh):
    """A DTensor of the full tensor's values."""
    placements = []
    for a, kind in enumerate(axes):
        if kind == "r":
            placements.append(Replicate())
        elif kind.endswith("s"):
            same = [b for b in range(a + 1, len(axes)) if axes[b] == kind[0]]
            factor = torch.Size(mesh.size(b) for b in same).numel()
            placements.append(_StridedShard(int(kind[0]), split_factor=factor))
        else:
            placements.append(Shard(int(kind)))
    local = piece(full, axes, mesh).clone().contiguous()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )
