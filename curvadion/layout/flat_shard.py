"""Parameters that are a contiguous range of a tensor's elements, as in ZeRO and FSDP1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.comm.collectives import group_size
from curvadion.comm.groups import Group
from curvadion.layout.matrix import FlatRange, Options, blocks_of

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


class FlatBlock(NamedTuple):
    """A block of rows or columns of one matrix of a tensor, as it is stored, (rows, width)."""

    first: int  # the number of the matrix's first element in the tensor
    width: int
    rows: range  # of the block
    columns: range

    def held(self, start: int, stop: int) -> range:
        """Which of the block's elements are among the tensor's elements [start, stop).

        They are numbered in the block, row by row, in which they follow one another.
        """
        return range(self._before(start), self._before(stop))

    def place(self, element: int) -> int:
        """The number in the tensor of an element of the block."""
        row, column = divmod(element, len(self.columns))
        return self.first + (self.rows.start + row) * self.width + self.columns.start + column

    def _before(self, element: int) -> int:
        """How many of the block's elements come before an element of the tensor."""
        row, column = divmod(element - self.first, self.width)
        if row < self.rows.start:
            return 0
        if row >= self.rows.stop:
            return len(self.rows) * len(self.columns)
        columns_before = min(max(column - self.columns.start, 0), len(self.columns))
        return (row - self.rows.start) * len(self.columns) + columns_before


def flat_matrices(
    shard: FlatShard, options: Options
) -> Iterator[tuple[FlatBlock, tuple[int, int], FlatRange]]:
    """Divide the tensor of a flat shard into its matrices.

    Yields:
        In order, where each matrix lies in the tensor; its shape (m, n), output features
        first; and this rank's part of it.
    """
    stack_dims = options["stack_dims"]
    input_first = options["input_first"]
    # Each matrix of the stack is stored as (height, width): (m, n), or (n, m) with the input
    # first. Its blocks are the matrices.
    height = shard.shape[stack_dims]
    width = math.prod(shard.shape[stack_dims + 1 :])
    blocks = blocks_of((width, height) if input_first else (height, width), options)
    for i in range(math.prod(shard.shape[:stack_dims])):
        for rows, columns in blocks:
            shape = (len(rows), len(columns))
            stored_rows, stored_columns = (columns, rows) if input_first else (rows, columns)
            block = FlatBlock(i * height * width, width, stored_rows, stored_columns)
            held = block.held(shard.start, shard.stop)
            view = FlatRange(
                held.start,
                held.stop,
                len(stored_columns),
                block.place(held.start) - shard.start,
                width,
                input_first,
            )
            yield block, shape, view


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
