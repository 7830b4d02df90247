"""How the options of a parameter group divide a parameter into matrices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from curvadion.layout.dtensor import (
    DimensionShard,
    dimension_shards,
    is_dtensor,
    placements_of,
    swapped,
)
from curvadion.layout.matrix import MatrixLayout


def block_sizes(rows: int, row_blocks: int | Sequence[int], name: str = "row_blocks") -> list[int]:
    """The number of rows of each block; row_blocks: the number of equal blocks, or their sizes."""
    if isinstance(row_blocks, int):
        if rows % row_blocks:
            raise ValueError(f"{name}={row_blocks!r} does not divide {rows} rows: list the sizes")
        return [rows // row_blocks] * row_blocks
    if sum(row_blocks) != rows:
        raise ValueError(f"{name}={row_blocks!r} must add up to the {rows} rows")
    return list(row_blocks)


def starts(sizes: Sequence[int]) -> list[int]:
    """The starts of consecutive ranges."""
    return list(itertools.accumulate(sizes, initial=0))[:-1]


def within(indices: range, first: int, size: int) -> range:
    """The indices in [first, first + size), counted from ``first``."""
    start = max(indices.start, first)
    return range(start - first, max(start, min(indices.stop, first + size)) - first)


def rank_of(layout: MatrixLayout, options: Mapping[str, Any]) -> int:
    """The rank r that a group's options give a matrix."""
    return layout.rank(options["rank_fraction"], options["rank_multiple_of"])


def output_first(X: Tensor, options: Mapping[str, Any]) -> Tensor:
    """A view of the parameter in the order (*stack, out, in, ...)."""
    return swapped(X, options["stack_dims"]) if options["input_first"] else X


class RowBlock(NamedTuple):
    """A block of rows: over all ranks; this rank's, from ``start``; and as local rows."""

    start: int
    size: int
    held: range
    local: slice


@dataclass(frozen=True)
class BlockedTensor:
    """An unsharded parameter or a DTensor, divided into matrices."""

    X: Tensor  # output first: (*stack, m, ...); the dimensions after m are columns
    stack: list[DimensionShard]
    rows: DimensionShard
    columns: DimensionShard  # of the dimension after the rows
    n: int  # number of columns of each matrix, over all ranks
    width: int  # columns per index of the dimension after the rows
    blocks: list[RowBlock]  # of each matrix in the stack

    def flattened(self, indices: range) -> range:
        """The columns of these indices of the dimension after the rows."""
        return range(indices.start * self.width, indices.stop * self.width)


def blocked(X: Tensor, options: Mapping[str, Any]) -> BlockedTensor:
    """Divide an unsharded parameter or a DTensor; ValueError if that is not possible."""
    X, stack_dims = output_first(X, options), options["stack_dims"]
    dimensions = dimension_shards(X)
    rows, columns = dimensions[stack_dims : stack_dims + 2]
    inner = dimensions[stack_dims + 2 :]
    shards = math.prod(X.device_mesh.size(a) for a in columns.axes) if is_dtensor(X) else 1
    if any(d.axes for d in inner) or (inner and X.shape[stack_dims + 1] % shards):
        raise ValueError(
            f"a parameter of shape {tuple(X.shape)} is sharded by {placements_of(X)}: shard a "
            f"convolution over output channels, or evenly over input channels"
        )
    width = math.prod(X.shape[stack_dims + 2 :])
    sizes = block_sizes(X.shape[stack_dims], options["row_blocks"])
    blocks = []
    for start, size in zip(starts(sizes), sizes, strict=True):
        held, offset = within(rows.held, start, size), start - rows.held.start
        local = slice(held.start + offset, held.stop + offset)
        blocks.append(RowBlock(start, size, held, local))
    n = X.shape[stack_dims + 1] * width
    return BlockedTensor(X, dimensions[:stack_dims], rows, columns, n, width, blocks)
