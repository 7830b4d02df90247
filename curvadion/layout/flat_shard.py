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
    group: Group | None  # the ranks that hold the tensor; None: this rank holds all of it


def declare_flat_shard(
    parameter: Tensor, shape: Sequence[int], start: int, stop: int, group: Group | None
) -> None:
    """Declare that ``parameter``, 1-D, holds elements [start, stop) of a tensor of ``shape``.

    Every rank of ``group`` declares its own range, perhaps an empty one. Together the ranges
    cover the tensor exactly once, which the first step checks. All replicas hold the same
    ranges, and state is sharded like its parameter.

    Args:
        parameter: this rank's elements, (stop - start,).
        shape: of the whole tensor.
        start: the number of the first element, in row-major order, from 0 on.
        stop: the number after the last element.
        group: the ranks that hold the tensor; None: this rank holds all of it.

    Raises:
        ValueError: if the shapes and the range do not fit.
    """
    numel = math.prod(shape)
    parameter_shape = tuple(parameter.shape)
    if not 0 <= start <= stop <= numel or parameter_shape != (stop - start,):
        raise ValueError(
            f"[start, stop)=[{start}, {stop}) needs a range within [0, {numel}) and a 1-D "
            f"parameter of stop - start elements, not one of shape {parameter_shape}: "
            f"declare the range of the elements that it holds"
        )
    setattr(parameter, _FLAT_SHARD, FlatShard(tuple(shape), start, stop, group))


def flat_shard(parameter: Tensor) -> FlatShard | None:
    """The parameter's declaration, or None."""
    return getattr(parameter, _FLAT_SHARD, None)


def flat_shard_state(parameter: Tensor) -> dict[str, Tensor]:
    """State that identifies this rank's flat shard; {} without one."""
    declared = flat_shard(parameter)
    if declared is None:
        return {}
    # A tensor on the CPU, which torch.distributed.checkpoint and FSDP1 change less than a number.
    return {FLAT_SHARD_START: torch.tensor(declared.start, device="cpu")}


def flat_matrices(
    shard: FlatShard, options: Options
) -> Iterator[tuple[range, tuple[int, int], FlatRange]]:
    """Divide the tensor of a flat shard into its matrices.

    Yields:
        In order, each matrix's elements, numbered in the tensor; its shape (m, n), output
        features first; and this rank's part of it.
    """
    stack_dims = options["stack_dims"]
    input_first = options["input_first"]
    row_blocks = options["row_blocks"]
    # Each matrix is stored as (rows, columns): (m, n), or (n, m) with the input first.
    columns = math.prod(shard.shape[stack_dims + 1 :])
    if input_first and len(block_sizes(shard.shape[-1], row_blocks)) > 1:
        raise ValueError(
            f"row_blocks={row_blocks!r} divides a flat shard of shape {shard.shape} with "
            f"input_first=True: leave row_blocks out, or use FSDP2"
        )
    rows_of_matrices = block_sizes(shard.shape[stack_dims], 1 if input_first else row_blocks)
    rows_of_matrices *= math.prod(shard.shape[:stack_dims])
    elements_of_matrices = spans(rows * columns for rows in rows_of_matrices)
    for rows, elements in zip(rows_of_matrices, elements_of_matrices, strict=True):
        shard_elements = within(range(shard.start, shard.stop), elements)
        offset = elements.start + shard_elements.start - shard.start
        view = FlatRange(shard_elements.start, shard_elements.stop, columns, offset, input_first)
        shape = (columns, rows) if input_first else (rows, columns)
        yield elements, shape, view


def ranges_of_all_ranks(shard: FlatShard) -> list[tuple[int, int]]:
    """[start, stop) of every rank, by its rank in the group; collective over the group."""
    ranges = [(shard.start, shard.stop)] * group_size(shard.group)
    if len(ranges) > 1:
        dist.all_gather_object(ranges, ranges[0], group=shard.group)
    filled_ranges = sorted((start, stop) for start, stop in ranges if start < stop)
    # Each begins where the one before ends, from the first element to the last.
    starts = [start for start, _ in filled_ranges]
    stops = [stop for _, stop in filled_ranges]
    numel = math.prod(shard.shape)
    if [*starts, numel] != [0, *stops]:
        raise ValueError(
            f"the flat shards {ranges} of shape {shard.shape} do not cover its {numel} "
            f"elements exactly once: declare each rank's own range"
        )
    return ranges
