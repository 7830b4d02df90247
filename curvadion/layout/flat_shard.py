"""Parameters that are a contiguous range of a tensor's elements, as in ZeRO and FSDP1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.comm.collectives import group_size
from curvadion.comm.groups import Group
from curvadion.layout.blocks import block_sizes, starts, within
from curvadion.layout.dtensor import is_dtensor
from curvadion.layout.matrix import FlatRange

FLAT_SHARD_START = "flat_shard_start"  # a state key
_FLAT_SHARD = "curvadion_flat_shard"


@dataclass(frozen=True)
class FlatShard:
    """A parameter that holds elements [start, stop) of a row-major tensor of a global shape."""

    shape: tuple[int, ...]
    start: int
    stop: int
    group: Group | None  # the ranks that hold the other elements; None if all are here


def declare_flat_shard(
    parameter: Tensor, shape: Sequence[int], start: int, stop: int, group: Group | None
) -> None:
    """Declare that ``parameter``, 1-D, holds elements [start, stop) of a tensor of ``shape``.

    Elements are numbered in row-major order. Every rank of ``group`` (None if all elements are
    here) declares its own range, which may be empty. Together the ranges cover the tensor exactly
    once; this is checked at the first step. All replicas hold the same ranges.

    The optimizer's state is sharded in the same way. Each rank saves and loads its own state_dict
    with torch.save, in the same layout; torch.distributed.checkpoint cannot reshard it. TypeError
    for a DTensor, or if ``group`` is not a process group; ValueError if shapes and range do not
    fit.
    """
    if is_dtensor(parameter):
        raise TypeError(
            f"parameter is a DTensor with placements {parameter.placements}, which already say "
            f"what each rank holds: do not declare it"
        )
    if group is not None and not isinstance(group, Group):
        raise TypeError(f"group={group!r} must be a ProcessGroup or None")
    numel = math.prod(shape)
    if parameter.dim() != 1:
        raise ValueError(f"parameter of shape {tuple(parameter.shape)} must be 1-D: flatten it")
    if not 0 <= start <= stop <= numel or parameter.numel() != stop - start:
        raise ValueError(
            f"[start, stop)=[{start}, {stop}) must lie in [0, {numel}) and cover the parameter's "
            f"{parameter.numel()} elements"
        )
    setattr(parameter, _FLAT_SHARD, FlatShard(tuple(shape), start, stop, group))


def flat_shard(parameter: Tensor) -> FlatShard | None:
    """The parameter's declaration, or None."""
    return getattr(parameter, _FLAT_SHARD, None)


def flat_shard_state(parameter: Tensor) -> dict[str, Tensor]:
    """State that identifies this rank's flat shard; {} for other parameters."""
    if (declared := flat_shard(parameter)) is None:
        return {}
    # torch.distributed.checkpoint and FSDP1 change a tensor least.
    return {FLAT_SHARD_START: torch.tensor(declared.start, device="cpu")}


def flat_matrices(
    shard: FlatShard, options: Mapping[str, Any]
) -> Iterator[tuple[int, tuple[int, int], FlatRange]]:
    """In order, each matrix's first element, its shape (m, n), and this rank's part of it."""
    stack_dims, input_first = options["stack_dims"], options["input_first"]
    row_blocks, shape = options["row_blocks"], shard.shape
    n = math.prod(shape[stack_dims + 1 :])
    if not input_first:
        sizes = block_sizes(shape[stack_dims], row_blocks)
    elif len(block_sizes(shape[-1], row_blocks)) == 1:
        sizes = [shape[stack_dims]]
    else:
        raise ValueError(
            f"row_blocks={row_blocks!r} with input_first=True splits a flat shard of shape {shape} "
            f"along its last dimension, where no block is contiguous: leave row_blocks out, or use "
            f"FSDP2, whose parameters are DTensors."
        )
    sizes = sizes * math.prod(shape[:stack_dims])
    for first, size in zip(starts([size * n for size in sizes]), sizes, strict=True):
        inside = within(range(shard.start, shard.stop), first, size * n)
        offset = first + inside.start - shard.start if inside else 0
        held = (inside.start, inside.stop) if inside else (0, 0)
        view = FlatRange(*held, n, offset, input_first)
        yield first, (n, size) if input_first else (size, n), view


def ranges_of_all_ranks(shard: FlatShard) -> list[tuple[int, int]]:
    """[start, stop) of every rank, by its rank in the group; collective over the group."""
    ranges = [(shard.start, shard.stop)]
    if group_size(shard.group) > 1:
        ranges = ranges * group_size(shard.group)
        dist.all_gather_object(ranges, (shard.start, shard.stop), group=shard.group)
    held = sorted(r for r in ranges if r[0] < r[1])
    stops = [0, *(stop for _, stop in held)]
    if [start for start, _ in held] != stops[:-1] or stops[-1] != math.prod(shard.shape):
        raise ValueError(
            f"the flat shards {ranges} of a parameter of shape {shard.shape} do not cover its "
            f"{math.prod(shard.shape)} elements exactly once: declare each rank's own range."
        )
    return ranges
