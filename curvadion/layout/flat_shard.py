"""Parameters that are a contiguous range of a tensor's elements, as in ZeRO and FSDP1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.comm.collectives import group_size
from curvadion.comm.groups import Group
from curvadion.division import spans
from curvadion.layout.matrix import FlatRange, Options, block_sizes, within

FLAT_SHARD_START = "flat_shard_start"  # a state key
_FLAT_SHARD = "curvadion_flat_shard"


@dataclass(frozen=True)
class FlatShard:
    """Elements [start, stop) of a row-major tensor of a global shape."""

    shape: tuple[int, ...]
    start: int
    stop: int
    group: Group | None  # the ranks that hold the tensor; None if it is here


def declare_flat_shard(
    parameter: Tensor, shape: Sequence[int], start: int, stop: int, group: Group | None
) -> None:
    """Declare that ``parameter``, 1-D, holds elements [start, stop) of a tensor of ``shape``.

    Elements are numbered in row-major order. Every rank of ``group`` (None if all elements
    are here) declares its own range, perhaps an empty one. Together the ranges cover the
    tensor exactly once, which the first step checks. All replicas hold the same ranges, and
    state is sharded like its parameter. ValueError if shapes and range do not fit.
    """
    numel, own = math.prod(shape), tuple(parameter.shape)
    if not 0 <= start <= stop <= numel or own != (stop - start,):
        raise ValueError(
            f"[start, stop)=[{start}, {stop}) needs a range within [0, {numel}) and a 1-D "
            f"parameter of stop - start elements, not one of shape {own}"
        )
    setattr(parameter, _FLAT_SHARD, FlatShard(tuple(shape), start, stop, group))


def flat_shard(parameter: Tensor) -> FlatShard | None:
    """The parameter's declaration, or None."""
    return getattr(parameter, _FLAT_SHARD, None)


def flat_shard_state(parameter: Tensor) -> dict[str, Tensor]:
    """State that identifies this rank's flat shard; {} without one."""
    declared = flat_shard(parameter)
    # torch.distributed.checkpoint and FSDP1 change a tensor least.
    return {FLAT_SHARD_START: torch.tensor(declared.start, device="cpu")} if declared else {}


def flat_matrices(
    shard: FlatShard, options: Options
) -> Iterator[tuple[range, tuple[int, int], FlatRange]]:
    """In order, each matrix's elements, its shape (m, n), and this rank's part of it."""
    stack_dims, input_first = options["stack_dims"], options["input_first"]
    row_blocks, shape = options["row_blocks"], shard.shape
    n = math.prod(shape[stack_dims + 1 :])
    if input_first and len(block_sizes(shape[-1], row_blocks)) > 1:
        raise ValueError(
            f"row_blocks={row_blocks!r} divides a flat shard of shape {shape} with "
            f"input_first=True: leave row_blocks out, or use FSDP2"
        )
    sizes = block_sizes(shape[stack_dims], 1 if input_first else row_blocks)
    sizes *= math.prod(shape[:stack_dims])
    for size, whole in zip(sizes, spans(size * n for size in sizes), strict=True):
        held = within(range(shard.start, shard.stop), whole)
        offset = whole.start + held.start - shard.start
        view = FlatRange(held.start, held.stop, n, offset, input_first)
        yield whole, (n, size) if input_first else (size, n), view


def ranges_of_all_ranks(shard: FlatShard) -> list[tuple[int, int]]:
    """[start, stop) of every rank, by its rank in the group; collective over the group."""
    ranges = [(shard.start, shard.stop)] * group_size(shard.group)
    if len(ranges) > 1:
        dist.all_gather_object(ranges, ranges[0], group=shard.group)
    held, numel = sorted(r for r in ranges if r[0] < r[1]), math.prod(shard.shape)
    stops = [0, *(stop for _, stop in held)]
    if [*(start for start, _ in held), numel] != stops:
        raise ValueError(
            f"the flat shards {ranges} of shape {shard.shape} do not cover its {numel} "
            f"elements exactly once: declare each rank's own range"
        )
    return ranges
